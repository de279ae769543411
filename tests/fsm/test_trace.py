"""Lines of the trace: numbered without gaps, one JSON object each, and nothing without a sink."""

from collections.abc import Callable

import msgspec
import pytest

from fsm.trace import (
    TRACE_VERSION,
    AnswerLine,
    Footer,
    Header,
    LeaseLine,
    Line,
    MoveLine,
    SubmitLine,
    Tracer,
)
from tests.support import checkers
from tests.support.checkers import Broken
from tests.support.node import Node, Shape


def story(tracer: Tracer) -> None:
    """One line of each kind."""
    tracer.header("boot", ("unified",), {"unified": "abc"}, {"rows": 4})
    tracer.submit("boot:1", "r", ("pages",), ("spans",), 9, 3)
    tracer.move("boot:1", 0, "r", "admit", "scheduler", "waiting", "prefilling", ("rows",), (), "")
    tracer.lease("grow", "boot:1", 2)
    tracer.answer("boot:1", "r", "abort", 1, 503, "deadline exceeded")
    tracer.footer(at_rest=True)


def traced() -> list[Line]:
    lines: list[Line] = []
    story(Tracer("unified-0", lambda: 1.23456789, lines.append))
    return lines


def test_lines_are_numbered_without_gaps_after_the_header() -> None:
    lines = traced()
    assert [type(line) for line in lines] == [
        Header,
        SubmitLine,
        MoveLine,
        LeaseLine,
        AnswerLine,
        Footer,
    ]
    assert isinstance(lines[0], Header)
    assert lines[0].version == TRACE_VERSION
    numbered = [line for line in lines if not isinstance(line, Header)]
    assert [line.seq for line in numbered] == [1, 2, 3, 4, 5]
    assert {(line.time, line.node) for line in numbered} == {(1.234568, "unified-0")}


def test_every_line_survives_its_json() -> None:
    """One object a line, told apart by ``kind``, and a move names its ends ``from`` and ``to``."""
    for line in traced():
        raw = msgspec.json.encode(line)
        assert b"\n" not in raw
        assert msgspec.json.decode(raw, type=Line) == line
    move = msgspec.json.decode(msgspec.json.encode(traced()[2]))
    assert (move["kind"], move["from"], move["to"]) == ("move", "waiting", "prefilling")
    assert "dropped" not in move, "what is empty is not written"


def test_without_a_sink_nothing_is_numbered() -> None:
    tracer = Tracer("unified-0", lambda: 0.0, None)
    story(tracer)
    assert (tracer.seq, tracer.active) == (0, False)


# --- the trace of a node --------------------------------------------------------------------------


def node_at_rest() -> Node:
    """Two requests, of which one grows, is retracted and aborted; a refusal."""
    node = Node(Shape(pages=12))
    first = node.ask("a", range(9), 12)
    node.ask("b", range(30, 45), 9)
    node.ask("c", [])
    node.until_tokens(first, 3)
    node.scheduler.retract("b")
    node.turn()
    node.abort("b")
    node.settle()
    return node


def test_the_trace_of_a_node_tells_the_whole_story() -> None:
    node = node_at_rest()
    kinds = {line.what for line in node.trace if isinstance(line, LeaseLine)}
    assert {"grow", "cache", "release"} <= kinds
    answers = [line for line in node.trace if isinstance(line, AnswerLine)]
    assert [(line.rid, line.reason, line.status) for line in answers] == [
        ("c", "abort", 400),
        ("b", "abort", None),
        ("a", "length", None),
    ]
    header = node.trace[0]
    assert isinstance(header, Header)
    assert header.pools["pages"] == 12


def lose_a_line(lines: list[Line]) -> None:
    del lines[4]


def answer_twice(lines: list[Line]) -> None:
    answer = next(line for line in lines if isinstance(line, AnswerLine))
    seq = len(lines)
    lines.append(msgspec.structs.replace(answer, seq=seq))


def forget_an_answer(lines: list[Line]) -> None:
    index = max(i for i, line in enumerate(lines) if isinstance(line, AnswerLine))
    lines[index] = LeaseLine(0.0, "unified-0", index, "grow", "x", 1)


def forget_to_drop(lines: list[Line]) -> None:
    index = next(i for i, line in enumerate(lines) if isinstance(line, MoveLine) and line.dropped)
    move = lines[index]
    assert isinstance(move, MoveLine)
    lines[index] = msgspec.structs.replace(move, dropped=move.dropped[1:])


def invent_an_edge(lines: list[Line]) -> None:
    index = next(i for i, line in enumerate(lines) if isinstance(line, MoveLine))
    move = lines[index]
    assert isinstance(move, MoveLine)
    lines[index] = msgspec.structs.replace(move, target="decoding")


def end_before_done(lines: list[Line]) -> None:
    index = max(i for i, line in enumerate(lines) if isinstance(line, MoveLine))
    lines[index] = LeaseLine(0.0, "unified-0", index, "grow", "x", 1)


@pytest.mark.parametrize(
    "damage",
    [lose_a_line, answer_twice, forget_an_answer, forget_to_drop, invent_an_edge, end_before_done],
    ids=lambda damage: damage.__name__,
)
def test_the_checker_of_traces_notices(damage: Callable[[list[Line]], None]) -> None:
    node = node_at_rest()
    checkers.check_trace(node.trace, len(node.clients))
    damage(node.trace)
    with pytest.raises(Broken, match=r"^trace: "):
        checkers.check_trace(node.trace, len(node.clients))
