"""``fsm-replay simulate --workload``: a workload on a simulated cluster, and its figures."""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from engine.sim.deployment import Cluster
from engine.sim.drive import Fault
from engine.sim.feeding import Feeder, Sizes, build, leaving
from engine.sim.figures import SHARES, Figures, Spread, figures
from engine.sim.runner import Costs
from engine.sim.workload import WorkloadError, check_fit, load
from server.replay_files import FAULTS, FITS, UNUSABLE, console, unusable

FAULT_LIMIT: Final = 20
"""Faults that are printed."""


def simulate(options: argparse.Namespace) -> int:
    """Run the workload that ``options`` describe; returns the exit code."""
    sizes = Sizes(
        options.page_size,
        options.pages,
        options.rows,
        options.chunk,
        costs=Costs(options.step_us, options.token_us),
    )
    try:
        arrivals = load(options.workload, options.requests, options.speed, options.seed)
        check_fit(arrivals, sizes.tokens)
        cluster = build(options.cluster, sizes, options.check)
        if options.trace is not None:
            options.trace.mkdir(parents=True, exist_ok=True)
    except WorkloadError as error:
        console(stderr=True).print(f"[red]unusable[/] {escape(str(error))}")
        return UNUSABLE
    except OSError as error:
        return unusable(error)
    feeder = Feeder(cluster, options.check)
    leaves = leaving(arrivals, options.aborts, options.disconnects, options.seed)
    faults: list[str] = []
    wall, core = time.perf_counter(), time.process_time()
    with _progress(feeder, len(arrivals)) as step:
        try:
            feeder.feed(arrivals, leaves, step)
        except Fault as fault:
            faults.append(f"at {cluster.world.now_us / 1e6:.6f} s: {fault}")
    wall, core = time.perf_counter() - wall, time.process_time() - core
    faults += [] if faults else feeder.faults()
    if options.trace is not None:
        try:
            write_traces(cluster, options.trace)
        except OSError as error:
            return unusable(error)
    found = figures(cluster)
    if options.json:
        console().print(
            json.dumps(as_dict(found, faults, wall, core), indent=2), markup=False, end="\n"
        )
    else:
        _print(console(), options.cluster, found, wall, core)
        _print_faults(console(), faults)
    return FAULTS if faults else FITS


def write_traces(cluster: Cluster, folder: Path) -> None:
    """One trace for each node, as ``interlock serve --trace`` writes them."""
    encoder = msgspec.json.Encoder()
    cluster.end()
    for node in cluster.nodes.values():
        with (folder / f"{node.name}.jsonl").open("wb") as file:
            file.writelines(encoder.encode(line) + b"\n" for line in node.book.lines)


def as_dict(found: Figures, faults: list[str], wall: float, core: float) -> dict[str, Any]:
    """Everything, for JSON. Names end in their unit; ``wall_s`` and what follows from it are the
    only figures that another run does not repeat."""
    return {
        **asdict(found),
        "hit_rate": round(found.hit_rate, 6),
        "requests_per_s": round(found.requests_per_s, 6),
        "output_tokens_per_s": round(found.output_tokens_per_s, 6),
        "faults": faults,
        "wall_s": round(wall, 3),
        "core_s": round(core, 3),
        "requests_per_minute_and_core": round(found.requests / core * 60, 1),
    }


@contextlib.contextmanager
def _progress(feeder: Feeder, total: int) -> Iterator[Callable[[], None]]:
    """Call what this yields now and then: on a terminal, answers are counted in a bar."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda: None
        return
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.update(task, completed=feeder.answered)


def _print(screen: Console, shape: str, found: Figures, wall: float, core: float) -> None:
    ends = ", ".join(f"{count:,} {end}" for end, count in found.ends.items())
    screen.print(f"[bold]{found.requests:,} requests[/] on {escape(shape)}: {escape(ends)}")
    screen.print(
        f"{found.seconds:,.3f} s simulated: {found.requests_per_s:,.2f} requests/s, "
        f"{found.output_tokens_per_s:,.1f} tokens/s"
    )
    screen.print(
        f"prompts: {found.prompt_tokens:,} tokens, {found.hit_rate:.1%} of them from prefix caches"
        f" · output: {found.output_tokens:,} tokens · retractions: {found.retractions}"
    )
    screen.print(_times(found))
    screen.print(_nodes(found))
    rate = found.requests / core * 60
    screen.print(f"{wall:.1f} s of wall time, {rate:,.0f} requests a minute and core")


def _times(found: Figures) -> Table:
    table = Table("virtual ms", box=None, pad_edge=False, header_style="dim")
    for name in SHARES:
        table.add_column(name, justify="right")
    rows: tuple[tuple[str, Spread], ...] = (
        ("first token (TTFT)", found.first_token),
        ("between tokens (ITL)", found.token_gap),
        ("mean of a request (TPOT)", found.token_mean),
        ("whole answer", found.answer),
    )
    for title, spread in rows:
        values = [spread.quantiles.get(name) for name in SHARES]
        table.add_row(title, *("–" if value is None else f"{value:,.2f}" for value in values))
    return table


def _nodes(found: Figures) -> Table:
    table = Table("node", box=None, pad_edge=False, header_style="dim")
    for title in ("steps", "peak pages", "of", ""):
        table.add_column(title, justify="right")
    for name, use in found.nodes.items():
        share = f"{use.peak_pages / use.pages:.0%}"
        table.add_row(name, f"{use.steps:,}", f"{use.peak_pages:,}", f"{use.pages:,}", share)
    return table


def _print_faults(screen: Console, faults: list[str]) -> None:
    for fault in faults[:FAULT_LIMIT]:
        screen.print(f"[red]fault[/] {escape(fault)}")
    if len(faults) > FAULT_LIMIT:
        screen.print(f"… and {len(faults) - FAULT_LIMIT} more")
    if not faults:
        screen.print("every request has one answer, and the cluster is at rest")
