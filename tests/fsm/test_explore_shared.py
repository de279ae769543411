"""Exploration of what two requests share on a unified node: planted bugs are found, and production
passes.

Method: one search for each bug of :mod:`tests.fsm.planted_shared`; the production design with
memory that is scarce and with memory for a shared prefix, with a guest, as a group and as turns of
a session. Longer runs are ``make explore``."""

from itertools import product

import pytest

from fsm.explore import Explorer
from fsm.explore_base import Budget
from fsm.explore_shared import SharedModel
from fsm.explore_shared_base import Life, Node, Together
from tests.fsm.planted_shared import PLANTED_SHARED, PlantedShared


@pytest.mark.parametrize("bug", PLANTED_SHARED, ids=lambda bug: bug.name.replace(" ", "_"))
def test_a_bug_planted_in_what_is_shared_is_found(bug: PlantedShared) -> None:
    violation = bug.violation
    assert violation is not None, "not found"
    assert bug.says in violation.what
    assert len(violation.steps) == bug.length, f"\n{violation}"


@pytest.mark.parametrize(
    ("together", "pages", "guest", "budget"),
    [
        ("alone", 3, False, Budget(1, 1, 1, 1)),
        ("alone", 4, False, Budget(0, 1)),
        ("alone", 3, True, Budget(0, 1)),
        ("group", 3, False, Budget(0, 1, 0, 1)),
        ("session", 3, False, Budget(1, 1, 1, 1)),
    ],
    ids=str,
)
def test_two_requests_that_share_a_node(
    together: Together, pages: int, guest: bool, budget: Budget
) -> None:
    model = SharedModel(together=together, pages=pages, guest=guest, pauses=budget.rebuilds > 0)
    result = Explorer(model, 1, budget).run()
    assert result.violation is None, f"\n{result.violation}"
    assert result.complete


def test_what_it_is_about_happens() -> None:
    """Pages with two owners and the cache; growth, eviction, and a victim that comes back to what
    it left in the cache."""
    result = Explorer(SharedModel(pages=4, pauses=False), 1, Budget()).run()
    nodes: list[Node] = list(result.seen)  # type: ignore[arg-type]
    owners = {who for node in nodes for who in node.owners}
    assert ("cache", "r1", "r2") in owners
    assert max(len(life.pages) for node in nodes for life in node.lives) == 3
    assert {key[1] for node in nodes for key, _ in node.tree} == {"A", "B1", "B2"}
    assert any(_resumed(life) for node in nodes for life in node.lives)
    short = [life for node in nodes for life in node.lives if len(life.pages) < life.size]
    assert any(life.state == "decoding" for life in short), "nobody waits for a page"


def _resumed(life: Life) -> bool:
    return life.state == "prefilling" and life.lock is not None and life.lock[1] != "A"


def test_a_node_must_hold_either_request() -> None:
    with pytest.raises(ValueError, match="a request may need 3 pages, the node has 2"):
        SharedModel(pages=2)


def test_every_area_has_bugs_of_its_own() -> None:
    areas = {"group", "session", "page", "weights"}
    counts = {area: sum(area in bug.name for bug in PLANTED_SHARED) for area in areas}
    assert all(count >= 2 for count in counts.values()), counts
    assert all(first.name != other.name for first, other in _pairs())


def _pairs() -> list[tuple[PlantedShared, PlantedShared]]:
    return [(a, b) for a, b in product(PLANTED_SHARED, repeat=2) if a is not b]
