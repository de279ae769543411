"""What clients are told: one frame a turn, tokens by their index, one terminal each."""

import pytest

from engine.answers import Outbox
from engine.batch import Sampled
from engine.request import Request
from fsm.ledger import Exhausted, Lease, LeaseError
from tests.support.requests import request
from transport.messages import Finish, SamplingParams

LENGTH = Finish(type="length", length=2)


def opened(outbox: Outbox, life: str, **sampling: object) -> tuple[Request, Lease]:
    r = request(life, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
    lease = outbox.open(r)
    lease.adopt()
    return r, lease


def deliver(outbox: Outbox, r: Request, token: int, sampled: Sampled | None = None) -> None:
    r.tokens.append(token)
    outbox.token(r, sampled or Sampled(token))


def test_a_turns_tokens_leave_in_one_output_with_their_index() -> None:
    outbox = Outbox(4)
    r, _ = opened(outbox, "a")
    deliver(outbox, r, 7)
    deliver(outbox, r, 8)
    first = outbox.flush()
    deliver(outbox, r, 9)
    second = outbox.flush()
    assert [(o.index, o.tokens, o.finish) for o in (*first, *second)] == [
        (0, [7, 8], None),
        (2, [9], None),
    ]
    assert outbox.flush() == []


def test_releasing_the_obligation_is_sending_the_answer() -> None:
    outbox = Outbox(4)
    r, lease = opened(outbox, "a")
    deliver(outbox, r, 7)
    r.finish = LENGTH
    lease.release()
    (output,) = outbox.flush()
    assert (output.tokens, output.finish, output.prompt_tokens) == ([7], LENGTH, 3)
    assert (outbox.answers, outbox.pool.counts().at_rest) == (1, True)


def test_an_answer_without_tokens_names_the_end_of_what_was_sent() -> None:
    outbox = Outbox(4)
    r, lease = opened(outbox, "a")
    deliver(outbox, r, 7)
    outbox.flush()
    r.finish = LENGTH
    lease.release()
    (output,) = outbox.flush()
    assert (output.index, output.tokens) == (1, [])


def test_an_answer_is_given_once_and_not_without_a_reason() -> None:
    outbox = Outbox(4)
    r, lease = opened(outbox, "a")
    r.finish = LENGTH
    lease.release()
    with pytest.raises(LeaseError):
        lease.release()
    _, unexplained = opened(outbox, "b")
    with pytest.raises(LeaseError, match="without a reason"):
        unexplained.release()
    assert outbox.answers == 1


def test_a_token_after_the_answer_is_a_bug() -> None:
    outbox = Outbox(4)
    r, lease = opened(outbox, "a")
    r.finish = LENGTH
    lease.release()
    with pytest.raises(LeaseError, match="after its answer"):
        deliver(outbox, r, 7)


def test_log_probabilities_run_beside_the_tokens_when_asked_for() -> None:
    outbox = Outbox(4)
    plain, _ = opened(outbox, "a")
    asked, _ = opened(outbox, "b", logprobs=True, top_logprobs=1, token_ids_logprob=(5,))
    sampled = Sampled(7, -0.5, [(7, -0.5)], [(5, -2.0)])
    for r in (plain, asked):
        deliver(outbox, r, 7, sampled)
    first, second = outbox.flush()
    assert (first.logprobs, first.top_logprobs, first.chosen_logprobs) == (None, None, None)
    assert (second.logprobs, second.top_logprobs) == ([-0.5], [[(7, -0.5)]])
    assert second.chosen_logprobs == [[(5, -2.0)]]


def test_open_requests_are_bounded() -> None:
    outbox = Outbox(1)
    opened(outbox, "a")
    with pytest.raises(Exhausted):
        outbox.open(request("b"))


def test_outputs_keep_the_order_in_which_requests_were_mentioned() -> None:
    outbox = Outbox(4)
    requests = [opened(outbox, life)[0] for life in "abc"]
    for number in (2, 0, 1, 0):
        deliver(outbox, requests[number], number)
    assert [output.rid for output in outbox.flush()] == ["c", "a", "b"]
