"""Groups: the parallel samples of one submission (``n > 1``), aborted and counted together
(B07)."""

from typing import Final

import msgspec

from engine.request import Request
from fsm.ledger import CountPool, Lease
from fsm.resources import Disposition
from transport.messages import Submit


def rooms_of(message: Submit) -> list[str]:
    """The rooms of all members of a split submission: both nodes pair them by room and number. The
    first has the room that the router gave."""
    return [message.room, *(f"{message.room}#{index}" for index in range(1, message.n))]


def member_of(message: Submit, index: int) -> Submit:
    """What member ``index`` of a submission asks for: the same, with the seed plus its number, and
    in a room of its own where the submission has one.

    With one seed for all, the randomness of a position would be the same in every member, and so
    would be their texts. The first keeps the seed: it says what ``n=1`` says.
    """
    if index == 0:
        return message
    seed = (message.sampling.seed + index + 2**63) % 2**64 - 2**63
    sampling = msgspec.structs.replace(message.sampling, seed=seed)
    room = f"{message.room}#{index}" if message.room else ""
    return msgspec.structs.replace(message, sampling=sampling, room=room)


class Membership(Lease):
    """One request's place in its group; the group disappears with its last member."""

    __slots__ = ("_book", "request")

    def __init__(self, book: "GroupBook", request: Request) -> None:
        super().__init__("group_members", request.life)
        self._book = book
        self.request: Final = request

    def _give_back(self, disposition: Disposition | None) -> None:
        self._book.leave(self.request)


class GroupBook:
    """Live groups by the rid of their submission."""

    def __init__(self, limit: int) -> None:
        self.pool: Final = CountPool("group_members", limit)
        self._members: dict[str, dict[str, Request]] = {}

    def __contains__(self, group: str) -> bool:
        return group in self._members

    def __len__(self) -> int:
        return len(self._members)

    def members(self, group: str) -> list[Request]:
        return list(self._members.get(group, {}).values())

    def reserve(self, request: Request) -> Membership:
        """Raises :class:`fsm.ledger.Exhausted` beyond the limit of open requests."""
        self.pool.take(request.life)
        self._members.setdefault(request.group or "", {})[request.life] = request
        return Membership(self, request)

    def leave(self, request: Request) -> None:
        members = self._members[request.group or ""]
        del members[request.life]
        if not members:
            del self._members[request.group or ""]
        self.pool.give_back(request.life, 1)
