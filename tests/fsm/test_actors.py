"""Who causes an edge, according to the chart, is exactly who does.

Two things fire. A decision table fires what a message leads to, and says by whom; so its rows are
asked. Intake and policy fire on their own, in the schedulers; so their moves are read out of the
reviewed traces of the scenarios, which the production schedulers wrote."""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from fsm.chart import Chart, Edge
from fsm.decide import BOOKS

TRACES: Final = Path(__file__).parents[1] / "scenarios"
MOVE: Final = re.compile(
    r"^ +[\d.]+ +(?:(unified|prefill|decode)-\d+ +)?\S+ +(\w+) -(\w+)-> \w+ by=(\w+)"
)
"""A line of a trace; a node alone is not named, and is a unified one."""
ON_ITS_OWN: Final = frozenset({"intake", "scheduler"})
"""Actors that fire without a message."""

EDGES: Final = [(book.chart, edge) for book in BOOKS.values() for edge in book.chart.edges]
Firing: TypeAlias = Mapping[tuple[str, str, str], set[str]]
"""(chart, source, event) → actors."""


@cache
def decided() -> Firing:
    """What the rows of the decision tables fire."""
    found: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for name, book in BOOKS.items():
        for rule in book.rules:
            if rule.decision.event is not None:
                for state in rule.states:
                    found[name, state, rule.decision.event].add(rule.decision.by)
    return dict(found)


@cache
def recorded() -> Firing:
    """What the traces of the scenarios show."""
    found: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for path in sorted(TRACES.glob("*.trace")):
        for line in path.read_text(encoding="utf-8").splitlines():
            move = MOVE.match(line)
            if move is not None:
                chart, source, event, by = move.groups()
                found[chart or "unified", source, event].add(by)
    return dict(found)


@pytest.mark.parametrize(
    ("chart", "edge"), EDGES, ids=[f"{chart.name} {e.source} {e.event}" for chart, e in EDGES]
)
def test_an_edge_names_exactly_those_who_fire_it(chart: Chart, edge: Edge) -> None:
    key = chart.name, edge.source, edge.event
    seen = recorded().get(key, set())
    assert set(edge.by) == decided().get(key, set()) | (seen & ON_ITS_OWN)
    assert seen <= set(edge.by)


def test_the_traces_show_moves_that_no_message_leads_to() -> None:
    """If their form changed, the test above would have nothing to compare with."""
    alone = {key for key, actors in recorded().items() if actors & ON_ITS_OWN} - decided().keys()
    assert {event for _, _, event in alone} == {
        "enqueue", "prefetch", "reject", "admit", "readmit", "retract", "grant",
    }  # fmt: skip
