"""What the lifecycle costs: microseconds for each fire, and its share of a step at 256 running.

``python -m benchmarks.lifecycle``. The model is left out: results are made up, so that a step is
planning, committing and answering. ``--step-ms`` is the model's time that the share refers to.
Nothing here is a test: a busy machine moves every figure; ratios of one run are what counts."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from engine.basics import Parts
from engine.batch import Batch, PageExport, PageImport, Sampled, StepResult
from engine.config import EngineConfig
from engine.scheduler import ModelFacts, Scheduler
from fsm.driver import DictDriver, Driver
from fsm.unified import BASE_KIT
from tests.support.subjects import Bench, Card, Make
from transport.messages import SamplingParams, Submit

LIFE = ("enqueue", "admit", "prefilled", "retract", "quiesce", "readmit", "prefilled", "finish")
"""A life with one retraction; ``quiesce`` ends it."""
US = 1e6


class Device:
    """A runner that computes nothing: every item that samples gets the same token."""

    def __init__(self) -> None:
        self.launched: list[Batch] = []

    def launch(self, work: Batch | PageExport | PageImport) -> None:
        if isinstance(work, Batch):
            self.launched.append(work)

    def result(self) -> StepResult:
        batch = self.launched.pop(0)
        token, nothing = Sampled(7), Sampled(None)
        return StepResult(
            batch.step, tuple(token if item.sample else nothing for item in batch.items)
        )


class Node:
    """A scheduler with ``running`` requests, and a new one for each that ends."""

    def __init__(self, running: int, prompt: int, new: int) -> None:
        self.device = Device()
        self.running, self.prompt, self.new = running, prompt, new
        config = EngineConfig(
            model="hash",
            page_size=16,
            max_running_requests=running,
            max_queued_requests=running,
            chunked_prefill_size=4096,
        )
        pages = running * (prompt + new + 32) // 16
        self.scheduler = Scheduler(
            Parts(
                config,
                ModelFacts(258, 8192, (257,), "none"),
                pages,
                time.perf_counter,
                self.device,
            ),
        )
        self.submitted = 0
        self.fire_s = 0.0
        self.fires = 0
        self._timed()
        self.refill()

    def refill(self) -> None:
        """Arrivals make up for those who left; lengths differ, so that ends are spread."""
        while len(self.scheduler.roster.live) < self.running:
            number = self.submitted
            self.submitted += 1
            tokens = [(number + i) % 251 for i in range(self.prompt)]
            length = self.new if number >= self.running else 1 + number * self.new // self.running
            sampling = SamplingParams(max_new_tokens=length)
            self.scheduler.submit(Submit(f"r{number}", tokens, sampling))

    def step(self) -> None:
        """One turn of the loop at depth 2."""
        while self.scheduler.launch() is not None:
            pass
        self.scheduler.commit(self.device.result())
        self.scheduler.flush()
        self.refill()

    def _timed(self) -> None:
        fire = self.scheduler.driver.fire

        def timed(*args: object) -> object:
            start = time.perf_counter()
            try:
                return fire(*args)  # type: ignore[arg-type]
            finally:
                self.fire_s += time.perf_counter() - start
                self.fires += 1

        self.scheduler.driver.fire = timed  # type: ignore[method-assign, assignment]


def fire_us(make: Make, lives: int) -> float:
    """Microseconds for one fire with its leases, averaged over whole lives."""
    bench = Bench(make, BASE_KIT, observer=lambda *_: None)
    for lease in bench.card.leases.values():
        lease.release()
    spent = 0.0
    for _ in range(lives):
        bench.card = Card(BASE_KIT)
        bench.driver.begin(bench.card, bench.reserve("spans", "frontend_records"))
        for event in (*LIFE, "quiesce"):
            move = bench.driver.move(bench.card, event)
            leases = bench.reserve(*move.takes)
            start = time.perf_counter()
            bench.driver.fire(bench.card, event, move.edge.by[0], "", leases)
            spent += time.perf_counter() - start
    return spent / (lives * (len(LIFE) + 1)) * US


def step_us(node: Node, steps: int) -> Iterator[tuple[float, float, int]]:
    """For each step: microseconds in all, microseconds in fires, and how many fires."""
    for _ in range(steps):
        fires, spent = node.fires, node.fire_s
        start = time.perf_counter()
        node.step()
        total = time.perf_counter() - start
        yield total * US, (node.fire_s - spent) * US, node.fires - fires


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=100.0, help="the model's time for a step")
    args = parser.parse_args(argv)

    makes: dict[str, Make] = {"transitions": Driver, "dictionary": DictDriver}
    table = Table(title="One fire, leases included")
    table.add_column("driver")
    table.add_column("µs", justify="right")
    fires = {name: min(fire_us(make, 300) for _ in range(3)) for name, make in makes.items()}
    for name, cost in fires.items():
        table.add_row(name, f"{cost:.1f}")
    console = Console()
    console.print(table)

    node = Node(args.running, args.prompt, args.new)
    for _ in range(args.new):
        node.step()  # until arrivals and ends are in balance
    totals, spents, counts = zip(*step_us(node, args.steps), strict=True)
    total, spent, count = (statistics.fmean(column) for column in (totals, spents, counts))
    table = Table(title=f"One step, {args.running} running, {args.prompt} in, {args.new} out")
    for column in ("what", "µs", "of scheduling", f"of {args.step_ms:g} ms + scheduling"):
        table.add_column(column, justify="left" if column == "what" else "right")
    whole = args.step_ms * 1000 + total
    for what, cost in (
        ("scheduling: plan, commit, answer", total),
        (f"of it {count:.1f} fires with all they do", spent),
        (f"of it the driver alone ({count:.1f} × transitions)", count * fires["transitions"]),
    ):
        table.add_row(what, f"{cost:,.0f}", f"{cost / total:.1%}", f"{cost / whole:.2%}")
    median = statistics.median(totals)
    table.caption = f"median step {median:,.0f} µs, worst {max(totals):,.0f} µs"
    console.print(table)


if __name__ == "__main__":
    main()
