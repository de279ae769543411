"""What every message does to a request on a unified node."""

from typing import Final

from fsm.rules import DROP, FINISHED, KEEP, REFUSE, Decision, Message, Rule, RuleBook
from fsm.unified import UNIFIED

UNIFIED_MESSAGES: Final[tuple[Message, ...]] = (
    "abort",
    "expired",
    "stop_matched",
    "chunk_committed",
    "token_committed",
    "last_token_committed",
    "step_failed",
    "quiet",
    "prefetch_loaded",
    "prefetch_failed",
    "prefetch_expired",
    "paused",
    "continued",
)

QUEUED: Final = ("prefetching", "waiting", "retracted", "held")
ON_DEVICE: Final = ("prefilling", "decoding", "retracting", "holding")
ANSWERED: Final = ("stopping", "done")
ALL: Final = ("arrived", *QUEUED, *ON_DEVICE, *ANSWERED)
PREFETCHES: Final[tuple[Message, ...]] = (
    "prefetch_loaded",
    "prefetch_failed",
    "prefetch_expired",
)

UNIFIED_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        ("arrived", *QUEUED, *ON_DEVICE),
        "abort",
        Decision("fire", "abort", "client"),
        "every live state accepts an abort; what it costs is in the chart",
    ),
    Rule(ANSWERED, "abort", FINISHED, "it has its answer; pages follow at quiesce"),
    Rule(
        (*QUEUED, *ON_DEVICE),
        "expired",
        Decision("fire", "expire", "clock"),
        "the deadline's timer names the attempt and phase it was set for, so it is current",
        stale=False,
    ),
    Rule(ALL, "expired", DROP, "a timer of an earlier attempt", stale=True),
    Rule(("arrived", *ANSWERED), "expired", DROP, "no deadline runs here", stale=False),
    Rule(
        ("retracted", "held", *ON_DEVICE),
        "stop_matched",
        Decision("fire", "finish", "server"),
        "the server saw it first; tokens after the match are dropped by the front-end record",
    ),
    Rule(ANSWERED, "stop_matched", DROP, "it had already ended; the smaller index wins there"),
    Rule(
        ("arrived", "prefetching", "waiting"),
        "stop_matched",
        REFUSE,
        "nothing was ever sent that a stop string could be in",
    ),
    Rule(("prefilling", "retracting", "holding"), "chunk_committed", KEEP, "progress", stale=False),
    Rule(("decoding",), "chunk_committed", REFUSE, "every decode step samples", stale=False),
    Rule(
        ("prefilling",),
        "token_committed",
        Decision("fire", "prefilled", "runner"),
        "the prompt is complete",
        stale=False,
    ),
    Rule(
        ("decoding", "retracting", "holding"),
        "token_committed",
        KEEP,
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
        Rule(ANSWERED, message, DROP, "late: launched before its end", stale=False)
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
            REFUSE,
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
        Rule(ALL, message, DROP, "a result of an earlier attempt", stale=True)
        for message in (
            "chunk_committed",
            "token_committed",
            "last_token_committed",
            "step_failed",
        )
    ),
    Rule(
        ("retracting", "holding", "stopping"),
        "quiet",
        Decision("fire", "quiesce", "runner"),
        "nothing can touch its pages any more",
        launched=False,
    ),
    Rule(
        ("retracting", "holding", "stopping"),
        "quiet",
        REFUSE,
        "a step still contains it",
        launched=True,
    ),
    Rule(("prefilling", "decoding"), "quiet", KEEP, "between two steps", launched=False),
    Rule(("prefilling", "decoding"), "quiet", REFUSE, "a step contains it", launched=True),
    Rule(("arrived", *QUEUED, "done"), "quiet", DROP, "it holds nothing a step could touch"),
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
    Rule(
        ("prefetching",),
        "prefetch_expired",
        Decision("fire", "missed", "clock"),
        "the store is not waited for any longer: it runs as a miss (B101)",
        stale=False,
    ),
    *(
        Rule(
            tuple(state for state in ALL if state != "prefetching"),
            message,
            DROP,
            "late: cancelled, given up, or ended (B104)",
            stale=False,
        )
        for message in PREFETCHES
    ),
    *(
        Rule(ALL, message, DROP, "a prefetch of an earlier attempt", stale=True)
        for message in PREFETCHES
    ),
    Rule(
        ("prefilling", "decoding"),
        "paused",
        Decision("fire", "hold", "scheduler"),
        "its KV is given back; its tokens are kept",
    ),
    Rule(
        tuple(state for state in ALL if state not in ("prefilling", "decoding")),
        "paused",
        KEEP,
        "it has no KV, or is about to have none",
    ),
    Rule(
        ("held",),
        "continued",
        Decision("fire", "resume", "scheduler"),
        "computed again when there is room, in its place by rank",
    ),
    Rule(
        tuple(state for state in ALL if state != "held"),
        "continued",
        KEEP,
        "nothing to resume (one that is still holding is resumed when it is held)",
    ),
)

UNIFIED_BOOK: Final = RuleBook(UNIFIED, UNIFIED_MESSAGES, ("stale", "launched"), UNIFIED_RULES)
