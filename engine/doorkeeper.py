"""Rooms in which nobody of this node is: who knocked too early, and how those who left ended.

:class:`fsm.protocol.Doors` decides what is answered and what is kept; here are the frames
themselves, where they came from, and the words of an ending."""

from __future__ import annotations

from typing import Final, NamedTuple

from engine import frames
from engine.pairing import boot_of
from fsm.protocol import Address, Doors, FrameKind, Role
from transport.control import Origin, PeerFrame

DOOR_CAPACITY: Final = 4096
"""Rooms remembered, of each kind; the oldest is forgotten first."""
UNKNOWN_ROOM: Final = "the other half of this request has ended"


class Early(NamedTuple):
    """What was said to a room before its request arrived, and the node that said it."""

    node: str
    kind: FrameKind
    frame: PeerFrame


class _Ending(NamedTuple):
    message: str
    status: int | None
    origin: Origin | None = None


_UNKNOWN: Final = _Ending(UNKNOWN_ROOM, 503)


class Doorkeeper:
    """Answers for rooms without a life, from a bounded memory."""

    def __init__(self, role: Role) -> None:
        self._doors: Final = Doors[tuple[str, PeerFrame], _Ending](DOOR_CAPACITY, role)

    def knock(self, node: str, frame: PeerFrame) -> list[PeerFrame]:
        """A frame of ``node`` for nobody of this node: what it is answered."""
        ending = self._doors.words(frame.room) or _UNKNOWN
        address = Address(frame.room, frame.sender, frame.receiver)
        replies = self._doors.knock(frames.KINDS[type(frame)], address, (node, frame))
        return [frames.at_door(kind, frame, *ending) for kind in replies]

    def arrived(self, room: str) -> Early | None:
        """The request of ``room`` is here: what was said to it before."""
        early = self._doors.arrived(room)
        if early is None:
            return None
        kind, _, (node, frame) = early
        return Early(node, kind, frame)

    def ended(
        self, room: str, how: FrameKind, message: str, status: int | None, origin: Origin | None
    ) -> None:
        """Whoever asks for ``room`` from now on is told how its life ended; ``origin`` says where
        that is traced."""
        self._doors.ended(room, how, _Ending(message or UNKNOWN_ROOM, status, origin))

    def has_ended(self, room: str) -> bool:
        return self._doors.words(room) is not None

    def forget(self, node: str, successor: str) -> None:
        """A process of ``node`` is gone: what it had said counts no more. ``successor`` is the boot
        id of the one that is there now, empty if none is known."""
        self._doors.forget(
            lambda address, said: said[0] == node and boot_of(address.sender) != successor
        )

    def counts(self) -> dict[str, int]:
        """Tombstones, for the ledger's view."""
        return self._doors.counts()
