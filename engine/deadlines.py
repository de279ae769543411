"""Deadlines are events of the clock: a heap of timers, each for one request, kind and attempt.

A timer is never cancelled; when it is due, it is asked whether it still means anything.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from engine.request import Request
from fsm.chart import Chart

TimerKind: TypeAlias = Literal[
    "prefetch", "waiting", "running", "client", "meeting", "transfer", "held"
]


@dataclass(frozen=True, slots=True)
class Timer:
    """``kind`` of deadline that ``request`` has; ``attempt`` is the one it was set in."""

    kind: TimerKind
    request: Request
    attempt: int


_STATES: Final[dict[TimerKind, tuple[str, ...]]] = {
    "waiting": (),
    "meeting": ("meeting",),  # and only until the peer is met
    "transfer": ("receiving", "sending"),
    "held": ("held",),
}
"""Deadlines that count in one attempt only, and where; waiting is wherever a chart's queue is."""


HELD_TIMEOUT_S: Final = 3600.0
"""How long a request may be held, where nothing else is said (design, section 6)."""

FROZEN: Final[frozenset[TimerKind]] = frozenset({"waiting", "running"})
"""Deadlines that stand still while generation is paused (design, section 6)."""


class Deadlines:
    """Timers of one node, in seconds on its clock."""

    def __init__(self, chart: Chart, queued: frozenset[str]) -> None:
        self._chart = chart
        self._queued = queued
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial: int = 0
        self._frozen_at: float | None = None
        self._compact_at = 64

    def set(self, when: float, kind: TimerKind, request: Request) -> None:
        self._serial += 1
        if len(self._heap) >= self._compact_at:
            # What has ended must not wait here for a deadline that may be days away.
            self._heap = [entry for entry in self._heap if self._applies(entry[2])]
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 64
        timer = Timer(kind, request, request.attempt)
        heapq.heappush(self._heap, (when, self._serial, timer))

    def due(self, now: float) -> Timer | None:
        """The next timer that is due and still applies, taken off the heap."""
        parked = []
        found = None
        while found is None and self._heap and self._heap[0][0] <= now:
            entry = heapq.heappop(self._heap)
            if self._frozen_at is not None and entry[2].kind in FROZEN:
                parked.append(entry)
            elif self._applies(entry[2]):
                found = entry[2]
        for entry in parked:
            heapq.heappush(self._heap, entry)
        return found

    def of(self, request: Request, now: float) -> dict[str, float]:
        """The deadlines that apply to ``request`` where it is: kind → seconds left, the earliest
        of each kind. A frozen one does not come nearer."""
        left: dict[str, float] = {}
        for when, _, timer in sorted(self._heap, key=lambda entry: entry[:2]):
            if timer.request is request and self._applies(timer):
                left.setdefault(timer.kind, when - self._still_since(timer, now))
        return left

    def freeze(self, now: float) -> None:
        """Generation is paused: what a request waits for through no fault of its own stops."""
        if self._frozen_at is None:
            self._frozen_at = now

    def thaw(self, now: float) -> None:
        """Generation goes on; frozen deadlines are later by as long as the pause was."""
        if self._frozen_at is None:
            return
        self._heap = [
            (when + now - self._still_since(timer, now), serial, timer)
            for when, serial, timer in self._heap
        ]
        heapq.heapify(self._heap)
        self._frozen_at = None

    def _still_since(self, timer: Timer, now: float) -> float:
        """Since when a deadline stands still: a request that arrives in a pause waits, with all of
        its time, from its arrival. ``now`` where it does not stand still."""
        if self._frozen_at is None or timer.kind not in FROZEN:
            return now
        return max(self._frozen_at, timer.request.arrived_at)

    def _applies(self, timer: Timer) -> bool:
        """Whether the request still is where this deadline counts."""
        state = timer.request.state
        if timer.kind == "prefetch":
            return state == "prefetching"
        if timer.kind in _STATES and timer.request.attempt != timer.attempt:
            return False
        if timer.kind == "waiting":
            return state in self._queued
        if timer.kind == "meeting":
            # The peer that was met is watched by its heartbeats; its queue is not its death (B69).
            pairing = timer.request.pairing
            return state == "meeting" and (pairing is None or not pairing.met)
        if timer.kind in _STATES:
            return state in _STATES[timer.kind]
        return self._chart.is_live(state)

    @property
    def next(self) -> float | None:
        """When the earliest timer is due, whether or not it will still apply."""
        if self._frozen_at is None:
            return self._heap[0][0] if self._heap else None
        return min(
            (when for when, _, timer in self._heap if timer.kind not in FROZEN), default=None
        )
