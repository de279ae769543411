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
    "meeting": ("meeting",),
    "transfer": ("receiving", "sending"),
    "held": ("held",),
}
"""Deadlines that count in one attempt only, and where; waiting is wherever a chart's queue is."""


class Deadlines:
    """Timers of one node, in seconds on its clock."""

    def __init__(self, chart: Chart, queued: frozenset[str]) -> None:
        self._chart = chart
        self._queued = queued
        self._heap: list[tuple[float, int, Timer]] = []
        self._serial: int = 0

    def set(self, when: float, kind: TimerKind, request: Request) -> None:
        self._serial += 1
        timer = Timer(kind, request, request.attempt)
        heapq.heappush(self._heap, (when, self._serial, timer))

    def due(self, now: float) -> Timer | None:
        """The next timer that is due and still applies, taken off the heap."""
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if self._applies(timer):
                return timer
        return None

    def _applies(self, timer: Timer) -> bool:
        """Whether the request still is where this deadline counts."""
        state = timer.request.state
        if timer.kind == "prefetch":
            return state == "prefetching"
        if timer.kind in _STATES and timer.request.attempt != timer.attempt:
            return False
        if timer.kind == "waiting":
            return state in self._queued
        if timer.kind in _STATES:
            return state in _STATES[timer.kind]
        return self._chart.is_live(state)

    @property
    def next(self) -> float | None:
        """When the earliest timer is due, whether or not it will still apply."""
        return self._heap[0][0] if self._heap else None
