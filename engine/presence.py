"""The part of a paired scheduler that knows who is there, and says that it is there itself.

The layer between :mod:`engine.speaking` and :mod:`engine.paired`. A node is heard, falls silent, or
is gone; what that means for its requests is decided by :func:`fsm.decide.decide`, which is asked
here. The book of who was heard when is in :mod:`engine.peers`."""

from __future__ import annotations

from typing import Final

from engine import endings
from engine.basics import Parts
from engine.deadlines import Timer
from engine.pairing import Pairing, boot_of
from engine.peers import Peers
from engine.request import Request
from engine.rooms import Rooms
from engine.speaking import Speaking
from fsm import protocol
from fsm.rules import Facts, Message
from transport.control import Heartbeat, PeerFrame
from transport.messages import Finish

MEETING_TIMEOUT_S: Final = 30.0
TRANSFER_TIMEOUT_S: Final = 60.0


class Presence(Speaking):
    """A scheduler whose requests depend on other nodes."""

    def __init__(self, parts: Parts) -> None:
        # Before the layers below, whose ledger takes in the pool of rooms. There may be one for
        # each live request, and for as many that are answered and still on the wire.
        config = parts.config
        self.rooms: Final = Rooms(
            3 * config.max_running_requests + config.max_queued_requests + self._slots_here
        )
        self.peers: Final = Peers()
        self.meeting_timeout_s = MEETING_TIMEOUT_S
        self.transfer_timeout_s = TRANSFER_TIMEOUT_S
        super().__init__(parts)

    # --- hooks of a role ---

    @property
    def _slots_here(self) -> int:
        """Metadata slots of this node: each may be draining."""
        return 1

    def _facts(self, request: Request, frame: PeerFrame | None) -> Facts:
        """What ``decide`` is to know of a request, to which ``frame`` has come (None: no frame)."""
        return Facts(launched=request.in_steps > 0)

    def _closed_door(self, request: Request, pairing: Pairing) -> bool:
        """Nobody is at the peer's node, for the second time. True if another one is asked."""
        return False

    # --- time ---

    def _postponed(self, timer: Timer) -> bool:
        """What waits for a peer goes on waiting while the peer says that it is paused."""
        if timer.kind not in ("meeting", "transfer"):
            return False
        if not self.peers.paused(self._pairing(timer.request).node):
            return False
        limit = self.meeting_timeout_s if timer.kind == "meeting" else self.transfer_timeout_s
        self._deadlines.set(self._clock() + limit, timer.kind, timer.request)
        return True

    def tick(self) -> None:
        super().tick()
        now = self._now()
        if (self.rooms or self.peers) and self.peers.beat_is_due(now):
            self._beat()
            self._listen(now)
        elif self.peers.somebody_falls_silent(now):
            self._listen(now)

    def next_deadline(self) -> float | None:
        times = [t for t in [super().next_deadline()] if t is not None]
        if self.rooms or self.peers:
            # Also without a room: silence is noticed only by whoever listens all the time, and
            # the first request after a quiet hour must not find its peer "silent" (B81).
            times.append(self.peers.next_due)
        return min(times, default=None)

    def _beat(self) -> None:
        """Say what stands."""
        nodes: dict[str, list[str]] = {name: [] for name in self.peers}
        for request in list(self.rooms):
            pairing = self._pairing(request)
            if not pairing.node:
                continue
            nodes.setdefault(pairing.node, []).append(pairing.room)
            self._stand(request, pairing)
        paused, origin = self.pause_mode is not None, self._origin(self.tracer.seq)
        for node, rooms in nodes.items():
            self._send(node, Heartbeat(self.node, self.boot_id, rooms, paused, origin))

    def _listen(self, now: float) -> None:
        """Whoever was not heard for too long may be frozen, or cut off: requests do not wait."""
        for node in self.peers.silent(now):
            for request in self.rooms.of_peer(node):
                finish = self._unavailable(node, "does not answer")
                self._deliver(request, "peer_missed", finish)

    def _stand(self, request: Request, pairing: Pairing) -> None:
        """Say again what stands: a frame that was lost is repaired within one heartbeat."""
        frames = protocol.standing(self.role, request.state, pairing.met, pairing.written)
        self._tell(request, pairing, frames)

    # --- peers ---

    def _heartbeat_arrived(self, node: str, beat: Heartbeat) -> None:
        self._heard(node, beat.boot_id)
        ours = {self._pairing(r).room: r for r in self.rooms.of_peer(node) if self._relies(r)}
        for room in self.peers.stands(node, beat.paused, frozenset(beat.rooms), ours):
            finish = self._unavailable(node, "does not know the request any more")
            self._prove(ours[room], "peer_gone", finish)

    def _relies(self, request: Request) -> bool:
        return protocol.relies_on_peer(self.role, request.state, self._pairing(request).met)

    def _heard(self, node: str, boot_id: str) -> None:
        """Somebody is there. Another process than the one that was there proves that the old one
        writes no more. An empty ``boot_id`` is the door of a node that knows no such life."""
        if boot_id and self.peers.heard(node, boot_id, self._clock()):
            self._process_gone(node, boot_id)

    def _unavailable(self, node: str, why: str) -> Finish:
        other = "decode" if self.role == "prefill" else "prefill"
        return endings.unavailable(f"the {other} node {node} {why}")

    def _process_gone(self, node: str, successor: str) -> None:
        """A peer's process has ended; ``successor`` is the boot id of the one that is there now, if
        that is known. Whoever had met the old one is told. Whoever had not met anybody knocks once
        more, because there may be a successor (B74); a second closed door is the end."""
        for request in self.rooms.of_peer(node):
            pairing = self._pairing(request)
            if pairing.life is None and not pairing.knocked_again:
                pairing.knocked_again = True
                self._stand(request, pairing)
            elif pairing.life is None and self._closed_door(request, pairing):
                continue
            elif pairing.life is None or boot_of(pairing.life) != successor:
                self._prove(request, "peer_gone", self._unavailable(node, "is gone"))

    def _prove(self, request: Request, message: Message, finish: Finish | None) -> None:
        """Deliver what also proves that the wire is silent, until it leads nowhere any more."""
        while request.life in self.roster.lives:
            decision = self._decide(request, message, self._facts(request, None))
            if decision.effect != "fire":
                return
            self._apply(request, message, decision, finish)
