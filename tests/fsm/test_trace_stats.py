"""Figures of traces: quantiles within their bound, dwell times and levels by hand."""

import math
import random

import pytest

from fsm.timeline import MOST_SAMPLES, Lane, Pool, Timeline, View
from fsm.timeline_svg import draw
from fsm.trace import Balance, Header
from fsm.trace_stats import RELATIVE_ERROR, NodeStats, Sketch
from tests.fsm.test_replay import endless, header
from tests.support.stories import eventful


@pytest.mark.parametrize("seed", range(5))
def test_quantiles_are_within_their_bound(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice([0.0, rng.lognormvariate(-3, 3), rng.random()]) for _ in range(2000)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    values.sort()
    for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0):
        exact = values[math.floor(q * (len(values) - 1))]
        assert sketch.quantile(q) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001, abs=1e-7)
    assert sketch.max == values[-1]
    assert sketch.total == pytest.approx(sum(values))


def test_quantiles_of_nothing_and_of_one() -> None:
    sketch = Sketch()
    assert sketch.quantile(0.5) == 0.0
    sketch.add(2.0)
    assert sketch.quantile(0.0) == sketch.quantile(1.0) == 2.0


def test_a_sketch_stays_small() -> None:
    rng = random.Random(0)
    sketch = Sketch()
    for _ in range(50_000):
        sketch.add(rng.lognormvariate(0, 4))
    assert len(sketch._buckets) < 2000


def test_figures_by_hand() -> None:
    """A life of `endless` lasts six milliseconds, one for each line."""
    node = NodeStats(header())
    for line in endless(10):
        node.feed(line)
    assert (node.requests, node.open, node.tokens) == (10, 0, 10)
    assert node.entries == dict.fromkeys(
        ("arrived", "waiting", "prefilling", "stopping", "done"), 10
    )
    assert node.edges["prefilling", "finish"] == 10
    assert node.dwell["stopping"].quantile(0.5) == pytest.approx(0.003, rel=0.011)
    assert node.whole.total == pytest.approx(10 * 0.003)
    assert node.endings == {("length", None): 10}
    pages, rows = node.levels["pages"], node.levels["rows"]
    assert (pages.peak, pages.now, rows.peak) == (1, 0, 1)
    assert pages.unit_seconds == pytest.approx(10 * 0.003)
    assert rows.unit_seconds == pytest.approx(10 * 0.004)


def test_lanes_of_a_page() -> None:
    lines = eventful()
    first = lines[0]
    assert isinstance(first, Header)

    def timeline(view: View) -> Timeline:
        made = Timeline([first], view)
        for line in lines:
            made.feed(0, line)
        return made

    whole = timeline(View())
    lanes = whole.lanes()
    assert whole.matching == 14
    assert [lane.rid for lane in lanes][:3] == ["refused", "grows", "hit"]
    grows = lanes[1]
    assert [span.state for span in grows.spans].count("prefilling") == 2
    assert [mark.kind for mark in grows.marks] == ["retract", "answer"]
    pages = [timeline(View(limit=4, page=page)).lanes() for page in (1, 2, 3, 4, 5)]
    assert [len(page) for page in pages] == [4, 4, 4, 2, 0]
    assert [lane.rid for page in pages for lane in page] == [lane.rid for lane in lanes]
    some = timeline(View(since=1.0))
    assert {lane.rid for lane in some.lanes()} == {"slow", "fails"}
    assert "none of 14 requests on page 9" in draw(timeline(View(page=9)), "t")


def test_requests_that_are_open_are_drawn_to_the_end() -> None:
    lines = eventful()[:40]
    first = lines[0]
    assert isinstance(first, Header)
    made = Timeline([first], View())
    for line in lines:
        made.feed(0, line)
    lanes = made.lanes()
    still = [lane for lane in lanes if lane.end is None]
    assert still
    assert all(lane.spans[-1].end == made.end for lane in still)
    assert ">open</text>" in draw(made, "t")


def test_lives_of_one_rid_lie_together() -> None:
    """A pair's two lanes are neighbours, wherever they began."""
    made = Timeline([], View())
    lives = (("p", "1", "a"), ("p", "2", "b"), ("d", "3", "a"))
    made._kept = [Lane(*names, begin=n / 10, number=n) for n, names in enumerate(lives)]
    assert [lane.life for lane in made.lanes()] == ["1", "3", "2"]


def test_a_pool_is_thinned_out() -> None:
    pool = Pool(100)
    for number in range(50_000):
        pool.add(number / 1000, Balance(number % 100, 0, 0))
    assert MOST_SAMPLES // 8 < len(pool.samples) <= MOST_SAMPLES + 1
    times = [sample[0] for sample in pool.samples]
    assert times == sorted(times)
