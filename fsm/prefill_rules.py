"""What every message does to a prefill life."""

from typing import Final

from fsm.prefill import PREFILL
from fsm.rules import DROP, FINISHED, KEEP, REFUSE, Decision, Message, Rule, RuleBook

PREFILL_MESSAGES: Final[tuple[Message, ...]] = (
    "abort",
    "expired",
    "chunk_committed",
    "token_committed",
    "step_failed",
    "quiet",
    "peer_hello",
    "peer_grant",
    "peer_landed",
    "peer_abort",
    "peer_reject",
    "peer_gone",
    "peer_missed",
    "wire_failed",
    "wire_quiet",
)

BEFORE: Final = ("meeting", "waiting")
SENDING: Final = ("prefilling", "sending")
ANSWERED: Final = ("stopping", "draining", "done")
ALL: Final = ("arrived", *BEFORE, *SENDING, *ANSWERED)
RESULTS: Final[tuple[Message, ...]] = ("chunk_committed", "token_committed", "step_failed")

PREFILL_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        ("arrived", *BEFORE, *SENDING),
        "abort",
        Decision("fire", "abort", "client"),
        "by name also while sending; a client that leaves after its 200 is no abort, and not sent",
    ),
    Rule(ANSWERED, "abort", FINISHED, "pages follow when steps and wire are quiet"),
    Rule(
        (*BEFORE, *SENDING),
        "expired",
        Decision("fire", "expire", "clock"),
        "peer not met, no room in time, or a transfer that takes too long",
    ),
    Rule(
        ("arrived", *ANSWERED), "expired", DROP, "no deadline runs here; alarms are not deadlines"
    ),
    Rule(("prefilling",), "chunk_committed", KEEP, "progress: the chunk may be written"),
    Rule(
        ("prefilling",),
        "token_committed",
        Decision("fire", "prefilled", "runner"),
        "the prompt is complete; whether the token ends the request is decode's to say",
    ),
    Rule(("prefilling",), "step_failed", Decision("fire", "fail", "runner"), "a clear error"),
    *(Rule(ANSWERED, message, DROP, "late: launched before its end") for message in RESULTS),
    *(
        Rule(("arrived", *BEFORE, "sending"), message, REFUSE, "no step contains it")
        for message in RESULTS
    ),
    Rule(
        ("stopping",),
        "quiet",
        Decision("fire", "quiesce", "runner"),
        "steps are over; the wire is waited for next",
        launched=False,
    ),
    Rule(("prefilling",), "quiet", KEEP, "between two chunks", launched=False),
    Rule(("prefilling", "stopping"), "quiet", REFUSE, "a step contains it", launched=True),
    Rule(
        ("arrived", *BEFORE, "sending", "draining", "done"),
        "quiet",
        DROP,
        "it holds nothing that a step could touch",
    ),
    Rule(
        ("meeting",), "peer_hello", KEEP, "the peer's life and layout are noted; the grant follows"
    ),
    Rule(("waiting", *SENDING), "peer_hello", DROP, "duplicate"),
    Rule(ANSWERED, "peer_hello", FINISHED, "the peer is told that this life has ended"),
    Rule(("arrived",), "peer_hello", REFUSE, "a life has no room before it is accepted"),
    Rule(
        ("meeting",),
        "peer_grant",
        Decision("fire", "granted", "peer"),
        "runnable, in its place by rank",
    ),
    Rule(("waiting", *SENDING), "peer_grant", DROP, "duplicate"),
    Rule(ANSWERED, "peer_grant", FINISHED, "the peer is told, and frees what it reserved"),
    Rule(("arrived",), "peer_grant", REFUSE, "a life has no room before it is accepted"),
    Rule(("sending",), "peer_landed", Decision("fire", "landed", "peer"), "handed over"),
    Rule(
        ("meeting", "waiting", "prefilling", *ANSWERED),
        "peer_landed",
        DROP,
        "late, duplicate, or for a hand-over that was given up",
    ),
    Rule(("arrived",), "peer_landed", REFUSE, "a life has no room before it is accepted"),
    Rule(
        (*BEFORE, *SENDING),
        "peer_abort",
        Decision("fire", "abort", "peer"),
        "decode gave up: its reason is ours (B53)",
    ),
    Rule(("stopping", "draining"), "peer_abort", DROP, "it has already ended; quiet follows"),
    Rule(("done",), "peer_abort", FINISHED, "nothing is outstanding: the peer may free its pages"),
    Rule(("arrived",), "peer_abort", REFUSE, "a life has no room before it is accepted"),
    Rule(
        (*BEFORE, *SENDING),
        "peer_reject",
        Decision("fire", "lost", "peer"),
        "refused at decode's door: both sides answer alike",
    ),
    Rule(ANSWERED, "peer_reject", DROP, "it has already ended"),
    Rule(("arrived",), "peer_reject", REFUSE, "a life has no room before it is accepted"),
    Rule(
        (*BEFORE, *SENDING),
        "peer_gone",
        Decision("fire", "lost", "peer"),
        "closed socket, missed heartbeats, or a room that the peer does not know",
    ),
    Rule(("arrived", *ANSWERED), "peer_gone", DROP, "our own wire says when it is quiet"),
    Rule(
        (*BEFORE, *SENDING),
        "peer_missed",
        Decision("fire", "lost", "peer"),
        "frozen, or cut off: it is told when it comes back",
    ),
    Rule(("arrived", *ANSWERED), "peer_missed", DROP, "our own wire says when it is quiet"),
    Rule(SENDING, "wire_failed", Decision("fire", "lost", "wire"), "a write failed"),
    Rule(("stopping", "draining", "done"), "wire_failed", DROP, "it has already ended"),
    Rule(("arrived", *BEFORE), "wire_failed", REFUSE, "nothing was written yet"),
    Rule(
        ("draining",),
        "wire_quiet",
        Decision("fire", "silence", "wire"),
        "no write of ours is outstanding: the peer is told, pages go",
    ),
    Rule((*SENDING, "stopping"), "wire_quiet", KEEP, "between two writes"),
    Rule(("arrived", *BEFORE, "done"), "wire_quiet", DROP, "it holds nothing the wire could read"),
)

PREFILL_BOOK: Final = RuleBook(PREFILL, PREFILL_MESSAGES, ("launched",), PREFILL_RULES)
