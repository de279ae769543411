"""The pages of a unified node that exploration walks: a ledger, and the prefix cache above it.

Ownership is kept by production's :class:`fsm.ledger.PagePool`, rebuilt for each operation from the
owners that a state names (the outcomes are remembered: there are few). The prefix cache is a model
of :mod:`engine.prefix_cache`: one node a page, leaves are evicted, a lock on a node keeps the path
to it. Which of several leaves is evicted is free choice.

Requests share the first page of their prompts, ``A``; the second one is a request's own, ``B1`` or
``B2``, and its child. Pages of other weights are other nodes."""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

from fsm.ledger import CACHE, PagePool
from fsm.trace import Balance

Owners: TypeAlias = tuple[tuple[str, ...], ...]
"""page → who owns it, sorted."""
Key: TypeAlias = tuple[int, str]
"""A node of the prefix cache: the weights that its KV was computed under, and what it holds."""
Tree: TypeAlias = tuple[tuple[Key, int], ...]
"""(node, its page), sorted."""

SHARED: Final = "A"
BUILDER: Final = "builder"


class Counts(NamedTuple):
    """What a pool's books say, and what is wrong with them."""

    free: int
    cached: int
    held: int
    quarantined: int
    faults: tuple[str, ...]


def path_of(weights: int, who: int, length: int) -> tuple[Key, ...]:
    """The nodes for the first ``length`` full pages of request ``who``, the root left out."""
    return ((weights, SHARED), (weights, f"B{who + 1}"))[:length]


def parent_of(key: Key) -> Key | None:
    weights, name = key
    return None if name == SHARED else (weights, SHARED)


# --- the ledger -----------------------------------------------------------------------------------


class Books:
    """What a page pool of some class does, operation by operation. Outcomes are remembered."""

    def __init__(self, kind: Callable[[int], PagePool] = PagePool) -> None:
        self._kind: Final = kind
        self._taken: dict[tuple[Owners, str, int], tuple[Owners, tuple[int, ...]]] = {}
        self._moved: dict[tuple[bool, Owners, int, str], Owners] = {}
        self._counts: dict[Owners, Counts] = {}

    def take(self, owners: Owners, owner: str, count: int) -> tuple[Owners, tuple[int, ...]]:
        """``count`` free pages for ``owner``: the owners after it, and the pages.

        Raises:
            LeaseError: The pool's books are wrong.
            Exhausted: There are not so many.
        """
        key = (owners, owner, count)
        found = self._taken.get(key)
        if found is None:
            pool = self._pool(owners)
            pages = tuple(pool.take(owner, count))
            found = self._taken[key] = self._owners(pool), pages
        return found

    def share(self, owners: Owners, page: int, owner: str) -> Owners:
        """``owner`` becomes one more owner. Raises :class:`fsm.ledger.LeaseError`."""
        key = (True, owners, page, owner)
        found = self._moved.get(key)
        if found is None:
            pool = self._pool(owners)
            pool.share(page, owner)
            found = self._moved[key] = self._owners(pool)
        return found

    def drop(self, owners: Owners, page: int, owner: str) -> Owners:
        """``owner`` gives the page up. Raises :class:`fsm.ledger.LeaseError`."""
        key = (False, owners, page, owner)
        found = self._moved.get(key)
        if found is None:
            pool = self._pool(owners)
            pool.drop(page, owner)
            found = self._moved[key] = self._owners(pool)
        return found

    def counts(self, owners: Owners) -> Counts:
        """The four classes, and what an audit says."""
        found = self._counts.get(owners)
        if found is None:
            pool = self._pool(owners)
            said, faults = pool.counts(), pool.audit()
            if not said.conserved:
                faults.append(f"{said.as_dict()} do not add up")
            found = self._counts[owners] = Counts(
                said.free, said.cached, said.held, said.quarantined, tuple(faults)
            )
        return found

    def balance(self, owners: Owners, tree: Tree) -> Balance:
        """As a trace notes it."""
        said = self.counts(owners)
        return Balance(said.free, said.cached, len(tree))

    def _pool(self, owners: Owners) -> PagePool:
        pool = self._kind(len(owners))
        for page in PagePool.take(pool, BUILDER, len(owners)):
            for owner in owners[page]:
                pool.share(page, owner)
        for page in reversed(range(len(owners))):  # what is freed last goes out first
            PagePool.drop(pool, page, BUILDER)
        return pool

    @staticmethod
    def _owners(pool: PagePool) -> Owners:
        return tuple(tuple(sorted(pool.owners_of(page))) for page in range(pool.total))


BOOKS: Final = Books()
"""Production's pool."""


# --- the prefix cache -----------------------------------------------------------------------------


def evictable(tree: Tree, locks: tuple[Key | None, ...]) -> list[Key]:
    """Leaves that nobody locks."""
    parents = {parent_of(key) for key, _ in tree}
    return [key for key, _ in tree if key not in parents and key not in locks]


def kept(tree: Tree, locks: tuple[Key | None, ...]) -> set[Key]:
    """Nodes that a lock keeps, their own or one further down."""
    found: set[Key] = set()
    for lock in locks:
        node = lock
        while node is not None:
            found.add(node)
            node = parent_of(node)
    return found & {key for key, _ in tree}


def tree_faults(owners: Owners, tree: Tree, locks: tuple[Key | None, ...]) -> Iterator[str]:
    """As :meth:`engine.prefix_cache.PrefixCache.audit`."""
    nodes = dict(tree)
    held = kept(tree, locks)
    if len(set(nodes.values())) != len(nodes):
        yield "a page is in the prefix cache twice"
    for key, page in tree:
        parent = parent_of(key)
        if parent is not None and parent not in nodes:
            yield f"{key[1]} is in the prefix cache, and its parent is not"
        if CACHE not in owners[page]:
            yield f"the prefix cache has page {page}, which it does not own"
        elif key in held and owners[page] == (CACHE,):
            yield f"{key[1]} is locked in the prefix cache and its page owned by nobody"
    for page, who in enumerate(owners):
        if CACHE in who and page not in nodes.values():
            yield f"the prefix cache owns page {page}, which it does not have"
