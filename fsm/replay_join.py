"""Several traces as one story: joined by ``cause``, never by clock.

The clocks of two nodes cannot be compared, but a line that names its cause on another node cannot
have happened before it. Among lines that may come next, the one with the smallest time does: that
orders nothing, it only reads better where the clocks happen to agree.

A trace that is not there, or that was cut short, cannot be waited for: what it would have said is
taken for said."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fsm.replay import NodeReplay
from fsm.replay_faults import Fault
from fsm.replay_links import Links, Sources
from fsm.trace import Footer, Header, MoveLine, SubmitLine
from fsm.trace_read import Malformed, Read, Trace

Report = Callable[[Fault], None]

MOST_AWAITED: Final = 256
"""Lines of a trace that are looked out for when they are late, so that memory is constant."""


class _Awaited:
    """A line that came without the cause that it names."""

    def __init__(self, cause: tuple[str, int], ring: str, effect: "_Stream", who: str) -> None:
        self.seq: Final = cause[1]
        self.ring: Final = ring
        """Who waited for whom."""
        self._place: Final = effect.name, effect.number, who
        self._cause: Final = f"its cause {cause[0]}:{cause[1]}"

    def fault(self, why: str) -> Fault:
        return Fault(*self._place, f"{self._cause} {why}")


class _Stream:
    """One trace, a line ahead."""

    def __init__(self, index: int, trace: Trace) -> None:
        self.index: Final = index
        self.name: Final = trace.name
        self.node: Final = trace.header.node
        self.number = 1
        self.seq = 0
        """Of the newest line that was passed."""
        self.complete = False
        """It has ended, by a footer: there are no further lines."""
        self.head: Read | None = trace.header
        """The next line; None at the end."""
        self.time = float("-inf")
        """Of the head; whatever has no time comes at once."""
        self.source: _Stream | None = None
        """The trace that the head's cause is in, if there is such a trace."""
        self.needs = 0
        """The cause's ``seq``."""
        self.awaited: list[_Awaited] = []
        """What was not waited for, and may still come."""
        self._lines = _numbered(trace)

    def advance(self) -> None:
        """Past the head."""
        last = self.head
        self.number, self.head = next(self._lines, (self.number, None))
        head = self.head
        if head is None:
            self.complete = isinstance(last, Footer)
        if not isinstance(last, Header | Malformed) and last is not None and last.seq > self.seq:
            self.seq = last.seq
        self.time = float("-inf") if head is None or isinstance(head, Malformed) else head.time
        self.source = None

    @property
    def waits_for(self) -> "_Stream | None":
        """Whose line has to come before the head. What was cut short is not waited for."""
        source = self.source
        if source is None or source.seq >= self.needs:
            return None
        return source if source.head is not None or source.complete else None

    def __str__(self) -> str:
        return f"{self.node}:{self.seq + 1}"


class _Join:
    """The streams, and which of them wait for which."""

    def __init__(self, traces: Sequence[Trace], report: Report) -> None:
        self.streams: Final = [_Stream(index, trace) for index, trace in enumerate(traces)]
        self._report = report
        self._sources: Final = Sources([trace.header for trace in traces])

    def advance(self, stream: _Stream) -> None:
        """Past the head of ``stream``."""
        stream.advance()
        head = stream.head
        if isinstance(head, MoveLine | SubmitLine) and head.boot and head.cause is not None:
            index = self._sources.index(head)
            if index is not None and index != stream.index:
                stream.source, stream.needs = self.streams[index], head.cause[1]
        if stream.awaited:
            self._came(stream)

    def force(self, running: Sequence[_Stream]) -> _Stream:
        """All wait: which one does not wait any longer. What is wrong with its cause is known when
        that trace has gone on."""
        over = [each for each in running if each.waits_for and each.waits_for.head is None]
        stream = min(over or running, key=_time)
        ring = [] if over else _ring(stream)
        if ring:
            stream = ring[0]
        head, source = stream.head, stream.source
        assert isinstance(head, MoveLine | SubmitLine), "only these wait for a cause"
        assert head.cause is not None, "it waits for it"
        assert source is not None, "it is in that trace"
        waits = " waits for ".join(str(each) for each in (*ring, stream))
        awaited = _Awaited(head.cause, waits, stream, f"{head.rid} ({head.life})")
        if len(source.awaited) < MOST_AWAITED:
            source.awaited.append(awaited)
            self._came(source)
        else:
            self._report(awaited.fault("is not in that trace, or follows from it"))
        return stream

    def _came(self, stream: _Stream) -> None:
        """What was not waited for has come by now, or never will, or is still to come."""
        still = []
        for each in stream.awaited:
            if stream.seq >= each.seq:
                self._report(each.fault(f"follows from it: {each.ring}"))
            elif stream.complete:
                last = f"is not in that trace, which ends with seq {stream.seq}"
                self._report(each.fault(last))
            elif stream.head is not None:
                still.append(each)
        stream.awaited = still


def join(traces: Sequence[Trace], report: Report) -> Iterator[tuple[int, int, Read]]:
    """The lines of all traces, each with the index of its trace and its number there.

    A cause that cannot come is reported, and its line comes without it. Memory is that of one line
    of each trace.
    """
    joined = _Join(traces, report)
    for stream in joined.streams:
        joined.advance(stream)  # past the header
    running = [stream for stream in joined.streams if stream.head is not None]
    while running:
        first: _Stream | None = None
        for stream in running:
            if (first is None or stream.time < first.time) and stream.waits_for is None:
                first = stream
        if first is None:
            first = joined.force(running)
        head = first.head
        assert head is not None, "a stream that runs has a head"
        yield first.index, first.number, head
        joined.advance(first)
        if first.head is None:
            running.remove(first)


def replay(
    traces: Sequence[Trace], report: Report, progress: Callable[[], None] | None = None
) -> list[NodeReplay]:
    """Replay traces; ``progress`` is called now and then. Call ``finish`` on each result.

    Raises:
        Unusable: A trace has no chart of this build.
    """
    replays = [NodeReplay(trace.name, trace.header, report) for trace in traces]
    if len(traces) == 1:
        for first, lines in traces[0]:
            replays[0].run(first, lines)
            if progress is not None:
                progress()
        return replays
    links = Links([trace.header for trace in traces])
    for count, (index, number, line) in enumerate(join(traces, report)):
        replays[index].run(number, (line,))
        link = links.feed(index, line)
        if link is not None:
            replays[index].linked(line, link.cause)
        if progress is not None and count % 4096 == 0:
            progress()
    return replays


def _numbered(trace: Trace) -> Iterator[tuple[int, Read]]:
    for first, lines in trace:
        yield from enumerate(lines, first)


def _ring(stream: _Stream) -> list[_Stream]:
    """Streams that wait for each other in a ring; ``stream`` waits for one of them."""
    seen: list[_Stream] = []
    while stream not in seen:
        seen.append(stream)
        source = stream.waits_for
        assert source is not None, "all wait"
        stream = source
    return seen[seen.index(stream) :]


def _time(stream: _Stream) -> float:
    return stream.time
