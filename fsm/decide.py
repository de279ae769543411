"""``decide(state, message, facts) → decision``: what a request does when something arrives.

One pure, total table. The scheduler asks it, exploration asks it, and it has a row for every
state, every message and every combination of facts, the late and duplicate ones included. What is
*not* here is policy: who is admitted, readmitted or retracted is a choice of
:mod:`engine.policy`, which exploration treats as free.

A decision has an *effect*:

``fire``      fire ``event``; what the message carries (a token) counts
``keep``      stay; what the message carries counts
``drop``      late or duplicate: nothing counts and nothing changes
``finished``  the sender is told that this request has already finished
``refuse``    the message makes no sense here and only a bug of ours can have sent it
"""

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple, TypeAlias

from fsm.chart import Actor, Chart
from fsm.unified import UNIFIED

Effect: TypeAlias = Literal["fire", "keep", "drop", "finished", "refuse"]

Message: TypeAlias = Literal[
    "abort",  # the client, or somebody for it, wants the request to end
    "expired",  # a deadline of the state it is in, or of the client, has passed
    "stop_matched",  # the server found a stop string in what was sent
    "chunk_committed",  # a step committed a part of the prompt, and sampled nothing
    "token_committed",  # a step committed and sampled a token that does not end the request
    "last_token_committed",  # a step committed and sampled a token that ends it
    "step_failed",  # the step raised; nothing of it counts
    "quiet",  # no launched step contains the request any more
    "prefetch_loaded",  # the stored pages are in the prefix cache
    "prefetch_failed",  # the store failed, or the prefetch deadline passed
]

MESSAGES: Final[tuple[Message, ...]] = Message.__args__  # type: ignore[attr-defined]


class Facts(NamedTuple):
    """What the table may look at besides state and message."""

    stale: bool = False
    """The message belongs to an earlier attempt of this life."""
    launched: bool = False
    """A launched step still contains the request (after the message's own step was counted off)."""


class Decision(NamedTuple):
    effect: Effect
    event: str | None = None
    by: Actor = "scheduler"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: in these states this message does this. ``None`` for a fact means either."""

    states: tuple[str, ...]
    message: Message
    decision: Decision
    why: str
    stale: bool | None = None
    launched: bool | None = None


QUEUED: Final = ("prefetching", "waiting", "retracted")
ON_DEVICE: Final = ("prefilling", "decoding", "retracting")
ANSWERED: Final = ("stopping", "done")
ALL: Final = ("arrived", *QUEUED, *ON_DEVICE, *ANSWERED)

_REFUSE: Final = Decision("refuse")
_DROP: Final = Decision("drop")
_KEEP: Final = Decision("keep")

UNIFIED_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        ("arrived", *QUEUED, *ON_DEVICE),
        "abort",
        Decision("fire", "abort", "client"),
        "every live state accepts an abort; what it costs is in the chart",
    ),
    Rule(ANSWERED, "abort", Decision("finished"), "it has its answer; pages follow at quiesce"),
    Rule(
        (*QUEUED, *ON_DEVICE),
        "expired",
        Decision("fire", "expire", "clock"),
        "the deadline's timer names the attempt and phase it was set for, so it is current",
        stale=False,
    ),
    Rule(ALL, "expired", _DROP, "a timer of an earlier attempt", stale=True),
    Rule(("arrived", *ANSWERED), "expired", _DROP, "no deadline runs here", stale=False),
    Rule(
        ("retracted", *ON_DEVICE),
        "stop_matched",
        Decision("fire", "finish", "server"),
        "the server saw it first; tokens after the match are dropped by the front-end record",
    ),
    Rule(ANSWERED, "stop_matched", _DROP, "it had already ended; the smaller index wins there"),
    Rule(
        ("arrived", "prefetching", "waiting"),
        "stop_matched",
        _REFUSE,
        "nothing was ever sent that a stop string could be in",
    ),
    Rule(("prefilling", "retracting"), "chunk_committed", _KEEP, "progress", stale=False),
    Rule(("decoding",), "chunk_committed", _REFUSE, "every decode step samples", stale=False),
    Rule(
        ("prefilling",),
        "token_committed",
        Decision("fire", "prefilled", "runner"),
        "the prompt is complete",
        stale=False,
    ),
    Rule(
        ("decoding", "retracting"),
        "token_committed",
        _KEEP,
        "delivered; a victim's late token counts too (B31)",
        stale=False,
    ),
    Rule(
        ON_DEVICE,
        "last_token_committed",
        Decision("fire", "finish", "runner"),
        "end of sequence, stop token or length",
        stale=False,
    ),
    Rule(
        ON_DEVICE, "step_failed", Decision("fire", "fail", "runner"), "a clear error", stale=False
    ),
    *(
        Rule(ANSWERED, message, _DROP, "late: launched before its end", stale=False)
        for message in (
            "chunk_committed",
            "token_committed",
            "last_token_committed",
            "step_failed",
        )
    ),
    *(
        Rule(
            ("arrived", *QUEUED),
            message,
            _REFUSE,
            "no step contains it: it left the device at quiesce",
            stale=False,
        )
        for message in (
            "chunk_committed",
            "token_committed",
            "last_token_committed",
            "step_failed",
        )
    ),
    *(
        Rule(ALL, message, _DROP, "a result of an earlier attempt", stale=True)
        for message in (
            "chunk_committed",
            "token_committed",
            "last_token_committed",
            "step_failed",
        )
    ),
    Rule(
        ("retracting", "stopping"),
        "quiet",
        Decision("fire", "quiesce", "runner"),
        "nothing can touch its pages any more",
        launched=False,
    ),
    Rule(("retracting", "stopping"), "quiet", _REFUSE, "a step still contains it", launched=True),
    Rule(("prefilling", "decoding"), "quiet", _KEEP, "between two steps", launched=False),
    Rule(("prefilling", "decoding"), "quiet", _REFUSE, "a step contains it", launched=True),
    Rule(("arrived", *QUEUED, "done"), "quiet", _DROP, "it holds nothing a step could touch"),
    Rule(
        ("prefetching",),
        "prefetch_loaded",
        Decision("fire", "loaded", "store"),
        "ready to be admitted with a hit",
        stale=False,
    ),
    Rule(
        ("prefetching",),
        "prefetch_failed",
        Decision("fire", "missed", "store"),
        "it runs as a miss (B101)",
        stale=False,
    ),
    *(
        Rule(
            tuple(state for state in ALL if state != "prefetching"),
            message,
            _DROP,
            "late: cancelled, given up, or ended (B104)",
            stale=False,
        )
        for message in ("prefetch_loaded", "prefetch_failed")
    ),
    *(
        Rule(ALL, message, _DROP, "a prefetch of an earlier attempt", stale=True)
        for message in ("prefetch_loaded", "prefetch_failed")
    ),
)

Table: TypeAlias = dict[tuple[str, Message, Facts], Decision]


class TableError(ValueError):
    """Rules that do not cover every case exactly once, or that name an edge the chart does not
    have."""


def compile_table(chart: Chart, rules: tuple[Rule, ...]) -> Table:
    """Expand ``rules`` to one decision for each state, message and facts; raises
    :class:`TableError`."""
    table: Table = {}
    for rule in rules:
        for state, stale, launched in product(rule.states, (False, True), (False, True)):
            if rule.stale not in (None, stale) or rule.launched not in (None, launched):
                continue
            key = (state, rule.message, Facts(stale, launched))
            if key in table:
                raise TableError(f"two rules for {key}")
            table[key] = rule.decision
            event = rule.decision.event
            if event is None:
                continue
            edge = chart.table.get((state, event))
            if edge is None:
                raise TableError(f"{state} on {rule.message}: the chart has no {event!r} there")
            if rule.decision.by not in edge.by:
                raise TableError(
                    f"{state} on {rule.message}: {rule.decision.by} may not cause {event!r}"
                )
    for state, message, stale, launched in product(
        chart.by_name, MESSAGES, (False, True), (False, True)
    ):
        if (state, message, Facts(stale, launched)) not in table:
            raise TableError(f"no rule for {state}, {message}, stale={stale}, launched={launched}")
    return table


TABLES: Final[dict[str, Table]] = {UNIFIED.name: compile_table(UNIFIED, UNIFIED_RULES)}


NO_FACTS: Final = Facts()


def decide(chart: Chart, state: str, message: Message, facts: Facts = NO_FACTS) -> Decision:
    """The one decision for a request in ``state`` on ``message``. Pure and total."""
    return TABLES[chart.name][state, message, facts]
