"""Control frames from facts: what is said to a peer, and what a peer's end means here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from engine import endings
from fsm import protocol
from fsm.protocol import FrameKind, Role
from fsm.rules import Message
from fsm.trace import Cause
from transport.control import (
    ControlFrame,
    Origin,
    PeerAbort,
    PeerDone,
    PeerFrame,
    PeerGrant,
    PeerHello,
    PeerLanded,
    PeerQuiet,
    PeerReject,
)
from transport.messages import Finish

KINDS: Final[Mapping[type[PeerFrame], FrameKind]] = {
    PeerHello: "hello",
    PeerGrant: "grant",
    PeerDone: "done",
    PeerLanded: "landed",
    PeerReject: "reject",
    PeerAbort: "abort",
    PeerQuiet: "quiet",
}
DOOR: Final = "door"
"""The sender where no life was meant."""


def parting(
    kind: FrameKind, room: str, sender: str, receiver: str | None, message: str, status: int | None
) -> PeerFrame:
    """A frame that ends something, and carries no more than why."""
    match kind:
        case "landed":
            return PeerLanded(room=room, sender=sender, receiver=receiver)
        case "quiet":
            return PeerQuiet(room=room, sender=sender, receiver=receiver)
        case "reject":
            return PeerReject(
                room=room, sender=sender, receiver=receiver, message=message, status=status
            )
        case "abort":
            return PeerAbort(
                room=room, sender=sender, receiver=receiver, message=message, status=status
            )
        case "hello" | "grant" | "done":
            raise ValueError(f"{kind} carries more than why something ends")


def at_door(
    kind: FrameKind, frame: PeerFrame, message: str, status: int | None, origin: Origin | None
) -> PeerFrame:
    """The answer to a frame for nobody: from the life that was meant, if one was."""
    answer = parting(kind, frame.room, frame.receiver or DOOR, frame.sender, message, status)
    return traced(answer, origin)


def traced(frame: PeerFrame, origin: Origin | None) -> PeerFrame:
    """``frame``, with the line of its sender's trace that it follows from, if there is one."""
    return frame if origin is None else replace(frame, origin=origin)


def cause_of(frame: ControlFrame) -> Cause | None:
    """The line of the sender's trace, as a trace here names it."""
    origin = frame.origin
    return None if origin is None else Cause(origin.node, origin.seq, origin.boot_id)


def reading(role: Role, message: Message, frame: PeerFrame) -> tuple[Message, Finish | None]:
    """What a frame that ``role`` reads as ``message`` is decided as, and how it ends its request,
    if it does. A peer whose step or transfer has failed has not given up."""
    if isinstance(frame, PeerQuiet):
        return message, Finish(type="abort", message="the peer stopped writing", status=503)
    if not isinstance(frame, (PeerAbort, PeerReject)):
        return message, None
    if frame.status != 500 or message != "peer_abort":
        return message, Finish(type="abort", message=frame.message, status=frame.status)
    return protocol.READS_FAILURE[role], endings.broken(frame.message)
