"""Who is where: indexes over requests that follow from their states.

They are updated in one place, :meth:`Roster.moved`, which the driver's observer calls after every
move; nobody else puts a request into the queue or takes it out."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import Final

from engine.request import Request

RECENT_LIMIT: Final = 4096
"""Finished rids remembered, so that a late abort is told "finished" and not "unknown"."""


class RosterError(AssertionError):
    """An index differs from the states: a bug of ours."""


class Ranked:
    """Requests sorted by rank: the best first. Insertion and removal cost a binary search and a
    shift."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[Request] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._entries)

    def first(self, count: int) -> list[Request]:
        return list(islice(self._entries, count))

    def add(self, request: Request) -> None:
        bisect.insort(self._entries, request, key=_rank)

    def remove(self, request: Request) -> None:
        index = bisect.bisect_left(self._entries, request.rank, key=_rank)
        if index == len(self._entries) or self._entries[index] is not request:
            raise RosterError(f"{request.rid} is not where its state says it is")
        del self._entries[index]


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


class Roster:
    """All requests of a node. ``lives`` are those not yet done, ``live`` those not yet answered,
    by rid."""

    def __init__(self, queued: frozenset[str], on_device: frozenset[str]) -> None:
        self._queued = queued
        self._on_device = on_device
        self.lives: Final[dict[str, Request]] = {}
        self.live: Final[dict[str, Request]] = {}
        self.recent: Final[OrderedDict[str, Request]] = OrderedDict()
        self.queue: Final = Ranked()
        self.device: Final = Ranked()

    def moved(self, request: Request, source: str, target: str) -> None:
        """``request`` went from ``source`` to ``target``."""
        for states, index in ((self._queued, self.queue), (self._on_device, self.device)):
            if source in states and target not in states:
                index.remove(request)
            elif target in states and source not in states:
                index.add(request)
        if target == "done":
            del self.lives[request.life]
            request.forget()

    def retired(self, request: Request) -> bool:
        """``request`` was answered; returns whether it had ever been accepted."""
        if self.live.get(request.rid) is not request:
            return False
        del self.live[request.rid]
        self.recent[request.rid] = request
        self.recent.move_to_end(request.rid)
        while len(self.recent) > RECENT_LIMIT:
            self.recent.popitem(last=False)
        return True

    def audit(self) -> list[str]:
        """Faults: an index that differs from the states."""
        faults = []
        for name, states, index in (
            ("queue", self._queued, self.queue),
            ("device", self._on_device, self.device),
        ):
            expected = {r.life for r in self.lives.values() if r.state in states}
            if {r.life for r in index} != expected or len(index) != len(expected):
                faults.append(f"{name}: differs from the states of {sorted(expected)}")
        return faults
