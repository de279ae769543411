"""Exploration finds every planted bug, by a counterexample of minimal length.

Method: one search for each bug of :mod:`tests.fsm.planted`, with the smallest budget that shows
it. That the production design passes the same run is asked too: a property that always fails would
find every bug."""

from pathlib import Path

import pytest

from fsm.explore import Explorer
from fsm.explore_base import Budget
from fsm.explore_pd_model import PairModel
from fsm.explore_pd_nodes import DROPPING
from tests.fsm.planted import BY_LIFE, PLANTED, Planted
from tests.fsm.planted_shared import PLANTED_SHARED
from tests.fsm.planted_unified import PLANTED_UNIFIED


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.name.replace(" ", "_"))
def test_a_planted_bug_is_found(bug: Planted) -> None:
    violation = bug.violation
    assert violation is not None, "not found"
    assert bug.says in violation.what
    assert len(violation.steps) == bug.length, f"\n{violation}"


RUNS = sorted({(bug.requests, bug.budget) for bug in PLANTED if bug.pauses is DROPPING})


@pytest.mark.parametrize(("requests", "budget"), RUNS, ids=lambda value: str(value))
def test_production_passes_the_same_runs(requests: int, budget: Budget) -> None:
    result = Explorer(PairModel(), requests, budget).run()
    assert result.violation is None, f"\n{result.violation}"
    assert result.complete


def test_a_room_may_be_used_again_by_who_looks_at_lives() -> None:
    """The counterpart of the bug that looks at rooms: nothing but that is wrong with it."""
    result = Explorer(PairModel(BY_LIFE), 1, Budget(aborts=1, rebuilds=1)).run()
    assert result.violation is None, f"\n{result.violation}"
    assert result.complete


def test_there_are_more_than_fifteen_bugs_and_each_says_something_of_its_own() -> None:
    assert len({bug.name for bug in PLANTED}) == len(PLANTED) > 15


def test_the_page_lists_every_bug_with_its_length() -> None:
    page = Path(__file__).parents[2] / "docs" / "exploration.md"
    rows = page.read_text(encoding="utf-8").splitlines()
    bugs = [*PLANTED, *PLANTED_UNIFIED, *PLANTED_SHARED]
    missing = [bug.name for bug in bugs if f"| {bug.name} | {bug.length} |" not in rows]
    assert missing == []
