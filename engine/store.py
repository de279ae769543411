"""A store of KV pages outside the device: prefetched before admission, written after prefill.

A page is stored under a key that chains the weights digest, the page layout and every token up to
the end of the page, so a page can only be found for the text and the weights that computed it
(invariant 9).

Reading and writing never happens on the scheduler's thread. An operation is started with a ticket
and reported by :meth:`PageStore.poll`; a cancelled read is still reported, when its I/O really is
over, and until then the ledger shows its unit as quarantined (B104). Late, failed and short reads
are ordinary outcomes.

:class:`DirectoryStore` keeps one file a page. A file is written under a temporary name, carries a
digest of its contents, and is renamed; a torn or foreign file is a miss, never an error."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from engine.request import Request
from fsm.ledger import QUARANTINE, Exhausted, Lease, LeaseError, LeaseObserver, PoolCounts
from fsm.resources import Disposition, Resource

PageKey = str


def page_keys(seed: str, tokens: Sequence[int], page_size: int, pages: int) -> list[PageKey]:
    """Keys of the first ``pages`` full pages of ``tokens`` under ``seed`` (weights digest and
    layout)."""
    digest = hashlib.blake2b(seed.encode(), digest_size=16)
    keys = []
    for index in range(pages):
        digest.update(array("q", tokens[index * page_size : (index + 1) * page_size]).tobytes())
        keys.append(digest.hexdigest())
    return keys


@dataclass(frozen=True, slots=True)
class StoreDone:
    """A read or write is over. ``blobs`` is None for a write, and for a read that failed or found
    too little."""

    ticket: int
    blobs: list[bytes] | None = None
    error: str = ""


class PageStore(Protocol):
    """What the scheduler needs of a store. Every method returns at once."""

    def hits(self, keys: Sequence[PageKey]) -> int:
        """How many leading ``keys`` are (probably) stored; looks at memory only."""
        ...

    def load(self, ticket: int, keys: Sequence[PageKey]) -> None: ...

    def save(self, ticket: int, keys: Sequence[PageKey], blobs: Sequence[bytes]) -> None: ...

    def poll(self) -> list[StoreDone]:
        """Operations that are over since the last call."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Work:
    ticket: int
    keys: list[PageKey]
    blobs: list[bytes] | None = None


class DirectoryStore:
    """Pages as files in one directory, read and written by one thread of its own.

    ``limit`` bounds the number of files; beyond it, nothing more is written. ``wake`` is called
    from the I/O thread after each operation, so that a sleeping loop looks."""

    _MAGIC: Final = b"ILKV1\n"

    def __init__(self, folder: Path, wake: Callable[[], None], limit: int = 65536) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder: Final = folder
        self._wake = wake
        self._limit: Final = limit
        self._known = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StoreDone] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._thread.start()

    def hits(self, keys: Sequence[PageKey]) -> int:
        count = 0
        for key in keys:
            if key not in self._known:
                break
            count += 1
        return count

    def load(self, ticket: int, keys: Sequence[PageKey]) -> None:
        self._work.put(_Work(ticket, list(keys)))

    def save(self, ticket: int, keys: Sequence[PageKey], blobs: Sequence[bytes]) -> None:
        self._work.put(_Work(ticket, list(keys), list(blobs)))

    def poll(self) -> list[StoreDone]:
        out = []
        with contextlib.suppress(queue.Empty):
            while True:
                out.append(self._done.get_nowait())
        return out

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                blobs = self._read(work.keys) if work.blobs is None else None
                if work.blobs is not None:
                    self._write(work.keys, work.blobs)
                self._done.put(StoreDone(work.ticket, blobs))
            except OSError as error:
                self._done.put(StoreDone(work.ticket, error=str(error)))
            self._wake()

    def _read(self, keys: list[PageKey]) -> list[bytes]:
        """The leading pages that are there and intact; possibly none."""
        blobs = []
        for key in keys:
            try:
                raw = (self._folder / key).read_bytes()
            except FileNotFoundError:
                self._known.discard(key)
                break
            head = len(self._MAGIC) + 16
            blob = raw[head:]
            if raw[:head] != self._MAGIC + hashlib.blake2b(blob, digest_size=16).digest():
                self._known.discard(key)
                (self._folder / key).unlink(missing_ok=True)
                break
            blobs.append(blob)
        return blobs

    def _write(self, keys: list[PageKey], blobs: list[bytes]) -> None:
        for key, blob in zip(keys, blobs, strict=True):
            if key in self._known or len(self._known) >= self._limit:
                continue
            partial = self._folder / f".{key}.{os.getpid()}"
            try:
                partial.write_bytes(
                    self._MAGIC + hashlib.blake2b(blob, digest_size=16).digest() + blob
                )
                partial.replace(self._folder / key)
            finally:
                partial.unlink(missing_ok=True)
            self._known.add(key)


class Prefetch(Lease):
    """One read of stored pages for one request. Releasing it gives the read up if it is not
    over."""

    __slots__ = ("_book", "first_page", "keys", "request", "ticket", "tokens", "weights")

    def __init__(
        self,
        book: PrefetchBook,
        request: Request,
        ticket: int,
        first_page: int,
        keys: list[PageKey],
        weights: str,
    ) -> None:
        super().__init__("prefetches", request.life)
        self._book = book
        self.request: Final = request
        self.tokens: Final = request.tokens  # outlives the request, which forgets its own
        self.ticket: Final = ticket
        self.first_page: Final = first_page
        self.keys: Final = keys
        self.weights: Final = weights

    def adopt(self) -> None:
        super().adopt()
        self._book.start(self)

    def _give_back(self, disposition: Disposition | None) -> None:
        self._book.give_back(self)


@dataclass(slots=True)
class PrefetchBook:
    """Prefetches in flight. A unit is *held* while a request waits for it, *quarantined* after
    the request gave it up and until its I/O is over, and free again then."""

    store: PageStore
    total: int
    next_ticket: Callable[[], int]
    observer: LeaseObserver | None = None
    name: Resource = "prefetches"
    _held: dict[int, Prefetch] = field(default_factory=dict)
    _reading: dict[int, str] = field(default_factory=dict)

    def reserve(
        self, request: Request, first_page: int, keys: list[PageKey], weights: str = ""
    ) -> Prefetch:
        """Raises :class:`Exhausted` when ``total`` reads are in flight, given up ones included."""
        if len(self._held.keys() | self._reading.keys()) >= self.total:
            raise Exhausted(f"prefetches: {self.total} in flight")
        lease = Prefetch(self, request, self.next_ticket(), first_page, keys, weights)
        self._held[lease.ticket] = lease
        return lease

    def start(self, lease: Prefetch) -> None:
        self._reading[lease.ticket] = lease.owner
        self.store.load(lease.ticket, lease.keys)

    def give_back(self, lease: Prefetch) -> None:
        if self._held.pop(lease.ticket, None) is None:
            raise LeaseError(f"prefetch {lease.ticket} of {lease.owner} is given back twice")
        if lease.ticket in self._reading and self.observer is not None:
            self.observer("quarantine", lease.owner, 1)

    def is_read(self, ticket: int) -> bool:
        return ticket in self._reading

    def over(self, ticket: int) -> Prefetch | None:
        """The I/O of a read is over; returns the lease if its request still waits for it."""
        owner = self._reading.pop(ticket)
        if ticket not in self._held and self.observer is not None:
            self.observer("release", f"{QUARANTINE}{owner}", 1)
        return self._held.get(ticket)

    def counts(self) -> PoolCounts:
        held = len(self._held)
        quarantined = len(self._reading.keys() - self._held.keys())
        return PoolCounts(self.total, self.total - held - quarantined, 0, held, quarantined)

    def owners(self) -> dict[str, int]:
        owners = Counter(lease.owner for lease in self._held.values())
        owners.update(f"{QUARANTINE}{o}" for t, o in self._reading.items() if t not in self._held)
        return dict(owners)

    def audit(self) -> list[str]:
        return []
