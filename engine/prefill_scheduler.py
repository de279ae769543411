"""The scheduler of a prefill node: prompts are computed here, and their KV is written to decode.

Pages of a chunk that is committed are written while later chunks compute. The last page goes with
the last chunk, the metadata slot after it; when that write has completed, decode is told. Memory
of a prompt is reserved as a whole, so nothing here is ever retracted.

A turn of the loop also calls :meth:`PrefillScheduler.poll_wire`. What decode asks to be computed
again waits here until the queue has room, and is then a submission like any other."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import ClassVar

import msgspec

from engine import endings
from engine.basics import Parts
from engine.batch import Batch, Sampled, StepResult
from engine.frames import cause_of
from engine.paired import PairedScheduler
from engine.pairing import Pairing
from engine.policy import Candidate, admit, tokens_ahead
from engine.request import Request
from fsm import pauses, protocol
from fsm.chart import Chart, Edge
from fsm.ledger import CountPool, Exhausted, Lease, Pool
from fsm.prefill import BASE_KIT, PREFILL
from fsm.protocol import Role
from fsm.resources import Resource
from fsm.rules import Message
from transport.control import PeerFrame, PeerGrant, PeerHello, Recompute, SlotRecord
from transport.messages import Finish, Submit
from transport.wire import Wire

QUEUE_SCAN = 32


class PrefillScheduler(PairedScheduler):
    """All requests of one prefill node."""

    role: ClassVar[Role] = "prefill"
    chart: ClassVar[Chart] = PREFILL
    base_kit: ClassVar[frozenset[Resource]] = BASE_KIT
    queued: ClassVar[frozenset[str]] = frozenset({"waiting"})
    on_device: ClassVar[frozenset[str]] = frozenset({"prefilling"})

    def __init__(
        self,
        parts: Parts,
        wire: Wire,
    ) -> None:
        self._wire = wire
        self._writes: dict[int, Request] = {}
        self._tickets = 0
        self._recomputes = 0
        self._recomputed: dict[str, str] = {}
        self._asked_again: OrderedDict[str, Recompute] = OrderedDict()
        super().__init__(parts)

    # --- hooks ---

    def _role_pools(self) -> list[Pool]:
        self.senders = CountPool("senders", 2 * self.config.max_running_requests)
        return [*super()._role_pools(), self.senders]

    def _runnable(self) -> list[Request]:
        """Admit granted requests while rows, pages, and the prompt budget last.

        A pause that drops KV lets prompts that are being computed run to their end: nothing here
        can be computed again later, and decode does not use what lands into its own pause."""
        if not pauses.admits(self.pause_mode):
            return []
        prompts = self._prompts()
        candidates = {r.life: r for r in self.roster.queue.first(QUEUE_SCAN)}
        admission = admit(
            (self._candidate(r, tokens_ahead(r.rank, prompts)) for r in candidates.values()),
            min(self.rows.free, self.senders.free),
            self.kv.available,
            self.config.chunked_prefill_size,
            0,
            self.config.max_overtakes,
            growth=0,  # nothing decodes here
        )
        for life in admission.admit:
            if not self._admit_one(candidates[life]):
                break
        for life in admission.passed:
            candidates[life].overtaken += 1
        return []  # prompts are planned from the device; nothing here decodes

    def _candidate(self, request: Request, ahead: int) -> Candidate:
        pages, tokens = self.kv.cost(request)
        ready = not request.withheld
        return Candidate(request.life, pages, tokens, request.overtaken, ready, ahead)

    def _admit_one(self, request: Request) -> bool:
        try:
            pages, lock = self.kv.reserve(request)
        except Exhausted:
            return False
        row = self.rows.reserve(request.life)
        request.launched = request.committed = pages.shared * self.config.page_size
        self._admitted(request, request.committed)
        self.steps.init_row(request, row)
        leases: dict[Resource, Lease] = {
            "rows": row,
            "pages": pages,
            "prefix_locks": lock,
            "senders": self.senders.reserve(request.life),
        }
        self._fire(request, "admit", "scheduler", "", leases)
        self._write(request)  # what the prefix cache has may go at once
        return True

    def _outcome(self, request: Request, token: int) -> tuple[Message, Finish | None]:
        """Whether the token ends the request is decode's to say; the client here gets its 200."""
        return "token_committed", Finish(type="length", length=1)

    def _prompt_committed(self, request: Request, sampled: Sampled) -> None:
        super()._prompt_committed(request, sampled)
        pairing = self._pairing(request)
        pairing.record = msgspec.msgpack.encode(
            SlotRecord(
                room=pairing.room,
                token=sampled.token or 0,
                logprob=sampled.logprob,
                top_logprobs=sampled.top_logprobs,
                chosen_logprobs=sampled.chosen_logprobs,
                cached_tokens=request.cached_tokens,
            )
        )

    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        super()._after(request, edge, cause)
        if not self.chart.is_live(edge.target):
            rid = request.rid.rpartition("@")[0]
            if self._recomputed.get(rid) == request.rid:
                del self._recomputed[rid]
        if edge.target == "sending":
            self._deadlines.set(self._clock() + self.transfer_timeout_s, "transfer", request)

    def launch(self) -> Batch | None:
        self._compute_again()
        return super().launch()

    def _process_gone(self, node: str, successor: str) -> None:
        for room in [room for room, frame in self._asked_again.items() if frame.node == node]:
            del self._asked_again[room]
        super()._process_gone(node, successor)

    def _meant(self, rid: str) -> list[Request]:
        again = self.roster.live.get(self._recomputed.get(rid, ""))
        return [*super()._meant(rid), *([again] if again is not None else [])]

    def commit(self, result: StepResult) -> None:
        """Commit the step, then start the writes of what it computed."""
        requests = self.steps.oldest
        super().commit(result)
        for request in requests:
            self._write(request)

    def _objection(self, request: Request, frame: PeerFrame) -> Finish | None:
        """What decode advertises is checked here, too, so that both sides answer the same 400; a
        grant that does not fit the prompt is never written to."""
        objection = super()._objection(request, frame)
        if objection is not None:
            return objection
        if isinstance(frame, PeerHello) and request.prompt_len > frame.max_prompt_tokens:
            return Finish(
                type="abort",
                message=f"prompt: {request.prompt_len} tokens; decode takes "
                f"{frame.max_prompt_tokens} at most",
                status=400,
                err_type="BadRequestError",
            )
        if isinstance(frame, PeerGrant):
            wanted = self.kv.pages_for(request.prompt_len)
            if len(frame.pages) != wanted or frame.slot < 0:
                return endings.broken(
                    f"decode granted {len(frame.pages)} pages where {wanted} are needed"
                )
        return None

    def _note(self, request: Request, pairing: Pairing, frame: PeerFrame) -> None:
        if isinstance(frame, PeerGrant) and request.state == "meeting":
            pairing.target = array("q", frame.pages)
            pairing.slot = frame.slot

    def _recompute(self, frame: Recompute) -> None:
        """Compute a prompt and output again; nobody waits for this node's answer."""
        if frame.room in self.rooms or self.doors.has_ended(frame.room):
            return  # said again, because the first time might have been lost
        self._asked_again[frame.room] = frame
        self._compute_again()

    def _compute_again(self) -> None:
        """Begin what decode asked to be computed again, in its order, as far as the queue has room.

        A limit on what may come in is no reason to end what is in already (S0.2): many are held by
        one pause, and all of them are asked for by one continuation."""
        while self._asked_again and (self.draining or self._room_for(1)):
            _, frame = self._asked_again.popitem(last=False)
            self._recompute_one(frame)

    def _recompute_one(self, frame: Recompute) -> None:
        self._recomputes += 1
        rid = f"{frame.rid}@{self._recomputes}"
        self._recomputed[frame.rid] = rid  # who aborts the request here means this life
        before, self.tracer.cause = self.tracer.cause, cause_of(frame)
        self.submit(
            Submit(
                rid=rid,
                prompt=frame.tokens,
                sampling=msgspec.structs.replace(
                    frame.sampling,
                    max_new_tokens=1,
                    min_new_tokens=min(frame.sampling.min_new_tokens, 1),
                ),
                priority=frame.priority,
                room=frame.room,
            )
        )
        self.tracer.cause = before

    def _write(self, request: Request) -> None:
        """Start writes of every page that is complete, and at the end of the slot."""
        pairing = request.pairing
        if pairing is None or not protocol.may_write(request.state) or pairing.sealed:
            return
        last = request.state == "sending"
        ready = request.committed // self.config.page_size
        if last:
            ready = self.kv.pages_for(request.prompt_len)
        if ready > pairing.sent:
            source = self._pages(request).table[pairing.sent : ready]
            target = pairing.target[pairing.sent : ready]
            pairing.sent = ready
            self._wire.write(self._start(request, pairing), pairing.process, source, target)
        if last:
            pairing.sealed = True
            ticket = self._start(request, pairing)
            self._wire.write_slot(ticket, pairing.process, pairing.slot, pairing.record)

    def _start(self, request: Request, pairing: Pairing) -> int:
        self._tickets += 1
        self._writes[self._tickets] = request
        pairing.writes.add(self._tickets)
        return self._tickets

    def writer(self, ticket: int) -> Request:
        """The request that a write is for."""
        return self._writes[ticket]

    def poll_wire(self) -> None:
        """Take what the wire has finished."""
        self._now()
        for done in self._wire.poll():
            request = self._writes.pop(done.ticket)
            pairing = self._pairing(request)
            pairing.writes.discard(done.ticket)
            if request.life not in self.roster.lives:
                continue
            if done.error:
                finish = endings.broken(f"the transfer failed: {done.error}")
                self._deliver(request, "wire_failed", finish)
            elif pairing.sealed and not pairing.writes:
                pairing.written = True
                self._tell(request, pairing, protocol.on_written(request.state))
            self._settle(request)

    @property
    def at_rest(self) -> bool:
        return super().at_rest and not self._writes and not self._asked_again
