"""The traces of a prefill and a decode node replay clean, whatever was lost, aborted, retracted,
held and rebuilt between them."""

from random import Random

import pytest

from tests.support.pair import DECODE, PREFILL, Pair
from tests.support.stories import judge
from transport.messages import SamplingParams, Submit


def run(seed: int, loss: float) -> Pair:
    """Requests on a pair that is disturbed in every way that it knows."""
    rng = Random(seed)
    pair = Pair(seed, loss)
    for number in range(10):
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        sampling = SamplingParams(max_new_tokens=rng.randrange(30), seed=number)
        pair.submit(Submit(f"r{number}", prompt, sampling), prefill_first=bool(rng.randrange(2)))
        for _ in range(3):
            pair.turn(rng.randrange(10))
            match rng.randrange(8):
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
    pair.settle()
    return pair


@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(8))
def test_the_traces_of_a_pair_fit(seed: int, loss: float) -> None:
    pair = run(seed, loss)
    for scheduler in (pair.prefill, pair.decode):
        scheduler.tracer.footer(scheduler.at_rest)
        assert [str(fault) for fault in judge(pair.traces[scheduler.node])] == []


def test_the_runs_meet_every_kind_of_line() -> None:
    """Otherwise that they fit says little."""
    seen: set[str] = set()
    for seed in range(4):
        for lines in run(seed, 0.0).traces.values():
            seen |= {
                str(getattr(line, name))
                for line in lines
                for name in ("event", "what")
                if name in line.__struct_fields__
            }
    assert {"granted", "prefilled", "landed", "retract", "hold", "restored", "quarantine"} <= seen
