"""What hits a whole node of a prefill/decode pair: processes that die, pauses, changed weights."""

from collections.abc import Mapping
from functools import partial
from typing import Final, TypeAlias

from fsm.explore_base import FAULT, FREE, MIXED, REBUILD, UNSURE, Cost
from fsm.explore_pd import ABSENT, DEAD, GONE, HANDED_OVER, NO_ROOM, OVER, Design, Leg, World
from fsm.explore_pd_actions import decode_client, prefill_client
from fsm.explore_pd_draft import Draft
from fsm.explore_pd_steps import Action
from fsm.pauses import MODES, PauseMode
from fsm.protocol import Role

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")

Pauses: TypeAlias = Mapping[Role, tuple[PauseMode, ...]]
"""The pauses of each role that a run explores."""

DROPPING: Final[Pauses] = {"prefill": (), "decode": ("retract",)}
"""The pause that rebuilds need."""
EVERY: Final[Pauses] = {"prefill": MODES, "decode": MODES}


def events(design: Design, pauses: Pauses, world: World) -> list[tuple[str, Cost, World]]:
    """(label, cost, world after it). Weights are changed once on each node, while one is paused; in
    place, where that node is paused, and a run explores such pauses."""
    died = world._replace(decode_pause=None, slot_dirty=False)
    found: list[tuple[str, Cost, World]] = [
        ("prefill's process dies", FAULT, world._replace(prefill_pause=None)),
        ("decode's process dies", FAULT, died),
    ]
    changes: list[tuple[str, Cost, World]] = []
    for role in ROLES:
        now = world.decode_pause if role == "decode" else world.prefill_pause
        for mode in pauses[role]:
            if mode != now:
                after = design.after_pause(now, mode)
                found.append((f"{role} pauses ({mode})", REBUILD, with_pause(world, role, after)))
        if now is not None:
            found.append((f"{role} continues", FREE, with_pause(world, role, None)))
        weights = world.decode_weights if role == "decode" else world.prefill_weights
        if not weights:
            field = f"{role}_weights"
            changed = world._replace(**{field: 1})  # type: ignore[arg-type]
            changes.append((f"{role} changes weights", UNSURE, changed))
            if now is not None and "in_place" in pauses[role]:
                changes.append((f"{role} changes weights in place", UNSURE, changed))
    paused = world.decode_pause is not None or world.prefill_pause is not None
    return found + changes if paused else found


def with_pause(world: World, role: Role, mode: PauseMode | None) -> World:
    if role == "decode":
        return world._replace(decode_pause=mode)
    return world._replace(prefill_pause=mode)


# --- what they do to a decode life and one of its legs --------------------------------------------


def _prefill_dies(draft: Draft) -> None:
    """Its lives are gone, and so are frames; decode sees a closed socket."""
    knows = draft.place not in (ABSENT, *OVER)
    state = ABSENT if draft.leg.state == ABSENT else DEAD
    draft.leg = Leg(state, answers=draft.leg.answers, to_decode=(GONE,) if knows else ())
    draft.prefill_pause = None


def _decode_dies(draft: Draft) -> None:
    """A prefill life that has met its peer sees it; one that has not never will, and what was said
    to its door is forgotten."""
    leg = draft.leg
    told = (GONE,) if leg.met and leg.state not in OVER else ()
    note = None if leg.state in NO_ROOM else leg.note
    draft.leg = leg._replace(to_decode=(), to_prefill=told, note=note)
    draft.decode_pause = None
    draft.dies()


def _decode_pauses(mode: PauseMode, draft: Draft) -> None:
    """What a pause that drops KV does is due at the end of the turn."""
    draft.decode_pause = draft.design.after_pause(draft.decode_pause, mode)
    if mode == "abort" and draft.place not in (ABSENT, DEAD):
        decode_client(draft)


def _prefill_pauses(mode: PauseMode, draft: Draft) -> None:
    draft.prefill_pause = draft.design.after_pause(draft.prefill_pause, mode)
    if mode == "abort" and draft.leg.state not in (ABSENT, DEAD):
        prefill_client(draft)


def _decode_continues(draft: Draft) -> None:
    draft.decode_pause = None


def _prefill_continues(draft: Draft) -> None:
    draft.prefill_pause = None


def _decode_changes(in_place: bool, draft: Draft) -> None:
    if in_place and draft.place in HANDED_OVER:
        draft.weights = MIXED
    draft.decode_weights = 1
    draft.tell_prefill(draft.design.on_new_weights("decode", draft.place))


def _prefill_changes(in_place: bool, draft: Draft) -> None:
    leg = draft.leg
    if in_place and "pages" in draft.design.prefill.holds.get(leg.state, ()):
        draft.leg = leg._replace(weights=MIXED)
    draft.prefill_weights = 1


HITS: Final[Mapping[str, Action]] = {
    "prefill's process dies": _prefill_dies,
    "decode's process dies": _decode_dies,
    "decode continues": _decode_continues,
    "prefill continues": _prefill_continues,
    "decode changes weights": partial(_decode_changes, False),
    "decode changes weights in place": partial(_decode_changes, True),
    "prefill changes weights": partial(_prefill_changes, False),
    "prefill changes weights in place": partial(_prefill_changes, True),
    **{f"decode pauses ({mode})": partial(_decode_pauses, mode) for mode in MODES},
    **{f"prefill pauses ({mode})": partial(_prefill_pauses, mode) for mode in MODES},
}

EVERY_LEG: Final = frozenset(
    {
        "decode's process dies",
        "prefill changes weights in place",
        *(f"prefill pauses ({mode})" for mode in MODES),
    }
)
"""Those that hit the prefill lives of earlier rooms, too."""
