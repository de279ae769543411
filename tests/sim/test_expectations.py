"""Goal: every expectation can fail, and says what it expected, what it got, and what happened.

Method: short scenarios that are wrong on purpose.
"""

import pytest

from engine.sim.language import ScenarioError
from engine.sim.scenario import run_text

START = """cluster unified=1 pages=64 page_size=16 rows=8 chunk=64 depth=2
submit r1 prompt=40 max_tokens=5 logprobs
submit r2 prompt=40 max_tokens=50
"""

WRONG = [
    ("run until r1 tokens=6", "this never happens; r1 is done"),
    ("hold step unified-0\nrun until r1 decoding", "this never happens; r1 is prefilling"),
    ("hold step unified-0\nrun until idle", "never gets idle (held: step)"),
    ("run until idle\nstep unified-0", "there is no step to do"),
    ("run until idle\nretract r1", "it is not on the device: r1 is done"),
    ("run until r1 finished=stop|abort", "this never happens; r1 is done"),
    ("expect r1 phase=decoding", "expected phase=decoding, got prefilling"),
    ("expect r1 state=done", "expected state=done, got prefilling"),
    ("expect r1 finished=length", "expected finished=length, got nothing yet"),
    ("expect r1 finished=length within=2ms", "expected finished=length, got nothing yet"),
    ("run until idle\nexpect r1 finished=stop|abort", "got length"),
    ("run until idle\nexpect r1 tokens=4", "expected tokens=4, got 5"),
    ("run until idle\nexpect r1 status=500", "expected status=500, got 200"),
    ("abort r1\nexpect r1 message=gone", "expected message=gone, got Aborted"),
    ("run until idle\nexpect r1 matched=x", "expected matched=x, got None"),
    ("run until idle\nexpect no answer r1", "r1 has its answer: length"),
    ("run until idle\nexpect never r1 phase=decoding", "r1 was decoding at"),
    ("run until idle\nexpect never r1 state=stopping", "r1 was stopping at"),
    ("run until idle\nexpect order finish r2 r1", "expected finish of r2 r1, got r1 r2"),
    ("run until idle\nexpect order retract r2 r1", "retract never happened to r2"),
    ("expect base", "still without an answer: r1, r2"),
    ("hold step unified-0\nabort r1 r2\nexpect base", "launched works are open"),
    ("expect base within=9ms", "still without an answer: r2"),
    ("expect r1 golden within=2ms", "still without an answer: r1"),
    ("expect no answer r1 within=20ms", "r1 has its answer: length"),
    ("expect never r1 phase=decoding within=20ms", "r1 was decoding at"),
    ("expect held r1 pages=0 within=2ms", "expected pages=0, holds 3"),
    ("expect held r1 senders=1", "expected senders=1, holds 0"),
    ("expect ledger unified-0 pages.held = 0 within=5ms", "expected pages.held = 0, got 6"),
    ("run until idle\nexpect r1 finished=error", "expected finished=error, got length"),
    ("abort r1\nexpect r1 finished=error", "expected finished=error, got abort"),
    ("run until idle\nexpect r1 status=5xx", "expected status=5xx, got 200"),
    ("expect held r1 pages=9", "expected pages=9, holds 3"),
    ("expect ledger unified-0 rows.held = 0", "expected rows.held = 0, got 1"),
    ("expect ledger unified-0 pages.free < 3", "expected pages.free < 3, got 61"),
    ("expect load unified-0 running >= 4", "expected running >= 4, got 1"),
    ("run until idle\nexpect logprobs r1 = 4", "expected logprobs r1 = 4, got 5"),
    ("run until idle\nexpect retractions r1 > 0", "expected retractions r1 > 0, got 0"),
    ("run until idle\nexpect cached r1 != 0", "expected cached r1 != 0, got 0"),
    ("run until idle\nexpect same r1 r2", "r1 and r2 were shown different tokens"),
    ("run until idle\nexpect differ r1 r1", "r1 and r1 were shown the same tokens"),
    ("expect reply flushed=yes", "nothing was asked"),
    ("flush unified-0\nexpect reply flushed=yes", "the reply is {'flushed': False"),
    ("abort r1\nexpect reply aborted=r2", "the reply is {'aborted': ['r1']"),
    ("close session s\nexpect reply closed=yes", "the reply is {'closed': False"),
    ("close session s\nexpect reply error=busy", "expected error=busy"),
    ("submit r3 rid=r1\nexpect r3 golden", "r3 was refused by the front end"),
    ("submit r3 rid=r1\nexpect cached r3 = 0", "r3 was refused by the front end"),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_it_fails_where_it_does_not_hold(text: str, message: str) -> None:
    outcome = run_text(START + text, "wrong.scenario")
    (fault,) = outcome.faults
    assert message in fault
    line = START.count("\n") + text.count("\n") + 1
    command = text.splitlines()[-1]
    assert fault.startswith(f"wrong.scenario:{line}: {command}\n"), fault
    assert "the trace up to here:" in fault
    assert "r1       submit prompt=40" in fault or "answer" in fault


def test_within_counts_from_the_command_before() -> None:
    text = START + "expect r1 finished=length within=9ms\nexpect r2 tokens=9 within={}"
    assert "expected tokens=9" in run_text(text.format("3ms"), "f").faults[0]
    assert not run_text(text.format("9ms"), "f").faults


def test_within_of_what_must_hold_and_of_what_must_not_happen() -> None:
    text = START + (
        "expect no answer r2 within=9ms\n"
        "expect never r2 phase=retracted within=0\n"
        "expect held r2 pages=0 rows=0 metadata_slots=0 within=1s\n"
        "expect ledger unified-0 rows.held=0 within=1s\n"
        "expect r2 golden within=1s\n"
        "expect base within=1s\n"
    )
    assert not run_text(text, "f").faults


def test_records_of_a_router() -> None:
    text = (
        "cluster unified=2 router=1\nsubmit r1\nrun 1ms\nexpect held r1 router_records=1\n"
        "expect ledger router-0 router_records.held = 1\nrun until r1 finished\n"
        "expect base router-0\nexpect held r1 router_records=0\n"
        "expect ledger router-0 router_records.held={}"
    )
    assert not run_text(text.format(0), "f").faults
    assert "expected router_records.held = 1, got 0" in run_text(text.format(1), "f").faults[0]
    early = "cluster unified=1 router=1\nhold step\nsubmit r1\nexpect base router-0"
    assert "not at rest" in run_text(early, "f").faults[0]


def test_an_answer_with_an_error_status_is_an_error() -> None:
    text = "cluster pages=4\nsubmit r1 prompt=99\nexpect r1 finished={} status=4xx"
    assert not run_text(text.format("error"), "f").faults
    assert not run_text(text.format("abort"), "f").faults
    assert "got abort" in run_text(text.format("length"), "f").faults[0]


def test_pages_that_the_scenario_takes_are_not_missed_at_rest() -> None:
    text = START + "exhaust pages unified-0 leave=20\nrun until idle\nexpect base\n"
    assert not run_text(text + "release pages unified-0\nexpect base", "f").faults


def test_a_session_begins_with_its_first_turn_and_ends_when_it_is_closed() -> None:
    text = "cluster\nsubmit t{} prompt=9 session=s\nexpect t{} finished={} golden within=1s\n"
    text = text.format(1, 1, "length") + text[8:].format(2, 2, "length") + "close session s\n"
    assert not run_text(text + "submit t3 session=s\nexpect t3 status=400 within=1s", "f").faults


def test_the_halves_of_a_request_that_is_split_by_hand_share_its_name() -> None:
    text = (
        "cluster prefill=2 decode=2\nsubmit r1 prompt=40 to=prefill-1\n"
        "submit r1 prompt=40 to=decode-0\nrun until r1 state=sending\n"
        "expect held r1 pages=3 senders=1\nexpect r1 finished=length golden within=1s\nexpect base"
    )
    assert not run_text(text, "f").faults
    with pytest.raises(ScenarioError, match="is submitted already"):
        run_text(text + "\nsubmit r1 to=decode-1", "f")


def test_weights_under_a_pause_in_place_are_taken_in_place() -> None:
    text = START + (
        "run until r1 tokens=2\npause unified-0 mode=in-place\nweights unified-0 W2\n"
        "expect reply updated=yes\ncontinue unified-0\nrun until r1 finished\nexpect base within=1s"
    )
    assert not run_text(text, "f").faults


def test_base_wants_rest_within_a_second_and_waits_no_longer() -> None:
    text = "cluster unified=1 store=on store_latency={}\nsubmit r1 prompt=40 max_tokens=2\n"
    text += "run until r1 tokens=2\nexpect base"
    assert not run_text(text.format("900ms"), "f").faults
    assert "not at rest" in run_text(text.format("1100ms"), "f").faults[0]


def test_a_phase_that_is_passed_through_counts_as_reached() -> None:
    text = "cluster unified=1\nsubmit r1 prompt=4 max_tokens=1\nrun until r1 state=stopping"
    assert not run_text(text, "f").faults


PAIR = "cluster prefill=1 decode=1 router=1 host_pages=0\n"


@pytest.mark.parametrize(
    ("name", "hit"),
    [("r1", {"r1"}), ("r*", {"r1", "r2"}), ("g", {"g#0", "g#1"}), ("g#1", {"g#1"})],
)
def test_a_wire_is_broken_before_the_request_comes(name: str, hit: set[str]) -> None:
    """The fault is armed by the name of what a later line submits: of a group, or of a member."""
    text = f"cluster prefill=1 decode=1\nfail wire {name} count=9\n"
    for request in ("r1 rid=x", "r2", "g n=2"):
        text += f"submit {request} to=prefill-0\nsubmit {request} to=decode-0\n"
    text += "run until idle\n"
    for each in ("r1", "r2", "g#0", "g#1"):
        text += f"expect {each} finished={'error' if each in hit else 'length'}\n"
    assert not run_text(text, "f").faults
    late = text.replace("fail", "delay").replace(" count", " by=300ms count")
    late = late.replace("run until idle", "run 200ms").replace("finished=error", "tokens=0")
    assert not run_text(late, "f").faults


def test_a_state_on_a_node_is_that_of_the_newest_life_there() -> None:
    text = PAIR + (
        "submit r1 prompt=40\nrun until r1 tokens=3\npause decode-0 mode=retract\nrun 10ms\n"
        "continue decode-0\nrun until r1 state=prefilling on=prefill-0 within=10ms\n"
        "expect r1 state=prefilling phase=prefilling on=prefill-0\nrun until idle\n"
        "expect r1 finished=length golden"
    )
    assert not run_text(text, "f").faults


def test_the_order_of_events_that_only_prefill_has_and_of_two_nodes() -> None:
    text = (
        "cluster prefill=2 decode=1\nhold schedule prefill-0\n"
        "submit a to=prefill-0\nsubmit a to=decode-0\nrun 1ms\n"
        "submit b to=prefill-1\nsubmit b to=decode-0\nrun 1ms\n"
        "release schedule prefill-0\nrun until idle\nexpect order {} {} {}"
    )
    for event in ("admit", "finish"):
        assert not run_text(text.format(event, "b", "a"), "f").faults
        (fault,) = run_text(text.format(event, "a", "b"), "f").faults
        assert f"expected {event} of a b, got b a" in fault


def test_what_a_process_held_can_be_released_after_its_end() -> None:
    text = "cluster\nhold step\nsubmit r1\nrun 1ms\n{}\nrelease step\n"
    text += "expect r1 finished=error status=503"
    for end in ("kill unified-0", "restart unified-0"):
        assert not run_text(text.format(end), "f").faults


def test_a_reply_is_the_newest_of_any_node() -> None:
    text = PAIR + (
        "flush decode-0\nexpect reply flushed=yes\nsubmit r1\nabort r1\n"
        "expect reply aborted=r1\nexpect reply flushed=yes on=decode-0\n"
        "run until idle\nflush prefill-0\nexpect reply flushed=yes\nexpect reply aborted=r1"
    )
    (fault,) = run_text(text, "f").faults
    assert "the reply is {'flushed': True" in fault


def test_a_forced_retraction_without_host_memory_answers_the_request_at_once() -> None:
    text = (
        PAIR + "submit r1\nrun until r1 tokens=3\nretract r1\nexpect r1 finished=error status=500"
    )
    assert not run_text(text, "f").faults
    (fault,) = run_text(text + "\nretract r1", "f").faults
    assert "it is not on the device: r1 is" in fault
