"""Virtual time: a clock that jumps from event to event.

Time is counted in whole microseconds, so that sums are exact and a trace reads the same on every
machine. Events of the same instant run in the order in which they were scheduled. Nothing here
knows what an event does.
"""

import heapq
import math
from collections.abc import Callable
from typing import Final

US_PER_MS: Final = 1_000
US_PER_S: Final = 1_000_000

Action = Callable[[], None]


class World:
    """The clock and the events that are due."""

    def __init__(self) -> None:
        self.now_us = 0
        self.events = 0
        """Events run so far."""
        self.place: float = math.inf
        """Where in its instant the event stands that is being run; outside of one, after all."""
        self._heap: list[tuple[int, int, Action]] = []
        self._serial = 0

    def clock(self) -> float:
        """Seconds since the start: the clock that the scheduler is given."""
        return self.now_us / US_PER_S

    def at(self, when_us: int, action: Action) -> None:
        """Run ``action`` at ``when_us``; a time that has passed means now."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when_us, self.now_us), self._serial, action))

    def reserve(self) -> int:
        """A place among the events of this instant, for :meth:`take`: after everything that is
        scheduled already, before what is scheduled from now on."""
        self._serial += 1
        return self._serial

    def take(self, place: int, action: Action) -> None:
        """Run ``action`` in this instant, at a place that was reserved in it."""
        heapq.heappush(self._heap, (self.now_us, place, action))

    def after(self, delay_us: int, action: Action) -> None:
        """Run ``action`` in ``delay_us``, which may be 0: after everything due now."""
        self.at(self.now_us + delay_us, action)

    def at_seconds(self, when_s: float, action: Action) -> int:
        """Run ``action`` at the first microsecond that is not before ``when_s``, and not now;
        returns it.

        For deadlines: the conversion must not wake anybody a rounding error too early, for ever.
        """
        when_us = round(when_s * US_PER_S)
        if when_us / US_PER_S < when_s:
            when_us += 1
        when_us = max(when_us, self.now_us + 1)
        self.at(when_us, action)
        return when_us

    @property
    def next_us(self) -> int | None:
        """When the next event is due; None if nothing will ever happen by itself."""
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Advance to the next event and run it."""
        self.now_us, self.place, action = heapq.heappop(self._heap)
        self.events += 1
        action()
        self.place = math.inf

    def advance(self, until_us: int) -> None:
        """Move the clock of a world in which nothing is due before ``until_us``."""
        if self._heap and self._heap[0][0] < until_us:
            raise ValueError(f"an event is due before {until_us} us")
        self.now_us = max(self.now_us, until_us)
