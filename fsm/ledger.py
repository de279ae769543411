"""Leases, pools and the ledger: who owns what, counted by owner and never by a bare number.

A *lease* is one request's claim on one pool. It is **reserved** before a transition (this may
fail, and then nothing has changed), **adopted** when the transition enters a state that holds it,
and **released** when a transition leaves the last such state. Release cannot fail and happens
exactly once; a second release, or one of a lease that was never held, raises :class:`LeaseError`,
because it is always a bug of ours.

A *pool* hands out leases and satisfies, at every instant and also mid-step,

    free + cached + held + quarantined = total
    (invariant 1)

TigerBeetle's ``FreeSet`` is the source of reserve-then-acquire; the class of a page is decided by
its set of owners."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, Protocol, TypeAlias

from fsm.resources import Disposition, Resource

LeaseStage: TypeAlias = Literal["reserved", "held", "released"]


class LeaseError(RuntimeError):
    """A lease or a page was used against its life cycle: a bug of ours, never an operating
    error."""


class Exhausted(Exception):  # noqa: N818 - an answer of a pool, not a fault
    """A pool cannot satisfy a reservation now. Nothing has changed."""


class Lease:
    """One owner's claim on one pool. Subclasses give it contents (a row number, a block table,
    …)."""

    __slots__ = ("owner", "resource", "stage", "units")

    def __init__(self, resource: Resource, owner: str, units: int = 1) -> None:
        self.resource: Final = resource
        self.owner: Final = owner
        self.units = units
        self.stage: LeaseStage = "reserved"

    def adopt(self) -> None:
        """Entering a state that holds it. Cannot fail for a reserved lease."""
        if self.stage != "reserved":
            raise LeaseError(f"{self.resource} of {self.owner}: adopted while {self.stage}")
        self.stage = "held"

    def release(self, disposition: Disposition | None = None) -> None:
        """Leaving the last state that holds it; ``disposition`` says where pages go."""
        if self.stage != "held":
            raise LeaseError(f"{self.resource} of {self.owner}: released while {self.stage}")
        self.stage = "released"
        self._give_back(disposition)

    def cancel(self) -> None:
        """Give a reservation back that no transition adopted."""
        if self.stage != "reserved":
            raise LeaseError(f"{self.resource} of {self.owner}: cancelled while {self.stage}")
        self.stage = "released"
        self._give_back(None)

    def _give_back(self, disposition: Disposition | None) -> None:
        """Return the units to the pool. Must not fail."""
        raise LeaseError(f"{self.resource} of {self.owner}: a bare lease has nothing to give back")


class PoolCounts:
    """One instant of a pool: how its units are spread over the four classes."""

    __slots__ = ("cached", "free", "held", "quarantined", "total")

    def __init__(self, total: int, free: int, cached: int, held: int, quarantined: int) -> None:
        self.total = total
        self.free = free
        self.cached = cached
        self.held = held
        self.quarantined = quarantined

    @property
    def conserved(self) -> bool:
        return self.free + self.cached + self.held + self.quarantined == self.total

    @property
    def at_rest(self) -> bool:
        return self.held == 0 and self.quarantined == 0

    def as_dict(self) -> dict[str, int]:
        return {
            "total": self.total,
            "free": self.free,
            "cached": self.cached,
            "held": self.held,
            "quarantined": self.quarantined,
        }


class Pool(Protocol):
    """What the ledger needs of a pool."""

    @property
    def name(self) -> Resource: ...

    def counts(self) -> PoolCounts: ...

    def owners(self) -> dict[str, int]:
        """Units by owner, the cache and quarantine included."""
        ...

    def audit(self) -> list[str]:
        """Faults in its own books, recomputed from scratch; empty when they are right."""
        ...


class CountLease(Lease):
    """Units of a :class:`CountPool`."""

    __slots__ = ("_pool",)

    def __init__(self, pool: "CountPool", owner: str, units: int) -> None:
        super().__init__(pool.name, owner, units)
        self._pool = pool

    def _give_back(self, disposition: Disposition | None) -> None:
        self._pool.give_back(self.owner, self.units)


class CountPool:
    """A bounded number of interchangeable units, counted by owner."""

    def __init__(self, name: Resource, total: int) -> None:
        self.name: Final[Resource] = name
        self.total = total
        self._held: Counter[str] = Counter()
        self._held_units = 0

    def reserve(self, owner: str, units: int = 1) -> CountLease:
        """Raises :class:`Exhausted` when fewer than ``units`` are free."""
        self.take(owner, units)
        return CountLease(self, owner, units)

    def take(self, owner: str, units: int = 1) -> None:
        """Count units out to ``owner`` for a lease of another class, which gives them back."""
        if self._held_units + units > self.total:
            raise Exhausted(f"{self.name}: {self.total - self._held_units} of {self.total} free")
        self._held[owner] += units
        self._held_units += units

    def give_back(self, owner: str, units: int) -> None:
        if self._held[owner] < units:
            raise LeaseError(f"{self.name}: {owner} gives back {units}, owns {self._held[owner]}")
        self._held[owner] -= units
        self._held_units -= units
        if not self._held[owner]:
            del self._held[owner]

    @property
    def free(self) -> int:
        return self.total - self._held_units

    def counts(self) -> PoolCounts:
        return PoolCounts(self.total, self.free, 0, self._held_units, 0)

    def owners(self) -> dict[str, int]:
        return dict(self._held)

    def audit(self) -> list[str]:
        if sum(self._held.values()) != self._held_units:
            return [f"{self.name}: books say {self._held_units}, owners {dict(self._held)}"]
        return []


class SlotLease(Lease):
    """One numbered slot."""

    __slots__ = ("_pool", "slot")

    def __init__(self, pool: "SlotPool", owner: str, slot: int) -> None:
        super().__init__(pool.name, owner)
        self._pool = pool
        self.slot: Final = slot

    def _give_back(self, disposition: Disposition | None) -> None:
        self._pool.give_back(self.owner, self.slot)


class SlotPool:
    """Numbered slots ``0 … total-1`` (request rows, metadata slots); the most recently freed goes
    out first."""

    def __init__(self, name: Resource, total: int) -> None:
        self.name: Final[Resource] = name
        self.total: Final = total
        self._free = list(range(total - 1, -1, -1))
        self._owner: dict[int, str] = {}

    def reserve(self, owner: str) -> SlotLease:
        """Raises :class:`Exhausted` when no slot is free."""
        if not self._free:
            raise Exhausted(f"{self.name}: all {self.total} taken")
        slot = self._free.pop()
        self._owner[slot] = owner
        return SlotLease(self, owner, slot)

    def give_back(self, owner: str, slot: int) -> None:
        if self._owner.get(slot) != owner:
            raise LeaseError(f"{self.name}: {owner} gives back {slot} of {self._owner.get(slot)}")
        del self._owner[slot]
        self._free.append(slot)

    @property
    def free(self) -> int:
        return len(self._free)

    def counts(self) -> PoolCounts:
        return PoolCounts(self.total, len(self._free), 0, len(self._owner), 0)

    def owners(self) -> dict[str, int]:
        return dict(Counter(self._owner.values()))

    def audit(self) -> list[str]:
        slots = sorted([*self._free, *self._owner])
        if slots != list(range(self.total)):
            return [f"{self.name}: free and taken slots are {slots}"]
        return []


CACHE: Final = "cache"
"""The owner of pages that the prefix cache keeps."""

QUARANTINE: Final = "quarantine:"
"""Prefix of owners that stand for a peer which may still touch the page."""

PageClass: TypeAlias = Literal["free", "cached", "held", "quarantined"]


class PagePool:
    """KV pages ``0 … total-1``, each with its set of owners; the class of a page follows from
    that set: quarantined if anything in it is a quarantine, else held if anything but the cache,
    else cached, else free.

    Owners are added and removed one page at a time; the class counts are kept incrementally and
    :meth:`audit` recomputes them.
    """

    name: Final[Resource] = "pages"

    def __init__(self, total: int) -> None:
        self.total: Final = total
        self._free = list(range(total - 1, -1, -1))
        self._owners: list[set[str]] = [set() for _ in range(total)]
        self._count: dict[PageClass, int] = {
            "free": total,
            "cached": 0,
            "held": 0,
            "quarantined": 0,
        }

    @property
    def free(self) -> int:
        return self._count["free"]

    @property
    def cached(self) -> int:
        """Pages that only the prefix cache owns: an eviction can free every one of them."""
        return self._count["cached"]

    def owners_of(self, page: int) -> frozenset[str]:
        return frozenset(self._owners[page])

    def class_of(self, page: int) -> PageClass:
        return _class(self._owners[page])

    def take(self, owner: str, count: int) -> list[int]:
        """``count`` free pages for ``owner``. Raises :class:`Exhausted`, and then takes none."""
        if count > len(self._free):
            raise Exhausted(f"pages: {len(self._free)} of {self.total} free, {count} wanted")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            if self._owners[page]:
                raise LeaseError(f"page {page} was free and is owned by {self._owners[page]}")
            self._owners[page].add(owner)
        kind: PageClass = _class({owner})
        self._count["free"] -= count
        self._count[kind] += count
        return taken

    def share(self, page: int, owner: str) -> None:
        """``owner`` becomes one more owner of a page that somebody owns."""
        owners = self._owners[page]
        if not owners:
            raise LeaseError(f"page {page} is free and cannot be shared with {owner}")
        if owner in owners:
            raise LeaseError(f"page {page} is already owned by {owner}")
        before = _class(owners)
        owners.add(owner)
        self._moved(before, _class(owners))

    def drop(self, page: int, owner: str) -> bool:
        """``owner`` gives up a page; the last one frees it. Returns whether it is free now."""
        owners = self._owners[page]
        if owner not in owners:
            raise LeaseError(f"page {page} is not owned by {owner} but by {sorted(owners)}")
        before = _class(owners)
        owners.remove(owner)
        if not owners:
            self._free.append(page)
        self._moved(before, _class(owners))
        return not owners

    def _moved(self, before: PageClass, after: PageClass) -> None:
        if before != after:
            self._count[before] -= 1
            self._count[after] += 1

    def counts(self) -> PoolCounts:
        count = self._count
        return PoolCounts(
            self.total, count["free"], count["cached"], count["held"], count["quarantined"]
        )

    def owners(self) -> dict[str, int]:
        return dict(Counter(owner for owners in self._owners for owner in owners))

    def pages_of(self, owner: str) -> list[int]:
        """For audits: walks the whole pool."""
        return [page for page, owners in enumerate(self._owners) if owner in owners]

    def audit(self) -> list[str]:
        faults = []
        real = Counter(_class(owners) for owners in self._owners)
        for kind, count in self._count.items():
            if real[kind] != count:
                faults.append(f"pages: books say {count} {kind}, owners say {real[kind]}")
        free = {page for page, owners in enumerate(self._owners) if not owners}
        if free != set(self._free) or len(free) != len(self._free):
            faults.append("pages: the free list differs from the pages without owners")
        return faults


def _class(owners: set[str]) -> PageClass:
    if not owners:
        return "free"
    for owner in owners:  # no generator: this runs for every page that changes hands
        if owner.startswith(QUARANTINE):
            return "quarantined"
    return "cached" if len(owners) == 1 and CACHE in owners else "held"


class Ledger:
    """Every pool of a node, and the questions one asks of all of them."""

    def __init__(self, pools: Iterable[Pool] = ()) -> None:
        self._pools: dict[str, Pool] = {pool.name: pool for pool in pools}

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def add(self, pool: Pool) -> None:
        if pool.name in self._pools:
            raise LeaseError(f"two pools are named {pool.name}")
        self._pools[pool.name] = pool

    @property
    def at_rest(self) -> bool:
        return all(pool.counts().at_rest for pool in self)

    def conserved(self) -> bool:
        """Invariant 1, cheap enough for production."""
        return all(pool.counts().conserved for pool in self)

    def audit(self) -> list[str]:
        """Every pool recomputes its books; empty when all are right."""
        faults = [fault for pool in self for fault in pool.audit()]
        faults += [
            f"{pool.name}: {pool.counts().as_dict()} do not add up"
            for pool in self
            if not pool.counts().conserved
        ]
        return faults

    def snapshot(self, owners: bool = True) -> dict[str, dict[str, object]]:
        """For ``/ledger``: the four classes of each pool and, with ``owners``, the units by
        owner."""
        out: dict[str, dict[str, object]] = {}
        for pool in self:
            row: dict[str, object] = dict(pool.counts().as_dict())
            if owners:
                row["owners"] = pool.owners()
            out[pool.name] = row
        return out


LeaseObserver: TypeAlias = Callable[[str, str, int], None]
"""Called with (what, owner, units) for grow, cache, evict, quarantine and release of pages."""
