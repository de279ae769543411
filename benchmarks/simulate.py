"""How fast clusters are simulated: requests a minute, on one core.

``python -m benchmarks.simulate`` runs 256 tokens in and 32 out on two prefill and two decode nodes;
``--mooncake FILE`` runs a trace of that form on eight and eight. Every token is computed by the
hash model through the page tables and the wire; checks after every event are off.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

from engine.config import EngineConfig
from engine.sim.deployment import Cluster, ClusterSettings
from engine.sim.node import NodeSettings
from engine.sim.paired_node import PairSettings
from engine.sim.workload import feed, mooncake, synthetic
from engine.sim.world import World


def cluster(pairs: int, page_size: int, pages: int, chunk: int, context: int) -> Cluster:
    """``pairs`` prefill and as many decode nodes behind one router."""
    config = EngineConfig(
        model="hash",
        page_size=page_size,
        context_length=context,
        max_running_requests=64,
        max_queued_requests=4096,
        chunked_prefill_size=chunk,
    )
    names = [f"{role}-{index}" for role in ("prefill", "decode") for index in range(pairs)]
    settings = ClusterSettings(
        {name: NodeSettings(config, pages) for name in names},
        routers=1,
        pair=PairSettings(metadata=64, host_pages=pages),
    )
    return Cluster(World(), settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--mooncake", type=Path, help="a trace file of the Mooncake form")
    options = parser.parse_args()
    if options.mooncake is None:
        where = cluster(2, 16, 4096, 2048, 8192)
        arrivals = synthetic(options.requests, 256, 32, 2_000)
        what, goal = "256 in, 32 out, on 2 + 2", 10_000
    else:
        where = cluster(8, 512, 600, 8192, 200_000)
        arrivals = list(mooncake(options.mooncake, options.requests))
        what, goal = f"{options.mooncake.name} on 8 + 8", 1_000
    began = time.process_time()
    sent = feed(where, arrivals)
    seconds = time.process_time() - began
    answers = [
        view.finish.type
        for _, each in where.submissions().values()
        for view in each.views
        if view.finish is not None
    ]
    rate = sent / seconds * 60
    Console().print(
        f"{what}: {sent} requests ({answers.count('length')} whole) in {seconds:.1f} s of a core, "
        f"{where.world.now_us / 1e6:.1f} s simulated: {rate:,.0f} a minute (goal {goal:,})"
    )


if __name__ == "__main__":
    main()
