"""The model of a unified node that exploration walks: see :mod:`fsm.explore`.

One request is a life, its launched steps, its operation at the store, and how often it has
answered. Who is admitted, retracted or readmitted is free choice; there is one row and one unit of
pages, so that two requests contend. Pauses in every mode, and changes of weights (in place, too),
hit the whole node. What two requests share is in :mod:`fsm.explore_shared`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from fsm.explore_base import (
    ABORT,
    DEADLINE,
    FAULT,
    FREE,
    REBUILD,
    UNSURE,
    Cost,
    Hit,
    Step,
    Traced,
)
from fsm.explore_unified_draft import (
    ABSENT,
    MEMORY,
    Broken,
    Draft,
    Life,
    UnifiedDesign,
    World,
    aborted,
    arrives,
    commits,
    launches,
    loaded,
    nothing,
    paused,
    policy,
    told,
    weights_changed,
)
from fsm.pauses import MODES, PauseMode
from fsm.rules import Facts, Message
from fsm.unified import BASE_KIT

Action: TypeAlias = Callable[[Draft], None]
Option: TypeAlias = tuple[str, Cost, int, Action]
"""(label, cost, needs, action)"""

PAUSES: Final = {f"pauses ({mode})": mode for mode in MODES}
CONTINUES: Final = "continues"
CHANGES: Final = "changes weights"
IN_PLACE: Final = "changes weights in place"


class UnifiedModel:
    """Requests on a unified node."""

    name = "unified"

    def __init__(self, design: UnifiedDesign | None = None, depth: int = 2) -> None:
        """``depth``: steps launched at a time, 1 or 2."""
        self.design: Final = design or UnifiedDesign()
        self.nodes: Final[Mapping[str, Traced]] = {"unified": Traced(self.design.chart, BASE_KIT)}
        self.depth: Final = depth

    def begin(self) -> tuple[World, Life]:
        return World(), Life()

    def steps(self, environment: World, request: Life) -> list[Step]:
        steps = []
        for label, cost, needs, action in self._options(environment, request):
            hit = self._taken(environment, request, action)
            steps.append(
                Step(label, cost, needs, environment, hit.request, False, hit.violation, hit.moves)
            )
        return steps

    def _taken(self, world: World, life: Life, action: Action) -> Hit:
        draft, violation = Draft(self.design, world, life), ""
        try:
            action(draft)
            draft.settle()
        except Broken as error:
            violation = str(error)
        after = draft.frozen()
        return Hit(after, violation or self._broken(world, after), tuple(draft.moves))

    def _options(self, world: World, life: Life) -> Iterator[Option]:
        state, chart, design = life.state, self.design.chart, self.design
        if state == ABSENT:
            yield "arrives", FREE, 0, arrives
            return
        if life.loading:
            yield "prefetch_loaded", FREE, 0, partial(loaded, "prefetch_loaded")
            yield "prefetch_failed", FAULT, 0, partial(loaded, "prefetch_failed")
            yield "prefetch deadline", DEADLINE, 0, partial(told, "prefetch_expired")
        if life.launched:
            results: list[Message] = ["token_committed", "last_token_committed", "step_failed"]
            if state != "decoding":
                results.append("chunk_committed")
            for result in results:
                cost = FAULT if result == "step_failed" else FREE
                yield result, cost, 0, partial(commits, result)
        for event in ("enqueue", "prefetch", "reject", "admit", "readmit", "retract"):
            edge = chart.table.get((state, event))
            admits = design.admits(world.pause) or event not in ("admit", "readmit")
            if edge is not None and admits:
                takes = chart.holds[edge.target] - chart.holds[edge.source]
                cost = UNSURE if event in ("reject", "retract") else FREE
                yield event, cost, _bits(takes), partial(policy, event)
        computes = state in ("prefilling", "decoding")
        if computes and life.launched < self.depth and not design.is_frozen("unified", world.pause):
            yield "a step is launched", FREE, 0, launches
        if state in ("retracted", "prefilling", "decoding", "retracting", "holding", "held"):
            yield "stop_matched", UNSURE, 0, partial(told, "stop_matched")
        if chart.is_live(state):
            yield "client aborts", ABORT, 0, aborted
            if design.table[state, "expired", Facts(launched=life.launched > 0)].effect == "fire":
                yield "deadline", DEADLINE, 0, partial(told, "expired")

    def _broken(self, world: World, life: Life) -> str:
        return broken(self.design, world.pause, life.state, life.launched, life.answers)

    def claims(self, request: Life) -> int:
        return _bits(self.design.chart.holds.get(request.state, frozenset()))

    # --- what hits the whole node ---

    def events(self, environment: World) -> list[tuple[str, Cost, World]]:
        return events(self.design, environment)

    def hit(self, label: str, environment: World, request: Life) -> Hit | None:
        world, action = environment, nothing
        if label in PAUSES:
            if self.at_rest(environment._replace(pause=None), request):
                return None  # whatever follows is a run of the other request alone
            mode = PAUSES[label]
            world = world._replace(pause=self.design.after_pause(world.pause, mode))
            return self._taken(world, request, partial(paused, mode))
        if label == CONTINUES:
            return self._taken(world._replace(pause=None), request, action)
        in_place = label == IN_PLACE
        if not in_place and not self._may_flush(world, request):
            return None
        return self._taken(world._replace(weights=1), request, partial(weights_changed, in_place))

    def _may_flush(self, world: World, request: Life) -> bool:
        chart = self.design.chart
        states = [request.state] if request.state in chart.holds else []
        return self.design.may_flush(chart, states, self.design.drops_kv(world.pause))

    def at_rest(self, environment: World, request: Life) -> bool:
        return request.state == "done" and not request.loading and environment.pause is None

    def describe(self, environment: World, requests: Sequence[Life]) -> str:
        return " ‖ ".join(_describe(life) for life in requests) + describe_world(environment)


def events(design: UnifiedDesign, world: World) -> list[tuple[str, Cost, World]]:
    """What an operator may do to a node: pause it, once more and further, let it continue, and
    change its weights, once. Outside a pause a change of weights costs as much as a pause."""
    if "held" not in design.chart.by_name:
        return []
    found: list[tuple[str, Cost, World]] = []
    for label, mode in PAUSES.items():
        if mode != world.pause:
            pause: PauseMode = design.after_pause(world.pause, mode)
            found.append((label, REBUILD, world._replace(pause=pause)))
    if world.pause is not None:
        found.append((CONTINUES, FREE, world._replace(pause=None)))
    if not world.weights:
        cost = REBUILD if world.pause is None else UNSURE
        changed = world._replace(weights=1)
        found += [(CHANGES, cost, changed), (IN_PLACE, cost, changed)]
    return found


def broken(
    design: UnifiedDesign, pause: PauseMode | None, state: str, launched: int, answers: int
) -> str:
    """The first property of a life that does not hold; empty if all do."""
    chart = design.chart
    holds = chart.holds.get(state)
    if holds is None:
        return ""
    if launched and not set(MEMORY) <= holds:
        return f"a launched step touches pages that were released in {state}"
    if pause in ("abort", "retract") and "pages" in holds and (state, "quiesce") not in chart.table:
        return f"KV is kept in {state} by a pause that drops it"
    if answers > 1:
        return "the client is answered twice"
    owes = "frontend_records" in holds
    if owes == bool(answers):
        return f"in {state} the client {'has' if owes else 'has not'} been answered"
    return ""


def _bits(resources: frozenset[str] | frozenset[object]) -> int:
    return sum(1 << n for n, pool in enumerate(MEMORY) if pool in resources)


def _describe(life: Life) -> str:
    notes = [f"{life.launched} launched"] if life.launched else []
    notes += ["loading"] if life.loading else []
    return life.state + (f" ({', '.join(notes)})" if notes else "")


def describe_world(world: World) -> str:
    notes = [f"paused ({world.pause})"] if world.pause is not None else []
    notes += [f"weights W{world.weights}"] if world.weights else []
    return f"   [{', '.join(notes)}]" if notes else ""
