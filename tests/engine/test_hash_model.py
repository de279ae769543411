"""The hash model notices what a real model hides.

Method: a request runs alone until it has some tokens; then one page of its KV is damaged in one
way, and its next tokens must differ from golden. Then the small rules: feeds, rows, positions."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import FEED, Batch, BatchItem, RowInit
from engine.hash_model import EOS, LONG, HashModel, mix
from engine.pages import Pages
from tests.support.cases import complete
from tests.support.examples import examples
from tests.support.node import Client, Node, Shape
from tests.support.oracle import Context
from transport.messages import SamplingParams

PROMPT = list(range(100, 119))
Damage = Callable[[HashModel, "array[int]", int], None]


def running(page_size: int) -> tuple[Node, Client, array[int]]:
    """A request with some tokens, quiet, and its block table."""
    node = Node(Shape(page_size=page_size, pages=64 // page_size * 2, cache=False))
    client = node.ask("a", PROMPT, 30)
    node.until_tokens(client, 3)
    node.launching = False
    node.until("quiet", lambda: not node.runner.work)
    node.launching = True
    lease = node.request("a").leases["pages"]
    assert isinstance(lease, Pages)
    return node, client, lease.table


def stale(model: HashModel, table: array[int], page: int) -> None:
    """What an earlier owner of the page computed."""
    model.import_pages(
        table[page : page + 1], [array("Q", entries_of_another(model, page)).tobytes()]
    )


def entries_of_another(model: HashModel, page: int) -> list[int]:
    size = model._page_size
    return [mix(page * size + slot) for slot in range(size)]


def foreign(model: HashModel, table: array[int], page: int) -> None:
    """A page of other positions of the same request."""
    other = (page + 1) % (len(table) - 1)
    model.import_pages(table[page : page + 1], model.export_pages(table[other : other + 1]))


def zeroed(model: HashModel, table: array[int], page: int) -> None:
    model.import_pages(table[page : page + 1], [bytes(8 * model._page_size)])


def swapped(model: HashModel, table: array[int], page: int) -> None:
    """Two pages of one request in each other's place."""
    pages = array("q", [table[page], table[(page + 1) % (len(table) - 1)]])
    model.import_pages(pages[::-1], model.export_pages(pages))


def written_late(model: HashModel, table: array[int], page: int) -> None:
    """One entry is overwritten by somebody who should have been gone."""
    model._write(table, page * model._page_size, 5)


@pytest.mark.parametrize("damage", [stale, foreign, zeroed, swapped, written_late])
@pytest.mark.parametrize("page_size", [1, 4])
def test_damage_to_any_page_changes_the_output(damage: Damage, page_size: int) -> None:
    pages = (len(PROMPT) + 2) // page_size - 1
    for page in range(0, pages, max(1, pages // 5)):
        node, client, table = running(page_size)
        before = list(client.tokens)
        damage(node.model, table, page)
        node.until_tokens(client, len(before) + 9)
        golden = node.golden(client).tokens
        assert before == golden[: len(before)]
        fresh = client.tokens[len(before) : len(before) + 8]
        assert fresh != golden[len(before) : len(before) + 8], f"page {page}"


def test_without_damage_the_same_run_is_golden() -> None:
    for page_size in (1, 4):
        node, client, _ = running(page_size)
        node.settle()
        complete(node, client)


def test_other_weights_say_something_else() -> None:
    """Invariant 9 can be tested only if weights show."""
    node = Node()
    client = node.ask("a", PROMPT, 12)
    node.settle()
    node.model._seed = Context("W2").seed
    assert HashModel(1, 1, "W2")._seed == Context("W2").seed
    other = node.ask("b", PROMPT, 12)
    while other.finish is None:
        node.turn()
    assert other.tokens != client.tokens
    assert HashModel(1, 1, "W2").weights_digest != HashModel(1, 1, "W1").weights_digest


# --- steps by hand --------------------------------------------------------------------------------

PARAMS = SamplingParams(max_new_tokens=99, temperature=0.0)


def init(row: int, sampling: SamplingParams = PARAMS, prompt: int = 3) -> RowInit:
    return RowInit(row, [], prompt, sampling, ())


def step(
    items: list[tuple[int, list[int], int, list[int]]],
    rows: tuple[RowInit, ...] = (),
    size: int = 4,
) -> Batch:
    """Items are (row, pages, start, tokens); everything samples."""
    tokens, qo, kv, indices = array("q"), array("q", [0]), array("q", [0]), array("q")
    for _, pages, _, new in items:
        tokens.extend(new)
        qo.append(len(tokens))
        indices.extend(pages)
        kv.append(len(indices))
    made = tuple(
        BatchItem(f"life{row}", 0, row, start, len(new), True) for row, _, start, new in items
    )
    return Batch(1, size, made, tokens, qo, kv, indices, array("q", [1] * len(items)), rows)


def sampled(model: HashModel, batch: Batch) -> list[int]:
    return [s.token for s in model.execute(batch).sampled if s.token is not None]


def test_a_feed_is_the_token_that_its_own_row_sampled() -> None:
    model = HashModel(8, 4)
    first = sampled(
        model, step([(0, [1], 0, [5, 6, 7]), (1, [2], 0, [8, 9, 7])], (init(0), init(1)))
    )
    fed = sampled(model, step([(0, [1], 3, [FEED]), (1, [2], 3, [FEED])]))
    again = HashModel(8, 4)
    sampled(again, step([(0, [1], 0, [5, 6, 7]), (1, [2], 0, [8, 9, 7])], (init(0), init(1))))
    assert fed == sampled(again, step([(0, [1], 3, first[:1]), (1, [2], 3, first[1:])]))
    crossed = step([(0, [1], 3, first[1:]), (1, [2], 3, first[:1])])
    assert fed != sampled(again, crossed)


def test_a_row_that_was_taken_anew_does_not_remember() -> None:
    model = HashModel(8, 4)
    sampled(model, step([(0, [1], 0, [5, 6, 7])], (init(0),)))
    eos_soon = SamplingParams(max_new_tokens=9, eos_at=0)
    assert sampled(model, step([(0, [2], 0, [1, 2, 3])], (init(0, eos_soon),))) == [EOS]


def test_a_row_that_has_not_come_so_far_gives_an_error_and_hurts_no_other() -> None:
    model = HashModel(8, 4)
    sampled(model, step([(0, [1], 0, [5, 6, 7]), (1, [2], 0, [8, 9, 7])], (init(0), init(1))))
    fed = step([(0, [1], 3, [FEED]), (1, [2], 4, [FEED]), (5, [3], 0, [1])])
    good, ahead, unknown = model.execute(fed).sampled
    assert (good.token is None, good.error) == (False, None)
    assert (ahead.token, ahead.error) == (None, "row 1 has not come so far")
    assert (unknown.token, unknown.error) == (None, "row 5 has not come so far")


def test_items_that_do_not_sample_return_nothing() -> None:
    model = HashModel(8, 4)
    batch = step([(0, [1], 0, [5, 6])], (init(0),))
    quiet = tuple(BatchItem("life0", 0, 0, 0, 2, sample=False) for _ in batch.items)
    silent = Batch(
        1,
        4,
        quiet,
        *(batch.tokens, batch.qo_indptr, batch.kv_indptr),
        batch.kv_indices,
        batch.kv_last_page_len,
        batch.rows,
    )
    assert model.execute(silent).sampled[0].token is None


@given(
    st.one_of(
        st.lists(st.integers(0, 257), min_size=1, max_size=40),
        st.lists(st.integers(0, 257), min_size=LONG, max_size=3 * LONG),
    ),
    st.lists(st.integers(1, 2 * LONG), min_size=1, max_size=9),
)
@examples(60)
def test_the_context_does_not_depend_on_chunks_or_pages(tokens: list[int], cuts: list[int]) -> None:
    """Sums kept for pages are only a short cut: every way to the same text hashes the same, also
    in pages that came from elsewhere."""
    results = set()
    for size in (1, 3, 4, 16, 2 * LONG):
        model = HashModel(3 * LONG, size)
        pages = [3 * LONG - 1 - index for index in range(-(-len(tokens) // size))]
        start, turn = 0, 0
        while start < len(tokens):
            new = tokens[start : start + cuts[turn % len(cuts)]]
            used = pages[: -(-(start + len(new)) // size)]
            rows = (init(0, prompt=len(tokens)),) if start == 0 else ()
            last = sampled(model, step([(0, used, start, new)], rows, size))
            start, turn = start + len(new), turn + 1
        results.add(last[0])
        there = HashModel(3 * LONG, size)
        moved = list(range(len(pages)))
        there.import_pages(array("q", moved), model.export_pages(array("q", pages)))
        rows = (init(0, prompt=len(tokens)),)
        again = step([(0, moved, len(tokens) - 1, tokens[-1:])], rows, size)
        results |= {*sampled(there, again), *sampled(there, again)}
    context = Context("W1")
    for token in tokens:
        context.read(token)
    assert results == {context.value % 256}


def test_the_draw_depends_on_seed_and_position_only() -> None:
    hot = SamplingParams(max_new_tokens=9, temperature=1.0, seed=1)
    draws = []
    for sampling in (
        PARAMS,
        hot,
        SamplingParams(max_new_tokens=9, temperature=0.5, seed=1),
        SamplingParams(max_new_tokens=9, temperature=1.0, seed=2),
    ):
        model = HashModel(8, 4)
        draws.append(sampled(model, step([(0, [1], 0, [5, 6, 7])], (init(0, sampling),)))[0])
    assert draws[1] == draws[2]
    assert len(set(draws)) == 3


def test_log_probabilities_of_a_token_are_the_same_wherever_they_are_asked_for() -> None:
    asked = SamplingParams(
        max_new_tokens=9, eos_at=0, logprobs=True, top_logprobs=3, token_ids_logprob=(EOS, 0, 1)
    )
    model = HashModel(8, 4)
    (one,) = model.execute(step([(0, [1], 0, [5, 6, 7])], (init(0, asked),))).sampled
    assert one.token == EOS
    assert one.top_logprobs is not None
    assert one.chosen_logprobs is not None
    top = dict(one.top_logprobs)
    assert top == {t: lp for t, lp in one.chosen_logprobs if t in top}
    assert top[EOS] == one.logprob
    assert all(lp < 0 for lp in top.values())
