"""The output of every request is that of the request alone (what a correct engine is).

Method: hypothesis draws a node and requests and what happens around them: batch, chunk size, page
size, prefix cache, depth, retractions, displacement, loads from a store, session turns. Golden is
computed a second way, from token ids alone (``tests.support.oracle``), and that it equals the
request alone on a fresh engine is checked first. ``INTERLOCK_EXAMPLES=20`` makes a long run."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import cases
from tests.support.cases import Case
from tests.support.examples import examples
from tests.support.node import Node, Shape
from transport.messages import Submit


@given(cases.submissions(0), st.sampled_from([1, 4, 16]), st.booleans())
@examples(60)
def test_golden_is_the_request_alone_on_a_fresh_engine(
    message: Submit, page_size: int, cache: bool
) -> None:
    """Both ways of computing golden agree: an engine with one request, and token ids alone."""
    node = Node(Shape(pages=128, page_size=page_size, cache=cache, depth=1, chunk=64))
    client = node.submit(message)[0]
    node.settle()
    cases.complete(node, client)


@given(cases.cases())
@examples(120)
def test_an_output_does_not_depend_on_anything_around_it(case: Case) -> None:
    cases.check(case)


BUSY = tuple(
    Submit(
        f"r{number}",
        [number % 2, *range(3, 3 + number), *[1] * (number * 5)],
        replace_sampling,
        priority=number % 2,
    )
    for number, replace_sampling in enumerate(
        [cases.SamplingParams(max_new_tokens=9 + n, seed=n, logprobs=True) for n in range(6)]
    )
)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("disturbed", [False, True], ids=["undisturbed", "retracted"])
def test_the_named_dimensions_one_by_one(
    page_size: int, depth: int, cache: bool, chunk: int, disturbed: bool
) -> None:
    """The same six requests in every combination of the dimensions that the issue names."""
    shape = Shape(
        pages=64 // page_size, page_size=page_size, depth=1, cache=cache, chunk=chunk, rows=4
    )
    shape = replace(shape, depth=depth)
    cases.check(Case(shape, BUSY, retract_every=3 if disturbed else 0))


def test_a_pool_that_is_too_small_retracts_and_changes_nothing() -> None:
    """Retraction by shortage, not by force: it happens, and nobody can tell."""
    shape = Shape(pages=14, page_size=4, rows=6, chunk=16)
    node = cases.check(Case(shape, BUSY))
    assert node.scheduler.stats.retracted > 0


def test_displacement_by_priority_changes_nothing() -> None:
    shape = Shape(pages=32, page_size=4, rows=2, chunk=16)
    node = cases.check(Case(shape, BUSY, gap=3))
    displaced = [
        line
        for request in node.scheduler.roster.recent.values()
        for line in request.journal.entries()
        if line.why.startswith("displaced")
    ]
    assert displaced


def test_a_load_from_the_store_changes_nothing() -> None:
    node = cases.check(Case(Shape(prefetch_timeout_s=60.0), BUSY[3:], stored=16))
    assert "loaded" in {e.event for e in node.scheduler.roster.recent["r3"].journal.entries()}
