"""A store of KV pages in virtual time: slow, silent or failing when a scenario says so."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from engine.sim.gates import Gate
from engine.sim.world import World
from engine.store import PageKey, StoreDone


@dataclass(frozen=True, slots=True)
class _Operation:
    ticket: int
    keys: tuple[PageKey, ...]
    blobs: tuple[bytes, ...] | None


class VirtualStore:
    """An :class:`engine.store.PageStore` in memory. Every operation takes ``latency_us``.

    While its gate is closed no operation is over; they end together when it opens. It survives the
    node, as a directory would.
    """

    def __init__(self, world: World, latency_us: int, wake: Callable[[], None]) -> None:
        self.gate: Final = Gate()
        self.pages: Final[dict[PageKey, bytes]] = {}
        self.fail_reads: deque[str] = deque()
        """Errors of the next reads, one each."""
        self.last_end_us = 0
        self.reads = 0
        """Reads that were started."""
        self._world = world
        self._latency_us = latency_us
        self._wake = wake
        self._waiting: list[_Operation] = []
        self._done: list[StoreDone] = []

    @property
    def open_operations(self) -> int:
        """Operations that wait at the gate."""
        return len(self._waiting)

    def hits(self, keys: Sequence[PageKey]) -> int:
        count = 0
        for key in keys:
            if key not in self.pages:
                break
            count += 1
        return count

    def load(self, ticket: int, keys: Sequence[PageKey]) -> None:
        self.reads += 1
        self._begin(_Operation(ticket, tuple(keys), None))

    def save(self, ticket: int, keys: Sequence[PageKey], blobs: Sequence[bytes]) -> None:
        self._begin(_Operation(ticket, tuple(keys), tuple(blobs)))

    def poll(self) -> list[StoreDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self._waiting.clear()

    def look(self) -> None:
        """The gate has changed: what waits at it may be over now."""
        while self._waiting and self.gate.passes():
            self._end(self._waiting.pop(0))

    def _begin(self, operation: _Operation) -> None:
        self._world.after(self._latency_us, lambda: self._arrive(operation))

    def _arrive(self, operation: _Operation) -> None:
        self._waiting.append(operation)
        self.look()

    def _end(self, operation: _Operation) -> None:
        self.last_end_us = self._world.now_us
        self._done.append(self._outcome(operation))
        self._wake()

    def _outcome(self, operation: _Operation) -> StoreDone:
        if operation.blobs is not None:
            for key, blob in zip(operation.keys, operation.blobs, strict=True):
                self.pages.setdefault(key, blob)  # a page is written once, as in a directory
            return StoreDone(operation.ticket)
        if self.fail_reads:
            return StoreDone(operation.ticket, error=self.fail_reads.popleft())
        found = self.hits(operation.keys)
        return StoreDone(operation.ticket, [self.pages[key] for key in operation.keys[:found]])
