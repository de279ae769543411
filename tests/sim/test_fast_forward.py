"""Goal: fast-forwarding changes nothing but the time it takes: the traces, and what clients are
shown and when, are those of the same workload without it.

Method: workloads from seeds, with times in round numbers so that steps end at the very instant at
which something arrives, on clusters small enough to queue and to run out of pages. And a step that
is wrongly called uneventful is noticed.
"""

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from engine.config import EngineConfig
from engine.sim import node as node_module
from engine.sim.deployment import Cluster, ClusterSettings
from engine.sim.fast_forward import Eventful, uneventful
from engine.sim.feeding import Feeder, leaving
from engine.sim.node import NodeSettings, SimNode
from engine.sim.paired_node import PairSettings
from engine.sim.ranks import RankSettings
from engine.sim.workload import Arrival
from engine.sim.world import World


@dataclass(frozen=True)
class Shape:
    """A cluster, and what one seed sends to it."""

    nodes: tuple[str, ...]
    pages: int = 64
    page_size: int = 16
    rows: int = 8
    every_us: int = 3_000
    outputs: tuple[int, ...] = (1, 2, 5, 40, 90)
    pair: PairSettings = field(default_factory=PairSettings)


PAIR = ("prefill-0", "decode-0")
SHAPES = {
    "unified": Shape(("unified-0",)),
    "unified, short of pages": Shape(("unified-0",), pages=24, page_size=4, outputs=(3, 30, 60)),
    "two unified": Shape(("unified-0", "unified-1"), every_us=10_000),
    "1+1": Shape(PAIR),
    "1+1, a queue": Shape(PAIR, rows=2, every_us=20_000),
    "1+1, short of pages": Shape(PAIR, pages=20, every_us=20_000),
    "2+2": Shape((*PAIR, "prefill-1", "decode-1"), outputs=(1, 100, 200)),
    "1+1, long": Shape(PAIR, every_us=300_000, outputs=(600, 900), pages=256),
}


def cluster(shape: Shape, ranks: RankSettings | None = None) -> Cluster:
    config = EngineConfig(
        model="hash",
        page_size=shape.page_size,
        max_running_requests=shape.rows,
        max_queued_requests=64,
        chunked_prefill_size=64,
    )
    settings = NodeSettings(config, shape.pages, ranks=ranks or RankSettings())
    nodes = dict.fromkeys(shape.nodes, settings)
    routers = int(len(nodes) > 1)
    return Cluster(World(), ClusterSettings(nodes, routers, shape.pair))


def workload(shape: Shape, seed: int) -> list[Arrival]:
    draw = random.Random(seed)
    arrivals, time_us = [], 0
    for _ in range(20):
        time_us += 10 * draw.randrange(shape.every_us // 5)
        length = draw.choice([1, 16, 50, 90])
        output = min(draw.choice(shape.outputs), shape.pages * shape.page_size - length)
        arrivals.append(Arrival(time_us, length, output, seed=draw.randrange(3)))
    return arrivals


def feed(where: Cluster, arrivals: list[Arrival], fast_forward: bool = True) -> None:
    """Send them; some clients leave. Nothing is wrong at the end."""
    feeder = Feeder(where, fast_forward=fast_forward)
    feeder.feed(arrivals, leaving(arrivals, 0.1, 0.1, 7))
    assert feeder.faults() == []


def history(where: Cluster) -> list[bytes]:
    """Everything that happened: all trace lines in order, and all that clients were shown."""
    lines = [book.node.encode() + msgspec.json.encode(line) for book, line in where.lines]
    shown = [
        (name, view.tokens, view.times, view.weights, view.answered_us, view.finish)
        for name, (_, each) in where.submissions().items()
        for view in each.views
    ]
    ends = {name: node.runner.last_end_us for name, node in where.nodes.items()}
    steps = {name: node.scheduler.stats for name, node in where.nodes.items()}
    return [*lines, msgspec.json.encode([shown, ends, steps, where.world.now_us])]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_fast_forward_changes_nothing(name: str, seed: int) -> None:
    shape = SHAPES[name]
    slow, fast = cluster(shape), cluster(shape)
    feed(slow, workload(shape, seed), fast_forward=False)
    feed(fast, workload(shape, seed))
    assert history(fast) == history(slow)
    assert fast.world.events < slow.world.events


def test_most_of_a_long_answer_is_fast_forwarded() -> None:
    shape = SHAPES["1+1, long"]
    slow, fast = cluster(shape), cluster(shape)
    feed(slow, workload(shape, 1)[:4], fast_forward=False)
    feed(fast, workload(shape, 1)[:4])
    assert fast.world.events < slow.world.events / 3
    assert fast.nodes["decode-0"].steps_committed == slow.nodes["decode-0"].steps_committed > 800


@pytest.mark.parametrize("shape", [SHAPES["unified"], SHAPES["1+1"]], ids=["unified", "1+1"])
def test_a_step_that_was_not_uneventful_is_noticed(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(node: SimNode) -> int:
        return steps + 5 if (steps := uneventful(node)) else 0

    monkeypatch.setattr(node_module, "uneventful", too_many)
    with pytest.raises(Eventful, match="was not foreseen"):
        feed(cluster(shape), [Arrival(0, 3, 40)])


@pytest.mark.parametrize("what", ["stop string", "closed gate", "failing step", "followers"])
def test_a_node_that_is_interfered_with_does_not_doze(what: str) -> None:
    ranks = RankSettings(count=2 if what == "followers" else 1)
    slow, fast = cluster(SHAPES["unified"], ranks), cluster(SHAPES["unified"], ranks)
    for where in (slow, fast):
        node = where.nodes["unified-0"]
        if what == "stop string":
            node.clients.looks_at_tokens = True
        elif what == "closed gate":
            node.gates["step"].hold(chunk=99)
        elif what == "failing step":
            node.runner.fail_steps.extend([""] * 100)
    arrivals = [Arrival(0, 3, 40)]
    feed(slow, arrivals, fast_forward=False)
    feed(fast, arrivals)
    assert fast.world.events == slow.world.events
