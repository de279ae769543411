"""The model of what two requests share on a unified node: pages by number, the prefix cache, a
group or a session. See :mod:`fsm.explore`.

Both requests are one state here, because what one may do depends on what the other one has. Their
prompts begin with the same page; a request needs two pages, and a third when it has grown. Whom
policy admits, retracts or lets grow is free choice, and so is which leaf of the prefix cache is
evicted; only that somebody gives way when nobody can go on is counted on. A guest takes a page now
and then: a load from the store, or, as on a decode node, a peer that may still write into it.

Shared by design, and checked: a page has the owners that use it, and nobody writes into a page that
somebody else uses; what only the cache owns can be evicted, and nothing else is; a group ends once,
with its last member; one turn of a session at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from fsm import explore_shared_actions as actions
from fsm.explore_base import (
    ABORT,
    DEADLINE,
    FAULT,
    FREE,
    UNSURE,
    Cost,
    Hit,
    Step,
    Traced,
)
from fsm.explore_shared_base import (
    KITS,
    LONG,
    SHORT,
    Life,
    Node,
    SharedDesign,
    Together,
    edges_of,
)
from fsm.explore_shared_checks import broken
from fsm.explore_shared_draft import Draft
from fsm.explore_shared_pages import Key, Tree
from fsm.explore_unified import CONTINUES, IN_PLACE, PAUSES, describe_world, events
from fsm.explore_unified_draft import ABSENT, Broken, World
from fsm.pauses import PauseMode
from fsm.rules import Facts, Message

Action: TypeAlias = Callable[[Draft], None]
Option: TypeAlias = tuple[str, Cost, int, Action]
"""(label, cost, which request or -1, action)"""

TOKENS: Final[tuple[Message, ...]] = ("token_committed", "last_token_committed")


class SharedModel:
    """Two requests on a unified node, as one state."""

    def __init__(
        self,
        design: SharedDesign | None = None,
        together: Together = "alone",
        pages: int = 4,
        depth: int = 1,
        guest: bool = False,
        pauses: bool = True,
    ) -> None:
        """``pages``: of the whole node, 3 at least, so that either request fits alone. ``depth``:
        steps launched at a time, 1 or 2. ``guest``: somebody else takes a page now and then."""
        if pages < LONG:
            raise ValueError(f"a request may need {LONG} pages, the node has {pages}")
        self.name: Final = {
            "alone": "unified, shared pages",
            "group": "unified, group",
            "session": "unified, session",
        }[together]
        self.design: Final = design or SharedDesign()
        self.nodes: Final[Mapping[str, Traced]] = {
            "unified": Traced(self.design.chart, KITS[together], pages, SHORT)
        }
        self.together: Final = together
        self.pages: Final = pages
        self.depth: Final = depth
        self.guest: Final = guest
        self.pauses: Final = pauses
        self._edges: Final = edges_of(self.design.chart, KITS[together])
        self._verdicts: dict[tuple[PauseMode | None, Node], str] = {}

    def begin(self) -> tuple[World, Node]:
        return World(), Node((Life(), Life()), ((),) * self.pages)

    def steps(self, environment: World, request: Node) -> list[Step]:
        steps = []
        for label, cost, who, action in self._options(environment, request):
            hit = self._taken(environment, request, action)
            steps.append(
                Step(label, cost, 0, environment, hit.request, False, hit.violation, hit.moves, who)
            )
        return steps

    def _taken(self, world: World, node: Node, action: Action) -> Hit:
        draft, violation = Draft(self.design, self._edges, world, node), ""
        try:
            action(draft)
            draft.settle()
        except Broken as error:
            violation = str(error)
        after = draft.frozen()
        return Hit(after, violation or self._verdict(world, after), tuple(draft.moves))

    def _verdict(self, world: World, node: Node) -> str:
        """The first property that does not hold in a state, which many steps lead to."""
        key = (world.pause, node)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = broken(self.design, self.together, world.pause, node)
        return verdict

    # --- options ---

    def _options(self, world: World, node: Node) -> Iterator[Option]:
        yield from self._arrivals(node)
        for who, life in enumerate(node.lives):
            if life.state != ABSENT:
                yield from self._of_life(world, node, who, life)
        if node.members:
            yield "client aborts the group", ABORT, -1, self._abort_group
        if self.design.may_flush(self.design.chart, self._states(node), False):
            yield "the prefix cache is flushed", UNSURE, -1, Draft.flush
        if node.guest:
            yield "the guest's page is given back", FREE, -1, partial(actions.guest_leaves, False)
        if node.guest == "load":
            yield "the guest's page is loaded", FREE, -1, partial(actions.guest_leaves, True)
        if self.guest and not node.guest:
            for evicting in self._rooms(node, 1, ()):
                for what in ("load", "peer"):
                    label = f"a guest ({what}) takes a page{_evicting(evicting)}"
                    yield label, UNSURE, -1, partial(actions.guest_takes, what, evicting)

    def _arrivals(self, node: Node) -> Iterator[Option]:
        first, second = node.lives
        if self.together == "group":
            if first.state == second.state == ABSENT:
                yield "arrives, with both members", FREE, -1, actions.group_arrives
                yield "arrives, reject", UNSURE, 0, partial(actions.arrives, 0, "reject")
            return
        for who, life in enumerate(node.lives):
            if life.state != ABSENT:
                continue
            if node.turn >= 0:
                yield (
                    "arrives, reject: a turn is in flight",
                    FREE,
                    who,
                    partial(actions.arrives, who, "reject"),
                )
                continue
            yield "arrives, enqueue", FREE, who, partial(actions.arrives, who, "enqueue")
            yield "arrives, reject", UNSURE, who, partial(actions.arrives, who, "reject")

    def _of_life(self, world: World, node: Node, who: int, life: Life) -> Iterator[Option]:
        design, state = self.design, life.state
        chart = design.chart
        if life.launched:
            yield from self._commits(who, life)
        for event in ("admit", "readmit"):
            if (state, event) in chart.table and design.admits(world.pause):
                yield from self._admissions(world, node, who, event)
        if (state, "retract") in chart.table:
            cost = FREE if design.gives_way(self._stuck(world, node)) else UNSURE
            yield "retract", cost, who, partial(actions.policy, who, "retract")
        computes = state in ("prefilling", "decoding")
        if computes and not design.is_frozen("unified", world.pause):
            if len(life.pages) < life.size:
                for evicting in self._rooms(node, 1, ()):
                    yield (
                        f"grows{_evicting(evicting)}",
                        FREE,
                        who,
                        partial(actions.grows, who, evicting),
                    )
            elif life.launched < self.depth:
                yield "a step is launched", FREE, who, partial(actions.launches, who)
        if state in ("retracted", "prefilling", "decoding", "retracting", "holding", "held"):
            yield "stop_matched", UNSURE, who, partial(actions.told, who, "stop_matched")
        if chart.is_live(state):
            yield "client aborts", ABORT, who, partial(actions.aborted, who)
            if design.table[state, "expired", Facts(launched=life.launched > 0)].effect == "fire":
                yield "deadline", DEADLINE, who, partial(actions.told, who, "expired")

    def _commits(self, who: int, life: Life) -> Iterator[Option]:
        if life.state != "decoding":
            yield "chunk_committed", FREE, who, partial(actions.commits_chunk, who)
        for message in TOKENS:
            yield message, FREE, who, partial(actions.commits, who, message, False)
        if life.state == "decoding" and not life.long and life.launched == 1:
            label = "token_committed, and its pages are full"
            yield label, FREE, who, partial(actions.commits, who, "token_committed", True)
        yield "step_failed", FAULT, who, partial(actions.commits_failure, who)

    def _admissions(self, world: World, node: Node, who: int, event: str) -> Iterator[Option]:
        """Every way to make room for the pages that the prefix cache does not have."""
        draft = Draft(self.design, self._edges, world, node)
        path = draft.found(who)
        lock = path[-1] if path else None
        for evicting in self._rooms(node, node.lives[who].size - len(path), (lock,)):
            label = event + (f", with {path[-1][1]} from the cache" if path else "")
            yield (
                label + _evicting(evicting),
                FREE,
                who,
                partial(actions.admits, who, event, evicting),
            )

    def _rooms(
        self, node: Node, wanted: int, locks: tuple[Key | None, ...]
    ) -> Iterator[tuple[Key, ...]]:
        """The leaves that may be evicted, one after another, until ``wanted`` pages are free."""
        free = self.design.books.counts(node.owners).free
        held = (*(life.lock for life in node.lives), *locks)

        def search(tree: Tree, keys: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
            if free + len(keys) >= wanted:
                yield keys
                return
            for key in self.design.evictable(tree, held):
                rest = tuple(entry for entry in tree if entry[0] != key)
                yield from search(rest, (*keys, key))

        return search(node.tree, ())

    def _stuck(self, world: World, node: Node) -> bool:
        """Somebody on the device needs a page, and there is none, and none is coming: policy gives
        way to it (:func:`engine.policy.allot`)."""
        needs = any(life.state == "decoding" and len(life.pages) < life.size for life in node.lives)
        said = self.design.books.counts(node.owners)
        both = all(life.state in ("prefilling", "decoding") for life in node.lives)
        return needs and both and not (said.free + said.cached) and world.pause is None

    def _states(self, node: Node) -> list[str]:
        return [life.state for life in node.lives if life.state in self.design.chart.holds]

    def _abort_group(self, draft: Draft) -> None:
        members = draft.members
        for who in self.design.aborts(members):
            draft.tell(who, "abort")
        for who in members:
            actions.must_be_over(draft, who)

    # --- what the explorer asks ---

    def claims(self, request: Node) -> int:
        return 0

    def events(self, environment: World) -> list[tuple[str, Cost, World]]:
        return events(self.design, environment) if self.pauses else []

    def hit(self, label: str, environment: World, request: Node) -> Hit | None:
        world = environment
        if label in PAUSES:
            mode = PAUSES[label]
            world = world._replace(pause=self.design.after_pause(world.pause, mode))
            return self._taken(world, request, partial(actions.pauses, mode))
        if label == CONTINUES:
            return self._taken(world._replace(pause=None), request, actions.nothing)
        in_place = label == IN_PLACE
        drops = self.design.drops_kv(world.pause)
        if not in_place and not self.design.may_flush(
            self.design.chart, self._states(request), drops
        ):
            return None
        world = world._replace(weights=1)
        return self._taken(world, request, partial(actions.renews, in_place))

    def at_rest(self, environment: World, request: Node) -> bool:
        first, second = request.lives
        over = second.state == "done" or (self.together == "group" and second.state == ABSENT)
        said = self.design.books.counts(request.owners)
        return (
            environment.pause is None
            and first.state == "done"
            and over
            and not request.guest
            and not said.held
            and not said.quarantined
        )

    def describe(self, environment: World, requests: Sequence[Node]) -> str:
        (node,) = requests
        lives = " ‖ ".join(_describe(life) for life in node.lives)
        said = self.design.books.counts(node.owners)
        tree = ",".join(f"{key[1]}:{page}" for key, page in node.tree)
        pages = f"{said.free} free" + (f", cache {tree}" if tree else "")
        guest = f", {node.guest} has a page" if node.guest else ""
        return f"{lives}   ({pages}{guest}){describe_world(environment)}"


def _describe(life: Life) -> str:
    notes = [f"{life.launched} launched"] if life.launched else []
    if life.pages:
        notes.append("pages " + ",".join(map(str, life.pages)))
    if life.long:
        notes.append("grown")
    return life.state + (f" ({', '.join(notes)})" if notes else "")


def _evicting(keys: tuple[Key, ...]) -> str:
    return f", evicting {', '.join(key[1] for key in keys)}" if keys else ""
