"""Figures of a trace: how long requests stay where, what is held, how they end.

Quantiles come from a :class:`Sketch`, which needs the same memory for a thousand values and for a
billion and is off by at most one percent of the value."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from fsm.trace import PAGES, AnswerLine, Balance, Header, LeaseLine, MoveLine, SubmitLine
from fsm.trace_read import Malformed, Read

RELATIVE_ERROR: Final = 0.01
_GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA: Final = math.log(_GAMMA)
SMALLEST: Final = 1e-7
"""Seconds; the trace's clock has microseconds, so anything below is zero."""


class Sketch:
    """Quantiles of positive numbers in buckets that grow by a constant factor (DDSketch)."""

    __slots__ = ("_buckets", "_zeros", "count", "max", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.max = 0.0
        self._zeros = 0
        self._buckets: Counter[int] = Counter()

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        if value > self.max:
            self.max = value
        if value < SMALLEST:
            self._zeros += 1
        else:
            self._buckets[math.ceil(math.log(value) / _LOG_GAMMA)] += 1

    def quantile(self, q: float) -> float:
        """The value below which a share ``q`` of all values lies, within
        :data:`RELATIVE_ERROR`; 0 of nothing."""
        rank = q * (self.count - 1)
        seen = self._zeros
        if rank >= self.count - 1:
            return self.max
        if rank < seen:
            return 0.0
        for index in sorted(self._buckets):
            seen += self._buckets[index]
            if rank < seen:
                return min(self.max, 2 * _GAMMA**index / (_GAMMA + 1))
        return self.max


@dataclass(slots=True)
class Level:
    """How many units of a resource are held, over time."""

    total: int = 0
    now: int = 0
    peak: int = 0
    unit_seconds: float = 0.0
    _since: float = 0.0

    def change(self, time: float, value: int) -> None:
        self.unit_seconds += self.now * (time - self._since)
        self._since, self.now = time, value
        if value > self.peak:
            self.peak = value


@dataclass(slots=True)
class _Life:
    stage: str
    since: float
    began: float


@dataclass(slots=True)
class NodeStats:
    """The figures of one node; feed it every line. Times are in seconds."""

    header: Header
    entries: Counter[str] = field(default_factory=Counter)
    dwell: dict[str, Sketch] = field(default_factory=dict)
    """Time in a state, for each time that it was left."""
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(from, event) → how often."""
    levels: dict[str, Level] = field(default_factory=dict)
    endings: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    """(finish reason, status) → how many answers."""
    first_token: Sketch = field(default_factory=Sketch)
    """Submission to the end of the (first) prefill."""
    whole: Sketch = field(default_factory=Sketch)
    """Submission to the answer."""
    requests: int = 0
    tokens: int = 0
    retractions: int = 0
    evicted: int = 0
    end: float = 0.0
    _lives: dict[str, _Life] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end = self.header.time
        for name, total in self.header.pools.items():
            self.levels[name] = Level(total, _since=self.header.time)

    @property
    def seconds(self) -> float:
        """From the header to the last line."""
        return self.end - self.header.time

    @property
    def open(self) -> int:
        """Requests that were not done when the trace ended."""
        return len(self._lives)

    def feed(self, line: Read) -> None:
        match line:
            case MoveLine():
                self._move(line)
            case LeaseLine():
                if line.pool is not None:
                    self._pages(line.time, line.pool)
                if line.what == "evict":
                    self.evicted += line.units
            case SubmitLine():
                self.requests += 1
                self._lives[line.life] = _Life("", line.time, line.time)
                for name in line.taken:
                    self._count(line.time, name, 1)
            case AnswerLine():
                self.endings[line.reason, line.status] += 1
                self.tokens += line.tokens
            case Header() | Malformed():
                return
        self.end = max(self.end, line.time)

    def _move(self, line: MoveLine) -> None:
        time, life = line.time, self._lives.get(line.life)
        self.edges[line.source, line.event] += 1
        if life is not None:
            if not life.stage:
                self.entries[line.source] += 1
            self.entries[line.target] += 1
            self.dwell.setdefault(line.source, Sketch()).add(time - life.since)
            if line.event == "prefilled" and line.attempt == 0:
                self.first_token.add(time - life.began)
            if line.reason:
                self.whole.add(time - life.began)
            life.stage, life.since = line.target, time
            if line.target == "done":
                del self._lives[line.life]
        if "pages" in line.dropped and line.target == "retracted":
            self.retractions += 1
        for name in line.taken:
            self._count(time, name, 1)
        for name in line.dropped:
            self._count(time, name, -1)
        if line.pool is not None:
            self._pages(time, line.pool)

    def _count(self, time: float, name: str, change: int) -> None:
        level = self.levels.get(name)
        if level is not None and name != PAGES:
            level.change(time, level.now + change)

    def _pages(self, time: float, pool: Balance) -> None:
        level = self.levels[PAGES]
        level.change(time, level.total - pool.free - pool.cached)
