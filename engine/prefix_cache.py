"""The prefix cache: a radix tree over token ids whose edges are whole pages.

One node is one page of KV, reached by the tokens it holds. Requests lock the deepest node they
use; since only leaves are evicted, that one lock protects the whole path, the node itself
included (B26: a lock that began at the parent let pages in use be evicted). Locks are sets of
owners, never counts.

Every page in the tree has the owner ``cache`` in the page pool. A page that only the cache owns
can always be evicted, because whoever locks a node also owns every page on its path; the pool's
class ``cached`` is therefore exactly what an eviction can free, and :meth:`PrefixCache.audit`
proves it.

Source: SGLang's RadixAttention; page-granular so that a page has one meaning.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from fsm.ledger import CACHE, LeaseError, PagePool


class Node:
    """One cached page. The root has no page."""

    __slots__ = ("children", "key", "lockers", "page", "parent", "stamp")

    def __init__(self, parent: Node | None, key: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.children: dict[tuple[int, ...], Node] = {}
        self.lockers: set[str] = set()
        self.stamp = 0


class PrefixCache:
    """Finds, keeps and evicts pages by the tokens they hold. Switched off, it finds and keeps
    nothing."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        enabled: bool = True,
        observer: Callable[[str, int], None] | None = None,
    ) -> None:
        self._pool = pool
        self._page_size: Final = page_size
        self.enabled: Final = enabled
        self._observer = observer
        self._clock = 0
        self._idle: list[tuple[int, int, Node]] = []
        self._serial = 0
        self.root = Node(None, (), -1)
        self.size = 0
        """Pages in the tree."""
        self.added = 0
        """Pages ever put in: while it stands still, nothing that was not found can be found."""
        self.evictions = 0
        self._old_roots: list[Node] = []

    def match(self, tokens: Sequence[int], limit: int) -> tuple[Node, array[int]]:
        """The deepest node for a prefix of ``tokens`` of at most ``limit`` tokens, and the pages
        up to it."""
        node, pages = self.root, array("q")
        if not self.enabled:
            return node, pages
        size = self._page_size
        for start in range(0, min(limit, len(tokens)) - size + 1, size):
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            node = child
            pages.append(child.page)
            self._touch(child)
        return node, pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], count: int) -> int:
        """Keep the first ``count`` pages, which hold ``tokens``; returns how many were new.

        Where the tree already has a page for the same tokens, that one stays and the caller's is
        not kept. The caller still owns its pages afterwards."""
        node, new = self.root, 0
        for index in range(count if self.enabled else 0):
            key = self._key(tokens, index)
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, pages[index])
                new += 1
            else:
                self._touch(child)
            node = child
        return new

    def insert_own(
        self, tokens: Sequence[int], pages: Sequence[int], count: int
    ) -> tuple[Node, int]:
        """Keep pages of a request that goes on using them; returns the deepest node to lock, and
        how many were new.

        Stops at the first page that the tree holds in another copy: a request must own every page
        on the path that it locks, and swapping the copies under a launched step would be a use
        after free."""
        node, new = self.root, 0
        for index in range(count if self.enabled else 0):
            key = self._key(tokens, index)
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, pages[index])
                new += 1
            elif child.page != pages[index]:
                break
            node = child
        return node, new

    def lock(self, node: Node, owner: str) -> None:
        if owner in node.lockers:
            raise LeaseError(f"{owner} locks a prefix node twice")
        node.lockers.add(owner)

    def unlock(self, node: Node, owner: str) -> None:
        if owner not in node.lockers:
            raise LeaseError(f"{owner} unlocks a prefix node it has not locked")
        node.lockers.remove(owner)
        self._offer(node)

    @staticmethod
    def path(node: Node) -> list[int]:
        """The pages up to ``node``, the first one first."""
        pages = []
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]

    def evict(self, count: int) -> int:
        """Free up to ``count`` pages, least recently used leaves first; returns how many were
        freed."""
        freed = 0
        while freed < count and self._idle:
            stamp, _, node = heapq.heappop(self._idle)
            if stamp != node.stamp or not self._evictable(node):
                continue
            self._remove(node)
            freed += 1
        self.evictions += freed
        if freed and self._observer is not None:
            self._observer("evict", freed)
        return freed

    def flush(self) -> int:
        """Drop everything that nobody locks; returns how many pages were freed."""
        return self.evict(self._pool.total)

    def renew(self) -> None:
        """Forget everything for matching: it was computed under other weights (invariant 9).

        What somebody still locks stays until it is unlocked, and can then only be evicted.
        """
        self.flush()
        self._old_roots = [root for root in (*self._old_roots, self.root) if root.children]
        self.root = Node(None, (), -1)
        self.added += 1  # what was found before is found no more

    @property
    def pages(self) -> int:
        return sum(node.parent is not None for node in self._walk())

    def audit(self) -> list[str]:
        """Faults: a page owned by the cache but not in the tree, or the reverse, or not evictable
        when it should."""
        faults = []
        in_tree: set[int] = set()
        reachable = 0
        nodes = self._walk()
        kept: set[Node] = set()
        """Nodes that a lock keeps, their own or one further down."""
        for node in reversed(nodes):
            if node.lockers or node in kept:
                kept.add(node)
                if node.parent is not None:
                    kept.add(node.parent)
        for node in nodes:
            if node.parent is None:
                continue
            if node.page in in_tree:
                faults.append(f"prefix cache: page {node.page} is in the tree twice")
            in_tree.add(node.page)
            if self._pool.class_of(node.page) == "cached":
                reachable += 1
                if node in kept:
                    faults.append(f"prefix cache: page {node.page} is locked and owned by nobody")
        owned = set(self._pool.pages_of(CACHE))
        count = sum(node.parent is not None for node in nodes)
        if self.size != count:
            faults.append(f"prefix cache: books say {self.size} pages, it has {count}")
        if owned != in_tree:
            faults.append(f"prefix cache: owns {sorted(owned ^ in_tree)[:8]} … outside the tree")
        if reachable != self._pool.cached:
            faults.append(
                f"prefix cache: {reachable} evictable of {self._pool.cached} cached pages"
            )
        return faults

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        size = self._page_size
        key = tuple(tokens[index * size : (index + 1) * size])
        if len(key) != size:
            raise LeaseError(f"page {index} of {len(tokens)} tokens is not full")
        return key

    def _add(self, parent: Node, key: tuple[int, ...], page: int) -> Node:
        node = Node(parent, key, page)
        self._pool.share(page, CACHE)
        parent.children[key] = node
        self.size += 1
        self.added += 1
        self._touch(node)
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise LeaseError("the root of the prefix cache cannot be evicted")
        del parent.children[node.key]
        node.parent = None
        self.size -= 1
        self._pool.drop(node.page, CACHE)
        self._offer(parent)

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.stamp = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Note a node that might be evicted next; entries that turn out stale are skipped when
        popped."""
        if self._evictable(node):
            self._serial += 1
            heapq.heappush(self._idle, (node.stamp, self._serial, node))
            if len(self._idle) > 4 * self._pool.total + 64:
                self._compact()

    def _compact(self) -> None:
        """Drop stale entries: the heap stays linear in the pool however often leaves are
        touched."""
        live = {id(n): (s, i, n) for s, i, n in self._idle if s == n.stamp and self._evictable(n)}
        self._idle = sorted(live.values(), key=lambda entry: entry[:2])

    @staticmethod
    def _evictable(node: Node) -> bool:
        return node.parent is not None and not node.children and not node.lockers

    def _walk(self) -> list[Node]:
        out = [self.root, *self._old_roots]
        for node in out:
            out.extend(node.children.values())
        return out
