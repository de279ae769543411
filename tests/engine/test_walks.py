"""Seeded walks: whatever happens, in any order, a node ends at rest and nobody is told wrongly.

Method: ``tests.support.walks``. After every transition the scheduler audits itself; after every
turn checkers from outside look; at the end everything must be back, every submission answered once
and every output the beginning of its golden one. A failing seed prints a cut-down walk.
``INTERLOCK_EXAMPLES=20`` walks twenty times as many seeds."""

from collections import Counter

import pytest

from fsm.trace import MoveLine
from fsm.unified import UNIFIED
from tests.support import walks
from tests.support.examples import FACTOR
from tests.support.node import Node
from tests.support.walks import Action, Walk

BLOCK = 20
BLOCKS = 12 * FACTOR
EDGES = Counter[tuple[str, str]]()
"""Edges that the walks of this run have taken."""


def note(node: Node) -> None:
    EDGES.update((line.source, line.event) for line in node.trace if isinstance(line, MoveLine))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_walks_end_at_rest(block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        note(walks.check(seed))


def test_the_walks_take_every_edge_of_the_chart() -> None:
    """Else they prove less than they seem to. Runs after the walks, and adds some if it is run
    alone."""
    wanted = {(edge.source, edge.event) for edge in UNIFIED.edges} - {("arrived", "abort")}
    for seed in range(10_000, 10_400):
        if wanted <= EDGES.keys():
            break
        note(walks.check(seed))
    assert wanted <= EDGES.keys(), sorted(wanted - EDGES.keys())
    assert ("arrived", "abort") not in EDGES, "intake is over before anybody can abort"


def test_a_walk_is_its_seed() -> None:
    assert walks.make_walk(7) == walks.make_walk(7)
    assert walks.make_walk(7) != walks.make_walk(8)
    first, second = walks.run(walks.make_walk(7)), walks.run(walks.make_walk(7))
    assert first.trace == second.trace


def test_a_failing_walk_prints_its_seed_and_a_short_reproduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fault is planted that only a retraction shows; the walk is cut down to a few actions."""

    def broken(node: Node) -> None:
        assert node.scheduler.stats.retracted == 0, "planted"

    monkeypatch.setattr("tests.support.checkers.check_turn", broken)
    seed = next(s for s in range(500) if walks.failure(walks.make_walk(s)) is not None)
    with pytest.raises(AssertionError) as caught:
        walks.check(seed)
    (note,) = caught.value.__notes__
    assert f"seed {seed}" in note
    assert "submit" in note
    cut = walks.shrink(walks.make_walk(seed), caught.value)
    assert len(cut.actions) <= 6
    assert walks.failure(cut) is not None


def test_any_part_of_a_walk_is_a_walk() -> None:
    walk = walks.make_walk(3)
    for step in (2, 3, 5):
        part = Walk(walk.seed, walk.shape, walk.store, walk.actions[::step])
        walks.run(part)
    walks.run(Walk(0, walk.shape, False, (Action("abort", 3), Action("turns", 2))))
