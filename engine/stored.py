"""The store seen from the scheduler: what is loaded before admission and written after prefill.

This module moves pages and starts copies; it fires nothing. A load that is over is returned to
the scheduler, which decides what it means for its request."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.batch import PageExport, PageImport, PagesDone
from engine.pages import Kv, PrefixLock
from engine.prefix_cache import Node
from engine.request import Request
from engine.store import PageStore, Prefetch, PrefetchBook, page_keys
from fsm.ledger import LeaseObserver

STORE_OWNER: Final = "store:"
"""Owner of pages that are being copied in or out."""


def key_seed(weights_digest: str, page_size: int, dtype: str, layout: str) -> str:
    """All that the contents of a page depend on beside the tokens (invariant 9): two compute types
    round differently, and two layouts put the same numbers elsewhere."""
    return f"{weights_digest} page={page_size} dtype={dtype} layout={layout}"


@dataclass(frozen=True, slots=True)
class _Export:
    """Pages of one prompt on their way out, and those before them; they stay owned until the copy
    was made."""

    pin: PrefixLock
    pinned: array[int]
    keys: list[str]


@dataclass(frozen=True, slots=True)
class _Import:
    """Loaded pages on their way in. Nobody may read them before the copy was made."""

    lease: Prefetch
    pages: list[int]


class StoredKv:
    """Loads and writes of one node."""

    def __init__(
        self,
        store: PageStore,
        kv: Kv,
        weights_digest: str,
        dtype: str,
        layout: str,
        max_operations: int,
        launch: Callable[[PageExport | PageImport], None],
        observer: LeaseObserver | None = None,
    ) -> None:
        self._store = store
        self._kv = kv
        self._dtype: Final = dtype
        self._layout: Final = layout
        self.use_weights(weights_digest)
        self._limit: Final = max_operations
        self._launch = launch
        self._tickets = 0
        self._exports: dict[int, _Export] = {}
        self._writes: set[int] = set()
        self._imports: dict[int, _Import] = {}
        self.prefetches: Final = PrefetchBook(store, max_operations, self._ticket, observer)

    def use_weights(self, digest: str) -> None:
        """Pages are looked up and kept under other weights from now on."""
        self._seed = key_seed(digest, self._kv.page_size, self._dtype, self._layout)

    @property
    def at_rest(self) -> bool:
        return not (self._exports or self._writes or self._imports)

    def hits(self, prompt: list[int]) -> list[str]:
        """Keys of the stored pages that continue what the prefix cache has of ``prompt``; often
        none."""
        if not self._kv.cache.enabled or not self.prefetches.counts().free:
            return []
        usable = (len(prompt) - 1) // self._kv.page_size
        matched = self._matched(prompt)
        if matched >= usable:
            return []
        keys = self._keys(prompt, usable)[matched:]
        return keys[: self._store.hits(keys)]

    def reserve(self, request: Request) -> Prefetch:
        """The load of what :meth:`hits` found; it starts when the lease is adopted."""
        first = self._matched(request.tokens)
        keys = self.hits(request.tokens)
        return self.prefetches.reserve(request, first, keys, self._kv.weights)

    def poll(self) -> list[Prefetch]:
        """Loads that are over, still waited for, and brought nothing; the others are copied in."""
        over = []
        for done in self._store.poll():
            self._writes.discard(done.ticket)
            if self.prefetches.is_read(done.ticket):
                over.append((self.prefetches.over(done.ticket), done.blobs or []))
        return [
            lease
            for lease, blobs in over
            if lease is not None and not self._start_import(lease, blobs)
        ]

    def export(self, request: Request, lock: PrefixLock, table: array[int]) -> None:
        """Start copying the prompt's full pages out, if the store lacks some of them."""
        full = request.prompt_len // self._kv.page_size
        if lock.node is self._kv.cache.root or len(self._exports) >= self._limit:
            return
        keys = self._keys(request.tokens, full)
        known = self._store.hits(keys)
        if known == full:
            return
        ticket = self._ticket()
        pages = table[known:full]
        # Whoever locks a node owns the pages up to it: a locked page is never one to evict.
        pinned = array("q", {*self._kv.cache.path(lock.node), *pages})
        pin = self._kv.pin(f"{STORE_OWNER}{ticket}", lock.node, pinned)
        if pin is not None:
            self._exports[ticket] = _Export(pin, pinned, keys[known:])
            self._launch(PageExport(ticket, pages))

    def copied(self, done: PagesDone) -> tuple[Prefetch, bool] | None:
        """A copy in or out has run on the device; returns a load that is still waited for, and
        whether its pages are in the prefix cache now."""
        if done.ticket in self._imports:
            return self._end_import(self._imports.pop(done.ticket), done.error is None)
        export = self._exports.pop(done.ticket)
        export.pin.release()
        self._drop(done.ticket, export.pinned)
        if done.error is None:
            self._writes.add(done.ticket)
            self._store.save(done.ticket, export.keys, done.blobs)
        return None

    def _start_import(self, lease: Prefetch, blobs: list[bytes]) -> bool:
        """Copy loaded pages in; false if there are none, or no room or place for them."""
        node, have = self._place(lease)
        if not blobs or len(have) < lease.first_page or lease.weights != self._kv.weights:
            return False  # nothing came, or it continues nothing: evicted, or of other weights
        owner = f"{STORE_OWNER}{lease.ticket}"
        self._kv.cache.lock(node, owner)  # making room must not evict what this continues
        taken = self._kv.take(owner, len(blobs))
        self._kv.cache.unlock(node, owner)
        if taken is None:
            return False
        self._imports[lease.ticket] = _Import(lease, taken)
        self._launch(PageImport(lease.ticket, array("q", taken), blobs))
        return True

    def _end_import(self, done: _Import, copied: bool) -> tuple[Prefetch, bool] | None:
        """Put pages that were copied in into the prefix cache, for whoever has the same text."""
        lease, pages = done.lease, done.pages
        _, have = self._place(lease)
        current = lease.weights == self._kv.weights
        loaded = copied and current and len(have) == lease.first_page
        if loaded:
            owner = f"{STORE_OWNER}{lease.ticket}"
            count = lease.first_page + len(pages)
            self._kv.keep(owner, lease.tokens, [*have, *pages], count)
        self._drop(lease.ticket, array("q", pages))
        return (lease, loaded) if lease.stage == "held" else None

    def _place(self, lease: Prefetch) -> tuple[Node, array[int]]:
        """Where in the cache the loaded pages belong, and the pages before them."""
        return self._kv.cache.match(lease.tokens, lease.first_page * self._kv.page_size)

    def _drop(self, ticket: int, pages: array[int]) -> None:
        self._kv.drop(f"{STORE_OWNER}{ticket}", pages)

    def _matched(self, prompt: list[int]) -> int:
        return len(self._kv.cache.match(prompt, len(prompt) - 1)[1])

    def _keys(self, tokens: list[int], pages: int) -> list[str]:
        return page_keys(self._seed, tokens, self._kv.page_size, pages)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets
