"""A request's KV pages: the lease over its block table, and the lock on the prefix it shares.

``Kv`` joins the page pool and the prefix cache, and is the only place where pages are matched,
taken, grown and given back. A block table lists pages in token order: first those shared with the
cache, then its own."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from engine.prefix_cache import Node, PrefixCache
from engine.request import Request
from fsm.ledger import QUARANTINE, CountPool, Exhausted, Lease, LeaseObserver, PagePool, PoolCounts
from fsm.resources import Disposition
from fsm.trace import Balance


class PrefixLock(Lease):
    """A lock on the deepest prefix-cache node whose pages the request uses; the root where it
    uses none."""

    __slots__ = ("_kv", "node")

    def __init__(self, kv: Kv, owner: str, node: Node) -> None:
        super().__init__("prefix_locks", owner)
        self._kv = kv
        self.node = node

    def _give_back(self, disposition: Disposition | None) -> None:
        self._kv.cache.unlock(self.node, self.owner)
        self._kv.locks.give_back(self.owner, 1)


class Pages(Lease):
    """The pages of one request, in token order."""

    __slots__ = ("_kv", "quarantined", "request", "shared", "table", "weights")

    def __init__(self, kv: Kv, request: Request, table: array[int], shared: int) -> None:
        super().__init__("pages", request.life, len(table))
        self._kv = kv
        self.request: Final = request
        self.table: Final = table
        self.shared: Final = shared
        """How many leading pages came from the prefix cache, their KV ready to use."""
        self.quarantined = False
        self.weights: Final = kv.weights
        """What its KV was begun under. Where they are changed in place, the rest of it is computed
        under others."""

    @property
    def capacity(self) -> int:
        """Positions that fit into its pages."""
        return len(self.table) * self._kv.page_size

    def extend(self, count: int) -> bool:
        """Grow by ``count`` pages, evicting cached ones if need be. False: there is no room,
        nothing changed."""
        return self._kv.extend(self, count)

    def _give_back(self, disposition: Disposition | None) -> None:
        self._kv.give_back(self, disposition)


class Kv:
    """Pages and prefix cache of one node."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        locks: int,
        prefix_cache: bool,
        observer: LeaseObserver | None = None,
    ) -> None:
        self.page_size: Final = page_size
        self.weights = ""
        self.pool: Final = PagePool(pages)
        self.locks: Final = CountPool("prefix_locks", locks)
        self._observer = observer
        evicted: Callable[[str, int], None] | None = None
        if observer is not None:
            evicted = lambda what, count: observer(what, "cache", count)  # noqa: E731 - one line
        self.cache: Final = PrefixCache(self.pool, page_size, prefix_cache, evicted)

    @property
    def available(self) -> int:
        """Pages that can be had now: free, or evictable from the prefix cache."""
        return self.pool.free + self.pool.cached

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.page_size)

    def cost(self, request: Request) -> tuple[int, int]:
        """What admitting ``request`` would take: (pages that stop being available, tokens to
        compute).

        Matched pages that only the cache owns cost as much as free ones: in use, they cannot be
        evicted."""
        _, shared = self.cache.match(request.tokens, len(request.tokens) - 1)
        reused = sum(self.pool.class_of(page) == "cached" for page in shared)
        new = self.pages_for(len(request.tokens)) - len(shared)
        return new + reused, len(request.tokens) - len(shared) * self.page_size

    def reserve(self, request: Request, headroom: int = 0) -> tuple[Pages, PrefixLock]:
        """Everything that ``request`` needs to compute its tokens so far: shared prefix and own
        pages.

        At least one token is left to compute, because its logits are wanted. Raises
        :class:`Exhausted` when fewer than ``headroom`` further pages would be left, and then
        nothing has changed."""
        node, shared = self.cache.match(request.tokens, len(request.tokens) - 1)
        wanted = self.pages_for(len(request.tokens)) - len(shared)
        reused = sum(self.pool.class_of(page) == "cached" for page in shared)
        if wanted + headroom > self.available - reused:
            raise Exhausted(
                f"pages: {self.available - reused} available, {wanted}+{headroom} wanted"
            )
        self.locks.take(request.life)  # may raise: nothing has changed yet
        self.cache.lock(node, request.life)
        lock = PrefixLock(self, request.life, node)
        # Room is made before anything is shared, so that the trace's line about it tells the truth.
        own = self._take(request.life, wanted)
        for page in shared:
            self.pool.share(page, request.life)
        table = array("q", shared)
        table.extend(own)
        return Pages(self, request, table, len(shared)), lock

    def reserve_new(self, request: Request, positions: int) -> Pages | None:
        """Pages of its own for ``positions``, nothing shared (memory for a peer to write into);
        None without room."""
        count = self.pages_for(positions)
        if count > self.available:
            return None
        return Pages(self, request, array("q", self._take(request.life, count)), 0)

    def quarantine(self, lease: Pages) -> None:
        """Somebody else may still write into these pages: they are nobody's until that is over."""
        for page in lease.table:
            self.pool.share(page, f"{QUARANTINE}{lease.owner}")
        lease.quarantined = True
        self._note("quarantine", lease.owner, len(lease.table))

    def extend(self, lease: Pages, count: int) -> bool:
        if count > self.available:
            return False
        lease.table.extend(self._take(lease.owner, count))
        lease.units = len(lease.table)
        self._note("grow", lease.owner, count)
        return True

    def cache_prompt(self, request: Request, lease: Pages, lock: PrefixLock) -> None:
        """The prompt is committed: others may share its full pages from now on."""
        if lease.weights != self.weights:
            return
        full = min(request.committed, len(request.tokens)) // self.page_size
        node, new = self.cache.insert_own(request.tokens, lease.table, full)
        if node is not lock.node:
            self.cache.lock(node, lock.owner)
            self.cache.unlock(lock.node, lock.owner)
            lock.node = node
        if new:
            self._note("cache", lease.owner, new)

    def give_back(self, lease: Pages, disposition: Disposition | None) -> None:
        request = lease.request
        if disposition == "cache" and lease.weights == self.weights:
            full = min(request.committed, len(request.tokens)) // self.page_size
            self.keep(lease.owner, request.tokens, lease.table, full)
        if lease.quarantined:
            for page in lease.table:
                self.pool.drop(page, f"{QUARANTINE}{lease.owner}")
        self.drop(lease.owner, lease.table)

    def use_weights(self, digest: str) -> None:
        """Nothing that was computed under other weights is found or kept any more."""
        if digest != self.weights:
            self.weights = digest
            self.cache.renew()

    def take(self, owner: str, count: int) -> list[int] | None:
        """Pages for somebody who is not a request (a load from the store); None without room."""
        self.cache.evict(count - self.pool.free)
        if count > self.pool.free:
            return None
        taken = self.pool.take(owner, count)
        if taken:
            self._note("take", owner, count)
        return taken

    def keep(self, owner: str, tokens: Sequence[int], pages: Sequence[int], count: int) -> None:
        """Put the first ``count`` pages, which hold ``tokens``, into the prefix cache."""
        new = self.cache.insert(tokens, pages, count)
        if new:
            self._note("cache", owner, new)

    def drop(self, owner: str, pages: Iterable[int]) -> None:
        """``owner`` gives up all its ``pages``."""
        count = 0
        for page in pages:
            self.pool.drop(page, owner)
            count += 1
        if count:
            self._note("release", owner, count)

    def pin(self, owner: str, node: Node, pages: array[int]) -> PrefixLock | None:
        """Keep ``pages``, the whole path to ``node`` among them, as they are while some are copied.

        The caller drops its ownership of the pages after releasing the lock. None: too many locks.
        """
        try:
            self.locks.take(owner)
        except Exhausted:
            return None
        self.cache.lock(node, owner)
        for page in pages:
            self.pool.share(page, owner)
        self._note("pin", owner, len(pages))
        lock = PrefixLock(self, owner, node)
        lock.adopt()
        return lock

    def exclusive(self, lease: Pages) -> int:
        """Pages that giving ``lease`` back would make available: those no other request owns."""
        return sum(not (self.pool.owners_of(page) - {lease.owner, "cache"}) for page in lease.table)

    def counts(self) -> PoolCounts:
        return self.pool.counts()

    def balance(self) -> Balance:
        """The pool as the trace notes it."""
        return Balance(self.pool.free, self.pool.cached, self.cache.size)

    def audit(self) -> list[str]:
        return self.cache.audit()

    def _take(self, owner: str, count: int) -> list[int]:
        if count > self.pool.free:
            self.cache.evict(count - self.pool.free)
        return self.pool.take(owner, count)

    def _note(self, what: str, owner: str, count: int) -> None:
        if self._observer is not None:
            self._observer(what, owner, count)
