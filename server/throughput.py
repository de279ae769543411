"""Tokens per second, from the counters that the engine reports a few times a second."""

from collections import deque
from typing import Final

WINDOW_S: Final = 5.0


class Throughput:
    """The rate of a counter that only grows, over a sliding window of :data:`WINDOW_S` seconds.

    A rate of zero is a measurement: nothing was generated within the window.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        self._last = 0.0

    def add(self, now: float, count: int) -> None:
        """The counter stands at ``count``, at ``now`` seconds on any one clock. A counter that went
        back is another engine's, and starts the window anew."""
        samples = self._samples
        if samples and count < samples[-1][1]:
            samples.clear()
        samples.append((now, count))
        # The newest sample that is a whole window old is where the window begins.
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()
        self._last = self.rate or self._last

    @property
    def rate(self) -> float:
        """Per second, now; 0 before there are two samples."""
        if len(self._samples) < 2:
            return 0.0
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if ended > began else 0.0

    @property
    def last(self) -> float:
        """The last rate that was not zero; 0 when nothing was ever counted."""
        return self._last
