"""Requests over time, gathered from traces: the lanes of a picture (:mod:`fsm.timeline_svg`).

A *lane* is one life: spans of time in states, the marks on it, and its end. Memory grows with the
lanes that are shown, not with the trace."""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from fsm.decide import BOOKS
from fsm.replay_links import labels
from fsm.resources import Phase
from fsm.trace import AnswerLine, Balance, Header, LeaseLine, MoveLine, SubmitLine
from fsm.trace_read import Read

PHASE_OF: Final[dict[str, Phase]] = {
    state.name: state.phase for book in BOOKS.values() for state in book.chart.states
}
STOPPING: Final = frozenset(
    s.name
    for book in BOOKS.values()
    for s in book.chart.states
    if s.kind in ("stopping", "draining")
)


@dataclass(frozen=True, slots=True)
class Span:
    """A stay in one state, in seconds since the start of its node's trace."""

    state: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Mark:
    """An instant of a life."""

    kind: Literal["answer", "retract"]
    time: float
    text: str
    good: bool = True


@dataclass(slots=True)
class Lane:
    """One life on one node. ``end`` is when it was done; None while it is open."""

    node: str
    life: str
    rid: str
    begin: float
    number: int
    """In order of submission."""
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    end: float | None = None
    outcome: str = ""
    stage: str = ""
    since: float = 0.0

    def move(self, time: float, source: str, target: str) -> None:
        if time > self.since or not self.spans:
            self.spans.append(Span(self.stage or source, self.since, time))
        self.stage, self.since = target, time

    def close(self, time: float) -> None:
        """The trace ends while it is open."""
        self.spans.append(Span(self.stage, self.since, time))


@dataclass(frozen=True, slots=True)
class View:
    """Which lanes to keep: matching rids (``*`` and ``?`` are wild), those that overlap the times,
    and of these the page."""

    rids: tuple[str, ...] = ()
    since: float = 0.0
    until: float = float("inf")
    limit: int = 60
    page: int = 1

    @property
    def kept(self) -> int:
        return self.limit * self.page


@dataclass(slots=True)
class Pool:
    """The page pool of one node, as it changes."""

    total: int
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    """(time, held, cached), thinned out to a bounded number."""
    _every: float = 0.0

    def add(self, time: float, pool: Balance) -> None:
        held = self.total - pool.free - pool.cached
        if self.samples and time - self.samples[-1][0] < self._every:
            self.samples[-1] = (self.samples[-1][0], held, pool.cached)
            return
        self.samples.append((time, held, pool.cached))
        if len(self.samples) > MOST_SAMPLES:
            self._every = 4 * (time - self.samples[0][0]) / MOST_SAMPLES
            self.samples = self.samples[::2]


MOST_SAMPLES: Final = 4096


class Timeline:
    """Lanes of several nodes; feed every line with the index of its node."""

    def __init__(
        self,
        headers: Iterable[Header],
        view: View,
        shifts: Sequence[float] = (),
        drift: float = 0.0,
    ) -> None:
        """``shifts`` are added to the times of each node, and may leave an effect ``drift`` before
        its cause, both in seconds, as :class:`fsm.replay_clocks.Clocks` says."""
        self.headers: Final = list(headers)
        self.view: Final = view
        self.names: Final = labels(self.headers)
        self.shifts: Final = list(shifts) or [0.0] * len(self.headers)
        self.drift: Final = drift
        self.matching = 0
        """Lanes that the view would show without its limit."""
        self.start = view.since
        self.end = 0.0
        self.pools: Final = [Pool(header.pools.get("pages", 0)) for header in self.headers]
        self._open: dict[tuple[int, str], Lane] = {}
        self._kept: list[Lane] = []
        self._begun = 0

    def feed(self, index: int, line: Read) -> None:
        zero = self.headers[index].time - self.shifts[index]
        match line:
            case SubmitLine():
                time = line.time - zero
                if time <= self.view.until and self._wants(line.rid):
                    node = self.names[index]
                    self._begun += 1
                    lane = Lane(node, line.life, line.rid, time, self._begun, since=time)
                    self._open[index, line.life] = lane
            case MoveLine():
                time = line.time - zero
                found = self._open.get((index, line.life))
                if found is not None:
                    self._move(index, found, line, time)
                if line.pool is not None:
                    self._pool(index, time, line.pool)
            case LeaseLine():
                time = line.time - zero
                if line.pool is not None:
                    self._pool(index, time, line.pool)
            case AnswerLine():
                time = line.time - zero
            case _:
                return
        self.end = max(self.end, min(time, self.view.until))

    def lanes(self) -> list[Lane]:
        """The page's lanes by the time they began; those of one rid are together."""
        for lane in self._open.values():
            lane.close(self.end)
            self._keep(lane)
        self._open.clear()
        page = self._kept[self.view.limit * (self.view.page - 1) : self.view.kept]
        first: dict[str, int] = {}
        for number, lane in enumerate(page):
            first.setdefault(lane.rid, number)
        return sorted(page, key=lambda lane: first[lane.rid])

    def _wants(self, rid: str) -> bool:
        rids = self.view.rids
        return not rids or any(fnmatchcase(rid, pattern) for pattern in rids)

    def _pool(self, index: int, time: float, pool: Balance) -> None:
        if self.view.since <= time <= self.view.until:
            self.pools[index].add(time, pool)

    def _move(self, index: int, lane: Lane, line: MoveLine, time: float) -> None:
        lane.move(time, line.source, line.target)
        if line.event == "retract":
            lane.marks.append(Mark("retract", time, f"retracted: {line.why or line.by}"))
        if line.reason:
            status = f" {line.status}" if line.status is not None else ""
            lane.outcome = line.reason + status
            tokens = "1 token" if line.tokens == 1 else f"{line.tokens} tokens"
            text = f"{lane.outcome}, {tokens}" + (f": {line.why}" if line.why else "")
            good = line.reason in ("stop", "length")
            lane.marks.append(Mark("answer", time, text, good))
        if line.target == "done":
            lane.end = time
            del self._open[index, line.life]
            self._keep(lane)

    def _keep(self, lane: Lane) -> None:
        """Sort the lane in, if it overlaps the times of the view, and keep a page's worth."""
        if (self.end if lane.end is None else lane.end) < self.view.since:
            return
        self.matching += 1
        bisect.insort(self._kept, lane, key=lambda lane: (lane.begin, lane.number))
        del self._kept[self.view.kept :]
