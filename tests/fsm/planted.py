"""Bugs planted in charts, rules and protocol, which exploration must find.

A bug is a design that differs from production in one place. ``length`` is the length of the
shortest counterexample: the search is breadth first, so a longer one is a fault of the explorer,
and a shorter one means that the model, or the design, has changed."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from fsm import protocol
from fsm.decode import DECODE
from fsm.explore import Explorer
from fsm.explore_base import Budget, Violation
from fsm.explore_pd import PRODUCTION, Design
from fsm.explore_pd_model import PairModel
from fsm.explore_pd_nodes import DROPPING, EVERY, Pauses
from fsm.prefill import PREFILL
from fsm.rules import DROP, KEEP, Decision
from tests.fsm.planting import (
    accepts_by_life,
    accepts_by_room,
    computes_in_place,
    due_blind,
    due_but_for_decoding,
    due_while_paused,
    due_without,
    flush_unless,
    holding,
    keeps_nothing,
    leading,
    one_room,
    ruled,
    without,
)


@dataclass(frozen=True)
class Planted:
    """A bug, the smallest run that shows it, and what the run must say."""

    name: str
    design: Design
    budget: Budget
    says: str
    length: int
    requests: int = 1
    pauses: Pauses = field(default_factory=lambda: DROPPING)

    @property
    def model(self) -> PairModel:
        return PairModel(self.design, pauses=self.pauses)

    @cached_property
    def violation(self) -> Violation | None:
        """What the run finds."""
        return Explorer(self.model, self.requests, self.budget).run().violation


def _design(**changes: Any) -> Design:
    return replace(PRODUCTION, **changes)


A1, F1, R1 = Budget(aborts=1), Budget(faults=1), Budget(rebuilds=1)

BY_LIFE = _design(accepts=accepts_by_life, room_of=one_room)
"""No bug: a room may be used again by who looks at lives."""

PLANTED = (
    Planted(
        "decode releases on abort while prefill writes",
        _design(decode=leading(DECODE, "receiving", "abort", target="done", pages="discard")),
        A1,
        "the wire writes into pages that decode released in done",
        9,
    ),
    Planted(
        "prefill releases on abort while the wire reads",
        _design(prefill=leading(PREFILL, "sending", "abort", target="done", pages="cache")),
        A1,
        "the wire reads pages that prefill released in done",
        11,
    ),
    Planted(
        "no quiesce: decode's abort releases under a launched step",
        _design(decode=leading(DECODE, "decoding", "abort", target="done", pages="discard")),
        A1,
        "a launched step touches pages that decode released in done",
        14,
    ),
    Planted(
        "no quiesce: prefill's abort releases under a launched chunk",
        _design(prefill=leading(PREFILL, "prefilling", "abort", target="done", pages="cache")),
        A1,
        "a launched step touches pages that prefill released in done",
        9,
    ),
    Planted(
        "quiesce is never delivered",
        _design(due=due_without("stopping")),
        Budget(),
        "never come to rest",
        13,
    ),
    Planted(
        "an end in retracting drops host pages under the copy",
        _design(decode=leading(DECODE, "retracting", "abort", target="stopping")),
        A1,
        "a copy touches pages or host pages that decode released in stopping",
        14,
    ),
    Planted(
        "a readmitted request drops host pages while they are copied back",
        _design(decode=leading(DECODE, "retracted", "readmit", target="decoding")),
        Budget(),
        "a copy touches pages or host pages that decode released in decoding",
        15,
    ),
    Planted(
        "an acknowledgement counts by room instead of by life",
        _design(accepts=accepts_by_room, room_of=one_room),
        Budget(aborts=1, rebuilds=1),
        "decode takes the word of a prefill life that it is not paired with",
        19,
    ),
    Planted(
        "a rebuild reuses the room",
        _design(room_of=one_room),
        Budget(aborts=1, rebuilds=1),
        "decode takes the word of a prefill life that it is not paired with",
        16,
    ),
    Planted(
        "decode's abort is not forwarded",
        _design(on_moved=without("abort", "decode")),
        A1,
        "only a heartbeat can help",
        5,
    ),
    Planted(
        "prefill's abort is not forwarded",
        _design(on_moved=without("abort", "prefill")),
        A1,
        "only a heartbeat can help",
        7,
    ),
    Planted(
        "prefill ends before it was admitted and does not swear that it is quiet",
        _design(on_moved=without("quiet", "prefill", "meeting", "waiting")),
        A1,
        "only a heartbeat can help",
        8,
    ),
    Planted(
        "the writer's quiet is not sent",
        _design(on_moved=without("quiet", "prefill", "draining")),
        A1,
        "only a heartbeat can help",
        10,
    ),
    Planted(
        "a refusal at decode's door is not told",
        _design(on_moved=without("reject", "decode")),
        Budget(),
        "only a heartbeat can help",
        3,
    ),
    Planted(
        "a refusal at prefill's door does not answer an early hello",
        _design(on_refused=lambda early, how: ()),
        Budget(),
        "only a heartbeat can help",
        4,
    ),
    Planted(
        "an early hello is dropped",
        _design(knock=keeps_nothing),
        Budget(),
        "only a heartbeat can help",
        4,
    ),
    Planted(
        "a life that has ended does not answer a hello",
        _design(
            on_reply=lambda role, state, message, effect, refused=False: (
                ()
                if effect == "finished"
                else protocol.on_reply(role, state, message, effect, refused)
            )
        ),
        A1,
        "never come to rest",
        3,
    ),
    Planted(
        "a metadata slot is reused before it is cleared",
        _design(clears_slot=lambda chart, edge: False),
        Budget(),
        "a metadata slot is handed out that still names a room",
        17,
        requests=2,
    ),
    Planted(
        "a metadata slot is cleared while it may still be written",
        _design(clears_slot=lambda chart, edge: edge.source == "receiving"),
        A1,
        "a metadata slot is handed out that still names a room",
        18,
        requests=2,
    ),
    Planted(
        "the last token is sampled again after a rebuild",
        _design(replays_first_token=lambda emitted: False),
        R1,
        "the last token that the client has is sampled again",
        25,
    ),
    Planted(
        "decode is flushed while a life drains",
        _design(may_flush=flush_unless("draining")),
        A1,
        "flushed under the pages of a life that is draining",
        7,
    ),
    Planted(
        "prefill is flushed while it sends",
        _design(may_flush=flush_unless("sending")),
        Budget(),
        "prefill is flushed under the pages of a life that is sending",
        10,
    ),
    Planted(
        "an abort is lost while held",
        _design(decode_table=ruled("decode", "held", "abort", KEEP)),
        Budget(aborts=1, rebuilds=1),
        "decode is still held",
        14,
    ),
    Planted(
        "an abort is lost while retracted",
        _design(decode_table=ruled("decode", "retracted", "abort", KEEP)),
        A1,
        "decode is still retracted",
        15,
    ),
    Planted(
        "prefill answers twice",
        _design(
            prefill=holding(
                PREFILL,
                lambda s: tuple(r for r in s.holds if r != "frontend_records"),
                "waiting",
            )
        ),
        Budget(),
        "prefill still owes an answer in prefilling that it has given",
        7,
    ),
    Planted(
        "prefill answers again when its wire is quiet",
        _design(prefill=holding(PREFILL, lambda s: (*s.holds, "frontend_records"), "draining")),
        A1,
        "prefill answers its client twice",
        8,
    ),
    Planted(
        "the peer's abort frees under the reader",
        _design(
            prefill_table=ruled(
                "prefill", "draining", "peer_abort", Decision("fire", "silence", "wire")
            )
        ),
        Budget(aborts=2),
        "the wire reads pages that prefill released in done",
        11,
    ),
    Planted(
        "pages are freed when the wire is only believed to be quiet",
        _design(due=due_blind),
        A1,
        "the wire reads pages that prefill released in done",
        9,
    ),
    Planted(
        "missed heartbeats free what a frozen peer may still write",
        _design(
            decode_table=ruled(
                "decode", "draining", "peer_missed", Decision("fire", "silence", "peer")
            )
        ),
        Budget(faults=1, aborts=1),
        "the wire writes into pages that decode released in done",
        10,
    ),
    Planted(
        "prefill ignores that its peer is gone while waiting",
        _design(prefill_table=ruled("prefill", "waiting", "peer_gone", KEEP)),
        F1,
        "prefill is still waiting, though it was aborted or left alone",
        8,
    ),
    Planted(
        "decode ignores that its peer is gone while receiving",
        _design(decode_table=ruled("decode", "receiving", "peer_gone", KEEP)),
        F1,
        "decode is still receiving, though it was aborted or left alone",
        7,
    ),
    Planted(
        "KV that landed under other weights is used",
        _design(is_outdated=lambda landed, weights, paused: False),
        R1,
        "KV is used that was computed under other weights",
        16,
    ),
    Planted(
        "a hand-over that is complete is not acknowledged",
        _design(on_moved=without("landed", "decode")),
        Budget(),
        "only a heartbeat can help",
        13,
    ),
    Planted(
        "a late grant is dropped",
        _design(prefill_table=ruled("prefill", "meeting", "peer_grant", DROP)),
        Budget(),
        "never come to rest",
        6,
    ),
    Planted(
        "a grant of the peer takes a row",
        _design(prefill=holding(PREFILL, lambda s: (*s.holds, "rows"), "waiting")),
        Budget(),
        "peer_grant takes rows, which may not be there",
        6,
    ),
    Planted(
        "decode launches a step while it is paused in place",
        _design(is_frozen=computes_in_place("decode")),
        R1,
        "a step of decode is launched while it is paused",
        14,
        pauses=EVERY,
    ),
    Planted(
        "prefill launches a chunk while it is paused in place",
        _design(is_frozen=computes_in_place("prefill")),
        R1,
        "a step of prefill is launched while it is paused in place",
        9,
        pauses=EVERY,
    ),
    Planted(
        "what landed outdated is rebuilt in a pause that keeps KV",
        _design(due=due_while_paused),
        R1,
        "a held life is rebuilt before generation goes on",
        14,
        pauses=EVERY,
    ),
    Planted(
        "KV that was kept in place goes to the prefix cache",
        _design(may_cache=lambda kv, node: True),
        R1,
        "pages go to the prefix cache that were computed under other weights",
        11,
        pauses=EVERY,
    ),
    Planted(
        "done names the weights of prefill, and not those of its KV",
        _design(names=lambda kv: min(kv, 1)),
        Budget(rebuilds=2),
        "KV is used that was begun under other weights",
        16,
        pauses=EVERY,
    ),
    Planted(
        "a pause that drops KV forgets who decodes",
        _design(due=due_but_for_decoding),
        R1,
        "KV is kept in decoding by a pause of decode that drops it",
        13,
    ),
    Planted(
        "weights change under a life that is holding",
        _design(may_flush=flush_unless("holding")),
        R1,
        "decode is flushed under the pages of a life that is holding",
        15,
    ),
    Planted(
        "a pause that aborts passes over who waits",
        _design(decode_table=ruled("decode", "waiting", "abort", KEEP)),
        R1,
        "decode is still waiting, though it was aborted",
        5,
        pauses=EVERY,
    ),
)
