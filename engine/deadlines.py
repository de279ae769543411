"""Deadlines are events of the clock: a heap of timers, each for one request, kind and attempt.

A timer is never cancelled; when it is due, it is asked whether it still means anything.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, TypeAlias

from engine.request import Request
from engine.roster import QUEUED
from fsm.unified import UNIFIED

TimerKind: TypeAlias = Literal["prefetch", "waiting", "running", "client"]


@dataclass(frozen=True, slots=True)
class Timer:
    """``kind`` of deadline that ``request`` has; ``attempt`` is the one it was set in."""

    kind: TimerKind
    request: Request
    attempt: int

    @property
    def applies(self) -> bool:
        """Whether the request still is where this deadline counts."""
        state = self.request.state
        if self.kind == "prefetch":
            return state == "prefetching"
        if self.kind == "waiting":
            return state in QUEUED and self.request.attempt == self.attempt
        return UNIFIED.is_live(state)


class Deadlines:
    """Timers of one node, in seconds on its clock."""

    def __init__(self) -> None:
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
            if timer.applies:
                return timer
        return None

    @property
    def next(self) -> float | None:
        """When the earliest timer is due, whether or not it will still apply."""
        return self._heap[0][0] if self._heap else None
