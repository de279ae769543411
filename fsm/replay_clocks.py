"""How far the clocks of several nodes have to be moved so that nothing happens before its cause.

Each trace counts seconds from its header, on a clock of its own. A line cannot be earlier than the
line of another node that it follows from: from every such pair follows by how much the one clock
must be ahead of the other at least. The smallest shifts that satisfy all of them are found; clocks
that fit already are left alone. This says in which order things can have happened, not when they
did: a message seems to take no time where the clocks differ most."""

from collections.abc import Sequence
from typing import Final

from fsm.replay_links import Links
from fsm.trace import Header
from fsm.trace_read import Malformed, Read

EXACT_S: Final = 1e-6
"""Times are written in whole microseconds."""


class Clocks:
    """Learns from lines, in the order of :func:`fsm.replay_join.join`, what the clocks allow."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._zeros: Final = [header.time for header in headers]
        self._links: Final = Links(headers)
        self._behind: Final[dict[tuple[int, int], float]] = {}
        """(source, target) → how far an effect on target was, at most, before its cause."""

    def feed(self, index: int, line: Read) -> None:
        """The next line, of trace ``index``."""
        link = self._links.feed(index, line)
        if link is None or isinstance(line, Header | Malformed):
            return
        cause = link.cause.time - self._zeros[link.source]
        behind = cause - (line.time - self._zeros[index])
        pair = link.source, index
        if behind > self._behind.get(pair, float("-inf")):
            self._behind[pair] = behind

    def shifts(self) -> list[float]:
        """Seconds to add to the times of each trace, none of them negative.

        Clocks that do not run equally fast may allow none: then a cause can be late by what they
        have drifted apart, see :meth:`drift`."""
        shifts = [0.0] * len(self._zeros)
        for _ in shifts:
            for (source, target), behind in self._behind.items():
                if shifts[source] + behind > shifts[target] + EXACT_S:
                    shifts[target] = shifts[source] + behind
        return shifts

    def drift(self) -> float:
        """Seconds by which an effect is still before its cause, with these shifts; 0 if none is."""
        shifts = self.shifts()
        late = [shifts[s] + behind - shifts[t] for (s, t), behind in self._behind.items()]
        worst = max(late, default=0.0)
        return worst if worst > EXACT_S else 0.0
