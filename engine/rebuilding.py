"""The part of a decode scheduler that has held requests computed again.

The layer between :mod:`engine.paired` and :mod:`engine.decode_scheduler`. When generation goes on,
prompt and output are sent to a prefill node in a fresh room, and the pair meets there as any other
does: to the node that had computed them, and where that is gone or does not answer, to another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.paired import PairedScheduler
from engine.pairing import Pairing
from engine.request import Request
from fsm.ledger import Lease
from fsm.resources import Resource
from fsm.rules import Message
from transport.control import Recompute


class Rebuilding(PairedScheduler):
    """A node whose requests may be computed more than once."""

    # Handed in by the role, before anything is rebuilt.
    _mint: Callable[[], str]
    """Names a fresh room."""
    _workers: Callable[[], Iterable[str]]
    """Names the prefill nodes of the deployment, whether they were met or not."""

    def _asked(self, request: Request) -> list[int]:
        """The tokens whose KV prefill computes: the last one of a rebuilt request is its next
        input."""
        return request.tokens[:-1] if request.output_len else request.tokens

    def _due(self, request: Request, message: Message) -> None:
        if message != "continued":
            super()._due(request, message)
            return
        before = self._pairing(request)
        request.pairing = Pairing(self._mint(), before.node, line=before.line)
        if not self.peers.answers(request.pairing.node):
            self._try_another(request.pairing)
        self._ask_again(request, request.pairing)
        self._deadlines.set(self._clock() + self.meeting_timeout_s, "meeting", request)
        leases: dict[Resource, Lease] = {"rooms": self._open_room(request)}
        self._fire(request, "rebuild", "scheduler", "", leases, cause="continued")

    def _try_another(self, pairing: Pairing) -> bool:
        """Turn to another prefill node than the one that is gone, or does not answer: to one that
        is there if possible, to the one with the least to do for us. False if there is none."""
        pairing.tried.add(pairing.node)
        others = {*self._workers(), *self.peers} - pairing.tried
        if not others:
            return False
        pairing.node = min(
            others,
            key=lambda node: (not self.peers.answers(node), len(self.rooms.of_peer(node)), node),
        )
        pairing.knocked_again = False
        return True

    def _closed_door(self, request: Request, pairing: Pairing) -> bool:
        if request.state != "meeting" or not request.attempt or not self._try_another(pairing):
            return False
        self._stand(request, pairing)
        return True

    def _ask_again(self, request: Request, pairing: Pairing) -> None:
        self._send(
            pairing.node,
            Recompute(
                pairing.room,
                request.rid,
                self._asked(request),
                request.sampling,
                self.node,
                request.priority,
                self._origin(pairing.line),
            ),
        )

    def _stand(self, request: Request, pairing: Pairing) -> None:
        if request.state == "meeting" and request.attempt:
            self._ask_again(request, pairing)
        super()._stand(request, pairing)
