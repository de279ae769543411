"""Every single-line mutation of a trace: what a liar, a bug or a broken disk may do to it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from fsm.ledger import QUARANTINE
from fsm.trace import AnswerLine, Balance, Flow, Header, LeaseLine, Line, MoveLine, SubmitLine
from fsm.unified import UNIFIED

REASONS = ("abort", "stop", "length", "error")
STATUSES = (None, 400, 500, 503)
WHATS = ("take", "pin", "grow", "cache", "evict", "quarantine", "release", "borrow")


@dataclass(frozen=True)
class Mutation:
    """``what`` was done to the line at ``index``; ``lines`` is the trace afterwards, its numbers
    in order again if ``renumbered``."""

    what: str
    index: int
    before: Line
    after: Line | None
    lines: list[Line]
    renumbered: bool

    def __str__(self) -> str:
        number = ", renumbered" if self.renumbered else ""
        return f"{self.what} of {self.before} ({self.after}){number}"


def structural(lines: Sequence[Line]) -> Iterator[Mutation]:
    """Each line removed, repeated, and exchanged with the next one that depends on it."""
    for index in range(1, len(lines)):
        line = lines[index]
        variants = [
            ("removed", [*lines[:index], *lines[index + 1 :]]),
            ("repeated", [*lines[: index + 1], *lines[index:]]),
        ]
        other = next((i for i in range(index + 1, len(lines)) if depend(line, lines[i])), None)
        if other is not None:
            swapped = list(lines)
            swapped[index], swapped[other] = lines[other], line
            variants.append(("swapped", swapped))
        for what, result in variants:
            after = lines[other] if what == "swapped" and other is not None else None
            yield Mutation(what, index, line, after, result, False)
            yield Mutation(what, index, line, after, renumber(result), True)


def fields(lines: Sequence[Line]) -> Iterator[Mutation]:
    """Each line with one field changed to another value of its kind."""
    lives = [line.life for line in lines if isinstance(line, SubmitLine)]
    rids = [line.rid for line in lines if isinstance(line, SubmitLine)]
    for index in range(1, len(lines)):
        line = lines[index]
        for name, values in _changes(line, lives, rids):
            for value in values:
                after = replace(line, **{name: value})
                if after != line:
                    result = [*lines[:index], after, *lines[index + 1 :]]
                    yield Mutation(name, index, line, after, result, False)


def _changes(line: Line, lives: list[str], rids: list[str]) -> Iterator[tuple[str, list[object]]]:
    values = asdict(line)
    for name in ("life", "owner"):
        if name in values:
            yield name, [lives[0], lives[-1], "boot:99", "other:1", f"{QUARANTINE}{lives[0]}"]
    if "rid" in values:
        yield "rid", [rids[1], "nobody"]
    for name in ("taken", "dropped"):
        if name in values:
            have = list(values[name])
            fewer = [tuple(have[:i] + have[i + 1 :]) for i in range(len(have))]
            more = [(*have, other) for other in ("rows", "pages", "spans", "rooms", "no such")]
            yield name, [*fewer, *more, tuple(reversed(have))]
    for name in ("attempt", "units", "tokens"):
        if name in values:
            yield name, [values[name] + 1, values[name] - 1, values[name] + 100]
    if values.get("pool") is not None:
        flow, pool = values["flow"], values["pool"]
        yield "flow", [Flow(flow[0] + i, flow[1] + j) for i, j in ((1, 0), (0, 1), (1, -1))]
        steps = ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, -1, 0), (-1, 0, -1))
        yield "pool", [Balance(*(a + b for a, b in zip(pool, s, strict=True))) for s in steps]
        yield "pool", [None]
    match line:
        case MoveLine():
            states = list(UNIFIED.by_name)
            yield "event", [*UNIFIED.events, "vanish"]
            yield "source", [*states, "nowhere"]
            yield "target", [*states, "nowhere"]
            yield "by", ["intake", "scheduler", "runner", "client", "server", "clock", "peer"]
            yield "cause", [(line.node, line.seq), (line.node, line.seq + 1), ("elsewhere", 1)]
            yield "cause", [(line.node, line.seq - 1), (line.node, 0), None]
        case LeaseLine():
            yield "what", list(WHATS)
            yield "resource", ["rows", "prefetches", "nothing"]
        case SubmitLine():
            yield "kit", [line.kit[1:], line.kit[:-1], (*line.kit, "nothing")]
            yield "cause", [(line.node, line.seq), (line.node, 1), ("elsewhere", 1)]
    if isinstance(line, MoveLine | SubmitLine):
        yield "boot", ["other"]
    if isinstance(line, MoveLine | AnswerLine):
        yield "reason", [*REASONS, "", "tired"]
        yield "status", list(STATUSES)
    if isinstance(line, AnswerLine):
        yield "message", ["something else"]
    if not isinstance(line, Header):
        yield "node", ["elsewhere"]
        yield "time", [-1.0]
        yield "seq", [line.seq + 1, line.seq - 1]


def depend(one: Line, other: Line) -> bool:
    """The order of two lines means something: they are of one life, or both count pages."""
    a, b = asdict(one), asdict(other)
    if a.get("pool") is not None and b.get("pool") is not None:
        return a["pool"] != b["pool"] or _names(one) == _names(other)
    return bool(_names(one) & _names(other))


def _names(line: Line) -> set[str]:
    match line:
        case LeaseLine(what="quarantine"):
            return {line.owner, f"{QUARANTINE}{line.owner}"}
        case LeaseLine():
            return {line.owner}
        case SubmitLine() | MoveLine() | AnswerLine():
            return {line.life}
        case _:
            return set()


def renumber(lines: Sequence[Line]) -> list[Line]:
    """``seq`` from 1 on and times in order, so that only what lines mean can tell. Causes name
    the same lines as before."""
    times = sorted(line.time for line in lines)
    moved: dict[int, int] = {}
    out: list[Line] = []
    for seq, (line, time) in enumerate(zip(lines, times, strict=True)):
        if isinstance(line, Header):
            out.append(line)
        else:
            moved.setdefault(line.seq, seq)
            out.append(replace(line, seq=seq, time=time))
    for index, line in enumerate(out):
        if isinstance(line, MoveLine) and line.cause is not None and line.cause[1] in moved:
            out[index] = replace(line, cause=(line.cause[0], moved[line.cause[1]]))
    return out
