"""A prefill and a decode scheduler together: outputs are golden, and everything comes back.

Method: seeded runs over a channel that may lose frames and a wire that takes its time; invariants
are checked after every transition on both sides. Golden is computed a second way, from token ids
alone."""

from random import Random

import msgspec
import pytest

from fsm.trace import MoveLine
from tests.support.oracle import golden
from tests.support.pair import DECODE, PREFILL, Pair
from transport.messages import Abort, SamplingParams, Submit


def submissions(rng: Random, count: int) -> list[Submit]:
    base = [rng.randrange(256) for _ in range(40)]
    return [
        Submit(
            f"r{i}",
            base[: rng.randrange(30)] + [rng.randrange(256) for _ in range(rng.randrange(1, 40))],
            SamplingParams(
                max_new_tokens=rng.randrange(30), temperature=rng.choice([0.0, 1.0]), seed=i
            ),
        )
        for i in range(count)
    ]


def check(pair: Pair, messages: list[Submit], disturbed: bool) -> None:
    pair.settle()
    for message in messages:
        answer = pair.answers[message.rid]
        want = golden(message.prompt, message.sampling, 4096).tokens
        assert answer.finish is not None
        if answer.finish.type == "length":
            assert answer.tokens == want
        else:
            assert disturbed, f"{message.rid}: {answer.finish}"
            assert answer.tokens == want[: len(answer.tokens)]
    for scheduler in (pair.prefill, pair.decode):
        assert scheduler.audit() == []
        scheduler.kv.cache.flush()
        assert all(pool.counts().free == pool.counts().total for pool in scheduler.ledger)


@pytest.mark.parametrize("seed", range(8))
def test_a_pair_says_what_one_node_says(seed: int) -> None:
    rng = Random(seed)
    pair, messages = Pair(seed), submissions(rng, 10)
    for message in messages:
        pair.submit(message, prefill_first=bool(rng.randrange(2)))
        pair.turn(rng.randrange(10))
    check(pair, messages, disturbed=False)


@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(12))
def test_aborts_retractions_and_pauses_on_either_side_leak_nothing(seed: int, loss: float) -> None:
    """S0.5, S1.1, S3.1 to S3.4: by name on both sides, copies to the host, rebuilds through
    prefill; with ``loss``, every frame that matters is said again."""
    rng = Random(seed)
    pair, messages = Pair(seed, loss), submissions(rng, 10)
    for message in messages:
        pair.submit(message, prefill_first=bool(rng.randrange(2)))
        for _ in range(3):
            pair.turn(rng.randrange(10))
            match rng.randrange(12):
                case 0:
                    pair.abort(DECODE)
                case 1:
                    pair.abort(PREFILL)
                case 2 if pair.decode.roster.live:
                    pair.decode.retract(rng.choice(sorted(pair.decode.roster.live)))
                case 3:
                    pair.decode.pause("retract")
                    pair.turn(rng.randrange(20))
                    pair.decode.resume()
                case _:
                    pass
    check(pair, messages, disturbed=True)


def test_a_first_token_that_is_the_last_needs_no_step() -> None:
    """B91: exactly ``max_new_tokens``, and decode computes nothing."""
    pair = Pair(0)
    message = Submit("r", [1, 2, 3, 4, 5], SamplingParams(max_new_tokens=1, temperature=0.0))
    pair.submit(message, prefill_first=True)
    check(pair, [message], disturbed=False)
    assert pair.decode.stats.steps == 0


def test_the_first_token_of_a_request_held_before_it_had_any_is_chosen_as_it_asked() -> None:
    """What lands into a pause is not used; the token of the rebuild must be drawn with the
    request's own sampling, because nothing is replayed."""
    for seed in range(6):
        pair = Pair(seed)
        message = Submit("r", list(range(20)), SamplingParams(max_new_tokens=6, seed=9))
        pair.submit(message, prefill_first=False)
        pair.turn(6)
        pair.decode.pause("retract")
        pair.turn(30)
        pair.decode.resume()
        check(pair, [message], disturbed=False)


def test_a_prefill_that_is_gone_ends_what_has_not_landed_and_nothing_else() -> None:
    """S1.2: closed socket; decode's pages are free at once, because a dead process writes no
    more."""
    pair = Pair(3)
    old = Submit("old", list(range(12)), SamplingParams(max_new_tokens=40, temperature=0.0))
    new = Submit("new", list(range(30)), SamplingParams(max_new_tokens=40, temperature=0.0))
    pair.submit(old, prefill_first=True)
    while not pair.answers["old"].tokens:
        pair.turn()
    pair.submit(new, prefill_first=False)
    while "receiving" not in {r.state for r in pair.decode.roster.lives.values()}:
        pair.turn()
    pair.wire.queue.clear()
    pair.decode.peer_closed(PREFILL)
    for _ in range(200):
        pair.now += 0.001
        pair._turn_of(DECODE, pair.decode, PREFILL)
    assert pair.decode.at_rest
    finish = pair.answers["new"].finish
    assert finish is not None
    assert finish.status == 503
    assert PREFILL in finish.message
    assert pair.answers["old"].tokens == golden(old.prompt, old.sampling, 4096).tokens


def test_a_prompt_beyond_decodes_limit_is_refused_alike_on_both_sides() -> None:
    """Design, section 6: static limits answer the same 400 on both sides, whoever is first."""
    for prefill_first in (False, True):
        pair = Pair(1)
        object.__setattr__(pair.decode.limits, "pool_tokens", 10)
        message = Submit("r", list(range(20)), SamplingParams(max_new_tokens=4))
        pair.submit(message, prefill_first)
        pair.settle()
        assert pair.answers["r"].finish is not None
        assert pair.answers["r"].finish.status == 400
        assert pair.prefill.roster.recent["r"].finish is not None
        assert pair.prefill.roster.recent["r"].finish.status == 400


def test_an_invalid_retry_does_not_end_the_request_it_repeats() -> None:
    """Invariant 7: a refused submission changes nothing."""
    pair = Pair(2)
    message = Submit("r", list(range(9)), SamplingParams(max_new_tokens=8, temperature=0.0))
    pair.submit(message, prefill_first=True)
    while not pair.answers["r"].tokens:
        pair.turn()
    bad = Submit("r", [], message.sampling, room="other", prefill=PREFILL)
    pair.decode.submit(bad)
    assert pair.decode.roster.live["r"].state == "decoding"


def test_many_arrivals_are_refused_and_not_fatal() -> None:
    pair = Pair(4)
    for number in range(400):
        body = Submit(f"r{number}", [1, 2, 3], SamplingParams(max_new_tokens=2))
        for scheduler in (pair.prefill, pair.decode):
            scheduler.submit(msgspec.structs.replace(body, room=f"x{number}", prefill=PREFILL))
    assert len(pair.decode.roster.live) == len(pair.prefill.roster.live) == 264


def test_a_slot_record_that_does_not_decode_ends_its_request_only() -> None:
    pair = Pair(5)
    message = Submit("r", list(range(9)), SamplingParams(max_new_tokens=8))
    pair.submit(message, prefill_first=True)
    while not any(isinstance(what, int) for _, what, _ in pair.wire.queue):
        pair.turn()
    ticket, slot, _ = next(entry for entry in pair.wire.queue if isinstance(entry[1], int))
    pair.wire.queue[-1] = (ticket, slot, b"\xc1 not msgpack")
    pair.settle()
    finish = pair.answers["r"].finish
    assert finish is not None
    assert finish.status == 500


def test_a_node_that_writes_no_trace_names_no_line() -> None:
    """Frames carry no origin then; what the peer's say is of no use to anybody, and harmless."""
    pair, messages = Pair(3, traced=(PREFILL,)), submissions(Random(3), 4)
    said: dict[str, set[bool]] = {PREFILL: set(), DECODE: set()}
    for message in messages:
        pair.submit(message, prefill_first=True)
        for _ in range(20):
            pair.turn()
            for receiver, sender in ((DECODE, PREFILL), (PREFILL, DECODE)):
                said[sender] |= {frame.origin is not None for frame in pair.channels[receiver]}
    check(pair, messages, disturbed=False)
    assert said == {PREFILL: {True}, DECODE: {False}}
    assert pair.traces[DECODE] == []
    causes = [line.cause for line in pair.traces[PREFILL] if isinstance(line, MoveLine)]
    assert {cause[0] for cause in causes if cause is not None} == {PREFILL}


def test_what_was_said_before_a_request_arrived_is_the_cause_of_what_it_does() -> None:
    """Decode gives up before prefill has the request: its word is kept at the door."""
    pair = Pair(0)
    body = Submit("r", [1, 2, 3], SamplingParams(max_new_tokens=2), room="room", prefill=PREFILL)
    pair.decode.submit(body)
    pair.decode.abort(Abort(rids=("r",)))
    for _, frame in pair.decode.mail():
        pair.prefill.receive(DECODE, frame)
    pair.prefill.submit(body)
    moves = [line for line in pair.traces[PREFILL] if isinstance(line, MoveLine)]
    assert [line.event for line in moves] == ["enqueue", "abort"]
    assert (moves[0].cause, moves[0].boot) == ((PREFILL, 1), "")
    told = next(x for x in pair.traces[DECODE] if isinstance(x, MoveLine) and x.event == "abort")
    assert (moves[1].cause, moves[1].boot) == ((DECODE, told.seq), "D")


def test_a_prefill_has_so_many_grants_at_a_time_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Granted memory idles until it is written: also those of one step are counted."""
    monkeypatch.setattr("engine.decode_scheduler.GRANTS_A_PREFILL", 2)
    rng = Random(0)
    pair, messages = Pair(0), submissions(rng, 8)
    most = 0
    for message in messages:
        pair.submit(message, prefill_first=True)
    while pair.decode.roster.live:
        pair.turn(rng.randrange(10))
        most = max(most, sum(r.state == "receiving" for r in pair.decode.roster.lives.values()))
    assert most == 2
    check(pair, messages, disturbed=False)
