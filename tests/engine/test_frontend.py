"""Front-end records: whoever proposes an end, in whatever order, the fewest tokens win, once."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend import (
    DuplicateRid,
    FrontendRecord,
    FrontendTable,
    Member,
    ReservedRid,
    StillSettling,
    Terminal,
)
from transport.messages import Finish, Output

LENGTH = Finish("length", length=9)
ABORT = Finish("abort", message="Aborted")


def member() -> Member:
    return FrontendTable().open("r").members[0]


def output(index: int, *tokens: int, finish: Finish | None = None, rid: str = "r") -> Output:
    return Output(rid, index, list(tokens), finish=finish)


def test_an_end_of_the_engine_waits_until_its_last_token_was_examined() -> None:
    one = member()
    assert one.deliver(output(0, 5, 6, 7, finish=LENGTH)) == [5, 6, 7]
    one.examine(2)
    assert (one.terminal, one.visible) == (None, 2)
    one.examine(3)
    assert one.terminal == Terminal(3, LENGTH, "engine")


def test_a_stop_string_before_the_engines_end_wins_and_hides_what_follows() -> None:
    one = member()
    one.deliver(output(0, 5, 6, 7, 8, finish=LENGTH))
    one.examine(4, stop=(2, "ab"))
    assert one.terminal is not None
    assert (one.terminal.finish, one.terminal.tokens) == (Finish("stop", matched="ab"), 2)
    assert one.visible == 2
    assert not one.needs_stop, "the engine ended by itself: there is nobody to tell"


def test_a_stop_string_on_the_last_allowed_token_ends_with_stop() -> None:
    one = member()
    one.deliver(output(0, 5, 6, finish=Finish("length", length=2)))
    one.examine(2, stop=(2, "ab"))
    assert one.terminal is not None
    assert one.terminal.finish.matched == "ab"


def test_an_end_of_sequence_token_wins_over_a_stop_string_on_the_same_token() -> None:
    one = member()
    one.deliver(output(0, 5, 2, finish=Finish("stop", matched=2)))
    one.examine(2, stop=(2, "</s>"))
    assert one.terminal is not None
    assert one.terminal.finish.matched == 2


def test_tokens_after_the_terminal_are_dropped_and_the_engine_must_be_told() -> None:
    one = member()
    one.deliver(output(0, 5, 6))
    one.examine(2, stop=(2, "x"))
    assert one.needs_stop
    assert one.deliver(output(2, 7)) == []
    assert one.deliver(output(3, 8, finish=ABORT)) == []
    assert one.tokens == [5, 6]
    assert one.terminal is not None
    assert one.terminal.finish.matched == "x"
    assert one.settled
    assert not one.needs_stop


def test_a_repeated_output_is_dropped_by_its_index() -> None:
    one = member()
    one.deliver(Output("r", 0, [5, 6], logprobs=[-1.0, -2.0]))
    assert one.deliver(Output("r", 1, [6, 7], logprobs=[-2.0, -3.0])) == [7]
    assert one.deliver(Output("r", 0, [5], logprobs=[-1.0])) == []
    assert one.tokens == [5, 6, 7]
    assert one.logprobs == [-1.0, -2.0, -3.0]


def test_a_lost_output_is_an_error_and_shows_nothing_after_the_gap() -> None:
    one = member()
    one.deliver(output(0, 5))
    one.examine(1)
    assert one.deliver(output(3, 8)) == []
    assert one.terminal is not None
    assert one.terminal.finish.status == 500
    assert "tokens 1 to 2 were lost" in one.terminal.finish.message
    assert one.visible == 1
    assert one.needs_stop


def test_counts_of_an_early_output_are_not_erased_by_a_bare_finish() -> None:
    one = member()
    one.deliver(Output("r", 0, [5], prompt_tokens=7, cached_tokens=4, retractions=1))
    one.examine(1)
    one.deliver(Output("r", 1, finish=ABORT))
    assert (one.prompt_tokens, one.cached_tokens, one.retractions) == (7, 4, 1)


@dataclass
class Story:
    """What really happened to one request: the engine's outputs, and the stop string in them."""

    outputs: list[Output]
    total: int
    stop: int | None


@st.composite
def stories(draw: st.DrawFn) -> Story:
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    finish = draw(st.sampled_from([LENGTH, ABORT, Finish("stop", matched=2), Finish("error")]))
    outputs, index = [], 0
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        outputs.append(output(index, *range(index, index + size), finish=finish if last else None))
        index += size
    stop = draw(st.none() | st.integers(1, max(1, index)))
    return Story(outputs, index, stop if index else None)


@given(stories(), st.data())
def test_the_fewest_tokens_win_whatever_the_order(story: Story, data: st.DataObject) -> None:
    one = member()
    queue = list(story.outputs)
    terminals: list[object] = []
    shown, repeats = 0, 3
    while queue or one.examined < len(one.tokens):
        choices = ["deliver"] * bool(queue)
        choices += ["repeat"] * (repeats > 0 and len(queue) < len(story.outputs))
        choices += ["examine"] * (one.examined < len(one.tokens))
        match data.draw(st.sampled_from(choices)):
            case "deliver":
                one.deliver(queue.pop(0))
            case "repeat":
                repeats -= 1
                one.deliver(story.outputs[len(story.outputs) - len(queue) - 1])
            case _ if one.terminal is None:
                upto = data.draw(st.integers(one.examined + 1, len(one.tokens)))
                found = story.stop is not None and one.examined < story.stop <= upto
                one.examine(upto, stop=(story.stop, "stop") if found and story.stop else None)
            case _:
                break
        assert one.visible >= shown, "what was shown is not taken back"
        shown = one.visible
        if one.terminal is not None:
            terminals.append(one.terminal)
            assert one.visible == one.terminal.tokens
            assert all(terminal is terminals[0] for terminal in terminals), "one terminal"
    for rest in queue:
        one.deliver(rest)
    end = one.terminal
    assert end is not None
    assert one.settled
    engine = story.outputs[-1].finish
    assert engine is not None
    if story.stop is None or story.stop > story.total:
        assert (end.tokens, end.finish) == (story.total, engine)
    elif story.stop < story.total:
        assert (end.tokens, end.finish.matched) == (story.stop, "stop")
    else:
        assert end.tokens == story.total
        assert end.finish.type == "stop", "more specific than length, abort or error"


@given(stories(), st.integers(0, 5), st.sampled_from(["abort", "error"]))
def test_an_end_by_the_server_is_at_once_and_final(story: Story, after: int, kind: str) -> None:
    record = FrontendTable().open("r")
    record.submitted = True
    one = record.members[0]
    for number, out in enumerate(story.outputs):
        if number == after:
            record.end(Finish("abort" if kind == "abort" else "error", message="server"))
            assert record.answered
        fresh = one.deliver(out)
        if one.terminal is None:
            one.examine(len(one.tokens))
        else:
            assert fresh == [] or out.finish is not None
    assert record.settled
    assert one.terminal is not None
    if after < len(story.outputs):
        assert one.terminal.by == "server"
        assert one.visible == one.terminal.tokens == story.outputs[after].index


def finish_all(table: FrontendTable, record: FrontendRecord) -> None:
    for one in record.members:
        one.deliver(Output(one.rid, len(one.tokens), finish=LENGTH))
    table.retire_if_settled(record)


def test_a_live_rid_is_refused_and_an_ended_one_is_free_again() -> None:
    table = FrontendTable()
    first = table.open("x")
    first.submitted = True
    with pytest.raises(DuplicateRid, match="duplicate"):
        table.open("x")
    assert table.get("x") is first
    finish_all(table, first)
    second = table.open("x")
    assert second is not first
    assert len(table) == 1


def test_an_answered_rid_waits_for_the_engines_last_word() -> None:
    table = FrontendTable()
    first = table.open("x")
    first.submitted = True
    one = first.members[0]
    one.deliver(output(0, 5, 6, rid="x"))
    one.examine(2, stop=(2, "s"))
    assert not table.retire_if_settled(first)
    with pytest.raises(StillSettling) as caught:
        table.open("x")
    told: list[str] = []
    caught.value.record.when_settled(lambda: told.append("settled"))
    assert table.standing("x") == "finished", "its client has an answer"
    for late in table.route(output(2, 7, finish=ABORT, rid="x")):
        late.deliver(output(2, 7, finish=ABORT, rid="x"))
    assert table.retire_if_settled(first)
    assert told == ["settled"]
    assert not table.retire_if_settled(first), "only once"
    table.open("x")


def test_a_record_that_never_reached_the_engine_settles_with_its_answer() -> None:
    table = FrontendTable()
    record = table.open("x")
    record.end(ABORT)
    assert table.retire_if_settled(record)
    assert len(table) == 0
    assert table.standing("x") == "finished"


def test_members_of_a_group_end_one_by_one_and_the_group_with_the_last() -> None:
    table = FrontendTable()
    record = table.open("g", n=3)
    record.submitted = True
    assert [one.rid for one in record.members] == ["g#0", "g#1", "g#2"]
    for number, one in enumerate(record.members):
        assert not record.answered
        assert table.route(output(0, rid=one.rid)) == [one]
        one.deliver(output(0, finish=LENGTH, rid=one.rid))
        assert table.standing(one.rid) == "finished"
        assert table.retire_if_settled(record) == (number == 2)
    assert table.standing("g") == "finished"
    assert table.standing("g#1") == "finished"
    assert table.finished("g#1") == table.finished("g")
    assert len(table) == 0


def test_a_group_can_be_refused_by_its_own_rid() -> None:
    table = FrontendTable()
    record = table.open("g", n=2)
    record.submitted = True
    refusal = output(0, finish=Finish("error", status=503, message="full"), rid="g")
    for one in table.route(refusal):
        one.deliver(refusal)
    assert record.answered
    assert table.retire_if_settled(record)


def test_a_rid_that_looks_like_a_member_is_refused() -> None:
    table = FrontendTable()
    with pytest.raises(ReservedRid):
        table.open("g#0")
    table.open("issue #12 of #b")


def test_ended_rids_are_remembered_up_to_a_bound() -> None:
    table = FrontendTable(remember=3)
    for number in range(5):
        finish_all(table, table.open(f"r{number}"))
    assert table.finished_count == 3
    assert [table.standing(f"r{n}") for n in range(5)] == ["unknown"] * 2 + ["finished"] * 3
    assert table.route(output(0, rid="r4")) == []
    assert table.late_outputs == 1
