"""The structural rules, each proven by a chart that breaks it, and what a fingerprint covers.

Method: the real unified chart, with one row changed. A rule that no longer bites, or a new rule
without a broken chart here, fails a test.
"""

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from fsm import check
from fsm.chart import Chart, Edge, State
from fsm.check import ChartError
from fsm.resources import RESOURCES, Resource
from fsm.unified import BASE_KIT, UNIFIED

Break = Callable[[Chart], Chart]


def state(name: str, **changes: Any) -> Break:
    """Change fields of one state."""

    def apply(chart: Chart) -> Chart:
        assert name in chart.by_name
        rows = (replace(s, **changes) if s.name == name else s for s in chart.states)
        return replace(chart, states=tuple(rows))

    return apply


def edge(source: str, event: str, **changes: Any) -> Break:
    """Change fields of one edge."""

    def apply(chart: Chart) -> Chart:
        assert (source, event) in chart.table
        rows = (
            replace(e, **changes) if (e.source, e.event) == (source, event) else e
            for e in chart.edges
        )
        return replace(chart, edges=tuple(rows))

    return apply


def without(source: str, *events: str) -> Break:
    """Remove edges of one state."""

    def apply(chart: Chart) -> Chart:
        assert all((source, event) in chart.table for event in events)
        rows = (e for e in chart.edges if e.source != source or e.event not in events)
        return replace(chart, edges=tuple(rows))

    return apply


def plus(*rows: State | Edge) -> Break:
    """Add states and edges."""

    def apply(chart: Chart) -> Chart:
        states = tuple(row for row in rows if isinstance(row, State))
        edges = tuple(row for row in rows if isinstance(row, Edge))
        return replace(chart, states=chart.states + states, edges=chart.edges + edges)

    return apply


DECODING = UNIFIED.state("decoding")
ABORT = Edge("abort", "limbo", "done", ("client",), "planted")
LIMBO = State("limbo", "decoding", "live", ("frontend_records",), "planted")

BROKEN: dict[str, tuple[Break, str]] = {
    "a name used twice": (plus(DECODING), "state 'decoding' is defined 2 times"),
    "no such initial state": (
        lambda chart: replace(chart, initial="nowhere"),
        "initial state 'nowhere' does not exist",
    ),
    "an edge to nowhere": (
        edge("waiting", "admit", target="nowhere"),
        "edge waiting --admit--> nowhere: state 'nowhere' does not exist",
    ),
    "an edge from nowhere": (
        plus(Edge("admit", "nowhere", "done", ("client",), "planted")),
        "edge nowhere --admit--> done: state 'nowhere' does not exist",
    ),
    "two targets": (
        plus(Edge("abort", "waiting", "stopping", ("client",), "planted")),
        "event 'abort' has 2 targets in state 'waiting'",
    ),
    "a misspelt phase": (
        state("waiting", phase="wating"),
        "state 'waiting' has the unknown phase 'wating'",
    ),
    "a misspelt resource": (
        state("waiting", holds=("frontend_records", "page")),
        "state 'waiting' holds unknown resources ['page']",
    ),
    "a resource named twice": (
        state("waiting", holds=("frontend_records", "spans", "spans")),
        "state 'waiting' names a resource twice",
    ),
    "a live state called retired": (
        state("waiting", phase="retired"),
        "state 'waiting': exactly the states that are not live are retired",
    ),
    "an answered state called decoding": (
        state("stopping", phase="decoding"),
        "state 'stopping': exactly the states that are not live are retired",
    ),
    "an exit from the end": (
        plus(Edge("enqueue", "done", "waiting", ("intake",), "planted")),
        "final state 'done' has an exit",
    ),
    "an end that holds something": (
        state("done", holds=("rows",)),
        "final state 'done' holds ['rows']",
    ),
    "a trap": (without("stopping", "quiesce"), "state 'stopping' has no exit"),
    "no abort": (without("decoding", "abort"), "live state 'decoding' does not accept abort"),
    "an obligation forgotten": (
        state("waiting", holds=("spans",)),
        "live state 'waiting' does not owe its client an answer",
    ),
    "an answer owed after the answer": (
        state("stopping", holds=("pages", "frontend_records")),
        "retired state 'stopping' still owes its client an answer",
    ),
    "pages that go nowhere": (
        edge("stopping", "quiesce", pages=None),
        "edge stopping --quiesce--> done drops pages and does not say where they go",
    ),
    "pages dropped by the back door": (
        edge("decoding", "abort", target="done"),
        "edge decoding --abort--> done drops pages and does not say where they go",
    ),
    "a disposition of nothing": (
        edge("waiting", "abort", pages="cache"),
        "edge waiting --abort--> done names a disposition but drops no pages",
    ),
    "nobody's edge": (
        edge("waiting", "admit", by=()),
        "edge waiting --admit--> prefilling is caused by nobody",
    ),
    "an abort that is not the client's": (
        edge("waiting", "abort", by=("clock",)),
        "edge waiting --abort--> done cannot be caused by the client",
    ),
    "a second life": (
        edge("stopping", "quiesce", target="waiting"),
        "edge stopping --quiesce--> waiting leads from a retired state back to a live one",
    ),
    "a debt that comes back": (
        edge("stopping", "quiesce", target="waiting"),
        (
            "edge stopping --quiesce--> waiting leads from an answered state to one that owes an"
            " answer"
        ),
    ),
    "no reason": (
        edge("waiting", "admit", why=""),
        "edge waiting --admit--> prefilling has no reason",
    ),
    "an island": (plus(LIMBO, ABORT), "state 'limbo' cannot be reached"),
    "no end": (
        lambda chart: replace(
            chart,
            states=tuple(s for s in chart.states if s.name != "done"),
            edges=tuple(e for e in chart.edges if e.target != "done"),
        ),
        "there is no final state",
    ),
    "a life without an end": (
        edge("stopping", "quiesce", target="stopping"),
        "no path leads from state 'stopping' to a final state",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_chart_that_breaks_a_rule_cannot_be_built(fault: str) -> None:
    breaking, message = BROKEN[fault]
    with pytest.raises(ChartError) as caught:
        breaking(UNIFIED)
    assert message in str(caught.value)
    assert str(caught.value).startswith("chart 'unified': ")


def test_every_fault_of_a_chart_is_named_at_once() -> None:
    with pytest.raises(ChartError) as caught:
        plus(LIMBO)(UNIFIED)
    assert "state 'limbo' has no exit" in str(caught.value)
    assert "live state 'limbo' does not accept abort" in str(caught.value)
    assert "state 'limbo' cannot be reached" in str(caught.value)


def test_every_rule_has_a_chart_that_breaks_it() -> None:
    """Read the messages out of the rules' source: a broken chart must provoke each of them."""
    fragments = [
        max((str(part.value) for part in node.values if isinstance(part, ast.Constant)), key=len)
        for node in ast.walk(ast.parse(inspect.getsource(check)))
        if isinstance(node, ast.JoinedStr)
        and any(isinstance(part, ast.Constant) for part in node.values)
    ]
    rules = [text for text in fragments if len(text.split()) > 1]
    assert len(rules) >= 20, "the messages are no longer found, so this test proves nothing"
    provoked = "\n".join(message for _, message in BROKEN.values())
    assert [text for text in rules if text not in provoked] == []


def test_a_chart_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        UNIFIED.name = "other"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        UNIFIED.states[0].name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        UNIFIED.table["arrived", "admit"] = UNIFIED.edges[0]  # type: ignore[index]


def test_what_an_edge_takes_and_drops_follows_from_its_states_and_the_kit() -> None:
    everything = frozenset(RESOURCES)
    for row in UNIFIED.edges:
        for kit in (everything, BASE_KIT, frozenset[Resource]()):
            move = UNIFIED.move(row.source, row.event, kit)
            assert move is not None
            before, after = UNIFIED.holds[row.source] & kit, UNIFIED.holds[row.target] & kit
            assert (before | set(move.takes)) - set(move.drops) == after
            assert list(move.drops) == [r for r in RESOURCES if r in move.drops], "release order"
    assert UNIFIED.move("done", "abort", everything) is None


# --- fingerprint ----------------------------------------------------------------------------------


def variants() -> Iterator[tuple[str, Chart]]:
    """Every chart that differs from the unified one in one field of one row, or lacks one row."""
    yield "name", replace(UNIFIED, name="other")
    yield "initial", replace(UNIFIED, initial="waiting")
    for index, s in enumerate(UNIFIED.states):
        rest = UNIFIED.states[:index], UNIFIED.states[index + 1 :]
        changed: dict[str, tuple[State, ...]] = {
            "name": (replace(s, name="other"),),
            "phase": (replace(s, phase="transferring"),),
            "kind": (replace(s, kind="draining"),),
            "holds": (replace(s, holds=(*s.holds, "host_pages")),),
            "absent": (),
        }
        for field, row in changed.items():
            yield f"{s.name} {field}", replace(UNIFIED, states=rest[0] + row + rest[1])
    for index, e in enumerate(UNIFIED.edges):
        others = UNIFIED.edges[:index], UNIFIED.edges[index + 1 :]
        moved: dict[str, tuple[Edge, ...]] = {
            "event": (replace(e, event="other"),),
            "source": (replace(e, source="other"),),
            "target": (replace(e, target="other"),),
            "by": (replace(e, by=("peer",)),),
            "pages": (replace(e, pages="quarantine"),),
            "absent": (),
        }
        for field, line in moved.items():
            name = f"{e.source} {e.event} {field}"
            yield name, replace(UNIFIED, edges=others[0] + line + others[1])


def test_a_fingerprint_covers_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm.chart.check", lambda chart: None)  # most variants break a rule too
    seen = {UNIFIED.fingerprint: "the chart itself"}
    for name, chart in variants():
        assert chart.fingerprint not in seen, f"{name} looks like {seen[chart.fingerprint]}"
        seen[chart.fingerprint] = name


def test_a_fingerprint_does_not_cover_prose_or_order() -> None:
    rewritten = replace(
        UNIFIED,
        states=tuple(
            replace(s, doc="other words", holds=s.holds[::-1]) for s in reversed(UNIFIED.states)
        ),
        edges=tuple(replace(e, why="other words", by=e.by[::-1]) for e in reversed(UNIFIED.edges)),
    )
    assert rewritten.fingerprint == UNIFIED.fingerprint
    assert rewritten != UNIFIED


def test_a_fingerprint_is_twelve_hex_digits() -> None:
    assert len(UNIFIED.fingerprint) == 12
    int(UNIFIED.fingerprint, 16)
