"""What the schedulers of a prefill and of a decode node share: two halves of a request that talk.

Whom a life tells what, and what a frame means, is in :mod:`fsm.protocol`; the schedulers call it
and add what the protocol leaves open. It is two more layers on :mod:`engine.core`:
:mod:`engine.speaking` has what is said, :mod:`engine.presence` who is there; this module has what
is heard. Who has which room is in :mod:`engine.rooms`, what is answered for rooms without a life in
:mod:`engine.doorkeeper`.

A turn of the loop hands over what arrived (:meth:`PairedScheduler.receive`), and sends
:meth:`PairedScheduler.mail`."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable
from typing import Final

from engine import endings, frames
from engine.basics import Parts
from engine.doorkeeper import Doorkeeper
from engine.groups import rooms_of
from engine.intake import MAX_GROUP, Refusal
from engine.pairing import Pairing, boot_of
from engine.presence import Presence
from engine.request import Request
from engine.rooms import RoomLease
from fsm import protocol
from fsm.chart import Edge
from fsm.ledger import Lease, Pool
from fsm.protocol import Address, FrameKind, Terms
from fsm.resources import Resource
from fsm.rules import Decision, Message
from transport.control import (
    ControlFrame,
    Heartbeat,
    PeerFrame,
    PeerHello,
    Recompute,
)
from transport.messages import Finish, Submit

ROOM_TAKEN: Final = "the room is that of another live request"


def _rooms(message: Submit) -> list[str]:
    """Rooms of a submission, of which no check has passed yet."""
    return rooms_of(message) if message.n <= MAX_GROUP else [message.room]


class PairedScheduler(Presence):
    """A node whose requests have another half on another node."""

    def __init__(self, parts: Parts) -> None:
        self.doors: Final = Doorkeeper(self.role)
        self.malformed = 0
        super().__init__(parts)

    # --- frames ---

    def receive(self, node: str, frame: ControlFrame) -> None:
        """A frame from ``node`` arrived. What is done about it follows from what it tells of."""
        self._now()
        self.tracer.cause = frames.cause_of(frame)
        match frame:
            case Heartbeat():
                self._heartbeat_arrived(node, frame)
            case Recompute():
                self._recompute(frame)
            case _:
                self._peer_frame(node, frame)
        self.tracer.cause = None

    def peer_closed(self, node: str) -> None:
        """The socket to a peer was closed, or its process is gone: it writes no more."""
        self._now()
        self.peers.closed(node)
        self._process_gone(node, "")

    def _process_gone(self, node: str, successor: str) -> None:
        self.doors.forget(node, successor)
        super()._process_gone(node, successor)

    def _peer_frame(self, node: str, frame: PeerFrame) -> None:
        message = protocol.READS[self.role].get(frames.KINDS[type(frame)])
        if message is None:
            self.malformed += 1
            return
        address = Address(frame.room, frame.sender, frame.receiver)
        request = self.rooms.get(frame.room)
        pairing = request.pairing if request is not None else None
        if (
            request is None
            or pairing is None
            or not protocol.accepts(address, pairing.room, request.life, pairing.life)
        ):
            self._answer_at_door(node, frame)
            return
        self._hear(request, pairing, node, message, frame)

    def _hear(
        self, request: Request, pairing: Pairing, node: str, message: Message, frame: PeerFrame
    ) -> None:
        """A frame for a life of ours: note what it carries, decide, and answer."""
        if pairing.life is None:
            pairing.life, pairing.node = frame.sender, node
        self._heard(node, boot_of(frame.sender))
        if request.life not in self.roster.lives:
            return
        message, finish = frames.reading(self.role, message, frame)
        objection = self._objection(request, frame)
        if objection is not None:
            message, finish = "peer_reject", objection
            pairing.ends(objection)
            self._send(pairing.node, self._frame("reject", request, pairing))
        self._note(request, pairing, frame)
        decision = self._decide(request, message, self._facts(request, frame))
        if decision.effect in ("keep", "finished"):
            replies = protocol.on_reply(self.role, request.state, message, decision.effect)
            self._tell(request, pairing, replies)
        self._apply(request, message, decision, finish)
        if decision.effect == "fire" and protocol.is_proof(message):
            self._prove(request, message, finish)

    def _apply(
        self, request: Request, message: Message, decision: Decision, finish: Finish | None
    ) -> None:
        ends = decision.effect == "fire" and decision.event in protocol.ENDS
        if ends and finish is not None and request.pairing is not None:
            # Also where this side has answered already: what the peer is told is why it ends now.
            request.pairing.ends(finish)
        super()._apply(request, message, decision, finish)

    def _answer_at_door(self, node: str, frame: PeerFrame) -> None:
        tenant = self.rooms.get(frame.room)
        if frame.receiver is not None or tenant is None:
            for reply in self.doors.knock(node, frame):
                self._send(node, reply)
        elif isinstance(frame, PeerHello):
            # Somebody else's request has this room, and keeps it (B84).
            origin = self._origin(self._pairing(tenant).line)
            self._send(node, frames.at_door("reject", frame, ROOM_TAKEN, 400, origin))

    # --- hooks of the core ---

    def _check_ids(self, message: Submit, rids: Iterable[str]) -> None:
        if not self._superseded(message):
            super()._check_ids(message, rids)

    def _accepting(self, message: Submit) -> None:
        """A live rid that comes again in a new room is a router's retry: the old life is ended,
        and the new one admitted."""
        for old in self._superseded(message):
            finish = Finish(type="abort", message="superseded by a retry of the same request")
            self._deliver(old, "abort", finish)

    def _superseded(self, message: Submit) -> list[Request]:
        """Live requests of the same rid in another room: all members, or none."""
        live = self.roster.live.get(message.rid)
        old = self.groups.members(message.rid) or ([live] if live is not None else [])
        rooms = _rooms(message)
        if not message.room or any(self._pairing(each).room in rooms for each in old):
            return []
        return old

    def _role_pools(self) -> list[Pool]:
        return [self.rooms.pool]

    def _check_pair(self, message: Submit) -> None:
        """Raise :class:`Refusal` for a submission that cannot be paired."""
        if not message.room:
            raise Refusal("bootstrap_room: is missing; prefill and decode are apart on this node")
        if any(room in self.rooms for room in _rooms(message)):
            raise Refusal(f"bootstrap_room: {message.room} is the room of a live request")

    def _check_room(self, members: int) -> None:
        """A request that is met, queued or handed over counts as much as one that computes: each
        may come to need all that the limits of this node promise."""
        if self.draining:
            raise Refusal("the server is shutting down", 503)
        if not self._room_for(members):
            raise Refusal("The request queue is full.", 503)

    def _room_for(self, members: int) -> bool:
        limit = self.config.max_queued_requests + self.rows.total
        return len(self.roster.live) + members <= limit

    def _paired(self, request: Request, message: Submit) -> None:
        # The same body reaches both; prefill learns who its peer is from the hello. Members have
        # rids of their own, so one that has the group's is the refusal of all of them.
        whole_group = message.n > 1 and request.rid == message.rid
        request.pairing = Pairing(
            message.room,
            siblings=tuple(_rooms(message)[1:]) if whole_group else (),
            node=message.prefill if self.role == "decode" else "",
        )

    def _queue_up(self, request: Request, leases: dict[Resource, Lease]) -> str:
        leases["rooms"] = self._open_room(request)
        self._deadlines.set(self._clock() + self.meeting_timeout_s, "meeting", request)
        return "enqueue"

    def _open_room(self, request: Request) -> RoomLease:
        pairing = self._pairing(request)
        return self.rooms.open(pairing.room, request)

    def _end_room(self, pairing: Pairing, how: FrameKind) -> None:
        """Whoever asks for this room from now on is told how it ended."""
        origin = self._origin(pairing.line)
        self.doors.ended(pairing.room, how, pairing.reason, pairing.status, origin)

    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        pairing = request.pairing
        if pairing is None:
            return
        pairing.line = self.tracer.seq
        if not self.chart.is_live(edge.target) and request.finish is not None:
            pairing.ends(request.finish)  # also what no message has ended: intake, policy
        if edge.event == "reject":
            for room in (pairing.room, *pairing.siblings):
                if room not in self.rooms:  # else another life has it, goes on, and hears nothing
                    self._refused_at_door(request, dataclasses.replace(pairing, room=room), edge)
            return
        self._tell(request, pairing, protocol.on_moved(self.role, edge, cause, pairing.met))
        if edge.event == "landed":
            return  # complete: nobody will ask for this room, and it may be used again
        if "rooms" in self.chart.holds[edge.source] - self.chart.holds[edge.target]:
            self._end_room(pairing, "abort")

    def _refused_at_door(self, request: Request, pairing: Pairing, edge: Edge) -> None:
        """Whoever said hello before is told; whoever says it later is told at the door."""
        self._tell(request, pairing, protocol.on_moved(self.role, edge, None, pairing.met))
        early = self.doors.arrived(pairing.room)
        if early is not None:
            pairing.life = early.frame.sender
            for kind in protocol.on_refused(early.kind, "reject"):
                self._send(early.node, self._frame(kind, request, pairing))
        self._end_room(pairing, "reject")

    def _enqueued(self, request: Request) -> None:
        """What was said to the room before the request arrived counts now."""
        pairing = self._pairing(request)
        early = self.doors.arrived(pairing.room)
        if early is not None:
            message = protocol.READS[self.role][early.kind]
            submission, self.tracer.cause = self.tracer.cause, frames.cause_of(early.frame)
            self._hear(request, pairing, early.node, message, early.frame)
            self.tracer.cause = submission

    def _settle(self, request: Request) -> None:
        while request.life in self.roster.lives:
            message = protocol.due(
                self.role,
                request.state,
                launched=request.in_steps > 0,
                writing=bool(request.pairing is not None and request.pairing.writes),
                paused=self.drops_kv,
                stopped=self.pause_mode is not None,
            )
            if message is None:
                return
            self._due(request, message)

    def _due(self, request: Request, message: Message) -> None:
        """Deliver a message that a life has coming from its own node."""
        self._deliver(request, message)

    def _objection(self, request: Request, frame: PeerFrame) -> Finish | None:
        """Why a frame that is for a life of ours cannot be accepted; None if it can."""
        if isinstance(frame, PeerHello) and protocol.compares_terms(request.state):
            why = protocol.mismatch(self.terms, Terms(*frame.terms))
            if why is not None:
                return endings.unavailable(f"the two nodes cannot work together: {why}")
        return None

    @abstractmethod
    def _note(self, request: Request, pairing: Pairing, frame: PeerFrame) -> None:
        """Keep what a frame carries, before it is decided what it means."""

    @abstractmethod
    def _recompute(self, frame: Recompute) -> None:
        """A decode node asks for a prompt to be computed again."""

    # --- pauses ---

    def _paused(self, request: Request) -> None:
        self._settle(request)  # what it has coming depends on what still touches its KV

    def flush_cache(self) -> tuple[bool, str]:
        states = [request.state for request in self.roster.lives.values()]
        if not protocol.may_flush(self.chart, states, self.drops_kv):
            return False, "Cache not flushed: KV is in use."
        freed = self.kv.cache.flush()
        return True, f"Cache flushed: {freed} pages."

    def use_weights(self, digest: str, in_place: bool = False) -> tuple[bool, str]:
        """Compute under other weights from now on; refused while KV of the old ones is in use.

        Peers that have not answered yet are told: what was said before names the old ones."""
        done, why = super().use_weights(digest, in_place)
        if not done:
            return False, why
        for request in list(self.rooms):
            self._tell(
                request,
                self._pairing(request),
                protocol.on_new_weights(self.role, request.state),
            )
        return True, why

    @property
    def tombstones(self) -> dict[str, int]:
        return self.doors.counts()
