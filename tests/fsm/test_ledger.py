"""Leases live once, pools conserve their units, and an audit notices books that are wrong.

Method: each rule by a small story; page classes by the set of owners that decides them; then random
stories against counts kept by hand."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm.ledger import (
    CACHE,
    CountPool,
    Exhausted,
    Lease,
    LeaseError,
    Ledger,
    PagePool,
    Pool,
    PoolCounts,
    SlotPool,
)
from tests.support.examples import examples

Reserve = Callable[[], tuple[Any, Callable[[str], Lease]]]


def count_pool() -> tuple[CountPool, Callable[[str], Lease]]:
    pool = CountPool("spans", 3)
    return pool, pool.reserve


def slot_pool() -> tuple[SlotPool, Callable[[str], Lease]]:
    pool = SlotPool("rows", 3)
    return pool, pool.reserve


both_pools = pytest.mark.parametrize("make", [count_pool, slot_pool], ids=["count", "slot"])


# --- the life of a lease --------------------------------------------------------------------------


@both_pools
def test_a_lease_is_reserved_then_held_then_released(make: Reserve) -> None:
    pool, reserve = make()
    lease = reserve("a")
    assert (lease.stage, pool.counts().held, pool.owners()) == ("reserved", 1, {"a": 1})
    lease.adopt()
    assert (lease.stage, pool.counts().held) == ("held", 1)
    lease.release()
    assert (lease.stage, pool.counts().held, pool.owners()) == ("released", 0, {})


@both_pools
def test_a_reservation_that_no_move_adopted_is_cancelled(make: Reserve) -> None:
    pool, reserve = make()
    reserve("a").cancel()
    assert pool.counts().free == 3


@both_pools
@pytest.mark.parametrize(
    ("done", "wrong"),
    [
        ((), "release"),
        (("adopt",), "adopt"),
        (("adopt",), "cancel"),
        (("cancel",), "cancel"),
        (("cancel",), "adopt"),
        (("cancel",), "release"),
        (("adopt", "release"), "release"),
        (("adopt", "release"), "adopt"),
        (("adopt", "release"), "cancel"),
    ],
)
def test_every_other_step_of_a_life_is_refused_and_moves_no_unit(
    make: Reserve, done: tuple[str, ...], wrong: str
) -> None:
    """Double release, release of what is not held, adoption of what was given back, …"""
    pool, reserve = make()
    lease = reserve("a")
    steps = {"adopt": lease.adopt, "release": lease.release, "cancel": lease.cancel}
    for step in done:
        steps[step]()
    before = pool.counts().as_dict(), pool.owners(), lease.stage
    with pytest.raises(LeaseError, match="of a"):
        steps[wrong]()
    assert (pool.counts().as_dict(), pool.owners(), lease.stage) == before
    assert pool.audit() == []


def test_a_bare_lease_has_nothing_to_give_back() -> None:
    lease = Lease("rows", "a")
    lease.adopt()
    with pytest.raises(LeaseError, match="bare lease"):
        lease.release()


# --- pools ----------------------------------------------------------------------------------------


@both_pools
def test_an_exhausted_pool_refuses_and_changes_nothing(make: Reserve) -> None:
    pool, reserve = make()
    for owner in "abc":
        reserve(owner)
    before = pool.counts().as_dict(), pool.owners()
    with pytest.raises(Exhausted):
        reserve("d")
    assert (pool.counts().as_dict(), pool.owners()) == before


def test_units_are_counted_by_owner() -> None:
    pool = CountPool("group_members", 8)
    pool.take("a", 3)
    pool.take("b", 2)
    pool.take("a")
    assert pool.owners() == {"a": 4, "b": 2}
    pool.give_back("a", 4)
    assert (pool.owners(), pool.free) == ({"b": 2}, 6)


def test_nobody_gives_back_what_he_does_not_own() -> None:
    """Foreign release, and more than was taken: refused before anything changes."""
    pool = CountPool("spans", 8)
    pool.take("a", 2)
    for owner, units in (("b", 1), ("a", 3)):
        with pytest.raises(LeaseError, match="gives back"):
            pool.give_back(owner, units)
    assert (pool.owners(), pool.audit()) == ({"a": 2}, [])

    slots = SlotPool("rows", 2)
    slot = slots.reserve("a").slot
    for owner, number in (("b", slot), ("a", 1 - slot), ("a", 9)):
        with pytest.raises(LeaseError, match="gives back"):
            slots.give_back(owner, number)
    assert (slots.owners(), slots.audit()) == ({"a": 1}, [])


def test_the_slot_that_was_freed_last_goes_out_first() -> None:
    slots = SlotPool("rows", 4)
    leases = [slots.reserve("a") for _ in range(3)]
    assert [lease.slot for lease in leases] == [0, 1, 2]
    leases[1].adopt()
    leases[1].release()
    assert slots.reserve("b").slot == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3), st.booleans()), max_size=30))
@examples(40)
def test_a_count_pool_agrees_with_counts_kept_by_hand(moves: list[tuple[str, int, bool]]) -> None:
    pool, by_hand = CountPool("spans", 6), dict.fromkeys("abc", 0)
    for owner, units, take in moves:
        if take and sum(by_hand.values()) + units <= 6:
            pool.take(owner, units)
            by_hand[owner] += units
        elif take:
            with pytest.raises(Exhausted):
                pool.take(owner, units)
        elif by_hand[owner] >= units:
            pool.give_back(owner, units)
            by_hand[owner] -= units
        else:
            with pytest.raises(LeaseError):
                pool.give_back(owner, units)
        assert pool.owners() == {owner: count for owner, count in by_hand.items() if count}
        assert pool.counts().conserved
        assert pool.audit() == []


# --- pages ----------------------------------------------------------------------------------------

OWNERS = ("a", "b", CACHE, "quarantine:peer")


@pytest.mark.parametrize("chosen", list(product([False, True], repeat=4)))
def test_the_class_of_a_page_follows_from_its_set_of_owners(chosen: tuple[bool, ...]) -> None:
    """All 16 sets of two requests, the cache and a quarantine, in every order of arrival."""
    owners = [owner for owner, yes in zip(OWNERS, chosen, strict=True) if yes]
    a, b, cache, quarantine = chosen
    wanted = "quarantined" if quarantine else "held" if a or b else "cached" if cache else "free"
    for turn in range(max(1, len(owners))):
        pool = PagePool(2)
        arrivals = owners[turn:] + owners[:turn]
        page = pool.take(arrivals[0], 1)[0] if arrivals else 0
        for owner in arrivals[1:]:
            pool.share(page, owner)
        assert pool.class_of(page) == wanted
        counts = pool.counts().as_dict()
        other = int(wanted == "free")
        assert counts[wanted] == 1 + other
        assert pool.audit() == []
        for owner in owners:
            assert pool.drop(page, owner) == (owner == owners[-1])
            assert pool.audit() == []
        assert pool.free == 2


def test_a_page_that_a_peer_may_still_write_is_not_given_out() -> None:
    """Its request is gone and only the quarantine owns it: neither free nor cached nor held."""
    pool = PagePool(1)
    page = pool.take("a", 1)[0]
    pool.share(page, "quarantine:peer")
    pool.drop(page, "a")
    counts = pool.counts()
    assert (counts.quarantined, counts.at_rest, pool.free) == (1, False, 0)
    with pytest.raises(Exhausted):
        pool.take("b", 1)
    assert pool.drop(page, "quarantine:peer")
    assert pool.counts().at_rest


def test_too_few_pages_means_none() -> None:
    pool = PagePool(4)
    pool.take("a", 3)
    with pytest.raises(Exhausted, match="1 of 4 free"):
        pool.take("b", 2)
    assert pool.owners() == {"a": 3}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pool: pool.share(0, "b"),  # free
        lambda pool: pool.share(3, "a"),  # its own already
        lambda pool: pool.drop(3, "b"),  # somebody else's
        lambda pool: pool.drop(0, "a"),  # nobody's
    ],
    ids=["share a free page", "share twice", "drop a foreign page", "drop a free page"],
)
def test_misuse_of_a_page_is_refused_and_changes_nothing(wrong: Callable[[PagePool], None]) -> None:
    pool = PagePool(4)
    pool._free = [0, 1, 2, 3]
    assert pool.take("a", 1) == [3]
    with pytest.raises(LeaseError, match="page"):
        wrong(pool)
    assert (pool.owners(), pool.free, pool.audit()) == ({"a": 1}, 3, [])


def test_a_double_drop_is_noticed() -> None:
    pool = PagePool(2)
    page = pool.take("a", 1)[0]
    pool.drop(page, "a")
    with pytest.raises(LeaseError, match="not owned by a"):
        pool.drop(page, "a")


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "drop"]), st.integers(0, 5), st.integers(0, 3)),
        max_size=40,
    )
)
@examples(60)
def test_a_page_pool_agrees_with_sets_kept_by_hand(moves: list[tuple[str, int, int]]) -> None:
    """Random takes, shares and drops: owners, classes and conservation after each."""
    pool = PagePool(6)
    by_hand: list[set[str]] = [set() for _ in range(6)]
    for kind, number, who in moves:
        owner = OWNERS[who]
        if kind == "take":
            free = sum(not owners for owners in by_hand)
            if number > free:
                with pytest.raises(Exhausted):
                    pool.take(owner, number)
            else:
                for page in pool.take(owner, number):
                    assert not by_hand[page]
                    by_hand[page].add(owner)
        elif kind == "share" and by_hand[number] and owner not in by_hand[number]:
            pool.share(number, owner)
            by_hand[number].add(owner)
        elif kind == "drop" and owner in by_hand[number]:
            pool.drop(number, owner)
            by_hand[number].remove(owner)
        else:
            with pytest.raises(LeaseError):
                (pool.share if kind == "share" else pool.drop)(number, owner)
        assert [pool.owners_of(page) for page in range(6)] == by_hand
        assert pool.counts().conserved
        assert pool.audit() == []
    assert all(pool.pages_of(o) == [p for p in range(6) if o in by_hand[p]] for o in OWNERS)


# --- the audits and the ledger --------------------------------------------------------------------


def corrupt_count(pool: CountPool) -> None:
    pool._held_units += 1


def corrupt_owner(pool: CountPool) -> None:
    pool._held["ghost"] += 1


def corrupt_slot(pool: SlotPool) -> None:
    pool._free.append(pool._free[0])


def lose_slot(pool: SlotPool) -> None:
    pool._free.pop()


def corrupt_class(pool: PagePool) -> None:
    pool._count["held"] += 1


def lose_page(pool: PagePool) -> None:
    pool._free.pop()


def free_a_held_page(pool: PagePool) -> None:
    pool._free.append(pool.pages_of("a")[0])


def forget_an_owner(pool: PagePool) -> None:
    pool._owners[pool.pages_of("a")[0]].clear()


@pytest.mark.parametrize(
    ("pool", "corrupt"),
    [
        (CountPool("spans", 4), corrupt_count),
        (CountPool("spans", 4), corrupt_owner),
        (SlotPool("rows", 4), corrupt_slot),
        (SlotPool("rows", 4), lose_slot),
        (PagePool(4), corrupt_class),
        (PagePool(4), lose_page),
        (PagePool(4), free_a_held_page),
        (PagePool(4), forget_an_owner),
    ],
    ids=lambda value: value.__name__ if callable(value) else value.name,
)
def test_an_audit_detects_corrupted_books(pool: Any, corrupt: Callable[[Any], None]) -> None:
    if isinstance(pool, PagePool):
        pool.take("a", 1)
    else:
        pool.reserve("a")
    ledger = Ledger([pool])
    assert ledger.audit() == []
    corrupt(pool)
    assert any(pool.name in fault for fault in ledger.audit())


def test_a_free_page_with_an_owner_is_never_handed_out() -> None:
    pool = PagePool(1)
    pool._owners[0].add("ghost")
    with pytest.raises(LeaseError, match="was free and is owned"):
        pool.take("a", 1)


def test_conservation_is_checked_over_all_pools() -> None:
    class Leaky(CountPool):
        def counts(self) -> PoolCounts:
            return PoolCounts(self.total, self.free - 1, 0, 0, 0)

    ledger = Ledger([CountPool("spans", 2)])
    assert ledger.conserved()
    ledger.add(Leaky("rows", 2))
    assert not ledger.conserved()
    assert any("do not add up" in fault for fault in ledger.audit())


def test_a_ledger_is_at_rest_when_nothing_is_held_or_quarantined() -> None:
    spans, pages = CountPool("spans", 2), PagePool(4)
    ledger = Ledger([spans, pages])
    pages.take(CACHE, 2)
    assert ledger.at_rest, "what only the cache keeps is at rest"
    lease = spans.reserve("a")
    assert not ledger.at_rest
    lease.cancel()
    assert ledger.at_rest
    pages.take("quarantine:peer", 1)
    assert not ledger.at_rest


def test_a_ledger_shows_its_pools_by_name_with_owners() -> None:
    spans: Pool = CountPool("spans", 2)
    ledger = Ledger([spans])
    assert ledger["spans"] is spans
    with pytest.raises(LeaseError, match="two pools"):
        ledger.add(CountPool("spans", 1))
    assert isinstance(spans, CountPool)
    spans.take("a")
    row = {"total": 2, "free": 1, "cached": 0, "held": 1, "quarantined": 0}
    assert ledger.snapshot(owners=False) == {"spans": row}
    assert ledger.snapshot() == {"spans": {**row, "owners": {"a": 1}}}
