"""``fsm-replay explore``: every state that requests can reach, and what is wrong in any of it."""

import argparse
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsm.explore import Explorer
from fsm.explore_base import Budget, Model, Result, Traced, Violation
from fsm.explore_pd_model import PairModel
from fsm.explore_pd_nodes import DROPPING, EVERY
from fsm.explore_shared import SharedModel
from fsm.explore_shared_base import Together
from fsm.explore_trace import to_traces
from fsm.explore_unified import UnifiedModel
from server.replay_files import FAULTS, FITS, UNUSABLE, at_least

HELP: Final = """\
Explore every state that the charts, the rules and the protocol of production
can reach, breadth first, and check each: no leak at rest, no touch of
released pages, exactly one answer, everything can come to rest, an abort ends
both sides, and so on (docs/exploration.md).

Budgets say how much may go wrong in one run. Without any option: one request,
one fault, one abort, one deadline. "shared" is two requests of a unified node
that share pages and the prefix cache, a group, or a session. A violation is
printed as a shortest sequence of steps."""

EPILOG: Final = """\
examples:
  fsm-replay explore                             all three, quickly
  fsm-replay explore pd --requests 2             two that contend for memory
  fsm-replay explore pd --faults 2 --rebuilds 2  pauses, weights, recomputation
  fsm-replay explore pd --rebuilds 1 --pauses    pauses of either node
  fsm-replay explore shared --together group     two members of a group
  fsm-replay explore --long                      all of docs/exploration.md

A pair is shown as: prefill (its wire) →frames to decode ←frames to prefill |
decode.

exit codes: 0 nothing found · 1 a violation
            2 not finished, or arguments that cannot be used"""


TABLE_WIDTH: Final = 112
"""Columns that the table of results needs."""


@dataclass(frozen=True, slots=True)
class Run:
    """One exploration."""

    what: str
    requests: int
    budget: Budget
    depth: int = 1
    intake_steps: bool = False
    contended: bool = True
    pauses: bool = False
    """Of a pair: in every mode, of either node; otherwise decode pauses and drops KV."""
    together: Together = "alone"
    pages: int = 3
    guest: bool = False

    def model(self) -> Model[Any, Any]:
        if self.what == "unified":
            return UnifiedModel(depth=self.depth)
        if self.what == "shared":
            pauses = self.budget.rebuilds > 0
            return SharedModel(
                None, self.together, self.pages, self.depth, guest=self.guest, pauses=pauses
            )
        return PairModel(
            depth=self.depth,
            intake_steps=self.intake_steps,
            contended=self.contended,
            pauses=EVERY if self.pauses else DROPPING,
        )

    @property
    def explored(self) -> int:
        """Requests for the explorer: what is shared is one state."""
        return 1 if self.what == "shared" else self.requests

    @property
    def title(self) -> str:
        """What the table of results says."""
        notes = [self.what]
        if self.what == "shared":
            notes += [self.together, f"{self.pages} pages"]
        if not self.contended:
            notes.append("ample")
        if self.intake_steps:
            notes.append("intake")
        if self.pauses:
            notes.append("pauses")
        if self.guest:
            notes.append("guest")
        return ", ".join(notes)


LONG: Final[tuple[Run, ...]] = (
    Run("unified", 2, Budget(2, 2, 2, 2), depth=2),
    Run("shared", 2, Budget(1, 1, 1, 1), depth=2),
    Run("shared", 2, Budget(1, 1, 0, 0), pages=4, guest=True),
    Run("shared", 2, Budget(0, 1, 0, 1), pages=4),
    Run("shared", 2, Budget(1, 1, 0, 1), pages=4, together="group"),
    Run("shared", 2, Budget(1, 1, 1, 1), pages=4, together="session"),
    Run("pd", 1, Budget(2, 2, 2), intake_steps=True),
    Run("pd", 2, Budget(1, 1, 1)),
    Run("pd", 2, Budget(1, 1, 1), depth=2),
    Run("pd", 2, Budget(1, 1, 1), contended=False),
    Run("pd", 1, Budget(1, 1, 0, 2), pauses=True),
    Run("pd", 2, Budget(0, 1, 0, 1), pauses=True),
    Run("pd", 1, Budget(2, 2, 2, 2)),
    Run("pd", 2, Budget(1, 1, 0, 1)),
    Run("pd", 2, Budget(1, 1, 1, 1)),
)
"""What ``make explore`` runs, the longest last."""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The arguments of ``fsm-replay explore``."""
    parser = commands.add_parser(
        "explore",
        help="explore every reachable state, and check each",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=("unified", "shared", "pd", "all"),
        default="all",
        help="which nodes [default all]",
    )
    number = range(4)
    add_number = parser.add_argument
    add_number("--requests", type=int, choices=(1, 2), default=1, help="requests [default 1]")
    for name in ("faults", "aborts", "deadlines"):
        add_number(
            f"--{name}", type=int, choices=number, default=1, metavar="N", help="0 to 3 [default 1]"
        )
    add_number(
        "--rebuilds",
        type=int,
        choices=number,
        default=0,
        metavar="N",
        help="0 to 3 pauses, with a change of weights on either side [default 0]",
    )
    add_number(
        "--depth", type=int, choices=(1, 2), default=1, help="steps launched at a time [default 1]"
    )
    parser.add_argument(
        "--ample",
        action="store_true",
        help="pages and rows for every request, instead of one unit that they contend for (pd)",
    )
    parser.add_argument(
        "--pauses",
        action="store_true",
        help="pauses of either node in every mode, not only of decode, dropping KV (pd)",
    )
    parser.add_argument(
        "--together",
        choices=("alone", "group", "session"),
        default="alone",
        help="what two requests are to each other (shared) [default alone]",
    )
    pages = range(3, 7)
    add_number(
        "--pages", type=int, choices=pages, default=3, help="of the node (shared) [default 3]"
    )
    parser.add_argument(
        "--guest", action="store_true", help="somebody else takes a page now and then (shared)"
    )
    parser.add_argument(
        "--limit", type=at_least(1), metavar="N", help="stop after N states [default none]"
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="write a violation there, as traces that fsm-replay replays and draws",
    )
    parser.add_argument(
        "--long", action="store_true", help="the runs of docs/exploration.md (minutes)"
    )
    parser.set_defaults(handler=explore)


def explore(options: argparse.Namespace) -> int:
    """``fsm-replay explore``."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    results = []
    for run in _runs(options):
        result = _explored(run, options.limit)
        results.append((run, result))
        if result.violation is not None:
            break
    wide = Console(highlight=False, emoji=False, width=max(console.width, TABLE_WIDTH))
    wide.print(_table(results))
    for run, result in results:
        if result.violation is not None:
            console.print(f"\n[red]violation[/] in {run.what}, shortest sequence of steps:")
            console.print(escape(str(result.violation)))
            if options.traces is not None:
                nodes = run.model().nodes
                return _write_traces(result.violation, nodes, options.traces, console)
            return FAULTS
    unfinished = [run for run, result in results if not result.complete]
    if unfinished:
        console.print(f"[yellow]not finished[/]: {len(unfinished)} of {len(results)} hit --limit")
        return UNUSABLE
    console.print("[green]nothing found[/]: every property holds in every state")
    return FITS


def _write_traces(
    violation: Violation, nodes: Mapping[str, Traced], folder: Path, console: Console
) -> int:
    """A trace for each node; the exit code."""
    encoder = msgspec.json.Encoder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for node, lines in to_traces(violation, nodes).items():
            path = folder / f"{node}.jsonl"
            path.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in lines))
            console.print(f"[dim]written[/] {escape(str(path))}")
    except OSError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return UNUSABLE
    return FAULTS


def _runs(options: argparse.Namespace) -> Sequence[Run]:
    if options.long:
        return [run for run in LONG if options.what in ("all", run.what)]
    budget = Budget(options.faults, options.aborts, options.deadlines, options.rebuilds)
    runs = {
        "unified": Run("unified", options.requests, budget, options.depth),
        "shared": Run(
            "shared",
            2,
            budget,
            options.depth,
            together=options.together,
            pages=options.pages,
            guest=options.guest,
        ),
        "pd": Run(
            "pd",
            options.requests,
            budget,
            options.depth,
            contended=not options.ample,
            pauses=options.pauses,
        ),
    }
    return [run for what, run in runs.items() if options.what in ("all", what)]


def _explored(run: Run, limit: int | None) -> Result:
    """One run, with a line of progress on a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bar:
        title = f"{run.title}, {run.requests} requests, {run.budget}"
        task = bar.add_task(title)

        def progress(result: Result, waiting: int) -> None:
            bar.update(
                task,
                description=f"{title}: {result.states:,} states, {waiting:,} waiting,"
                f" depth {result.depth}, {result.rate:,.0f} a second",
            )

        return Explorer(run.model(), run.explored, run.budget, progress).run(limit)


def _table(results: Sequence[tuple[Run, Result]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("nodes", no_wrap=True)
    for heading in (
        "requests",
        "budget",
        "depth",
        "states",
        "steps",
        "longest",
        "seconds",
        "a second",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for run, result in results:
        outcome = "[green]fits[/]" if result.complete else "[yellow]not finished[/]"
        if result.violation is not None:
            outcome = "[red]violation[/]"
        table.add_row(
            run.title,
            str(run.requests),
            str(run.budget),
            str(run.depth),
            f"{result.states:,}",
            f"{result.transitions:,}",
            str(result.depth),
            f"{result.seconds:.1f}",
            f"{result.rate:,.0f}",
            outcome,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB; bytes on macOS
    mebibytes = peak >> 20 if sys.platform == "darwin" else peak >> 10
    table.caption = f"{mebibytes:,} MiB of memory at most"
    table.caption_justify = "left"
    return table
