"""The scheduler of a decode node: memory is granted to prefill, what lands is decoded.

Memory for the prompt and every token a request may generate is reserved with the grant, so
decoding never runs out of it; what is retracted here is retracted on purpose (priority, operator,
tests), with a copy in host memory.

A pause that drops KV leaves requests *held*: they keep their tokens, and are computed again by
prefill, under the weights of then, when generation goes on (:mod:`engine.rebuilding`)."""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import ClassVar, Final

import msgspec

from engine import endings
from engine.basics import LifecycleBug, Parts
from engine.batch import PageExport, PageImport, PagesDone, Sampled
from engine.deadlines import HELD_TIMEOUT_S
from engine.host import HostPages, HostPool
from engine.pairing import Pairing
from engine.policy import Candidate, admit
from engine.rebuilding import Rebuilding
from engine.request import Request
from engine.slots import SlotMemory, SlotPoolOfRecords
from fsm import protocol
from fsm.chart import Chart, Edge
from fsm.decode import BASE_KIT, DECODE
from fsm.ledger import CountPool, Exhausted, Lease, Pool
from fsm.protocol import Role
from fsm.resources import Resource
from fsm.rules import Decision, Facts, Message
from transport.control import PeerDone, PeerFrame, PeerGrant, Recompute, SlotRecord
from transport.messages import Finish

QUEUE_SCAN: Final = 32
GRANTS_A_PREFILL: Final = 32
"""Grants that one prefill node may have at a time: granted memory idles until it is written."""


class DecodeScheduler(Rebuilding):
    """All requests of one decode node."""

    role: ClassVar[Role] = "decode"
    chart: ClassVar[Chart] = DECODE
    base_kit: ClassVar[frozenset[Resource]] = BASE_KIT
    queued: ClassVar[frozenset[str]] = frozenset({"waiting", "retracted"})
    on_device: ClassVar[frozenset[str]] = frozenset({"decoding"})

    def __init__(
        self,
        parts: Parts,
        slots: SlotMemory,
        host_pages: int,
        mint: Callable[[], str] = lambda: secrets.token_hex(8),
        workers: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """``workers`` names the prefill nodes of the deployment, whether they were met or not: they
        are asked to compute again what a node that is gone had computed."""
        self._slots = slots
        self._mint, self._workers = mint, workers
        self._host_total = host_pages
        self._grants: Counter[str] = Counter()
        """Requests that are receiving, by prefill node: a step must not cost a look at them all."""
        self._copies: dict[int, Request] = {}
        self._tickets = 0
        self.held_timeout_s = HELD_TIMEOUT_S
        super().__init__(parts)

    # --- hooks ---

    def _role_pools(self) -> list[Pool]:
        self.metadata = SlotPoolOfRecords(self._slots)
        self.receivers = CountPool("receivers", self._slots.total)
        self.host = HostPool(self._host_total)
        return [*super()._role_pools(), self.metadata, self.receivers, self.host]

    @property
    def _slots_here(self) -> int:
        return self._slots.total

    def _runnable(self) -> list[Request]:
        candidates = {r.life: r for r in self.roster.queue.first(QUEUE_SCAN)}
        admission = admit(
            (self._candidate(request) for request in candidates.values()),
            self.rows.free,
            self.kv.available,
            1 << 30,
            0,
            self.config.max_overtakes,
            growth=0,  # everything is reserved at once
        )
        for life in admission.admit:
            request = candidates[life]
            if not self._is_ready(request):
                continue  # a grant that was made just now was the last that its prefill may have
            ok = self._grant(request) if request.state == "waiting" else self._restore(request)
            if not ok:
                break
        for life in admission.passed:
            candidates[life].overtaken += 1
        return [r for r in self.roster.device if not r.withheld]

    def _candidate(self, request: Request) -> Candidate:
        pages = self.kv.pages_for(self._extent(request))
        return Candidate(request.life, pages, 0, request.overtaken, self._is_ready(request))

    def _is_ready(self, request: Request) -> bool:
        if request.withheld:
            return False
        return (
            request.state != "waiting"
            or self._grants[self._pairing(request).node] < GRANTS_A_PREFILL
        )

    def _extent(self, request: Request) -> int:
        """Positions that a request may ever need."""
        return request.prompt_len + request.max_new_tokens

    def _grant(self, request: Request) -> bool:
        """Reserve everything, and tell prefill that it may write."""
        # Pages last: nothing is evicted, and nothing stands in the trace, for a grant that fails.
        leases: dict[Resource, Lease] = {}
        pages = None
        try:
            leases["metadata_slots"] = self.metadata.reserve(request.life)
            leases["receivers"] = self.receivers.reserve(request.life)
            leases["rows"] = self.rows.reserve(request.life)
            pages = self.kv.reserve_new(request, self._extent(request))
        except Exhausted:
            pages = None
        if pages is None:
            for lease in leases.values():
                lease.cancel()
            return False
        leases["pages"] = pages
        self._fire(request, "grant", "scheduler", "", leases)
        self._deadlines.set(self._clock() + self.transfer_timeout_s, "transfer", request)
        return True

    def _grant_frame(self, request: Request, pairing: Pairing) -> PeerGrant:
        pages, slot = self._pages(request).table, self.metadata.slot_of(request)
        count = self.kv.pages_for(len(self._asked(request)))
        return PeerGrant(
            room=pairing.room,
            sender=request.life,
            receiver=pairing.life,
            pages=list(pages[:count]),
            slot=slot,
        )

    def _facts(self, request: Request, frame: PeerFrame | None) -> Facts:
        outdated = isinstance(frame, PeerDone) and protocol.is_outdated(
            frame.weights, self.weights, self.drops_kv
        )
        return Facts(launched=request.in_steps > 0, outdated=outdated)

    def _note(self, request: Request, pairing: Pairing, frame: PeerFrame) -> None:
        """What a decode life needs of a frame is in its slot."""

    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        super()._after(request, edge, cause)
        if "receiving" in (edge.source, edge.target):
            self._grants[self._pairing(request).node] += 1 if edge.target == "receiving" else -1
        if edge.target == "draining":
            self.kv.quarantine(self._pages(request))
        elif edge.target == "retracted":
            request.attempt += 1
            request.retractions += 1
            self.stats.retracted += 1
        elif edge.target == "held":
            request.attempt += 1
            request.retractions += 1
            request.launched = request.committed = 0
            self._deadlines.set(self._clock() + self.held_timeout_s, "held", request)
        elif edge.event == "restored":
            self.steps.init_row(request, self._row(request))

    # --- landing ---

    def _hear(
        self, request: Request, pairing: Pairing, node: str, message: Message, frame: PeerFrame
    ) -> None:
        if isinstance(frame, PeerDone) and request.state == "receiving":
            # Read before the move: leaving *receiving* zeroes the slot.
            pairing.record = self._slots.read(self.metadata.slot_of(request))
            try:
                record = self._decoded(pairing) if pairing.record else None
            except msgspec.MsgspecError as error:
                self.malformed += 1
                why = f"the transfer failed: its record does not decode ({error})"
                self._deliver(request, "wire_failed", endings.broken(why))
                return
            if record is None or record.room != pairing.room:
                return  # not written, whatever was said: it is said again with every heartbeat
        super()._hear(request, pairing, node, message, frame)

    def _apply(
        self, request: Request, message: Message, decision: Decision, finish: Finish | None
    ) -> None:
        super()._apply(request, message, decision, finish)
        if decision.event == "landed":
            self._landed(request)

    def _landed(self, request: Request) -> None:
        """Everything is here: take the first token, unless the client has it already.

        It may be the last one (B91); then no step is needed.
        """
        record = self._decoded(self._pairing(request))
        request.launched = request.committed = len(self._asked(request))
        finish: Finish | None = None
        if not protocol.replays_first_token(request.output_len):
            self._admitted(request, record.cached_tokens)
            _, finish = self._outcome(request, record.token)
            if request.max_new_tokens > 0:
                self._append(
                    request,
                    Sampled(
                        record.token, record.logprob, record.top_logprobs, record.chosen_logprobs
                    ),
                )
        if finish is None:
            self.steps.init_row(request, self._row(request))
        else:
            self._deliver(request, "last_token_committed", finish)

    @staticmethod
    def _decoded(pairing: Pairing) -> SlotRecord:
        return msgspec.msgpack.decode(pairing.record, type=SlotRecord)

    # --- retraction and pauses ---

    def retract(self, rid: str) -> bool:
        """Push a request out, with a copy of its KV in host memory. False where it cannot be."""
        request = self.roster.live.get(rid)
        if request is None or request.state != "decoding":
            return False
        pages = self._pages(request)
        written = self.kv.pages_for(request.launched)  # the rest is reserved, and empty
        try:
            host = self.host.reserve(request.life, written)
        except Exhausted:
            finish = endings.broken("Retraction host KV pool exhausted")
            request.finish = finish
            self._fire(request, "fail", "scheduler", finish.message)
            self._settle(request)
            return False
        self._fire(request, "retract", "scheduler", "forced", {"host_pages": host})
        self._copy(request, PageExport(self._ticket(), array("q", pages.table[:written])))
        return True

    def _restore(self, request: Request) -> bool:
        """Bring a retracted request back: its KV is copied in before any step reads it."""
        try:
            row = self.rows.reserve(request.life)
        except Exhausted:
            return False
        pages = self.kv.reserve_new(request, self._extent(request))
        if pages is None:
            row.cancel()
            return False
        host = request.leases["host_pages"]
        if not isinstance(host, HostPages):
            raise LifecycleBug(f"{request.rid} has no copy in host memory")
        blobs = host.blobs
        self._fire(request, "readmit", "scheduler", "", {"rows": row, "pages": pages})
        count = len(blobs)
        self._copy(request, PageImport(self._ticket(), array("q", pages.table[:count]), blobs))
        return True

    def _copy(self, request: Request, work: PageExport | PageImport) -> None:
        self._copies[work.ticket] = request
        request.in_steps += 1
        self._runner.launch(work)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def pages_done(self, done: PagesDone) -> None:
        """A copy to or from host memory has run."""
        request = self._copies.pop(done.ticket, None)
        if request is None:
            super().pages_done(done)
            return
        self._now()
        request.in_steps -= 1
        host = request.leases.get("host_pages")
        if done.error is not None:
            finish = endings.broken(f"the copy of its KV failed: {done.error}")
            self._deliver(request, "step_failed", finish)
        elif done.blobs and isinstance(host, HostPages):
            host.blobs = done.blobs
        self._settle(request)

    def _recompute(self, frame: Recompute) -> None:
        self.malformed += 1  # nobody asks a decode node to compute a prompt

    @property
    def at_rest(self) -> bool:
        return super().at_rest and not self._copies
