"""How fast clusters are simulated: requests a minute, on one core.

``python -m benchmarks.simulate`` runs 256 tokens in and 32 out on two prefill and two decode nodes;
``--mooncake FILE`` runs a trace of that form on eight and eight. Every token is computed by the
hash model through the page tables and the wire; checks after every event are off.
"""

import argparse
import time

from rich.console import Console

from engine.sim.feeding import Feeder, Sizes, build
from engine.sim.workload import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--mooncake", metavar="FILE", help="a trace file of the Mooncake form")
    options = parser.parse_args()
    if options.mooncake is None:
        shape, goal = "2+2", 10_000
        sizes = Sizes(page_size=16, pages=4096, chunk=2048)
        arrivals = load("synthetic:prompt=256,output=32,every=2ms", options.requests)
    else:
        shape, goal = "8+8", 1_000
        sizes = Sizes(page_size=512, pages=600)
        arrivals = load(options.mooncake, options.requests)
    feeder = Feeder(build(shape, sizes))
    began = time.process_time()
    feeder.feed(arrivals)
    seconds = time.process_time() - began
    rate = feeder.sent / seconds * 60
    Console().print(
        f"{options.mooncake or '256 in, 32 out'} on {shape}: {feeder.sent} requests in "
        f"{seconds:.1f} s of a core, {feeder.cluster.world.now_us / 1e6:.1f} s simulated: "
        f"{rate:,.0f} a minute (goal {goal:,})"
    )


if __name__ == "__main__":
    main()
