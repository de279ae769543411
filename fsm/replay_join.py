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

    def __init__(self, trace: Trace) -> None:
        self.name: Final = trace.name
        self.node: Final = trace.header.node
        self.number = 1
        self.seq = 0
        """Of the newest line that was passed."""
        self.complete = False
        """It has ended, by a footer: there are no further lines."""
        self.awaited: list[_Awaited] = []
        """What was not waited for, and may still come."""
        self.head: Read | None = trace.header
        self._lines = _numbered(trace)

    def advance(self) -> None:
        """Past the head; a finished stream has none."""
        head = self.head
        if head is not None and not isinstance(head, Header | Malformed):
            self.seq = max(self.seq, head.seq)
        self.number, self.head = next(self._lines, (self.number, None))
        self.complete = self.head is None and isinstance(head, Footer)

    @property
    def time(self) -> float:
        head = self.head
        return float("-inf") if head is None or isinstance(head, Malformed) else head.time

    def __str__(self) -> str:
        return f"{self.node}:{self.seq + 1}"


class _Join:
    """The streams, and which of them wait for which."""

    def __init__(self, traces: Sequence[Trace], report: Report) -> None:
        self.streams: Final = [_Stream(trace) for trace in traces]
        self._report = report
        self._sources: Final = Sources([trace.header for trace in traces])

    def waits_for(self, stream: _Stream) -> _Stream | None:
        """Whose line has to come before the next one of ``stream``."""
        head = stream.head
        if not isinstance(head, MoveLine | SubmitLine) or head.cause is None:
            return None
        index = self._sources.index(head)
        other = None if index is None else self.streams[index]
        if other is None or other is stream or other.seq >= head.cause[1]:
            return None
        return other if other.head is not None or other.complete else None

    def next(self, running: Sequence[tuple[int, _Stream]]) -> tuple[int, _Stream]:
        """Which stream comes next. Where all wait, one does not wait any longer; what is wrong with
        its cause is known when that trace has gone on."""
        waiting = {index: self.waits_for(stream) for index, stream in running}
        free = [each for each in running if waiting[each[0]] is None]
        if free:
            return min(free, key=_time)
        over = [each for each in running if _is_over(waiting[each[0]])]
        index, stream = min(over or running, key=_time)
        other = waiting[index]
        assert other is not None, "it waits"
        if not over:
            stream = self._ring(stream)[0]
            index, other = self.streams.index(stream), self.waits_for(stream)
            assert other is not None, "it waits, too"
        self._impatient(stream, other)
        return index, stream

    def passed(self, stream: _Stream) -> None:
        """``stream`` has gone on: what was not waited for has come, or never will."""
        open_still = []
        for each in stream.awaited:
            if stream.seq >= each.seq:
                self._report(each.fault(f"follows from it: {each.ring}"))
            elif stream.complete:
                ends = f"is not in that trace, which ends with seq {stream.seq}"
                self._report(each.fault(ends))
            elif stream.head is not None:
                open_still.append(each)
        stream.awaited = open_still

    def _ring(self, stream: _Stream) -> list[_Stream]:
        """Streams that wait for each other in a ring; ``stream`` waits for one of them."""
        seen: list[_Stream] = []
        while stream not in seen:
            seen.append(stream)
            other = self.waits_for(stream)
            assert other is not None, "all wait"
            stream = other
        return seen[seen.index(stream) :]

    def _impatient(self, stream: _Stream, other: _Stream) -> None:
        """The next line of ``stream`` comes without the one of ``other`` that it names."""
        head = stream.head
        assert isinstance(head, MoveLine | SubmitLine), "only these wait for a cause"
        assert head.cause is not None, "it waits for it"
        ring = "" if other.head is None else " waits for ".join(map(str, self._ring(stream)))
        who = f"{head.rid} ({head.life})"
        awaited = _Awaited(head.cause, ring and f"{ring} waits for {stream}", stream, who)
        if len(other.awaited) < MOST_AWAITED:
            other.awaited.append(awaited)
        else:
            self._report(awaited.fault("is not in that trace, or follows from it"))
        self.passed(other)


def join(traces: Sequence[Trace], report: Report) -> Iterator[tuple[int, int, Read]]:
    """The lines of all traces, each with the index of its trace and its number there.

    A cause that cannot come is reported, and its line comes without it. Memory is that of one line
    of each trace.
    """
    joined = _Join(traces, report)
    for stream in joined.streams:
        stream.advance()  # past the header
    running = [each for each in enumerate(joined.streams) if each[1].head is not None]
    while running:
        index, stream = joined.next(running)
        head = stream.head
        assert head is not None, "a stream that runs has a head"
        yield index, stream.number, head
        stream.advance()
        if stream.awaited:
            joined.passed(stream)
        if stream.head is None:
            running = [each for each in running if each[1] is not stream]


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


def _time(each: tuple[int, _Stream]) -> float:
    return each[1].time


def _is_over(stream: _Stream | None) -> bool:
    return stream is not None and stream.head is None
