"""Open rooms: which request a room's frames are for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from engine.request import Request
from fsm.ledger import CountPool, Lease
from fsm.resources import Disposition


class RoomLease(Lease):
    """An open room: frames that name it reach its life."""

    __slots__ = ("_rooms", "room")

    def __init__(self, rooms: Rooms, owner: str, room: str) -> None:
        super().__init__("rooms", owner)
        self._rooms = rooms
        self.room: Final = room

    def _give_back(self, disposition: Disposition | None) -> None:
        self._rooms.close(self.owner, self.room)


class Rooms:
    """Every open room of a node. Iterates over their requests, in the order of opening."""

    def __init__(self, total: int) -> None:
        self.pool: Final = CountPool("rooms", total)
        self._requests: Final[dict[str, Request]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, room: str) -> bool:
        return room in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def get(self, room: str) -> Request | None:
        return self._requests.get(room)

    def of_peer(self, node: str) -> list[Request]:
        """Requests whose other half is on ``node``."""
        return [r for r in self if r.pairing is not None and r.pairing.node == node]

    def open(self, room: str, request: Request) -> RoomLease:
        self.pool.take(request.life)
        self._requests[room] = request
        return RoomLease(self, request.life, room)

    def close(self, life: str, room: str) -> None:
        """Called by the lease."""
        del self._requests[room]
        self.pool.give_back(life, 1)
