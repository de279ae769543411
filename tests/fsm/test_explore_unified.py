"""Exploration of a unified node: planted bugs are found, and production passes.

Method: one search for each bug of :mod:`tests.fsm.planted_unified`, with one of everything; the
production design with two of everything."""

import pytest

from fsm.explore import Explorer
from fsm.explore_base import Budget
from fsm.explore_unified import UnifiedModel
from tests.fsm.planted_unified import PLANTED_UNIFIED, PlantedUnified


@pytest.mark.parametrize("bug", PLANTED_UNIFIED, ids=lambda bug: bug.name.replace(" ", "_"))
def test_a_bug_planted_in_a_unified_node_is_found(bug: PlantedUnified) -> None:
    violation = Explorer(UnifiedModel(bug.design), 1, Budget(1, 1, 1, 1)).run().violation
    assert violation is not None, "not found"
    assert bug.says in violation.what
    assert len(violation.steps) == bug.length, f"\n{violation}"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("requests", [1, 2])
def test_unified_nodes_with_two_of_everything(requests: int, depth: int) -> None:
    result = Explorer(UnifiedModel(depth=depth), requests, Budget(2, 2, 2, 2)).run()
    assert result.violation is None, f"\n{result.violation}"
    assert result.complete
