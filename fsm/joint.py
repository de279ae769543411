"""Which states of a prefill life and of a decode life may coexist, and the phase that a client is
shown then.

A request that is served by two nodes is in two states at once. This table lists every pair that
may be seen, and exploration proves it: the pairs that can be reached are exactly these, none
missing and none dead (``tests/fsm/test_joint.py``). A pair that is not listed is a bug, wherever
it is observed.

On either side, ``absent`` means that the request has not arrived there, and ``gone`` that the
process died and the life with it; neither is a state of a chart. The table is about the two lives
that share a room *now*. After a rebuild, the prefill life of an earlier room may still be about to
hear that its hand-over is complete: :data:`EARLIER`.

Until the hand-over a client is shown what its prefill does, because decode only waits; from then
on it is shown decode, which owns the outcome."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Final, TypeAlias

from fsm.resources import Phase

ABSENT: Final = "absent"
GONE: Final = "gone"

Pair: TypeAlias = tuple[str, str]
"""(prefill, decode)"""


@dataclass(frozen=True, slots=True)
class Row:
    """Every one of these prefill states may coexist with every one of these decode states."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    shown: Phase
    why: str

    @property
    def pairs(self) -> tuple[Pair, ...]:
        return tuple(product(self.prefill, self.decode))


NEW: Final = (ABSENT, "arrived")
OVER: Final = ("done", GONE)
ENDING: Final = ("stopping", "draining")
HANDING_OVER: Final = ("sending", *OVER)
"""Where prefill may be once everything has landed: the acknowledgement is on its way, or was
heard."""

JOINT: Final[tuple[Row, ...]] = (
    Row(NEW, NEW, "intake", "on its way to both"),
    Row(("meeting",), NEW, "bootstrapped", "prefill had it first; decode will say hello"),
    Row(
        OVER, NEW, "retired", "ended at prefill before decode had it; decode is told when it knocks"
    ),
    Row(
        (*NEW, "meeting"),
        ("meeting",),
        "bootstrapped",
        "decode has said hello, which waits at prefill's door or has been answered",
    ),
    Row(OVER, ("meeting",), "bootstrapped", "prefill has ended; the news is on its way"),
    Row(("meeting",), ("waiting",), "bootstrapped", "they have met; decode queues it for memory"),
    Row(OVER, ("waiting",), "bootstrapped", "prefill has ended; the news is on its way"),
    Row(
        ("meeting", "waiting"),
        ("receiving",),
        "bootstrapped",
        "memory is granted, and the grant is on its way; or prefill queues it for admission",
    ),
    Row(("prefilling",), ("receiving",), "prefilling", "computed here, and written there"),
    Row(("sending",), ("receiving",), "transferring", "the rest is on the wire"),
    Row(
        (*ENDING, *OVER),
        ("receiving",),
        "transferring",
        "prefill has ended before the hand-over; the news is on its way",
    ),
    Row(HANDING_OVER, ("decoding",), "decoding", "handed over"),
    Row(
        HANDING_OVER,
        ("retracting", "retracted", "restoring"),
        "retracted",
        "handed over, and pushed out by decode",
    ),
    Row(
        HANDING_OVER,
        ("holding", "held"),
        "held",
        "handed over, or landed under other weights, and paused without KV",
    ),
    Row(HANDING_OVER, ("stopping", "cancelling"), "retired", "decode has answered"),
    Row(
        ("meeting", "waiting", "prefilling", "sending", *ENDING, *OVER),
        ("draining",),
        "retired",
        "decode has answered and keeps its pages until prefill swears that it is quiet",
    ),
    Row(
        (*NEW, "meeting", "sending", *OVER),
        ("done",),
        "retired",
        "decode has answered and holds nothing; prefill is told, or will be at its door",
    ),
    Row(
        (*NEW, "meeting", "waiting", "prefilling", "sending", *ENDING, *OVER),
        (GONE,),
        "retired",
        "decode's process died; prefill notices, or waits for a hello until its deadline",
    ),
)

EARLIER: Final[frozenset[Pair]] = frozenset(
    product(
        ("sending",),
        (
            *("meeting", "waiting", "receiving", "decoding"),
            *("retracting", "retracted", "restoring", "holding", "held"),
            *("stopping", "cancelling", "draining", "done", GONE),
        ),
    )
)
"""(prefill life of an earlier room, decode), while the acknowledgement is on its way, or lost.
Nothing that it says counts for decode any more."""


@cache
def shown() -> Mapping[Pair, Phase]:
    """pair → the phase that a client is shown. Every pair is in exactly one row."""
    table: dict[Pair, Phase] = {}
    for row in JOINT:
        for pair in row.pairs:
            if pair in table:
                raise ValueError(f"two rows for {pair}")
            table[pair] = row.shown
    return MappingProxyType(table)


def phase_of(prefill: str, decode: str) -> Phase:
    """The phase a client is shown. Raises :class:`ValueError` for a pair that cannot be."""
    phase = shown().get((prefill, decode))
    if phase is None:
        raise ValueError(f"prefill {prefill} and decode {decode} cannot coexist")
    return phase
