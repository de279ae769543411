"""The joint table is exactly what can be reached.

Method: exploration of one request with arrivals that are not atomic, two faults and a rebuild, and
of one with two rebuilds for the lives of earlier rooms; then the sets are compared."""

import pytest

from fsm.decode import DECODE
from fsm.explore import Explorer
from fsm.explore_base import Budget
from fsm.explore_pd_model import PairModel
from fsm.explore_pd_nodes import DROPPING, EVERY, Pauses
from fsm.joint import ABSENT, EARLIER, GONE, JOINT, Pair, phase_of, shown
from fsm.prefill import PREFILL
from fsm.resources import PHASES


def reachable(budget: Budget, pauses: Pauses = DROPPING) -> tuple[set[Pair], set[Pair]]:
    """Pairs of lives that share a room, and pairs of an earlier prefill life and decode."""
    model = PairModel(intake_steps=True, pauses=pauses)
    result = Explorer(model, 1, budget).run()
    assert result.complete
    assert result.violation is None, f"\n{result.violation}"
    lives = [model.life(key) for key in result.seen]  # type: ignore[arg-type]
    return (
        {(life.leg.state, life.core.state) for life in lives},
        {(leg.state, life.core.state) for life in lives for leg in life.earlier},
    )


def test_the_table_is_what_two_faults_and_a_rebuild_reach() -> None:
    pairs, _ = reachable(Budget(faults=2, rebuilds=1))
    assert pairs - shown().keys() == set(), "reached, and not in the table"
    assert shown().keys() - pairs == set(), "in the table, and not reached"


def test_an_abort_and_a_deadline_reach_nothing_else() -> None:
    pairs, _ = reachable(Budget(faults=1, aborts=1, deadlines=1))
    assert pairs <= shown().keys()


def test_pauses_in_every_mode_reach_nothing_else() -> None:
    pairs, earlier = reachable(Budget(rebuilds=1), EVERY)
    assert pairs <= shown().keys()
    assert earlier <= EARLIER


def test_lives_of_earlier_rooms_are_what_two_rebuilds_reach() -> None:
    pairs, earlier = reachable(Budget(faults=1, rebuilds=2))
    assert pairs <= shown().keys()
    assert earlier == EARLIER


def test_every_state_of_both_charts_is_in_the_table() -> None:
    assert {prefill for prefill, _ in shown()} == {*PREFILL.by_name, ABSENT, GONE}
    assert {decode for _, decode in shown()} == {*DECODE.by_name, ABSENT, GONE}
    assert all(row.shown in PHASES for row in JOINT)


def test_a_client_is_shown_its_decode_from_the_hand_over_on() -> None:
    for (prefill, decode), phase in shown().items():
        if decode in DECODE.by_name and DECODE.phase(decode) in (
            "decoding",
            "retracted",
            "held",
            "retired",
        ):
            assert phase == DECODE.phase(decode), (prefill, decode)


def test_before_the_hand_over_it_is_shown_its_prefill() -> None:
    for (prefill, decode), phase in shown().items():
        if decode == "receiving" and prefill in PREFILL.by_name and PREFILL.is_live(prefill):
            assert phase == PREFILL.phase(prefill), (prefill, decode)


def test_a_pair_that_cannot_be_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="prefill waiting and decode decoding cannot coexist"):
        phase_of("waiting", "decoding")
    assert phase_of("sending", "receiving") == "transferring"
