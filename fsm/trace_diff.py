"""How two traces differ in structure: the ways requests went and how they ended.

Times, lives, pages and everything else that varies between two runs of the same thing are left
out. Equal ways are kept once, so memory grows by little more than a name for each request."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal, TypeAlias

from fsm.trace import AnswerLine, MoveLine, SubmitLine
from fsm.trace_read import Read

Pairing: TypeAlias = Literal["rid", "order"]

NOTHING: Final = "nothing"


@dataclass(frozen=True, slots=True)
class Way:
    """What one request did. ``steps`` are its moves and its answer, in order."""

    rid: str
    steps: tuple[str, ...]


@dataclass(slots=True)
class Ways:
    """The ways of all requests of a trace, in order of submission."""

    _known: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)
    _open: dict[str, list[str]] = field(default_factory=dict)
    _lives: dict[str, tuple[str, int]] = field(default_factory=dict)
    _ways: list[Way] = field(default_factory=list)

    def feed(self, line: Read) -> None:
        match line:
            case SubmitLine():
                sizes = f"submit of {line.prompt_tokens} tokens for {line.max_new_tokens}"
                extra = f" with {', '.join(line.kit)}"
                self._lives[line.life] = (line.rid, len(self._ways))
                self._open[line.life] = [sizes + extra]
                self._ways.append(Way(line.rid, ()))
            case MoveLine():
                steps = self._open.get(line.life)
                if steps is not None:
                    steps.append(f"{line.source} -{line.event}-> {line.target}")
                    if line.target == "done" and not line.reason:
                        self._close(line.life)
            case AnswerLine():
                steps = self._open.get(line.life)
                if steps is not None:
                    status = f" {line.status}" if line.status is not None else ""
                    steps.append(f"answer {line.reason}{status} of {line.tokens} tokens")
                    if steps[-2].endswith("-> done"):
                        self._close(line.life)

    def ways(self) -> list[Way]:
        """Call it at the end: whoever is still open went this far."""
        for life in list(self._open):
            self._close(life)
        return self._ways

    def _close(self, life: str) -> None:
        steps = tuple(self._open.pop(life))
        rid, index = self._lives.pop(life)
        self._ways[index] = Way(rid, self._known.setdefault(steps, steps))


@dataclass(frozen=True, slots=True)
class Difference:
    """One request that went another way. ``same`` steps were alike; then ``left`` and ``right``
    differ."""

    rid: str
    same: int
    after: str
    left: str
    right: str

    def __str__(self) -> str:
        after = f" after {self.after}" if self.after else ""
        return f"{self.rid}{after}: {self.left} | {self.right}"


def pairing(left: Iterable[Way], right: Iterable[Way]) -> Pairing:
    """By rid where the traces share most of them, else by order: rids may be made up anew."""
    ours, theirs = ({way.rid for way in ways} for ways in (left, right))
    return "rid" if 2 * len(ours & theirs) >= min(len(ours), len(theirs)) else "order"


def differences(left: list[Way], right: list[Way], by: Pairing) -> Iterator[Difference]:
    """The first difference of each request that differs."""
    for one, other in _pairs(left, right, by):
        if one is None or other is None:
            way = one or other
            assert way is not None, "a pair has a side"
            there = f"{way.steps[0]}" if way.steps else "a request"
            texts = (there, NOTHING) if other is None else (NOTHING, there)
            yield Difference(way.rid, 0, "", *texts)
        elif one.steps != other.steps:
            yield _first(one, other)


def _first(one: Way, other: Way) -> Difference:
    steps = zip_longest(one.steps, other.steps, fillvalue=NOTHING)
    same, (left, right) = next(
        (number, pair) for number, pair in enumerate(steps) if pair[0] != pair[1]
    )
    return Difference(one.rid, same, one.steps[same - 1] if same else "", left, right)


def _pairs(
    left: list[Way], right: list[Way], by: Pairing
) -> Iterator[tuple[Way | None, Way | None]]:
    if by == "order":
        yield from zip_longest(left, right)
        return
    theirs = dict(_keyed(right))
    for key, way in _keyed(left):
        yield way, theirs.pop(key, None)
    for way in theirs.values():
        yield None, way


def _keyed(ways: list[Way]) -> Iterator[tuple[tuple[str, int], Way]]:
    """A rid may be used again: the second request of a name is another one."""
    seen: Counter[str] = Counter()
    for way in ways:
        yield (way.rid, seen[way.rid]), way
        seen[way.rid] += 1
