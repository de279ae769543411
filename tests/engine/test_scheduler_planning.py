"""One rule plans prefill, decode, depth 2 and recomputation; one function turns spans into a batch.

Method: a request's counters are set by hand, and its next spans are asked for until there are none;
then the batch that is built from spans is read back as flashinfer reads it."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import endings
from engine.batch import FEED, RowInit
from engine.batching import Span, build_batch
from engine.request import Request
from tests.support.examples import examples
from tests.support.requests import request
from transport.messages import SamplingParams

Spans = list[tuple[int, int, bool]]


def made(prompt: int, output: int = 0, launched: int = 0, max_new: int = 8) -> Request:
    r = request(prompt=range(prompt), sampling=SamplingParams(max_new_tokens=max_new))
    r.tokens += range(100, 100 + output)
    r.launched = launched
    return r


def launch_all(r: Request, budget: int, depth: int) -> Spans:
    """Launch spans without committing any, until there is nothing to launch."""
    out: Spans = []
    while (span := r.next_span(budget, depth)) is not None:
        out.append(span)
        r.launched = span[0] + span[1]
    return out


# --- spans ----------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_only_its_last_one_samples() -> None:
    assert launch_all(made(10), budget=4, depth=1) == [(0, 4, False), (4, 4, False), (8, 2, True)]


def test_at_depth_two_one_token_is_fed_before_the_last_commit() -> None:
    assert launch_all(made(3), budget=9, depth=2) == [(0, 3, True), (3, 1, True)]
    assert launch_all(made(3), budget=9, depth=1) == [(0, 3, True)]


def test_a_prompt_of_one_token_is_a_prompt_and_a_decode_needs_no_budget() -> None:
    assert made(1).is_prefill
    assert made(1).next_span(0, 2) is None
    decoding = made(3, output=1, launched=3)
    assert not decoding.is_prefill
    assert decoding.next_span(0, 1) == (3, 1, True)


def test_nothing_is_fed_past_the_length() -> None:
    """A feed would need pages that the request was never promised."""
    assert launch_all(made(3, output=1, launched=3, max_new=2), 9, 2) == [(3, 1, True)]
    assert launch_all(made(3, max_new=1), 9, 2) == [(0, 3, True)]
    assert launch_all(made(3, max_new=0), 9, 2) == [(0, 3, True)]


def test_after_a_retraction_prompt_and_output_are_recomputed_without_sampling_again() -> None:
    """Only the last known token's logits are wanted; the ones before were delivered already."""
    r = made(6, output=5)
    assert launch_all(r, budget=4, depth=1) == [(0, 4, False), (4, 4, False), (8, 3, True)]


def test_a_retracted_request_with_all_but_one_token_cached_goes_on_by_decoding() -> None:
    r = made(6, output=3, launched=8)
    assert not r.is_prefill
    assert r.next_span(0, 1) == (8, 1, True)


@given(
    st.integers(1, 20),
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(1, 9),
    st.sampled_from([1, 2]),
    st.integers(0, 20),
)
@examples(150)
def test_every_position_is_computed_once_in_order(
    prompt: int, output: int, more: int, budget: int, depth: int, cached: int
) -> None:
    """From any start to the last token: no gap, no repetition, one sample for each new token."""
    r = made(prompt, output, min(cached, prompt + output - 1), output + more)
    position, samples, due = r.launched, 0, 0
    while r.output_len < r.max_new_tokens:
        span = r.next_span(budget, depth)
        if span is None:
            assert due > 0, "nothing to launch and nothing to come back"
            r.tokens.append(7)
            due -= 1
            continue
        start, count, sample = span
        assert start == position
        assert 0 < count <= max(budget, 1)
        position = r.launched = start + count
        due += sample
        samples += sample
        assert due <= depth
    assert samples == more
    assert position == prompt + output + more - 1, "the last token has no KV"


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_carries_ragged_indices_feeds_and_rows() -> None:
    decode, fed, chunk = made(5, output=1), made(4), made(9)
    spans = [
        Span(decode, 2, array("q", [9, 8]), 5, 1, True),
        Span(fed, 0, array("q", [7, 6]), 4, 1, True),
        Span(chunk, 1, array("q", [5, 4, 3]), 4, 4, False),
    ]
    init = RowInit(1, [], 9, SamplingParams(), ())
    batch = build_batch(3, 4, spans, (init,))
    assert (batch.step, batch.page_size, batch.rows) == (3, 4, (init,))
    assert list(batch.tokens) == [100, FEED, 4, 5, 6, 7]
    assert list(batch.qo_indptr) == [0, 1, 2, 6]
    assert list(batch.kv_indptr) == [0, 2, 4, 6]
    assert list(batch.kv_indices) == [9, 8, 7, 6, 5, 4], "the chunk ends in its second page"
    assert list(batch.kv_last_page_len) == [2, 1, 4]
    assert list(batch.positions()) == [5, 4, 4, 5, 6, 7]
    assert [list(batch.pages_of(index)) for index in range(3)] == [[9, 8], [7, 6], [5, 4]]
    assert [(item.row, item.start, item.count, item.sample) for item in batch.items] == [
        (2, 5, 1, True),
        (0, 4, 1, True),
        (1, 4, 4, False),
    ]


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "token", "minimum", "limit", "expected"),
    [
        (0, 5, 0, 4, None),
        (3, 5, 0, 4, "length"),
        (0, 99, 0, 4, "stop"),
        (3, 99, 0, 4, "stop"),
        (0, 99, 2, 4, None),
        (1, 99, 2, 4, "stop"),
        (0, 99, 0, 0, "length"),
    ],
)
def test_a_stop_token_ends_before_the_length_and_not_before_the_minimum(
    output: int, token: int, minimum: int, limit: int, expected: str | None
) -> None:
    sampling = SamplingParams(max_new_tokens=limit, min_new_tokens=minimum)
    r = request(sampling=sampling)
    r.tokens += [7] * output
    r.stop_ids = frozenset({99})
    finish = endings.ending(r, token)
    assert (finish.type if finish is not None else None) == expected
    if finish is not None:
        assert finish.matched == (99 if expected == "stop" else None)


def test_a_drain_is_an_error_only_for_who_has_nothing() -> None:
    r = request()
    r.state = "waiting"
    assert endings.aborted(r, "drain").status == 503
    assert endings.aborted(r, "api").message == "Abort in waiting queue"
    r.state = "decoding"
    r.tokens.append(1)
    assert (endings.aborted(r, "drain").status, endings.aborted(r, "drain").type) == (None, "abort")


def test_only_the_clients_own_deadline_gives_what_there_is() -> None:
    r = request()
    assert endings.expired(r, "client").status == 503
    r.tokens.append(1)
    assert endings.expired(r, "client").status is None
    assert endings.expired(r, "running").status == 503
    assert endings.failed("boom").status == 500
