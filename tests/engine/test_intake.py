"""The door: every limit at its border, on both sides, with the field named."""

import math
from typing import Any

import msgspec
import pytest

from engine.intake import (
    MAX_CHOSEN_LOGPROBS,
    MAX_GROUP,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    Limits,
    Refusal,
    check_submission,
)
from tests.support.node import Node, Shape
from transport.messages import FILL, SamplingParams, Submit

LIMITS = Limits(vocab_size=258, context_length=64, pool_tokens=48)
NAN, INF = math.nan, math.inf


def submit(prompt: list[int], sampling: dict[str, Any], **fields: Any) -> Submit:
    params = msgspec.structs.replace(SamplingParams(max_new_tokens=8), **sampling)
    return Submit("r", prompt, params, **fields)


def verdict(message: Submit) -> int | str:
    """The effective length, or the refusal's words."""
    try:
        return check_submission(message, message.prompt, LIMITS)
    except Refusal as refusal:
        finish = refusal.finish
    assert (finish.type, finish.status, finish.err_type) == ("abort", 400, "BadRequestError")
    return finish.message


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("max_new_tokens", [-2, 2**31], [0, 8, FILL]),
        ("min_new_tokens", [-1, 9], [0, 8]),
        ("temperature", [-0.1, NAN, INF, -INF], [0.0, 1e-9, 2.0]),
        ("top_p", [0.0, -0.1, 1.01, NAN, INF], [1e-9, 1.0]),
        ("top_k", [0, -2], [-1, 1, 10**6]),
        ("min_p", [-0.1, 1.01, NAN], [0.0, 1.0]),
        ("presence_penalty", [-2.1, 2.1, NAN, INF], [-2.0, 2.0]),
        ("frequency_penalty", [-2.1, 2.1, NAN], [-2.0, 2.0]),
        ("repetition_penalty", [0.0, -1.0, 2.1, 0.0099, 1e-42, NAN], [0.01, 2.0]),
        ("top_logprobs", [-1, MAX_TOP_LOGPROBS + 1], [0, MAX_TOP_LOGPROBS]),
        ("seed", [2**63, -(2**63) - 1], [2**63 - 1, -(2**63)]),
        ("stop_token_ids", [(258,), (-1,), (1,) * (MAX_STOP_TOKEN_IDS + 1)], [(0, 257), ()]),
        (
            "token_ids_logprob",
            [(258,), (-1,), (1,) * (MAX_CHOSEN_LOGPROBS + 1)],
            [(257,) * MAX_CHOSEN_LOGPROBS],
        ),
        (
            "logit_bias",
            [
                {258: 1.0},
                {-1: 1.0},
                {3: NAN},
                {3: INF},
                {3: 100.1},
                {3: -1e39},
                dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
            ],
            [{0: -100.0, 257: 100.0}],
        ),
    ],
)
def test_a_sampling_value_is_refused_beyond_its_border(
    field: str, bad: list[Any], good: list[Any]
) -> None:
    for value in bad:
        refusal = verdict(submit([1], {field: value}))
        assert isinstance(refusal, str)
        assert refusal.startswith(f"{field}: "), refusal
    for value in good:
        assert isinstance(verdict(submit([1], {field: value})), int), value


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt: is empty"),
        ([258], "prompt: token id 258 is outside 0..257"),
        ([5, -1], "prompt: token id -1"),
        ([1] * 64, "the context length is 64"),
        ([1] * 48, "can never fit; the KV pool holds 48"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_with_the_limit(
    prompt: list[int], words: str
) -> None:
    assert words in str(verdict(submit(prompt, {})))


def test_ids_outside_the_vocabulary_never_reach_a_step() -> None:
    """One that did would fail every request of its step."""
    node = Node()
    good = node.ask("good", [1, 2, 3], 4)
    refused = [node.ask(f"r{token}", [1, token], 4) for token in (-1, 258, 2**40)]
    assert all(client.refused for client in refused)
    node.settle()
    assert good.reason == "length"
    assert all(0 <= token < 258 for batch in node.batches for token in batch.tokens if token != -1)


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert LIMITS.max_prompt_tokens == 47
    assert verdict(submit([1] * 47, {})) == 1
    assert Limits(258, 32, 48).max_prompt_tokens == 31


def test_a_request_that_fits_the_context_but_not_the_pool_is_shortened() -> None:
    """B121: it ends with ``length`` when the pool is full."""
    assert verdict(submit([1] * 44, {"max_new_tokens": 20})) == 4
    assert verdict(submit([1] * 44, {"max_new_tokens": 3})) == 3


def test_a_request_without_a_limit_fills_what_there_is() -> None:
    assert verdict(submit([1] * 40, {"max_new_tokens": FILL, "min_new_tokens": 5})) == 8
    assert verdict(submit([1] * 47, {"max_new_tokens": FILL})) == 1


def test_prompt_and_output_together_fit_the_context() -> None:
    assert verdict(submit([1] * 44, {"max_new_tokens": 20})) == 4
    assert "max_new_tokens" in str(verdict(submit([1] * 44, {"max_new_tokens": 21})))


@pytest.mark.parametrize("n", [0, -1, MAX_GROUP + 1, 10**9])
def test_a_group_has_bounded_size(n: int) -> None:
    assert str(verdict(submit([1], {}, n=n))).startswith("n: ")
    node = Node()
    client = node.submit(submit([1], {}, n=n))[0]
    assert (client.rid, client.reason, client.refused) == ("r", "abort", True)
    node.settle()


@pytest.mark.parametrize("deadline", [0.0, -1.0, NAN])
def test_a_deadline_lies_in_the_future(deadline: float) -> None:
    assert str(verdict(submit([1], {}, deadline_s=deadline))).startswith("deadline_s: ")


def test_a_refusal_owns_nothing_and_leaves_nothing_behind() -> None:
    """S0.1: refused at the door, answered at once, and the ledger never saw it."""
    node = Node()
    start = node.scheduler.ledger.snapshot()
    for number, message in enumerate(
        (submit([], {}), submit([1], {"temperature": NAN}), submit([1] * 9999, {}))
    ):
        client = node.submit(msgspec.structs.replace(message, rid=f"r{number}"))[0]
        assert client.finish is not None
        assert client.finish.status == 400
        assert node.scheduler.ledger.snapshot() == start
    assert node.launch() == []
    node.settle()
    assert node.scheduler.stats.refused == 3


def test_a_full_queue_is_refused_with_503_and_accepts_again_when_there_is_room() -> None:
    node = Node(Shape(rows=1, queued=1))
    accepted = [node.ask(f"r{number}", [number], 4) for number in range(2)]
    full = node.ask("r2", [2], 4)
    assert full.finish is not None
    assert (full.finish.status, full.finish.message) == (503, "The request queue is full.")
    node.until("r0 ends", lambda: accepted[0].finish is not None)
    assert not node.ask("r3", [3], 4).refused
    node.settle()


def test_a_group_is_accepted_whole_or_not_at_all() -> None:
    node = Node(Shape(rows=1, queued=2))
    refused = node.submit(submit([1], {}, n=4))
    assert [client.refused for client in refused] == [True]
    assert len(node.submit(submit([1], {}, n=3))) == 3
    node.settle()
