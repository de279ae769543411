"""The values of the scenario language: each kind of value is a function that reads one.

A *kind* takes a :class:`Word` and gives its value, or raises :class:`BadValue`: what is wanted.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from engine.sim.world import US_PER_MS, US_PER_S


class BadValue(ValueError):  # noqa: N818 - named for what it says
    """The text of an option is not a value of its kind; says what is wanted."""


@dataclass(frozen=True, slots=True)
class Word:
    """``text``, or ``key=text``. Quoted text is taken as it is."""

    text: str
    key: str | None = None
    quoted: bool = False


Kind = Callable[[Word], object]


class Span(NamedTuple):
    """``A..B``: an integer drawn from A to B, by the name of the submission. ``A`` is A..A."""

    low: int
    high: int


class Prefix(NamedTuple):
    """``NAME:LENGTH``: so many tokens that all submissions with this name share."""

    name: str
    length: Span


class Golden(NamedTuple):
    """``@I`` or ``@I..J``: output tokens I to J (1 is the first) of the request run alone."""

    first: int
    last: int


def integer(word: Word) -> int:
    if word.quoted or not re.fullmatch(r"-?\d+", word.text):
        raise BadValue("a whole number is wanted")
    return int(word.text)


def natural(word: Word) -> int:
    if word.quoted or not re.fullmatch(r"\d+", word.text):
        raise BadValue("a whole number, 0 or more, is wanted")
    return int(word.text)


def number(word: Word) -> float:
    """Also ``nan`` and ``inf``: what a client may send has to be expressible."""
    try:
        return float(word.text)
    except ValueError:
        raise BadValue("a number is wanted") from None


_UNITS: Final = {
    "us": 1,
    "ms": US_PER_MS,
    "s": US_PER_S,
    "m": 60 * US_PER_S,
    "h": 3_600 * US_PER_S,
}


def duration(word: Word) -> int:
    """``50ms``, ``1s``, ``2.5s``, ``100us``, ``1m``, ``1h``, or ``0``: microseconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)|0", word.text)
    if match is None or word.quoted:
        raise BadValue("a duration such as 50ms, 1s or 100us is wanted")
    return round(float(match[1]) * _UNITS[match[2]]) if match[1] else 0


def offset(word: Word) -> int:
    """A duration that may be negative: microseconds."""
    if word.text.startswith("-"):
        return -duration(Word(word.text[1:], word.key, word.quoted))
    return duration(word)


def name(word: Word) -> str:
    if not word.text and not word.quoted:
        raise BadValue("a name is wanted")
    return word.text


def span(word: Word) -> Span:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", word.text)
    if match is None or word.quoted:
        raise BadValue("a whole number N or a range A..B is wanted")
    low = int(match[1])
    high = int(match[2]) if match[2] else low
    if high < low:
        raise BadValue("the range is empty")
    return Span(low, high)


def prefix(word: Word) -> Prefix:
    head, colon, tail = word.text.partition(":")
    if not head or not colon or word.quoted:
        raise BadValue("NAME:LENGTH is wanted, as in A:128")
    return Prefix(head, span(Word(tail)))


def golden(text: str) -> Golden | None:
    match = re.fullmatch(r"@(\d+)(?:\.\.(\d+))?", text)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if not 1 <= first <= last:
        raise BadValue("output tokens are counted from 1: @I or @I..J with I <= J")
    return Golden(first, last)


def stop(word: Word) -> str | Golden:
    value = None if word.quoted else golden(word.text)
    if value is None and not word.text:
        raise BadValue("a stop string is not empty")
    return word.text if value is None else value


def token_list(word: Word) -> tuple[int | Golden, ...]:
    return tuple(golden(part) or integer(Word(part)) for part in word.text.split(","))


def names(word: Word) -> tuple[str, ...]:
    """``r1,r2``; nothing at all is no name."""
    return tuple(filter(None, word.text.split(",")))


def statuses(word: Word) -> str:
    """``503``, any of a class (``5xx``), or one of several: ``400|5xx``."""
    if not re.fullmatch(r"(\d{3}|\dxx)(\|(\d{3}|\dxx))*", word.text):
        raise BadValue("a status such as 503, 5xx or 500|503 is wanted")
    return word.text


def one_of(*values: str) -> Kind:
    def kind(word: Word) -> str:
        if word.text not in values:
            raise BadValue(f"one of {', '.join(values)} is wanted")
        return word.text

    return kind


switch: Final = one_of("on", "off")
_pause_mode: Final = one_of("abort", "retract", "in_place")


def pause_mode(word: Word) -> object:
    """As the API spells it, or with a hyphen."""
    return _pause_mode(Word(word.text.replace("-", "_")))
