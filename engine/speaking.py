"""The part of a paired scheduler that speaks: control frames to the nodes of other halves.

The first layer of :mod:`engine.paired` on :mod:`engine.core`. Whom a life tells what is in
:mod:`fsm.protocol`; what a frame carries is here."""

from __future__ import annotations

from typing import ClassVar

from engine import frames
from engine.basics import LifecycleBug, Parts
from engine.core import SchedulerCore
from engine.pairing import Pairing
from engine.request import Request
from fsm import protocol
from fsm.protocol import FrameKind, Frames, Role, Terms
from transport.control import ControlFrame, Origin, PeerDone, PeerFrame, PeerGrant, PeerHello


class Speaking(SchedulerCore):
    """A scheduler whose requests have something to say to another node."""

    role: ClassVar[Role]

    def __init__(self, parts: Parts) -> None:
        self._mail: list[tuple[str, ControlFrame]] = []
        super().__init__(parts)

    def mail(self) -> list[tuple[str, ControlFrame]]:
        """Frames to be sent, as (node, frame), in order."""
        mail, self._mail = self._mail, []
        return mail

    @property
    def terms(self) -> Terms:
        charts = ",".join(protocol.CHARTS[role].fingerprint for role in ("prefill", "decode"))
        return Terms(
            "page-major",
            self.config.page_size,
            self.config.dtype,
            self.weights,
            charts,
        )

    def _tell(self, request: Request, pairing: Pairing, kinds: Frames) -> None:
        for kind in kinds:
            if pairing.node:
                self._send(pairing.node, self._frame(kind, request, pairing))

    def _frame(self, kind: FrameKind, request: Request, pairing: Pairing) -> PeerFrame:
        """What ``request`` says now: it follows from how it came to be where it is."""
        return frames.traced(self._untraced(kind, request, pairing), self._origin(pairing.line))

    def _untraced(self, kind: FrameKind, request: Request, pairing: Pairing) -> PeerFrame:
        room, sender, receiver = pairing.room, request.life, pairing.life
        match kind:
            case "hello":
                return PeerHello(
                    room=room,
                    sender=sender,
                    receiver=receiver,
                    node=self.node,
                    role=self.role,
                    terms=self.terms,
                    max_prompt_tokens=self.limits.max_prompt_tokens,
                )
            case "grant":
                return self._grant_frame(request, pairing)
            case "done":
                weights = self._pages(request).weights
                return PeerDone(room=room, sender=sender, receiver=receiver, weights=weights)
            case _:
                return frames.parting(kind, room, sender, receiver, pairing.reason, pairing.status)

    def _grant_frame(self, request: Request, pairing: Pairing) -> PeerGrant:
        raise LifecycleBug(f"{self.role} grants nothing ({request.rid}, room {pairing.room})")

    def _origin(self, line: int) -> Origin | None:
        """A line of our trace, for a peer; None for no line."""
        return Origin(self.node, self.boot_id, line) if line else None

    def _send(self, node: str, frame: ControlFrame) -> None:
        self._mail.append((node, frame))

    def _pairing(self, request: Request) -> Pairing:
        if request.pairing is None:
            raise LifecycleBug(f"{request.rid} has no pairing")
        return request.pairing
