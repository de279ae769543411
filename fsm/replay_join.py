"""Several traces as one story: joined by ``cause``, never by clock.

The clocks of two nodes cannot be compared, but a line that names its cause on another node cannot
have happened before it. Among lines that may come next, the one with the smallest time does: that
orders nothing, it only reads better where the clocks happen to agree."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fsm.replay import NodeReplay
from fsm.replay_faults import Fault
from fsm.trace import Header, MoveLine
from fsm.trace_read import Malformed, Read, TraceReader

Report = Callable[[Fault], None]


class _Stream:
    """One trace, a line ahead."""

    def __init__(self, reader: TraceReader) -> None:
        self.reader: Final = reader
        self.node: Final = reader.header.node
        self.number = 1
        self.seq = 0
        self.head: Read | None = reader.header
        self._lines = _numbered(reader)

    def advance(self) -> None:
        """Past the head; a finished stream has none."""
        head = self.head
        if head is not None and not isinstance(head, Header | Malformed):
            self.seq = head.seq
        self.number, self.head = next(self._lines, (self.number, None))

    @property
    def time(self) -> float:
        head = self.head
        return float("-inf") if head is None or isinstance(head, Malformed) else head.time


def join(readers: Sequence[TraceReader], report: Report) -> Iterator[tuple[int, int, Read]]:
    """The lines of all traces, each with the index of its trace and its number there.

    A cause that never comes is reported, and its line comes without it. Of two traces of one node,
    a cause means the later one: do not join them.
    """
    streams = [_Stream(reader) for reader in readers]
    nodes = {stream.node: stream for stream in streams}
    for stream in streams:
        stream.advance()  # past the header
    running = [(index, stream) for index, stream in enumerate(streams) if stream.head is not None]
    while running:
        free = [(i, s) for i, s in running if _cause(s, nodes) is None]
        index, stream = min(free or running, key=lambda each: each[1].time)
        if not free:
            missing = _cause(stream, nodes)
            assert isinstance(stream.head, MoveLine), "only a move waits for a cause"
            who = f"{stream.head.rid} ({stream.head.life})"
            text = f"its cause {missing} is not in that trace, or follows from it"
            report(Fault(stream.reader.name, stream.number, who, text))
        head = stream.head
        assert head is not None, "a stream that runs has a head"
        yield index, stream.number, head
        stream.advance()
        if stream.head is None:
            running = [each for each in running if each[1] is not stream]


def replay(
    readers: Sequence[TraceReader], report: Report, progress: Callable[[], None] | None = None
) -> list[NodeReplay]:
    """Replay traces; ``progress`` is called now and then. Call ``finish`` on each result.

    Raises:
        Unusable: A trace has no chart of this build.
    """
    replays = [NodeReplay(reader.name, reader.header, report) for reader in readers]
    if len(readers) == 1:
        for first, lines in readers[0]:
            replays[0].run(first, lines)
            if progress is not None:
                progress()
        return replays
    for count, (index, number, line) in enumerate(join(readers, report)):
        replays[index].run(number, (line,))
        if progress is not None and count % 4096 == 0:
            progress()
    return replays


def _numbered(reader: TraceReader) -> Iterator[tuple[int, Read]]:
    for first, lines in reader:
        yield from enumerate(lines, first)


def _cause(stream: _Stream, nodes: dict[str, _Stream]) -> tuple[str, int] | None:
    """What the next line of ``stream`` has to wait for."""
    head = stream.head
    if not isinstance(head, MoveLine) or head.cause is None:
        return None
    node, seq = head.cause
    other = nodes.get(node)
    if other is None or other is stream or other.seq >= seq:
        return None
    return head.cause
