"""Who guards the guards: bugs planted on purpose, each caught by a check of this suite.

Method: the checks are those that the other files run, unchanged. Without a bug each passes; with
the bug it fails, and the failure is the one that names what is broken."""

import re
from collections.abc import Callable
from typing import Final

import pytest

from tests.engine import (
    test_pages,
    test_prefix_cache,
    test_scheduler_reports,
    test_sessions,
    test_stored,
)
from tests.support import cases, planted, walks
from tests.support.cases import Case
from tests.support.examples import first_failure
from tests.support.node import Node, Shape
from transport.messages import SamplingParams, Submit

SEEDS: Final = 120
"""Walks that a bug has to be found in; most are found in the first ten."""


def walk() -> None:
    for seed in range(SEEDS):
        walks.run(walks.make_walk(seed))


def independence() -> None:
    """The central property on a few fixed cases, depth 2 and full batches among them."""
    for seed in range(4):
        requests = tuple(
            Submit(
                f"r{n}",
                [n, 1, 2][: 1 + n % 3] * (1 + seed),
                SamplingParams(max_new_tokens=8 + n, logprobs=True, seed=n),
            )
            for n in range(5)
        )
        cases.check(Case(Shape(page_size=(1, 4)[seed % 2]), requests, retract_every=seed))


def thrash() -> None:
    """Under pressure everybody is pushed out now and then, not at every turn."""
    node = Node(Shape(pages=16, page_size=4, rows=8, chunk=64))
    clients = [node.ask(f"r{n}", range(n, n + 6), 20) for n in range(8)]
    node.settle(3000)
    total = sum(client.retractions for client in clients)
    assert total <= len(clients), f"{total} retractions of {len(clients)} requests"


def starvation() -> None:
    """A large request in a stream of small ones is served while the stream goes on."""
    node = Node(Shape(pages=16, page_size=4, rows=4, overtakes=4))
    for number in range(2):
        node.ask(f"first{number}", range(number, number + 12), 8)
    node.turn()
    large = node.ask("large", range(60), 2)
    for number in range(60):
        node.ask(f"s{number}", [number] * 5, 8)
        node.turn()
        node.turn()
    assert large.tokens, "60 small ones came later and went before"
    node.settle()


def livelock() -> None:
    """Two long prompts, one row, no cache to remember a half: both end in bounded time."""
    node = Node(Shape(rows=1, chunk=4, cache=False))
    clients = [node.ask(f"r{n}", range(n, n + 20), 4) for n in range(2)]
    node.settle(400)
    assert all(client.reason == "length" for client in clients)


CHECKS: Final[dict[str, Callable[[], None]]] = {
    "walks": walk,
    "property": independence,
    "prefix cache": lambda: test_prefix_cache.run_machine(first_failure(200)),
    "reservation": test_pages.test_a_reservation_that_fails_changes_nothing,
    "b26": test_scheduler_reports.test_b26_a_matched_prefix_is_never_evicted_while_it_is_used,
    "b111": test_sessions.test_b111_a_turn_that_was_left_is_as_if_it_had_never_been,
    "failed copy": lambda: test_stored.test_a_load_that_goes_wrong_is_a_miss_or_a_shorter_hit(
        "copy fails"
    ),
    "displacement": test_scheduler_reports.test_displacement_waits_for_a_row_that_is_coming,
    "thrash": thrash,
    "starvation": starvation,
    "livelock": livelock,
}


@pytest.mark.parametrize("check", CHECKS)
def test_without_a_bug_the_check_passes(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize("name", planted.BUGS)
def test_the_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = planted.BUGS[name]
    bug.plant(monkeypatch)
    with pytest.raises(Exception) as caught:
        CHECKS[bug.check]()
    error = caught.value
    assert isinstance(error, walks.FAILURES)
    assert re.search(bug.noticed, f"{type(error).__name__}: {error}"), error


def test_enough_bugs_are_planted_and_every_check_has_caught_one() -> None:
    assert len(planted.BUGS) >= 15
    assert {bug.check for bug in planted.BUGS.values()} == set(CHECKS)
