"""Rooms in which nobody of this node is: who knocked too early, and how those who left ended.

:class:`fsm.protocol.Doors` decides what is answered and what is kept; this class keeps the frames
themselves, where they came from, and the words of an ending."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from engine import frames
from fsm.protocol import Address, Doors, FrameKind, Role
from transport.control import Origin, PeerAbort, PeerFrame, PeerHello, PeerReject

DOOR_CAPACITY: Final = 4096
"""Rooms remembered, of each kind; the oldest is forgotten first."""
UNKNOWN_ROOM: Final = "the other half of this request has ended"


class Early(NamedTuple):
    """What was said to a room before its request arrived."""

    node: str
    kind: FrameKind
    sender: str
    frame: PeerFrame


class _Ending(NamedTuple):
    message: str
    status: int | None
    origin: Origin | None = None


_UNKNOWN: Final = _Ending(UNKNOWN_ROOM, 503)


class Doorkeeper:
    """Answers for rooms without a life, from a bounded memory."""

    def __init__(self, role: Role) -> None:
        self._doors: Final = Doors(DOOR_CAPACITY, role)
        self._early: Final[OrderedDict[str, tuple[str, PeerFrame]]] = OrderedDict()
        self._endings: Final[OrderedDict[str, _Ending]] = OrderedDict()

    def knock(self, node: str, frame: PeerFrame) -> list[PeerFrame]:
        """A frame of ``node`` for nobody of this node: what it is answered."""
        address = Address(frame.room, frame.sender, frame.receiver)
        ending = self._endings.get(frame.room, _UNKNOWN)
        replies = self._doors.knock(frames.KINDS[type(frame)], address)
        if isinstance(frame, (PeerHello, PeerAbort, PeerReject)):
            self._early[frame.room] = (node, frame)
            while len(self._early) > DOOR_CAPACITY:
                self._early.popitem(last=False)
        return [frames.at_door(kind, frame, *ending) for kind in replies]

    def arrived(self, room: str) -> Early | None:
        """The request of ``room`` is here: what was said to it before."""
        early = self._doors.arrived(room)
        kept = self._early.pop(room, None)
        if early is None or kept is None:
            return None
        node, frame = kept
        return Early(node, early[0], early[1].sender, frame)

    def ended(
        self, room: str, how: FrameKind, message: str, status: int | None, origin: Origin | None
    ) -> None:
        """Whoever asks for ``room`` from now on is told how its life ended; ``origin`` says where
        that is traced."""
        self._doors.ended(room, how)
        self._endings[room] = _Ending(message or UNKNOWN_ROOM, status, origin)
        while len(self._endings) > DOOR_CAPACITY:
            self._endings.popitem(last=False)

    def has_ended(self, room: str) -> bool:
        return room in self._endings

    def forget(self, node: str, boot_id: str) -> None:
        """A peer's process is gone: what it had said counts no more. ``boot_id`` is empty if it was
        never heard."""
        if boot_id:
            self._doors.forget_peer(boot_id)
        for room in [room for room, (sender, _) in self._early.items() if sender == node]:
            del self._early[room]

    def counts(self) -> dict[str, int]:
        """Tombstones, for the ledger's view."""
        return self._doors.counts()
