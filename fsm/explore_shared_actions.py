"""What the options of :mod:`fsm.explore_shared` do to a node of two requests."""

from fsm.explore_base import MIXED
from fsm.explore_shared_checks import writes
from fsm.explore_shared_draft import Draft
from fsm.explore_shared_pages import Key
from fsm.explore_unified_draft import ABSENT, Broken
from fsm.rules import Facts, Message


def arrives(who: int, event: str, draft: Draft) -> None:
    draft.change(who, state=draft.chart.initial)
    draft.move(who, event)


def group_arrives(draft: Draft) -> None:
    for who in range(2):
        arrives(who, "enqueue", draft)


def admits(who: int, event: str, evicting: tuple[Key, ...], draft: Draft) -> None:
    if draft.world.pause is not None:
        raise Broken(f"{event} takes pages while generation is paused")
    draft.reserve(who, evicting)
    draft.move(who, event)


def policy(who: int, event: str, draft: Draft) -> None:
    draft.move(who, event)


def grows(who: int, evicting: tuple[Key, ...], draft: Draft) -> None:
    draft.extend(who, evicting)


def launches(who: int, draft: Draft) -> None:
    life = draft.lives[who]
    if draft.world.pause is not None:
        raise Broken("a step is launched while generation is paused")
    if life.weights not in (MIXED, draft.world.weights):
        raise Broken("KV is used that was computed under other weights")
    wrong = writes(draft.frozen(), who)
    if wrong:
        raise Broken(wrong)
    draft.change(who, launched=life.launched + 1)


def commits_chunk(who: int, draft: Draft) -> None:
    life = draft.lives[who]
    ready = max(life.ready, 1) if life.pages else 0
    draft.change(who, launched=life.launched - 1, ready=ready)
    draft.tell(who, "chunk_committed")


def commits(who: int, message: Message, fills: bool, draft: Draft) -> None:
    """A token has come; the prompt that it belongs to is committed, too."""
    life = draft.lives[who]
    draft.change(who, launched=life.launched - 1)
    facts = Facts(launched=life.launched > 1)
    if draft.design.table[life.state, message, facts].effect in ("fire", "keep"):
        draft.change(who, long=life.long or fills)
        draft.change(who, ready=draft.lives[who].size - 1)
        if life.state == "prefilling":
            draft.cache_prompt(who)
    draft.tell(who, message)


def commits_failure(who: int, draft: Draft) -> None:
    draft.change(who, launched=draft.lives[who].launched - 1)
    draft.tell(who, "step_failed")


def told(who: int, message: Message, draft: Draft) -> None:
    draft.tell(who, message)


def aborted(who: int, draft: Draft) -> None:
    draft.tell(who, "abort")
    must_be_over(draft, who)


def must_be_over(draft: Draft, who: int) -> None:
    state = draft.lives[who].state
    if draft.chart.is_live(state):
        raise Broken(f"r{who + 1} was aborted, and is still {state}")


def pauses(mode: str, draft: Draft) -> None:
    for who, life in enumerate(draft.lives):
        if life.state == ABSENT:
            continue
        if mode == "abort":
            aborted(who, draft)
        elif mode == "retract":
            draft.tell(who, "paused")


def renews(in_place: bool, draft: Draft) -> None:
    draft.renew(in_place)


def guest_takes(what: str, evicting: tuple[Key, ...], draft: Draft) -> None:
    draft.guest_takes(what, evicting)


def guest_leaves(loaded: bool, draft: Draft) -> None:
    draft.guest_leaves(loaded)


def nothing(draft: Draft) -> None:
    """Only what is due anyway."""
