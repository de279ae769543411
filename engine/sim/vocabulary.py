"""Every command of the scenario language with its options, as one table.

A value is read by a *kind*: a function from the :class:`Word` to the value, which raises
:class:`BadValue` with what it wants.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from engine.sim.world import US_PER_MS, US_PER_S
from fsm.resources import RESOURCES


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


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: how it is written, how many plain words it takes, and its options."""

    name: str
    usage: str
    least: int
    most: int
    options: Mapping[str, Kind] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options."""


CLUSTER: Final[Mapping[str, Kind]] = {
    "unified": natural,
    "prefill": natural,
    "decode": natural,
    "router": natural,
    "pages": natural,
    "page_size": natural,
    "rows": natural,
    "chunk": natural,
    "depth": natural,
    "queue": natural,
    "metadata": natural,
    "context": natural,
    "overtakes": natural,
    "prefix_cache": switch,
    "weights": name,
    "step": duration,
    "token": duration,
    "copy": duration,
    "detok": duration,
    "waiting_timeout": duration,
    "running_timeout": duration,
    "store": switch,
    "store_latency": duration,
    "prefetch_timeout": duration,
    "prefetches": natural,
    "sessions": natural,
    "trace": one_of("full", "moves", "answers"),
    "prefill_pages": natural,
    "decode_pages": natural,
    "unified_pages": natural,
    "prefill_rows": natural,
    "decode_rows": natural,
    "unified_rows": natural,
    "prefill_page_size": natural,
    "decode_page_size": natural,
    "host_pages": natural,
    "wire_latency": duration,
    "wire_page": duration,
    "latency": duration,
    "jitter": duration,
    "loss": number,
    "duplication": number,
    "retries": natural,
    "meeting_timeout": duration,
    "transfer_timeout": duration,
    "held_timeout": duration,
    "ranks": natural,
    "rank_delay": duration,
    "seed": natural,
}

SUBMIT: Final[Mapping[str, Kind]] = {
    "prompt": span,
    "max_tokens": span,
    "min_tokens": natural,
    "n": integer,
    "priority": integer,
    "session": name,
    "stop": stop,
    "stop_token_ids": token_list,
    "prefix": prefix,
    "eos": natural,
    "temperature": number,
    "top_p": number,
    "top_logprobs": integer,
    "seed": integer,
    "deadline": duration,
    "rid": name,
    "to": name,
    "room": name,
}

DEADLINES: Final = ("meeting", "transfer", "waiting", "running", "held")
CLUSTER_ALIASES: Final[Mapping[str, str]] = {
    alias: f"{each}_timeout" for each in DEADLINES for alias in (each, f"{each}_deadline")
}

EXPECT: Final[Mapping[str, Kind]] = {
    "phase": name,
    "state": name,
    "finished": name,
    "status": statuses,
    "tokens": natural,
    "message": name,
    "matched": name,
    "within": duration,
    "aborted": names,
    "unknown": names,
    "flushed": one_of("yes", "no"),
    "updated": one_of("yes", "no"),
    "closed": one_of("yes", "no"),
    "error": name,
    "session": name,
    "on": name,
    **dict.fromkeys(RESOURCES, natural),
}

_ANY: Final = 1_000

VERBS: Final[dict[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb("requires", "requires FEATURE…", 1, _ANY),
        Verb(
            "cluster",
            "cluster unified=1|prefill=1 decode=1 router=1 [OPTION=VALUE…]",
            0,
            0,
            CLUSTER,
            aliases=CLUSTER_ALIASES,
        ),
        Verb(
            "submit",
            "submit RID prompt=N max_tokens=N [OPTION=VALUE…]",
            1,
            1,
            SUBMIT,
            frozenset({"stream", "logprobs", "ignore_eos"}),
            {"timeout": "deadline"},
        ),
        Verb(
            "run",
            "run DURATION, run until idle, or run until RID PHASE|finished|state=S|tokens=N",
            1,
            3,
            {
                "phase": name,
                "state": name,
                "tokens": natural,
                "finished": name,
                "on": name,
                "within": duration,
            },
        ),
        Verb("step", "step NODE", 1, 1),
        Verb(
            "hold", "hold step|commit|schedule|store|wire NODE [chunk=K]", 1, 2, {"chunk": natural}
        ),
        Verb("release", "release step|commit|schedule|store|wire|pages NODE", 1, 2),
        Verb(
            "fail",
            "fail step|copy|store NODE, or fail wire RID [count=N]",
            2,
            2,
            {"count": natural},
        ),
        Verb(
            "delay",
            "delay message KIND from NODE to NODE by=DURATION, delay wire RID by=DURATION, "
            "or delay rank NODE RANK by=DURATION",
            2,
            6,
            {"count": natural, "by": duration},
        ),
        Verb(
            "drop",
            "drop message KIND from NODE to NODE [count=N], or drop plan NODE RANK [count=N]",
            3,
            6,
            {"count": natural},
        ),
        Verb(
            "duplicate",
            "duplicate message KIND from NODE to NODE [count=N], or duplicate plan NODE RANK "
            "[count=N]",
            3,
            6,
            {"count": natural},
        ),
        Verb("corrupt", "corrupt plan NODE RANK [count=N]", 3, 3, {"count": natural}),
        Verb(
            "pause",
            "pause NODE [mode=abort|retract|in_place]",
            1,
            1,
            {"mode": pause_mode},
        ),
        Verb("continue", "continue NODE", 1, 1),
        Verb("weights", "weights NODE NAME [in_place]", 2, 2, {}, frozenset({"in_place"})),
        Verb("kill", "kill NODE, or kill rank NODE RANK", 1, 3),
        Verb("restart", "restart NODE", 1, 1),
        Verb("freeze", "freeze NODE", 1, 1),
        Verb("thaw", "thaw NODE", 1, 1),
        Verb("partition", "partition NODE NODE", 2, 2),
        Verb("heal", "heal", 0, 0),
        Verb("skew", "skew NODE by=DURATION", 1, 1, {"by": offset}),
        Verb(
            "abort",
            "abort RID… [at=NODE], abort all [at=NODE], or abort RID… unseen",
            1,
            _ANY,
            {"at": name},
            frozenset({"unseen"}),
        ),
        Verb("disconnect", "disconnect RID…", 1, _ANY),
        Verb("retract", "retract RID [maybe]", 1, 1, {}, frozenset({"maybe"})),
        Verb("preempt", "preempt RID [maybe]", 1, 1, {}, frozenset({"maybe"})),
        Verb("exhaust", "exhaust pages NODE leave=N", 2, 2, {"leave": natural}),
        Verb("restore", "restore pages NODE", 2, 2),
        Verb("flush", "flush NODE", 1, 1),
        Verb("drain", "drain NODE [grace=DURATION]", 1, 1, {"grace": duration}),
        Verb(
            "open",
            "open session NAME [capacity=N] [timeout=DURATION]",
            2,
            2,
            {"capacity": natural, "timeout": duration},
        ),
        Verb("close", "close session NAME", 2, 2),
        Verb("expect", "expect …", 1, _ANY, EXPECT),
    )
}
