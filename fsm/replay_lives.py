"""Lives in a replay, and the moves that are legal for them.

The moves come from the table that :class:`fsm.driver.DictDriver` drives by, expanded once for each
kit: a trace of a million lines has a dozen kits."""

from collections.abc import Mapping
from functools import cache
from typing import Final, TypeAlias, get_args

from fsm.chart import Chart
from fsm.decide import BOOKS
from fsm.replay_pages import Account
from fsm.resources import Resource

KNOWN: Final[frozenset[str]] = frozenset(get_args(Resource))


class Step:
    """One legal move of requests with one kit."""

    __slots__ = (
        "by",
        "computing",
        "counts",
        "dropped",
        "drops_pages",
        "ends",
        "event",
        "first",
        "here",
        "new_attempt",
        "prefilling",
        "retires",
        "source",
        "taken",
        "takes_pages",
        "target",
    )

    def __init__(self, chart: Chart, state: str, event: str, kit: frozenset[Resource]) -> None:
        move = chart.move(state, event, kit)
        assert move is not None, (state, event)
        edge = move.edge
        live = chart.is_live(edge.source)
        self.event: Final = event
        self.source: Final = edge.source
        self.target: Final = edge.target
        self.by: Final[tuple[str, ...]] = edge.by
        self.taken: Final[tuple[str, ...]] = move.takes
        self.dropped: Final[tuple[str, ...]] = move.drops
        self.takes_pages: Final = "pages" in move.takes
        self.drops_pages: Final = "pages" in move.drops
        self.counts: Final = tuple((r, 1) for r in move.takes if r != "pages") + tuple(
            (r, -1) for r in move.drops if r != "pages"
        )
        self.first: Final = edge.source == chart.initial
        self.retires: Final = "frontend_records" in move.drops
        """Giving the obligation to answer back *is* answering."""
        self.ends: Final = chart.state(edge.target).kind == "done"
        self.computing: Final = live and "rows" in chart.holds[edge.source]
        """Tokens may have come since the last move."""
        self.prefilling: Final = chart.phase(edge.source) == "prefilling"
        given_up = {"pages", "host_pages"} & set(move.drops)
        kept = "pages" in chart.holds[edge.target]
        self.new_attempt: Final = bool(given_up) and not kept and chart.is_live(edge.target)
        """Its KV is gone, from the device or altogether, and it is to go on."""
        self.here: Steps = {}
        """What is legal after it."""


Steps: TypeAlias = dict[str, Step]
"""Legal moves in one state, by event."""


class Tables:
    """The legal moves of one chart, for every kit that occurs."""

    def __init__(self, chart: Chart) -> None:
        self.chart: Final = chart
        self.prefills: Final = any(state.phase == "prefilling" for state in chart.states)
        """Prompts are computed here, not by a peer."""
        self._known: dict[frozenset[Resource], Mapping[str, Steps]] = {}

    def steps(self, kit: tuple[str, ...]) -> Mapping[str, Steps]:
        """State → event → move. Resources that nobody knows count for nothing."""
        needs = self.chart.resources.intersection(kit)
        table = self._known.get(needs)
        if table is None:
            table = {
                state: {
                    event: Step(self.chart, state, event, needs)
                    for event in self.chart.events
                    if (state, event) in self.chart.table
                }
                for state in self.chart.by_name
            }
            for steps in table.values():
                for step in steps.values():
                    step.here = table[step.target]
            self._known[needs] = table
        return table

    def holds(self, state: str, kit: tuple[str, ...]) -> frozenset[Resource]:
        return frozenset(r for r in self.chart.state(state).holds if r in kit)


@cache
def tables_of(chart: str) -> Tables:
    """The moves of one of this build's charts."""
    return Tables(BOOKS[chart].chart)


class Life:
    """What a replay remembers of a request until it is done."""

    __slots__ = (
        "account",
        "answered",
        "attempt",
        "here",
        "kit",
        "life",
        "line",
        "max_new_tokens",
        "peer",
        "prompt_tokens",
        "rid",
        "seq",
        "stage",
        "tokens",
    )

    def __init__(
        self,
        life: str,
        rid: str,
        kit: tuple[str, ...],
        stage: str,
        here: Steps,
        prompt_tokens: int,
        max_new_tokens: int,
        line: int,
        seq: int,
    ) -> None:
        self.life: Final = life
        self.rid: Final = rid
        self.kit: Final = kit
        self.stage = stage
        """The state it is in. (Only a driver writes the ``state`` of a request.)"""
        self.here = here
        self.prompt_tokens: Final = prompt_tokens
        self.max_new_tokens: Final = max_new_tokens
        self.line = line
        """Where it moved last: the line of the file."""
        self.seq: Final = seq
        self.attempt = 0
        self.tokens = 0
        self.answered = False
        self.account: Account | None = None
        self.peer: tuple[str, str, int] | None = None
        """Node, boot id and ``seq`` of what its other half's node said last."""
