"""What every message does to a decode life."""

from typing import Final

from fsm.decode import DECODE
from fsm.rules import DROP, FINISHED, KEEP, REFUSE, Decision, Message, Rule, RuleBook

DECODE_MESSAGES: Final[tuple[Message, ...]] = (
    "abort",
    "expired",
    "stop_matched",
    "token_committed",
    "last_token_committed",
    "step_failed",
    "quiet",
    "paused",
    "continued",
    "peer_hello",
    "peer_done",
    "peer_abort",
    "peer_failed",
    "peer_reject",
    "peer_gone",
    "peer_missed",
    "wire_failed",
    "wire_quiet",
)

BEFORE: Final = ("meeting", "waiting")
TRANSFER: Final = ("meeting", "waiting", "receiving")
ON_DEVICE: Final = ("decoding", "retracting", "holding")
AWAY: Final = ("retracted", "restoring", "held")
"""Handed over, and no step contains it; while ``restoring``, a copy does."""
STOPPING: Final = ("stopping", "cancelling")
ANSWERED: Final = (*STOPPING, "draining", "done")
ALL: Final = ("arrived", *TRANSFER, *ON_DEVICE, *AWAY, *ANSWERED)
RESULTS: Final[tuple[Message, ...]] = (
    "token_committed",
    "last_token_committed",
    "step_failed",
)

DECODE_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        ("arrived", *TRANSFER, *ON_DEVICE, *AWAY),
        "abort",
        Decision("fire", "abort", "client"),
        "every live state accepts an abort, held and retracted included",
    ),
    Rule(ANSWERED, "abort", FINISHED, "pages follow when steps and wire are quiet"),
    Rule(
        (*TRANSFER, *ON_DEVICE, *AWAY),
        "expired",
        Decision("fire", "expire", "clock"),
        "the timer names the attempt and the state it was set for",
        stale=False,
    ),
    Rule(ALL, "expired", DROP, "a timer of an earlier attempt", stale=True),
    Rule(("arrived", *ANSWERED), "expired", DROP, "no deadline runs here", stale=False),
    Rule(
        (*TRANSFER, *ON_DEVICE, *AWAY),
        "stop_matched",
        Decision("fire", "finish", "server"),
        "found in tokens of this or of an earlier attempt; a rebuild on its way is given up",
    ),
    Rule(ANSWERED, "stop_matched", DROP, "it had already ended; the smaller index wins there"),
    Rule(("arrived",), "stop_matched", REFUSE, "nothing was ever sent"),
    Rule(ON_DEVICE, "token_committed", KEEP, "delivered; a late token counts too", stale=False),
    Rule(
        ON_DEVICE,
        "last_token_committed",
        Decision("fire", "finish", "runner"),
        "end of sequence, stop token or length",
        stale=False,
    ),
    Rule(
        (*ON_DEVICE, "restoring"),
        "step_failed",
        Decision("fire", "fail", "runner"),
        "a step, or a copy to or from the host, failed: a clear error",
        stale=False,
    ),
    *(
        Rule((*STOPPING, "done"), message, DROP, "late: launched before its end", stale=False)
        for message in RESULTS
    ),
    *(
        Rule(
            ("arrived", *TRANSFER, "retracted", "held", "draining"),
            message,
            REFUSE,
            "no step contains it",
            stale=False,
        )
        for message in RESULTS
    ),
    *(
        Rule(("restoring",), message, REFUSE, "only a copy contains it", stale=False)
        for message in RESULTS
        if message != "step_failed"
    ),
    *(Rule(ALL, message, DROP, "of an earlier attempt", stale=True) for message in RESULTS),
    Rule(
        ("retracting", "holding", *STOPPING),
        "quiet",
        Decision("fire", "quiesce", "runner"),
        "no step and no copy can touch its pages any more",
        launched=False,
    ),
    Rule(
        ("restoring",),
        "quiet",
        Decision("fire", "restored", "runner"),
        "the copy from the host is made",
        launched=False,
    ),
    Rule(("decoding",), "quiet", KEEP, "between two steps", launched=False),
    Rule(
        (*ON_DEVICE, "restoring", *STOPPING),
        "quiet",
        REFUSE,
        "a step or a copy contains it",
        launched=True,
    ),
    Rule(
        ("arrived", *TRANSFER, "retracted", "held", "draining", "done"),
        "quiet",
        DROP,
        "it holds nothing that a step could touch",
    ),
    Rule(
        ("decoding", "retracted"),
        "paused",
        Decision("fire", "hold", "scheduler"),
        "its KV, on the device or on the host, is dropped; its tokens are kept",
    ),
    Rule(
        ("retracting", "restoring"),
        "paused",
        KEEP,
        "a copy under way cannot be recalled; it is held as soon as the copy is made",
    ),
    Rule(
        ("arrived", *TRANSFER, "holding", "held", *ANSWERED),
        "paused",
        KEEP,
        "queues and transfers go on; what lands into a pause is held then",
    ),
    Rule(
        ("held",),
        "continued",
        Decision("fire", "rebuild", "scheduler"),
        "a fresh room, and prefill is asked to recompute prompt and output",
    ),
    Rule(
        ("arrived", *TRANSFER, *ON_DEVICE, "retracted", "restoring", *ANSWERED),
        "continued",
        KEEP,
        "nothing to rebuild (one that is still holding is rebuilt when it is held)",
    ),
    Rule(("meeting",), "peer_hello", Decision("fire", "met", "peer"), "queued for memory now"),
    Rule(
        ("waiting", "receiving", *ON_DEVICE, *AWAY), "peer_hello", DROP, "duplicate, or an old room"
    ),
    Rule(ANSWERED, "peer_hello", FINISHED, "the peer is told that this life has ended"),
    Rule(("arrived",), "peer_hello", REFUSE, "a life has no room before it is accepted"),
    Rule(
        ("receiving",),
        "peer_done",
        Decision("fire", "landed", "peer"),
        "everything is here",
        outdated=False,
    ),
    Rule(
        ("receiving",),
        "peer_done",
        Decision("fire", "outdated", "peer"),
        "invariant 9: computed under other weights, or landed into a pause that drops KV",
        outdated=True,
    ),
    Rule(
        ("draining",),
        "peer_done",
        Decision("fire", "silence", "peer"),
        "all written means that nothing more will be",
    ),
    Rule(
        ("meeting", "waiting", *ON_DEVICE, *AWAY, *STOPPING, "done"),
        "peer_done",
        DROP,
        "duplicate, or of a room that is over",
    ),
    Rule(("arrived",), "peer_done", REFUSE, "a life has no room before it is accepted"),
    Rule(
        TRANSFER,
        "peer_abort",
        Decision("fire", "abort", "peer"),
        "prefill ended before the hand-over: its reason is ours (B54)",
    ),
    Rule((*ON_DEVICE, *AWAY, *ANSWERED), "peer_abort", DROP, "handed over, or already ended"),
    Rule(("arrived",), "peer_abort", REFUSE, "a life has no room before it is accepted"),
    Rule(
        TRANSFER,
        "peer_failed",
        Decision("fire", "lost", "peer"),
        "a step or a write of prefill failed, maybe of the life that had this room before",
    ),
    Rule((*ON_DEVICE, *AWAY, *ANSWERED), "peer_failed", DROP, "handed over, or already ended"),
    Rule(("arrived",), "peer_failed", REFUSE, "a life has no room before it is accepted"),
    Rule(
        TRANSFER,
        "peer_reject",
        Decision("fire", "lost", "peer"),
        "refused at prefill's door: both sides answer alike",
    ),
    Rule((*ON_DEVICE, *AWAY, *ANSWERED), "peer_reject", DROP, "of a room that is over"),
    Rule(("arrived",), "peer_reject", REFUSE, "a life has no room before it is accepted"),
    Rule(
        TRANSFER,
        "peer_gone",
        Decision("fire", "lost", "peer"),
        "prefill is gone before everything has landed",
    ),
    Rule(
        ("draining",),
        "peer_gone",
        Decision("fire", "silence", "peer"),
        "a process that is gone writes no more",
    ),
    Rule(
        ("arrived", *ON_DEVICE, *AWAY, *STOPPING, "done"),
        "peer_gone",
        KEEP,
        "what has landed goes on without its prefill",
    ),
    Rule(
        TRANSFER,
        "peer_missed",
        Decision("fire", "lost", "peer"),
        "frozen, or cut off: its client is not kept waiting",
    ),
    Rule(
        ("draining",),
        "peer_missed",
        KEEP,
        "no proof: a frozen process may wake up and go on writing (invariant 4)",
    ),
    Rule(
        ("arrived", *ON_DEVICE, *AWAY, *STOPPING, "done"),
        "peer_missed",
        KEEP,
        "what has landed goes on without its prefill",
    ),
    Rule(
        ("receiving",),
        "wire_failed",
        Decision("fire", "lost", "wire"),
        "what was written into the slot is no record",
    ),
    Rule(
        tuple(state for state in ALL if state != "receiving"),
        "wire_failed",
        DROP,
        "of a transfer that is over",
    ),
    Rule(
        ("receiving",),
        "wire_quiet",
        Decision("fire", "lost", "wire"),
        "the writer stopped before it was done (its abort may come after its quiet)",
    ),
    Rule(
        ("draining",),
        "wire_quiet",
        Decision("fire", "silence", "wire"),
        "the writer swears that it is finished",
    ),
    Rule(
        tuple(state for state in ALL if state not in ("receiving", "draining")),
        "wire_quiet",
        DROP,
        "of a transfer that is over",
    ),
)

DECODE_BOOK: Final = RuleBook(
    DECODE, DECODE_MESSAGES, ("stale", "launched", "outdated"), DECODE_RULES
)
