"""Stored KV from the scheduler's side: hits, late and failed loads, copies in and out."""

import itertools
from array import array

import pytest

from engine.batch import Batch, PageExport, PageImport
from engine.hash_model import HashModel
from engine.pages import Kv
from engine.stored import StoredKv
from tests.support.node import Node, Runner, Shape
from tests.support.stores import MemoryStore

TEXT = list(range(40, 60))


def node_of(*texts: list[int], shape: Shape | None = None) -> tuple[Node, MemoryStore]:
    """A node whose store holds the full pages of ``texts``."""
    store, shape = MemoryStore(), shape or Shape()
    for text in texts:
        store.fill(shape.page_size, text)
    return Node(shape, store), store


def test_stored_pages_are_loaded_before_admission_and_count_as_cached() -> None:
    node, store = node_of(TEXT)
    client = node.ask("a", TEXT, 6, logprobs=True)
    assert node.state("a") == "prefetching"
    assert node.launch() == [], "it is not admitted while its pages are on the way"
    store.finish()
    node.settle()
    assert client.cached == 16, "one token is left to compute"
    assert (store.reads, node.scheduler.roster.recent["a"].journal.path()[1]) == (1, "prefetching")


def test_a_written_prompt_is_found_by_the_next_node() -> None:
    """Saved by one, loaded by another: same answers."""
    node, store = node_of()
    first = node.ask("a", TEXT, 6)
    for _ in range(20):
        node.turn()
        store.finish()
    node.settle()
    assert len(store.kept) == 5
    other = Node(Shape(depth=1), store)
    second = other.ask("b", TEXT, 6)
    store.finish()
    other.settle()
    assert (second.cached, second.tokens) == (16, first.tokens)


def test_pages_are_shared_only_by_equal_weights_types_and_layouts() -> None:
    """Invariant 9: int4, bfloat16 and float32 compute other pages from the same weights."""
    digests, layouts = ("W1", "W2"), ("a layout", "another layout")
    types = ("float32", "bfloat16", "int4")
    every = list(itertools.product(digests, types, layouts))
    store = MemoryStore()
    found = set()
    for digest, dtype, layout in every:
        kv = Kv(64, 4, 8, True)
        stored = StoredKv(store, kv, digest, dtype, layout, 4, Runner().launch)
        found.update(stored._keys(TEXT, 5))
        stored.use_weights(f"{digest} changed")
        found.update(stored._keys(TEXT, 5))
    assert len(found) == len(every) * 2 * 5


def test_what_the_store_has_already_is_not_written_again() -> None:
    node, store = node_of(TEXT[:8])
    node.ask("a", [*TEXT[:8], *range(90, 98)], 2)
    store.finish()
    works = []
    for _ in range(10):
        works += [w for w in node.runner.work if isinstance(w, PageExport)]
        node.turn()
        store.finish()
    assert {len(work.pages) for work in works} == {2}
    node.settle()


@pytest.mark.parametrize("how", ["fails", "brings nothing", "brings half", "copy fails"])
def test_a_load_that_goes_wrong_is_a_miss_or_a_shorter_hit(how: str) -> None:
    """B101: never an error for the client, and never a wrong token."""
    node, store = node_of(TEXT)
    client = node.ask("a", TEXT, 6)
    keys = list(store.kept)
    if how == "brings nothing":
        store.forget(keys[0])
    elif how == "brings half":
        store.tear(keys[2])
    store.finish(error="planted" if how == "fails" else "")
    if how == "copy fails":
        node.scheduler.poll_store()
        assert isinstance(node.runner.work[0], PageImport)
        node.commit(error="planted")
        assert node.state("a") == "waiting"
    for _ in range(20):
        node.turn()
        store.finish()
    node.settle()
    assert client.reason == "length"
    assert client.cached == (8 if how == "brings half" else 0)


def test_nobody_reads_loaded_pages_before_their_copy_has_run() -> None:
    """A copy that fails must not leave pages in the cache that nobody wrote."""
    node, store = node_of(TEXT)
    node.ask("a", TEXT, 6)
    store.finish()
    node.scheduler.poll_store()
    assert node.scheduler.kv.cache.pages == 0
    other = node.ask("b", TEXT, 6)
    assert node.state("a") == "prefetching"
    node.abort("a", "b")
    node.commit()
    assert node.scheduler.kv.cache.pages == 4, "a copy that ran is of use to the next one"
    node.turn()
    store.finish()
    node.settle()
    assert other.reason == "abort"


def test_b104_an_abort_gives_the_load_up_and_its_end_changes_nothing() -> None:
    node, store = node_of(TEXT)
    client = node.ask("a", TEXT, 6)
    node.abort("a")
    node.flush()
    assert client.reason == "abort"
    assert node.scheduler.ledger["prefetches"].counts().quarantined == 1
    assert not node.scheduler.at_rest
    store.finish()
    node.settle()
    assert node.scheduler.kv.pool.free == node.shape.pages


def test_loads_in_flight_are_bounded_and_the_next_one_runs_as_a_miss() -> None:
    node, store = node_of(TEXT, shape=Shape(prefetches=1))
    node.ask("a", TEXT, 4)
    second = node.ask("b", [*TEXT[:12], 1], 4)
    assert (node.state("a"), node.state("b")) == ("prefetching", "waiting")
    store.finish()
    node.settle()
    assert second.reason == "length"


def test_a_load_without_room_is_a_miss() -> None:
    """Pages for it are not taken from those who compute."""
    node, store = node_of(TEXT, shape=Shape(pages=6))
    busy = node.ask("x", range(18), 6)
    node.until_tokens(busy, 1)
    node.ask("a", TEXT, 2)
    store.finish()
    node.scheduler.poll_store()
    assert node.state("a") == "waiting"
    assert node.scheduler.kv.pool.counts().conserved
    for _ in range(40):
        node.turn()
        store.finish()
    node.settle()


def test_what_a_load_continues_may_be_evicted_meanwhile() -> None:
    """The cached first page is gone when the second one arrives: a miss, and no page in limbo."""
    node, store = node_of()
    node.ask("x", TEXT[:5], 1)
    for _ in range(20):  # its page is also written to the store
        node.turn()
        store.finish()
    node.settle()
    assert node.scheduler.kv.cache.pages == 1
    store.fill(4, TEXT)
    client = node.ask("a", TEXT, 4)
    node.scheduler.kv.cache.flush()
    store.finish()
    node.settle()
    assert (client.reason, client.cached) == ("length", 0)


def test_a_copy_out_keeps_its_pages_when_the_request_is_gone() -> None:
    """The export is launched and waits; the request ends and its pages must stay as they are."""
    node, store = node_of()
    client = node.ask("a", TEXT, 2)
    node.until_tokens(client, 1)
    assert [type(work) for work in node.runner.work] == [Batch, PageExport]
    node.commit()
    node.flush()
    assert client.reason == "length"
    assert node.scheduler.flush_cache() == (True, "Cache flushed: 0 pages.")
    assert node.scheduler.kv.pool.counts().held == 5
    node.commit()
    store.finish()
    node.settle()
    expected = MemoryStore()
    expected.fill(4, TEXT)
    assert store.kept == expected.kept


def test_pages_survive_export_and_import() -> None:
    """A copy is the page, whatever page it is copied into; a wrong size is refused."""
    store = MemoryStore()
    store.fill(4, TEXT)
    blobs = [blob for _, blob in store.kept.values()]
    model = HashModel(8, 4)
    model.import_pages(array("q", [7, 2]), blobs[:2])
    assert model.export_pages(array("q", [2, 7])) == [blobs[1], blobs[0]]
    with pytest.raises(ValueError, match="entries"):
        model.import_pages(array("q", [1]), [blobs[0][:-8]])
