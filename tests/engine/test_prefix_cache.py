"""The prefix cache against a dictionary of texts, and the faults it must refuse.

Method: a rule-based machine does what requests, stores and pressure do, and keeps a model by hand:
which page holds which text, who owns and who locks what, and when each text was last used. After
every rule the pool conserves its pages, the cache's own audit is clean, and the tree equals the
model."""

from array import array
from typing import Any

import pytest
from hypothesis import settings as Settings  # noqa: N812 - it is a class
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.prefix_cache import PrefixCache
from fsm.ledger import CACHE, LeaseError, PagePool
from tests.support.examples import examples

Text = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 1), max_size=8)


class Holder:
    """A request of the model: its text, its pages, and the text of the node it locks."""

    def __init__(self, name: str, text: list[int], pages: list[int], locked: Text) -> None:
        self.name, self.text, self.pages, self.locked = name, text, pages, locked


class CacheMachine(RuleBasedStateMachine):
    """Texts are whole pages of tokens 0 and 1, so that they collide all the time."""

    @initialize(total=st.integers(2, 10), size=st.integers(1, 2))
    def start(self, total: int, size: int) -> None:
        self.size = size
        self.pool = PagePool(total)
        self.evicted: list[int] = []
        self.cache = PrefixCache(self.pool, size, observer=lambda _, n: self.evicted.append(n))
        self.model: dict[Text, int] = {}
        self.used: dict[Text, int] = {}
        self.holders: list[Holder] = []
        self.clock = 0
        self.names = 0

    def texts(self, tokens: list[int], count: int) -> list[Text]:
        return [tuple(tokens[: (i + 1) * self.size]) for i in range(count)]

    def touch(self, text: Text) -> None:
        self.clock += 1
        self.used[text] = self.clock

    def matched(self, tokens: list[int], limit: int) -> list[Text]:
        out = []
        for text in self.texts(tokens, min(limit, len(tokens)) // self.size):
            if text not in self.model:
                break
            out.append(text)
        return out

    def locked(self, text: Text) -> bool:
        return any(holder.locked[: len(text)] == text for holder in self.holders)

    def evictable(self) -> set[Text]:
        return {text for text in self.model if not self.locked(text)}

    @rule(tokens=TOKENS, limit=st.integers(0, 8))
    def match(self, tokens: list[int], limit: int) -> None:
        node, pages = self.cache.match(tokens, limit)
        found = self.matched(tokens, limit)
        for text in found:
            self.touch(text)
        assert list(pages) == [self.model[text] for text in found]
        assert node.page == (pages[-1] if pages else -1)

    @rule(tokens=TOKENS)
    def arrive(self, tokens: list[int]) -> None:
        """A request matches, locks what it found, shares it, and takes the rest if it is there."""
        node, shared = self.cache.match(tokens, len(tokens))
        found = self.matched(tokens, len(tokens))
        for text in found:
            self.touch(text)
        wanted = -(-len(tokens) // self.size) - len(shared)
        self.names += 1
        name = f"r{self.names}"
        self.cache.lock(node, name)
        if wanted > self.pool.free:
            self.cache.unlock(node, name)
            return
        for page in shared:
            self.pool.share(page, name)
        pages = [*shared, *self.pool.take(name, wanted)]
        self.holders.append(Holder(name, tokens, pages, found[-1] if found else ()))

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def keep(self, tokens: list[int]) -> None:
        """Somebody came and went: a load from the store, or a request that ended long ago."""
        full = len(tokens) // self.size
        if full > self.pool.free:
            return
        pages = self.pool.take("store:1", full)
        new = 0
        for text, page in zip(self.texts(tokens, full), pages, strict=True):
            new += text not in self.model
            self.model.setdefault(text, page)
            self.touch(text)
        assert self.cache.insert(tokens, pages, full) == new
        for page in pages:
            self.pool.drop(page, "store:1")

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def insert_own(self, data: Any) -> None:
        """A request that goes on offers its full pages, and locks as deep as its own copies go."""
        holder = data.draw(st.sampled_from(self.holders), label="holder")
        full = len(holder.text) // self.size
        node, new = self.cache.insert_own(holder.text, holder.pages, full)
        added, deepest = 0, ()
        for text, page in zip(self.texts(holder.text, full), holder.pages, strict=False):
            if text not in self.model:
                self.model[text] = page
                self.touch(text)
                added += 1
            elif self.model[text] != page:
                break
            deepest = text
        assert new == added
        assert node.page == (self.model[deepest] if deepest else -1)
        if deepest != holder.locked:
            old = self.node_of(holder.locked)
            self.cache.lock(node, holder.name)
            self.cache.unlock(old, holder.name)
            holder.locked = deepest

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.booleans())
    def leave(self, data: Any, keep: bool) -> None:
        """A request ends: its lock goes, then its full pages go to the cache, then its claim."""
        holder = data.draw(st.sampled_from(self.holders), label="holder")
        self.holders.remove(holder)
        self.cache.unlock(self.node_of(holder.locked), holder.name)
        full = len(holder.text) // self.size
        if keep:
            new = self.cache.insert(holder.text, holder.pages, full)
            added = 0
            for text, page in zip(self.texts(holder.text, full), holder.pages, strict=False):
                added += text not in self.model
                self.model.setdefault(text, page)
                self.touch(text)
            assert new == added
        for page in holder.pages:
            self.pool.drop(page, holder.name)

    @rule(count=st.integers(-1, 4))
    def evict(self, count: int) -> None:
        """Least recently used leaves first, never one that somebody's lock keeps."""
        expected = []
        for _ in range(max(0, count)):
            leaves = [
                text
                for text in self.evictable()
                if not any(other != text and other[: len(text)] == text for other in self.model)
            ]
            if not leaves:
                break
            oldest = min(leaves, key=self.used.__getitem__)
            expected.append(oldest)
            del self.model[oldest]
        before = self.cache.evictions
        assert self.cache.evict(count) == len(expected)
        assert self.cache.evictions == before + len(expected)

    @rule()
    def flush(self) -> None:
        """Drops everything that nobody locks, and exactly what the pool calls cached."""
        cached = self.pool.cached
        assert self.cache.flush() == len(self.evictable()) >= cached
        self.model = {text: page for text, page in self.model.items() if self.locked(text)}
        assert self.pool.cached == 0

    def node_of(self, text: Text) -> Any:
        node = self.cache.root
        for start in range(0, len(text), self.size):
            node = node.children[text[start : start + self.size]]
        return node

    @invariant()
    def books_are_right(self) -> None:
        assert self.pool.audit() == []
        assert self.cache.audit() == []
        assert self.pool.counts().conserved
        assert self.cache.pages == len(self.model)

    @invariant()
    def the_tree_is_the_model(self) -> None:
        assert {text: self.node_of(text).page for text in self.model} == self.model
        assert set(self.pool.pages_of(CACHE)) == set(self.model.values())
        assert sum(self.evicted) == self.cache.evictions

    @invariant()
    def cached_means_evictable(self) -> None:
        """What only the cache owns is exactly what nobody's lock keeps."""
        only = {p for p in self.pool.pages_of(CACHE) if self.pool.class_of(p) == "cached"}
        assert only <= {self.model[text] for text in self.evictable()}

    def teardown(self) -> None:
        for holder in list(self.holders):
            self.cache.unlock(self.node_of(holder.locked), holder.name)
            for page in holder.pages:
                self.pool.drop(page, holder.name)
        self.cache.flush()
        assert self.pool.free == self.pool.total


def run_machine(settings: Settings) -> None:
    """Run the machine; ``tests/engine/test_planted.py`` runs it with bugs planted."""
    run_state_machine_as_test(CacheMachine, settings=settings)  # type: ignore[no-untyped-call]


def test_the_cache_equals_a_dictionary_of_texts() -> None:
    run_machine(examples(150))


# --- the rules one by one -------------------------------------------------------------------------


def cache_of(*texts: list[int], total: int = 8, size: int = 2) -> tuple[PagePool, PrefixCache]:
    """A cache that keeps ``texts``, oldest first, and nothing else is owned."""
    pool = PagePool(total)
    cache = PrefixCache(pool, size)
    for number, text in enumerate(texts):
        pages = pool.take(f"r{number}", len(text) // size)
        cache.insert(text, pages, len(pages))
        for page in pages:
            pool.drop(page, f"r{number}")
    return pool, cache


def test_a_match_is_whole_pages_within_its_limit() -> None:
    _, cache = cache_of([1, 2, 3, 4, 5, 6])
    for tokens, limit, pages in (
        ([1, 2, 3, 4, 5, 6], 6, 3),
        ([1, 2, 3, 4, 5, 6], 5, 2),
        ([1, 2, 3, 4, 9, 9], 6, 2),
        ([1, 2, 3], 3, 1),
        ([1], 1, 0),
        ([2, 1], 2, 0),
        ([1, 2], 0, 0),
        ([1, 2], -1, 0),
    ):
        assert len(cache.match(tokens, limit)[1]) == pages, (tokens, limit)


def test_a_text_that_is_there_keeps_its_page_and_the_callers_is_not_kept() -> None:
    pool, cache = cache_of([1, 2])
    copy = pool.take("r", 1)
    assert cache.insert([1, 2], copy, 1) == 0
    assert pool.owners_of(copy[0]) == {"r"}
    node, new = cache.insert_own([1, 2], copy, 1)
    assert (node, new) == (cache.root, 0), "a request may lock only what it owns"


def test_a_lock_protects_the_node_itself_and_everything_above_it() -> None:
    """B26: with a lock that began at the parent, the page in use would be evicted."""
    pool, cache = cache_of([1, 2, 3, 4])
    node, pages = cache.match([1, 2, 3, 4], 4)
    cache.lock(node, "r")
    for page in pages:
        pool.share(page, "r")
    assert cache.evict(8) == 0
    cache.unlock(node, "r")
    for page in pages:
        pool.drop(page, "r")
    assert cache.evict(8) == 2
    assert pool.free == pool.total


def test_the_least_recently_used_leaf_goes_first() -> None:
    _, cache = cache_of([1, 1], [2, 2], [3, 3])
    cache.match([1, 1], 2)
    assert cache.evict(1) == 1
    assert [len(cache.match([t, t], 2)[1]) for t in (1, 2, 3)] == [1, 0, 1]


def test_a_parent_goes_after_its_children() -> None:
    _, cache = cache_of([1, 1, 2, 2])
    cache.match([1, 1], 2)
    assert cache.evict(1) == 1
    assert len(cache.match([1, 1, 2, 2], 4)[1]) == 1
    assert cache.evict(1) == 1
    assert cache.pages == 0


def test_locks_are_sets_of_owners() -> None:
    _, cache = cache_of([1, 2])
    node, _ = cache.match([1, 2], 2)
    cache.lock(node, "a")
    with pytest.raises(LeaseError, match="twice"):
        cache.lock(node, "a")
    cache.lock(node, "b")
    cache.unlock(node, "a")
    with pytest.raises(LeaseError, match="has not locked"):
        cache.unlock(node, "a")
    assert node.lockers == {"b"}


def test_a_page_that_is_not_full_cannot_be_inserted() -> None:
    pool, cache = cache_of()
    with pytest.raises(LeaseError, match="not full"):
        cache.insert([1, 2, 3], pool.take("r", 2), 2)


def test_a_cache_that_is_off_finds_and_keeps_nothing() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool, 2, enabled=False)
    pages = pool.take("r", 2)
    assert cache.insert([1, 2, 3, 4], pages, 2) == 0
    assert cache.insert_own([1, 2, 3, 4], pages, 2) == (cache.root, 0)
    assert cache.match([1, 2, 3, 4], 4) == (cache.root, array("q"))
    assert (cache.evict(4), cache.pages, cache.audit()) == (0, 0, [])


def test_the_list_of_leaves_stays_linear_however_often_they_are_touched() -> None:
    pool, cache = cache_of([1, 1], [2, 2], total=2)
    for number in range(1000):
        cache.match([1 + number % 2] * 2, 2)
    assert len(cache._idle) <= 4 * pool.total + 64
    assert cache.flush() == 2


def test_the_audit_notices_a_tree_that_differs_from_the_pool() -> None:
    pool, cache = cache_of([1, 2, 3, 4])
    node, _ = cache.match([1, 2, 3, 4], 4)
    pool.drop(node.page, CACHE)
    assert any("outside the tree" in fault for fault in cache.audit())


def test_the_audit_notices_a_lock_without_ownership_also_further_up() -> None:
    """A locked page that counts as evictable would be promised to somebody else."""
    pool, cache = cache_of([1, 2, 3, 4])
    node, pages = cache.match([1, 2, 3, 4], 4)
    cache.lock(node, "r")
    pool.share(pages[1], "r")
    assert any("locked and owned by nobody" in fault for fault in cache.audit())
    pool.share(pages[0], "r")
    assert cache.audit() == []


def test_the_audit_notices_a_page_that_lies_in_the_tree_twice() -> None:
    _, cache = cache_of([1, 2], [3, 4])
    cache.match([1, 2], 2)[0].page = cache.match([3, 4], 2)[0].page
    assert any("twice" in fault for fault in cache.audit())
