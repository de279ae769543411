"""A journal keeps the newest moves and the number of all."""

import pytest

from fsm.journal import JOURNAL_LIMIT, Entry, Journal
from fsm.unified import UNIFIED
from tests.support.subjects import DRIVERS, Bench, Make


def entry(number: int) -> Entry:
    return Entry(float(number), "retract", f"s{number}", f"s{number + 1}", "scheduler", "")


def test_a_fresh_journal_is_empty() -> None:
    assert (Journal().path(), Journal().entries(), Journal().count) == ([], (), 0)


def test_a_path_names_every_state_in_order() -> None:
    journal = Journal()
    for number in range(3):
        journal.add(entry(number))
    assert journal.path() == ["s0", "s1", "s2", "s3"]
    assert [e.time for e in journal.entries()] == [0.0, 1.0, 2.0]


def test_the_oldest_moves_go_and_are_still_counted() -> None:
    """A request that is retracted again and again stays bounded."""
    journal = Journal(limit=4)
    for number in range(100):
        journal.add(entry(number))
    assert journal.count == 100
    assert journal.path() == ["s96", "s97", "s98", "s99", "s100"]


def test_a_life_without_much_trouble_fits_whole() -> None:
    """Ten retractions, each with its way back, and nothing of it is lost."""
    assert JOURNAL_LIMIT >= 2 + 10 * 4 + 3


@pytest.mark.parametrize("make", DRIVERS, ids=["transitions", "dict"])
def test_a_driver_writes_every_move_with_its_time_cause_and_reason(make: Make) -> None:
    bench = Bench(make).walk_to("decoding")
    bench.driver.fire(bench.card, "abort", "client", "left")
    entries = bench.card.journal.entries()
    assert entries[-1] == Entry(1.5, "abort", "decoding", "stopping", "client", "left")
    assert bench.card.journal.path() == [
        "arrived",
        "waiting",
        "prefilling",
        "decoding",
        "stopping",
    ]
    assert all(UNIFIED.table[e.source, e.event].target == e.target for e in entries)
