"""Block tables and prefix locks: what a request is given, grows by, shares and gives back."""

import pytest

from engine.pages import Kv, Pages, PrefixLock
from fsm.ledger import CACHE, Exhausted, LeaseError
from tests.support.requests import request

SIZE = 4


def kv_of(pages: int = 8, locks: int = 8, prefix_cache: bool = True) -> Kv:
    return Kv(pages, SIZE, locks, prefix_cache)


def hold(kv: Kv, life: str, prompt: list[int], headroom: int = 0) -> tuple[Pages, PrefixLock]:
    """Reserve and adopt, as an admission does."""
    pages, lock = kv.reserve(request(life, prompt), headroom)
    pages.adopt()
    lock.adopt()
    return pages, lock


def finish(kv: Kv, pages: Pages, lock: PrefixLock, committed: int | None = None) -> None:
    """Leave for the cache, as quiesce does."""
    pages.request.committed = len(pages.request.tokens) if committed is None else committed
    lock.release()
    pages.release("cache")


def state(kv: Kv) -> object:
    """Everything that a failed reservation must leave alone."""
    return kv.pool.counts().as_dict(), kv.pool.owners(), kv.locks.owners(), kv.cache.pages


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_positions_fill_whole_pages(tokens: int, pages: int) -> None:
    assert kv_of().pages_for(tokens) == pages


def test_a_reservation_is_the_whole_prompt() -> None:
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    assert (len(pages.table), pages.shared, pages.capacity) == (3, 0, 12)
    assert lock.node is kv.cache.root
    assert kv.pool.owners() == {"a": 3}
    finish(kv, pages, lock)
    assert kv.pool.counts().as_dict() == {
        "total": 8,
        "free": 6,
        "cached": 2,
        "held": 0,
        "quarantined": 0,
    }


def test_a_prefix_is_shared_and_one_token_is_always_left_to_compute() -> None:
    """The whole prompt is cached; its last page is computed again, because logits are wanted."""
    kv = kv_of()
    finish(kv, *hold(kv, "a", list(range(8))))
    pages, lock = hold(kv, "b", list(range(8)))
    assert (pages.shared, len(pages.table)) == (1, 2)
    assert kv.pool.owners_of(pages.table[0]) == {CACHE, "b"}
    assert kv.pool.owners_of(pages.table[1]) == {"b"}
    assert lock.node.page == pages.table[0]
    assert kv.cost(request("c", range(8))) == (1, 4), "the shared page costs nothing: it is held"
    finish(kv, pages, lock)
    assert kv.cache.pages == 2, "the second copy was not kept"


@pytest.mark.parametrize("committed", range(10))
def test_only_full_pages_of_committed_tokens_are_cached(committed: int) -> None:
    """B23: a page counts when its last token is computed, not before."""
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    finish(kv, pages, lock, committed)
    assert kv.cache.pages == committed // SIZE
    assert kv.pool.free == 8 - committed // SIZE
    assert kv.audit() == []


def test_tokens_cut_off_by_a_stop_string_are_not_cached() -> None:
    """More is committed than the text has left."""
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    del pages.request.tokens[6:]
    finish(kv, pages, lock, committed=9)
    assert kv.cache.pages == 1


@pytest.mark.parametrize("disposition", ["discard", "backup", None])
def test_other_dispositions_free_the_pages(disposition: str | None) -> None:
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    pages.request.committed = 9
    lock.release()
    pages.release(disposition)  # type: ignore[arg-type]
    assert (kv.pool.free, kv.cache.pages) == (8, 0)


def test_a_reservation_that_fails_changes_nothing() -> None:
    """Invariant 7: too few pages, and too few locks."""
    kv = kv_of(pages=4)
    hold(kv, "a", list(range(9)))
    before = state(kv)
    with pytest.raises(Exhausted, match="pages"):
        kv.reserve(request("b", range(5)))
    with pytest.raises(Exhausted, match=r"1\+1 wanted"):
        kv.reserve(request("b", range(3)), headroom=1)
    assert state(kv) == before
    kv = kv_of(locks=1)
    hold(kv, "a", [1])
    before = state(kv)
    with pytest.raises(Exhausted, match="prefix_locks"):
        kv.reserve(request("b", [2]))
    assert state(kv) == before


def test_a_reservation_evicts_what_is_cached_but_not_what_it_shares() -> None:
    """B26: the matched pages are the oldest of the cache, and stay."""
    kv = kv_of(pages=5)
    finish(kv, *hold(kv, "a", list(range(8))))
    finish(kv, *hold(kv, "x", list(range(50, 58))))
    pages, lock = hold(kv, "b", [0, 1, 2, 3, 4, 5, 6, 7, *range(60, 70)])
    assert (pages.shared, len(pages.table), len(set(pages.table))) == (2, 5, 5)
    assert kv.cache.pages == 2
    assert kv.pool.audit() + kv.audit() == []
    finish(kv, pages, lock)


def test_matched_pages_that_only_the_cache_owns_cost_as_much_as_free_ones() -> None:
    """In use they cannot be evicted, so they must not be counted twice."""
    kv = kv_of(pages=4)
    finish(kv, *hold(kv, "a", list(range(8))))
    hold(kv, "x", [9])
    assert kv.available == 3
    assert kv.cost(request("b", range(16))) == (4, 8)
    before = state(kv)
    with pytest.raises(Exhausted):
        kv.reserve(request("b", range(16)))
    assert state(kv) == before


def test_growing_fails_without_a_trace() -> None:
    kv = kv_of(pages=4)
    pages, _ = hold(kv, "a", list(range(9)))
    assert pages.extend(1)
    assert (len(pages.table), pages.units) == (4, 4)
    before = state(kv)
    assert not pages.extend(1)
    assert state(kv) == before
    assert len(pages.table) == 4


def test_growing_evicts() -> None:
    kv = kv_of(pages=4)
    finish(kv, *hold(kv, "x", list(range(50, 58))))
    pages, _ = hold(kv, "a", list(range(5)))
    assert kv.pool.free == 0
    assert pages.extend(2)
    assert kv.cache.pages == 0


def test_a_committed_prompt_is_shared_while_its_request_goes_on() -> None:
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    pages.request.committed = 9
    kv.cache_prompt(pages.request, pages, lock)
    assert lock.node.page == pages.table[1]
    assert [kv.pool.class_of(page) for page in pages.table] == ["held"] * 3
    other, other_lock = hold(kv, "b", list(range(9)))
    assert list(other.table[:2]) == list(pages.table[:2])
    assert other.table[2] != pages.table[2]
    finish(kv, pages, lock)
    finish(kv, other, other_lock)
    assert (kv.pool.counts().held, kv.cache.pages, kv.locks.free) == (0, 2, 8)


def test_two_who_computed_the_same_text_keep_their_own_copies() -> None:
    """Swapping them under a launched step would be a use after free."""
    kv = kv_of()
    a, a_lock = hold(kv, "a", list(range(9)))
    b, b_lock = hold(kv, "b", list(range(9)))
    for pages, lock in ((a, a_lock), (b, b_lock)):
        pages.request.committed = 9
        kv.cache_prompt(pages.request, pages, lock)
    assert set(a.table).isdisjoint(b.table)
    assert b_lock.node is kv.cache.root
    assert kv.audit() == []
    finish(kv, b, b_lock)
    finish(kv, a, a_lock)
    assert kv.pool.free + kv.cache.pages == 8


def test_what_giving_back_would_make_available() -> None:
    """Pages of others do not count, pages that only the cache shares do."""
    kv = kv_of()
    finish(kv, *hold(kv, "x", list(range(8))))
    a, _ = hold(kv, "a", [*range(8), 20])
    assert kv.exclusive(a) == 3
    hold(kv, "b", [*range(8), 30])
    assert kv.exclusive(a) == 1


def test_a_pin_keeps_pages_after_their_request_is_gone() -> None:
    """B104's cousin on the way out: a copy to the store reads them until it is over."""
    kv = kv_of()
    pages, lock = hold(kv, "a", list(range(9)))
    pages.request.committed = 9
    kv.cache_prompt(pages.request, pages, lock)
    table = pages.table[:2]
    pin = kv.pin("store:1", lock.node, table)
    assert pin is not None
    finish(kv, pages, lock)
    assert kv.cache.flush() == 0
    assert kv.pool.counts().held == 2
    assert kv.audit() == []
    pin.release()
    for page in table:
        kv.pool.drop(page, "store:1")
    assert kv.cache.flush() == 2
    assert kv_of(locks=0).pin("store:1", kv.cache.root, table[:0]) is None


def test_taking_for_the_store_is_all_or_nothing() -> None:
    kv = kv_of(pages=4)
    hold(kv, "a", list(range(9)))
    assert kv.take("store:1", 2) is None
    assert kv.pool.free == 1
    taken = kv.take("store:1", 1)
    assert taken is not None
    assert kv.pool.owners()["store:1"] == 1


def test_pages_are_given_back_once() -> None:
    kv = kv_of()
    pages, lock = hold(kv, "a", [1])
    finish(kv, pages, lock)
    with pytest.raises(LeaseError):
        pages.release("cache")
    with pytest.raises(LeaseError):
        lock.release()


def test_every_change_of_hands_outside_a_move_is_told() -> None:
    seen: list[tuple[str, str, int]] = []
    kv = Kv(4, SIZE, 4, True, lambda what, owner, units: seen.append((what, owner, units)))
    finish(kv, *hold(kv, "x", list(range(50, 58))))
    pages, lock = hold(kv, "a", list(range(9)))
    pages.extend(1)
    finish(kv, pages, lock)
    assert seen == [
        ("cache", "x", 2),
        ("release", "x", 2),
        ("evict", "cache", 1),
        ("evict", "cache", 1),
        ("grow", "a", 1),
        ("cache", "a", 2),
        ("release", "a", 4),
    ]
