"""The explorer: what it counts, what it finds, and that production's charts pass.

Method: a small model whose states can be counted by hand; a naive search over the same pair model,
without numbers, symmetry or compiled steps, as an oracle; and the runs that CI owes (the longer
ones are ``make explore``)."""

from collections import deque
from typing import Any

import pytest

from fsm.explore import Explorer
from fsm.explore_base import (
    ABORT,
    DEADLINE,
    FAULT,
    FREE,
    REBUILD,
    Budget,
    Hit,
    Result,
    Step,
)
from fsm.explore_pd_model import PairModel
from fsm.explore_pd_nodes import EVERY

# --- a model small enough to count ----------------------------------------------------------------


class Walk:
    """A request walks from 0 to ``end``; a fault takes it back to 0; at 1 it needs the only unit,
    which it keeps until the end."""

    name = "walk"

    def __init__(self, end: int = 3, wrong: int | None = None, trap: int | None = None) -> None:
        self.end, self.wrong, self.trap = end, wrong, trap

    def begin(self) -> tuple[str, int]:
        return "day", 0

    def steps(self, environment: str, request: int) -> list[Step]:
        if request in (self.end, self.trap):
            return []
        after = request + 1
        violation = "wrong place" if after == self.wrong else ""
        needs = 1 if after == 1 else 0
        steps = [Step("on", FREE, needs, environment, after, violation=violation)]
        if request:
            steps.append(Step("back", FAULT, 0, environment, 0))
        return steps

    def claims(self, request: int) -> int:
        return int(0 < request < self.end)

    def events(self, environment: str) -> list[tuple[str, int, str]]:
        return [("nightfall", REBUILD, "night")] if environment == "day" else []

    def hit(self, label: str, environment: str, request: int) -> Hit | None:
        return None if request == 1 else Hit(request)

    def at_rest(self, environment: str, request: int) -> bool:
        return request == self.end

    def describe(self, environment: str, requests: Any) -> str:
        return f"{environment} {list(requests)}"


def test_one_request_is_counted() -> None:
    result = Explorer(Walk(), 1).run()
    assert (result.states, result.depth, result.complete) == (4, 3, True)
    assert result.violation is None
    assert result.seen == {0, 1, 2, 3}


def test_two_requests_are_alike_and_contend() -> None:
    """Of 16 pairs, 10 remain by symmetry, and the four with both inside are ruled out by memory:
    (1, 1), (1, 2), (2, 2) as sets."""
    result = Explorer(Walk(), 2).run()
    assert result.states == 10 - 3
    assert result.violation is None


def test_a_budget_is_spent_and_is_part_of_the_state() -> None:
    assert Explorer(Walk(), 1, Budget(faults=1)).run().states == 4 + 4
    assert Explorer(Walk(), 1, Budget(faults=3)).run().states == 4 * 4


def test_an_event_of_a_node_hits_every_request_or_none() -> None:
    alone = Explorer(Walk(), 1, Budget(rebuilds=1)).run()
    assert alone.states == 4 + 4
    both = Explorer(Walk(), 2, Budget(rebuilds=1)).run()
    assert both.states == 7 + 7


def test_a_counterexample_is_a_shortest_one_and_can_be_read() -> None:
    result = Explorer(Walk(wrong=2), 2, Budget(faults=1)).run()
    violation = result.violation
    assert violation is not None
    assert violation.what == "wrong place"
    assert [step.label for step in violation.steps] == ["on", "on"]
    assert str(violation).splitlines() == [
        "wrong place",
        "   day [0, 0]",
        f"1  r{violation.steps[0].who + 1}: on",
        "     day [1, 0]",
        f"2  r{violation.steps[1].who + 1}: on",
        "     day [2, 0]",
    ]


def test_a_state_that_cannot_come_to_rest_is_found() -> None:
    result = Explorer(Walk(trap=2), 1, Budget(faults=1)).run()
    assert result.violation is not None
    assert "never come to rest" in result.violation.what
    assert [step.after for step in result.violation.steps] == ["day [1]", "day [2]"], (
        "the first state in which nothing can happen, not the first that leads there"
    )


def test_a_repair_is_a_violation_only_without_a_fault() -> None:
    class Repaired(Walk):
        def steps(self, environment: str, request: int) -> list[Step]:
            steps = super().steps(environment, request)
            if request == 2:
                steps = [replace_step(step, repair=step.label == "on") for step in steps]
            return steps

    result = Explorer(Repaired(), 1, Budget(faults=1)).run()
    assert result.violation is not None
    assert "only a heartbeat" in result.violation.what
    assert len(result.violation.steps) == 3


def replace_step(step: Step, **changes: Any) -> Step:
    return step._replace(**changes)


def test_a_limit_ends_a_run_that_is_then_not_complete() -> None:
    result = Explorer(PairModel(), 1, Budget(1, 1, 1)).run(limit=300)
    assert not result.complete
    assert result.states >= 300
    assert result.violation is None


def test_progress_is_told_once_for_each_depth() -> None:
    told: list[tuple[int, int, int]] = []

    def progress(result: Result, waiting: int) -> None:
        told.append((result.depth, result.states, waiting))

    result = Explorer(PairModel(), 1, Budget(), progress).run()
    assert [depth for depth, _, _ in told] == list(range(1, result.depth + 1))
    assert all(0 < waiting <= states for _, states, waiting in told)


@pytest.mark.parametrize("requests", [0, 3])
def test_other_numbers_of_requests_are_refused(requests: int) -> None:
    with pytest.raises(ValueError, match="one or two"):
        Explorer(Walk(), requests)


def test_a_budget_beyond_three_is_refused() -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        Explorer(Walk(), 1, Budget(faults=4))


# --- the oracle -----------------------------------------------------------------------------------

COSTS = {FAULT: 0, ABORT: 1, DEADLINE: 2, REBUILD: 3}


def naive(model: PairModel, requests: int, budget: Budget) -> set[tuple[Any, ...]]:
    """Every reachable (world, budget, sorted requests), by a search as plain as possible."""
    world, request = model.begin()
    first = (world, tuple(budget), tuple(sorted([request] * requests)))
    seen, waiting = {first}, deque([first])

    def reach(world: Any, left: tuple[int, ...], cost: int, lives: list[Any]) -> None:
        if cost in COSTS:
            at = COSTS[cost]
            if not left[at]:
                return
            left = (*left[:at], left[at] - 1, *left[at + 1 :])
        state = (world, left, tuple(sorted(lives)))
        if state not in seen:
            seen.add(state)
            waiting.append(state)

    while waiting:
        world, left, lives = waiting.popleft()
        for n, life in enumerate(lives):
            others = [*lives[:n], *lives[n + 1 :]]
            for step in model.steps(world, life):
                if not any(step.needs & model.claims(other) for other in others):
                    reach(step.environment, left, step.cost, [step.request, *others])
        for label, cost, after in model.events(world):
            hits = [model.hit(label, world, life) for life in lives]
            targets = [hit.request for hit in hits if hit is not None]
            if len(targets) == requests and (after, targets) != (world, list(lives)):
                reach(after, left, cost, targets)
    return seen


@pytest.mark.parametrize(
    ("requests", "budget"),
    [
        (1, Budget()),
        (1, Budget(1, 1, 1)),
        (1, Budget(0, 1, 0, 1)),
        (2, Budget()),
        (2, Budget(0, 1)),
        (2, Budget(0, 0, 1)),
    ],
    ids=str,
)
def test_the_explorer_reaches_what_a_naive_search_reaches(requests: int, budget: Budget) -> None:
    model = PairModel()
    expected = naive(model, requests, budget)
    result = Explorer(model, requests, budget).run()
    assert result.complete
    assert result.states == len(expected)
    assert result.seen == {life for _, _, lives in expected for life in lives}


# --- what CI owes ---------------------------------------------------------------------------------


def clean(model: Any, requests: int, budget: Budget) -> Result:
    result = Explorer(model, requests, budget).run()
    assert result.violation is None, f"\n{result.violation}"
    assert result.complete
    return result


def test_a_pair_with_arrivals_that_are_not_atomic() -> None:
    clean(PairModel(intake_steps=True), 1, Budget(2, 1, 1))


def test_a_pair_at_depth_two() -> None:
    clean(PairModel(depth=2), 1, Budget(1, 1, 1))


def test_a_pair_whose_nodes_pause_in_every_mode() -> None:
    clean(PairModel(pauses=EVERY), 1, Budget(0, 1, 0, 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_requests_with_a_fault_an_abort_and_a_deadline() -> None:
    assert clean(PairModel(), 2, Budget(1, 1, 1)).states > 50_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_requests_with_a_fault_and_a_rebuild() -> None:
    assert clean(PairModel(), 2, Budget(1, 0, 0, 1)).states > 100_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_request_with_two_of_everything_and_two_rebuilds() -> None:
    assert clean(PairModel(), 1, Budget(2, 2, 2, 2)).states > 500_000
