"""Which line of which trace a line follows from, where several traces are read together."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from fsm.trace import Header, MoveLine, Numbered, SubmitLine
from fsm.trace_read import Malformed, Read

WINDOW: Final = 8192
"""Lines of each trace that are remembered. A cause is a recent line: a frame says what stands."""


def labels(headers: Sequence[Header]) -> list[str]:
    """What each trace is called: its node, with the boot id where a node has started again."""
    nodes = [header.node for header in headers]
    return [
        header.node if nodes.count(header.node) == 1 else f"{header.node}@{header.boot_id}"
        for header in headers
    ]


class Sources:
    """The traces that causes are looked for in, by the processes that wrote them."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._processes: Final = {(h.node, h.boot_id): i for i, h in enumerate(headers)}

    def index(self, line: SubmitLine | MoveLine) -> int | None:
        """The trace that the cause of ``line`` is in, if that is another one, and is there."""
        if line.cause is None or not line.boot:
            return None
        return self._processes.get((line.cause[0], line.boot))


class Link(NamedTuple):
    """A line follows from ``cause``, a line of trace ``source``."""

    source: int
    cause: Numbered


class Links:
    """Finds causes in other traces; feed it all lines in the order of
    :func:`fsm.replay_join.join`. Its memory is :data:`WINDOW` lines of each trace."""

    def __init__(self, headers: Sequence[Header]) -> None:
        self._sources: Final = Sources(headers)
        self._recent: Final[list[list[Numbered | None]]] = [[None] * WINDOW for _ in headers]

    def feed(self, index: int, line: Read) -> Link | None:
        """The next line, of trace ``index``: what it follows from in another trace. None also
        where that line is too old."""
        if isinstance(line, Header | Malformed):
            return None
        self._recent[index][line.seq % WINDOW] = line
        if not isinstance(line, MoveLine | SubmitLine) or not line.boot or line.cause is None:
            return None
        source = self._sources.index(line)
        if source is None or source == index:
            return None
        cause = self._recent[source][line.cause[1] % WINDOW]
        return Link(source, cause) if cause is not None and cause.seq == line.cause[1] else None
