"""Replay: whole traces of nodes fit; what does not fit is said with its line, request and reason;
after a fault it goes on; memory does not grow with the trace."""

import random
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count

import msgspec
import pytest
from msgspec.structs import replace

from fsm.chart import Chart
from fsm.replay import NodeReplay
from fsm.replay_answers import ENDINGS
from fsm.replay_faults import Fault
from fsm.trace import (
    TRACE_VERSION,
    AnswerLine,
    Balance,
    Flow,
    Footer,
    Header,
    LeaseLine,
    Line,
    MoveLine,
    SubmitLine,
)
from fsm.trace_read import Malformed, Read, Unusable
from fsm.unified import BASE_KIT, UNIFIED
from tests.support.node import Node, Shape
from tests.support.stories import eventful, judge
from tests.support.walks import make_walk, run

# --- what fits ------------------------------------------------------------------------------------


def test_an_eventful_trace_fits() -> None:
    assert judge(eventful()) == []


@pytest.mark.parametrize("seed", range(40))
def test_the_trace_of_a_walk_fits(seed: int) -> None:
    node = run(make_walk(seed))
    node.scheduler.tracer.footer(node.scheduler.at_rest)
    assert [str(fault) for fault in judge(node.trace)] == []


def test_it_survives_its_json() -> None:
    lines = eventful()
    raw = msgspec.json.Encoder().encode_lines(lines)
    assert msgspec.json.Decoder(Line).decode_lines(raw) == lines


def test_balances_are_those_of_the_pool() -> None:
    """The last balance of the trace is what the pool of the node has."""
    lines = eventful()
    last = [line.pool for line in lines if isinstance(line, MoveLine | LeaseLine) if line.pool][-1]
    assert last.free + last.cached == 20
    assert last.kept == last.cached


# --- the rules of endings -------------------------------------------------------------------------


def ends(chart: Chart) -> set[str]:
    return {
        edge.event
        for edge in chart.edges
        if "frontend_records" in chart.holds[edge.source] - chart.holds[edge.target]
    }


def test_every_event_that_answers_has_a_rule() -> None:
    assert set(ENDINGS) == ends(UNIFIED)


# --- faults of a whole trace ----------------------------------------------------------------------


def first(lines: list[Line], kind: type[Line], **values: object) -> int:
    for index, line in enumerate(lines):
        fields = msgspec.structs.asdict(line)
        if isinstance(line, kind) and all(fields[name] == v for name, v in values.items()):
            return index
    raise LookupError(values)


def texts(lines: list[Read], complete: bool = True) -> list[str]:
    return [str(fault) for fault in judge(lines, complete)]


def test_a_chart_that_differs() -> None:
    lines: list[Read] = list(eventful())
    header = lines[0]
    assert isinstance(header, Header)
    lines[0] = replace(header, charts={"unified": "0" * 12})
    (text,) = texts(lines)
    assert text.startswith("trace:1: chart 'unified' has fingerprint 000000000000; this build has")
    assert text.endswith(UNIFIED.fingerprint)


def test_charts_that_nobody_knows() -> None:
    lines = eventful()
    header = lines[0]
    assert isinstance(header, Header)
    with pytest.raises(Unusable, match="no chart of tea is known to this build"):
        judge([replace(header, roles=("tea",), charts={"tea": "0" * 12}), *lines[1:]])


def test_an_illegal_move_is_named_with_line_request_and_choices() -> None:
    lines: list[Read] = list(eventful())
    index = first(lines, MoveLine, rid="grows", event="prefilled")  # type: ignore[arg-type]
    line = lines[index]
    assert isinstance(line, MoveLine)
    lines[index] = replace(line, event="readmit")
    (text,) = texts(lines)
    where, what = text.split("no edge")
    assert where == f"trace:{index + 1}: grows (boot:2): "
    assert what.startswith(" 'readmit' leaves prefilling; its edges are abort, expire, prefilled")


def test_it_goes_on_after_a_fault_and_counts() -> None:
    """Three damages, three faults: none drags others after it."""
    lines: list[Read] = list(eventful())
    for event, field, value in (
        ("enqueue", "by", "peer"),
        ("retract", "attempt", 7),
        ("fail", "dropped", ()),
    ):
        index = first(lines, MoveLine, event=event)  # type: ignore[arg-type]
        line = lines[index]
        assert isinstance(line, MoveLine)
        lines[index] = replace(line, **{field: value})
    kinds = [fault.text.split()[0] for fault in judge(lines) if "attempt" not in fault.text]
    assert kinds == ["enqueue", "drops"]
    stale = [fault.text for fault in judge(lines) if "attempt" in fault.text]
    assert stale[0] == "an attempt to come: 7, where it is at 0"


def test_a_leak_at_the_end() -> None:
    lines: list[Read] = list(eventful())
    index = first(lines, MoveLine, rid="fails", event="quiesce")  # type: ignore[arg-type]
    lines[index - 2 : index + 1] = []
    footer = lines[-1]
    assert isinstance(footer, Footer)
    lines[-1] = replace(footer, seq=lines[-2].seq + 1)  # type: ignore[union-attr]
    leak = next(text for text in texts(lines) if "leak" in text)
    assert leak.endswith("a leak: is in stopping at the end, holding prefix_locks, 2 pages, rows")


def test_malformed_lines_are_faults_of_their_own() -> None:
    lines: list[Read] = [*eventful(), Malformed("JSON is malformed")]
    assert texts(lines) == [f"trace:{len(lines)}: no line of a trace: JSON is malformed"]


def test_a_trace_that_breaks_off_is_at_fault_only_if_it_has_to_be_complete() -> None:
    lines = eventful()[:40]
    assert judge(lines, complete=False) == []
    faults = texts(list(lines), complete=True)
    assert faults[-1] == "trace:40: truncated: it has no footer"
    assert any("is in decoding at the end" in fault for fault in faults)


def test_a_node_that_was_not_at_rest_may_have_open_requests() -> None:
    lines = eventful()[:40]
    last = lines[-1]
    assert not isinstance(last, Header)
    footer = Footer(last.time, last.node, last.seq + 1, at_rest=False)
    assert judge([*lines, footer], complete=False) == []
    assert judge([*lines, replace(footer, at_rest=True)], complete=False)


def test_a_live_rid_cannot_arrive_again() -> None:
    node = Node(Shape(pages=20, page_size=4, rows=4))
    node.ask("a", range(9), 4)
    node.ask("b", range(9), 4)
    node.settle()
    lines: list[Read] = [
        replace(line, rid="a") if isinstance(line, SubmitLine | MoveLine | AnswerLine) else line
        for line in node.trace
    ]
    assert [f.text for f in judge(lines, complete=False)] == ["its rid is live already, as boot:1"]


def test_unknown_lives_are_reported_once() -> None:
    lines: list[Read] = list(eventful())
    ghosts = [
        replace(line, life="boot:99")
        if isinstance(line, MoveLine | AnswerLine) and line.life == "boot:5"
        else line
        for line in lines
    ]
    found = [f for f in judge(ghosts) if "never began" in f.text]
    assert len(found) == 1
    assert found[0].who == "group#0 (boot:99)"


# --- memory ---------------------------------------------------------------------------------------


def endless(requests: int) -> Iterator[Line]:
    """A long trace of short lives, a few at a time."""
    numbers, clock = count(1), count()
    kit = tuple(sorted(BASE_KIT))
    door, memory = ("spans", "frontend_records"), ("prefix_locks", "pages", "rows")
    rng = random.Random(0)

    def stamp() -> tuple[float, str, int]:
        return next(clock) / 1000, "unified-0", next(numbers)

    for number in range(1, requests + 1):
        life, rid = f"boot:{number}", f"r{rng.random()}"
        base = (life, 0, rid)
        begin = stamp()
        yield SubmitLine(*begin, life, rid, kit, door, 4, 1)
        cause = ("unified-0", begin[2])
        yield MoveLine(*stamp(), *base, "enqueue", "intake", "arrived", "waiting", cause=cause)
        yield MoveLine(
            *stamp(),
            *base,
            "admit",
            "scheduler",
            "waiting",
            "prefilling",
            memory,
            units=1,
            flow=Flow(-1, 0),
            pool=Balance(7, 0, 0),
        )
        yield MoveLine(
            *stamp(),
            *base,
            "finish",
            "runner",
            "prefilling",
            "stopping",
            (),
            door,
            tokens=1,
            reason="length",
        )
        yield AnswerLine(*stamp(), life, rid, "length", 1)
        yield LeaseLine(*stamp(), "release", life, 1, Flow(1, 0), Balance(8, 0, 0))
        yield MoveLine(
            *stamp(), *base, "quiesce", "runner", "stopping", "done", (), memory, tokens=1
        )


def header() -> Header:
    pools = {"pages": 8, "rows": 2, "prefix_locks": 2, "spans": 2, "frontend_records": 2}
    charts = {"unified": UNIFIED.fingerprint}
    return Header(TRACE_VERSION, "unified-0", "boot", ("unified",), charts, pools, 0.0, 4)


def peak(lines: Callable[[], Iterator[Line]]) -> int:
    faults: list[Fault] = []
    replay = NodeReplay("trace", header(), faults.append)
    tracemalloc.start()
    replay.run(2, lines())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert faults == []
    return most


def test_memory_does_not_grow_with_the_trace() -> None:
    short, long = peak(lambda: endless(500)), peak(lambda: endless(14_500))
    assert long < short + 20_000, f"{short} bytes for 3,500 lines, {long} for 101,500"
