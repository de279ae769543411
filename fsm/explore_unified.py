"""The model of a unified node that exploration walks: see :mod:`fsm.explore`.

One request is a life, its launched steps, its operation at the store, and how often it has
answered. Who is admitted, retracted or readmitted is free choice; there is one row and one unit of
pages, so that two requests contend. A pause that drops KV, and a change of weights while paused,
hit the whole node."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

from fsm import protocol
from fsm.chart import Chart
from fsm.decide import TABLES
from fsm.explore_base import ABORT, DEADLINE, FAULT, FREE, REBUILD, UNSURE, Cost, Hit, Step
from fsm.rules import Facts, Message, Table
from fsm.unified import UNIFIED

ABSENT: Final = "absent"
POOLS: Final = ("rows", "pages")


class Life(NamedTuple):
    state: str = ABSENT
    launched: int = 0
    loading: bool = False
    """An operation at the store has not come back."""
    answers: int = 0
    weights: int = 0
    """Those that its KV was computed under."""


class World(NamedTuple):
    """What the whole node is in."""

    paused: bool = False
    """Generation is paused, and KV is dropped."""
    weights: int = 0


class Broken(Exception):  # noqa: N818 - the model has found what it looks for
    """A property does not hold in the step being taken."""


class Draft:
    """A request in the middle of a step."""

    def __init__(self, chart: Chart, table: Table, world: World, life: Life) -> None:
        self.chart, self.table, self.world = chart, table, world
        self.place, self.launched, self.loading, self.answers, self.weights = life

    def move(self, event: str, cause: Message | None = None) -> None:
        edge = self.chart.table[self.place, event]
        before, after = self.chart.holds[edge.source], self.chart.holds[edge.target]
        if cause is not None and (after - before) & set(POOLS):
            raise Broken(f"{cause} takes memory, which may not be there")
        if edge.pages == "cache" and self.weights != self.world.weights:
            raise Broken("pages go to the prefix cache that were computed under other weights")
        if "pages" in after - before:
            self.weights = self.world.weights
        self.answers += "frontend_records" in before - after
        self.place = edge.target

    def tell(self, message: Message) -> None:
        decision = self.table[self.place, message, Facts(launched=self.launched > 0)]
        if decision.effect == "refuse":
            raise Broken(f"{message} makes no sense in {self.place}")
        if decision.event is not None:
            self.move(decision.event, message)

    def settle(self) -> None:
        """Deliver what is due at the end of a turn, until nothing is."""
        while self.place in self.chart.holds:
            message = self._due()
            if message is None or self.table[self.place, message, Facts()].effect != "fire":
                return
            self.tell(message)

    def _due(self) -> Message | None:
        if not self.launched and self.chart.table.get((self.place, "quiesce")):
            return "quiet"
        if self.world.paused and (self.place, "hold") in self.chart.table:
            return "paused"
        if not self.world.paused and (self.place, "resume") in self.chart.table:
            return "continued"
        return None

    def frozen(self) -> Life:
        weights = self.weights if "pages" in self.chart.holds.get(self.place, ()) else 0
        return Life(self.place, self.launched, self.loading, self.answers, weights)


Action: TypeAlias = Callable[[Draft], None]
Option: TypeAlias = tuple[str, Cost, int, Action]


class UnifiedModel:
    """Requests on a unified node."""

    name = "unified"

    def __init__(
        self,
        chart: Chart = UNIFIED,
        table: Table | None = None,
        depth: int = 2,
        may_flush: Callable[..., bool] = protocol.may_flush,
    ) -> None:
        """``depth``: steps launched at a time, 1 or 2."""
        self.may_flush: Final = may_flush
        self.chart: Final = chart
        self.table: Final = TABLES["unified"] if table is None else table
        self.depth: Final = depth

    def begin(self) -> tuple[World, Life]:
        return World(), Life()

    def steps(self, environment: World, request: Life) -> list[Step]:
        steps = []
        for label, cost, needs, action in self._options(environment, request):
            life, violation = self._taken(environment, request, action)
            steps.append(Step(label, cost, needs, environment, life, violation=violation))
        return steps

    def _taken(self, world: World, life: Life, action: "Action | None") -> tuple[Life, str]:
        draft, violation = Draft(self.chart, self.table, world, life), ""
        try:
            if action is not None:
                action(draft)
            draft.settle()
        except Broken as error:
            violation = str(error)
        after = draft.frozen()
        return after, violation or self._broken(after)

    def _options(self, world: World, life: Life) -> Iterator[Option]:
        state, chart = life.state, self.chart
        if state == ABSENT:
            yield "arrives", FREE, 0, _arrive
            return
        if life.loading:
            yield "prefetch_loaded", FREE, 0, partial(_loaded, "prefetch_loaded")
            yield "prefetch_failed", FAULT, 0, partial(_loaded, "prefetch_failed")
        if life.launched:
            results: list[Message] = ["token_committed", "last_token_committed", "step_failed"]
            if state != "decoding":
                results.append("chunk_committed")
            for result in results:
                cost = FAULT if result == "step_failed" else FREE
                yield result, cost, 0, partial(_commit, result)
        for event in ("enqueue", "prefetch", "reject", "admit", "readmit", "retract"):
            edge = chart.table.get((state, event))
            if edge is not None and not (world.paused and event in ("admit", "readmit")):
                takes = chart.holds[edge.target] - chart.holds[edge.source]
                cost = UNSURE if event in ("reject", "retract") else FREE
                yield event, cost, _bits(takes), partial(_policy, event)
        computes = state in ("prefilling", "decoding") and not world.paused
        if computes and life.launched < self.depth:
            yield "a step is launched", FREE, 0, _launch
        if state in ("retracted", "prefilling", "decoding", "retracting", "holding", "held"):
            yield "stop_matched", UNSURE, 0, partial(_message, "stop_matched")
        if chart.is_live(state):
            yield "client aborts", ABORT, 0, _abort
            if self.table[state, "expired", Facts(launched=life.launched > 0)].effect == "fire":
                yield "deadline", DEADLINE, 0, partial(_message, "expired")

    def _broken(self, life: Life) -> str:
        holds = self.chart.holds.get(life.state)
        if holds is None:
            return ""
        if life.launched and not {"pages", "rows"} <= holds:
            return f"a launched step touches pages that were released in {life.state}"
        if life.answers > 1:
            return "the client is answered twice"
        owes = "frontend_records" in holds
        if owes == bool(life.answers):
            return f"in {life.state} the client {'has' if owes else 'has not'} been answered"
        return ""

    def claims(self, request: Life) -> int:
        return _bits(self.chart.holds.get(request.state, frozenset()))

    def events(self, environment: World) -> list[tuple[str, Cost, World]]:
        world = environment
        if "held" not in self.chart.by_name:
            return []
        if not world.paused:
            return [("pauses", REBUILD, world._replace(paused=True))]
        events = [("continues", FREE, world._replace(paused=False))]
        if not world.weights:
            events.append(("changes weights", UNSURE, world._replace(weights=1)))
        return events

    def hit(self, label: str, environment: World, request: Life) -> Hit | None:
        world = environment
        if label == "pauses":
            if self.at_rest(environment, request):
                return None  # whatever follows is a run of the other request alone
            world = world._replace(paused=True)
        elif label == "continues":
            world = world._replace(paused=False)
        else:
            states = [request.state] if request.state in self.chart.holds else []
            if not self.may_flush(self.chart, states, world.paused):
                return None
            world = world._replace(weights=1)
        return Hit(*self._taken(world, request, None))

    def at_rest(self, environment: World, request: Life) -> bool:
        return request.state == "done" and not request.loading and not environment.paused

    def describe(self, environment: World, requests: Sequence[Life]) -> str:
        text = " ‖ ".join(_describe(life) for life in requests)
        notes = ["paused"] if environment.paused else []
        notes += [f"weights W{environment.weights}"] if environment.weights else []
        return text + (f"   [{', '.join(notes)}]" if notes else "")


def _bits(resources: frozenset[str] | frozenset[object]) -> int:
    return sum(1 << n for n, pool in enumerate(POOLS) if pool in resources)


def _describe(life: Life) -> str:
    notes = [f"{life.launched} launched"] if life.launched else []
    notes += ["loading"] if life.loading else []
    return life.state + (f" ({', '.join(notes)})" if notes else "")


def _arrive(draft: Draft) -> None:
    draft.place = draft.chart.initial


def _policy(event: str, draft: Draft) -> None:
    draft.move(event)
    draft.loading = draft.loading or event == "prefetch"


def _loaded(message: Message, draft: Draft) -> None:
    draft.loading = False
    draft.tell(message)


def _launch(draft: Draft) -> None:
    draft.launched += 1
    if draft.weights != draft.world.weights:
        raise Broken("KV is used that was computed under other weights")


def _commit(message: Message, draft: Draft) -> None:
    draft.launched -= 1
    draft.tell(message)


def _message(message: Message, draft: Draft) -> None:
    draft.tell(message)


def _abort(draft: Draft) -> None:
    draft.tell("abort")
    if draft.chart.is_live(draft.place):
        raise Broken(f"aborted, but still {draft.place}")
