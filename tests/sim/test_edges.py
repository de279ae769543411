"""Goal: every edge of every chart is taken in some scenario, so that none is dead, and a change of
what it does is seen in a golden trace.

Method: read the golden traces. Exceptions are named, with the reason.
"""

import re
from pathlib import Path
from typing import Final

import pytest

from fsm.chart import Chart
from fsm.decode import DECODE
from fsm.prefill import PREFILL
from fsm.unified import UNIFIED

FOLDER: Final = Path(__file__).parents[1] / "scenarios"
MOVE: Final = re.compile(r"^ +[\d.]+ +(?:(unified|prefill|decode)-\d+ )?.* (\w+) -(\w+)-> \w+")
ROLE: Final = re.compile(r"^> cluster .*?\b(unified|prefill|decode)=", re.MULTILINE)

NEVER: Final = {
    ("unified", "arrived", "abort"): "intake is one call: nothing comes between its two ends",
    ("prefill", "arrived", "abort"): "the same",
    ("decode", "arrived", "abort"): "the same",
}
"""(chart, state, event) that no scenario takes."""


def taken() -> set[tuple[str, str, str]]:
    """(chart, state, event) of all moves in golden traces. A trace of one node does not name it."""
    found = set()
    for path in FOLDER.glob("*.trace"):
        text = path.read_text(encoding="utf-8")
        only = ROLE.search(text)
        for line in text.splitlines():
            move = MOVE.match(line)
            if move is not None:
                role = move[1] or (only[1] if only else "unified")
                found.add((role, move[2], move[3]))
    return found


@pytest.mark.parametrize("chart", [UNIFIED, PREFILL, DECODE], ids=lambda chart: chart.name)
def test_every_edge_is_taken_in_a_scenario(chart: Chart) -> None:
    moves = taken()
    edges = {(chart.name, edge.source, edge.event) for edge in chart.edges}
    never = {edge for edge in NEVER if edge[0] == chart.name}
    assert edges - moves == never
    assert {move for move in moves if move[0] == chart.name} <= edges
