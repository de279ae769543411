"""``fsm-replay TRACE…``: replay traces, and say what does not fit."""

import argparse
import time
from typing import Final

from rich.markup import escape

from fsm.replay import NodeReplay
from fsm.replay_join import replay
from fsm.trace_read import TraceReader, Unusable
from server.replay_files import (
    FAULTS,
    FITS,
    JUDGED,
    Commands,
    Faults,
    at_least,
    command,
    console,
    open_traces,
    progress,
    unusable,
)

HELP: Final = """\
Replay every move and lease of a trace through fresh ledgers, by the charts of
this build, and say what does not fit: an illegal move, wrong leases, a leak,
a double release, a missing or second answer, a token count that cannot be, a
stale life or attempt, a chart that differs, a gap. After a fault it goes on,
and counts.

Traces of several nodes are joined by the causes they name, never by their
clocks. A trace without a footer was cut short; that is said, and is a fault
only with --complete.

'check' may be left out: fsm-replay TRACE … does the same."""

EXAMPLES: Final = """\
  fsm-replay trace.jsonl
  fsm-replay --complete prefill-0.jsonl.gz decode-0.jsonl.gz"""


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "check",
        check,
        "replay traces, and say what does not fit",
        HELP,
        EXAMPLES,
        codes=JUDGED,
    )
    parser.add_argument(
        "--complete",
        action="store_true",
        help="a trace that was cut short, or that ends before rest, is a fault",
    )
    parser.add_argument(
        "--limit",
        type=at_least(0),
        default=50,
        metavar="N",
        help="print the first N faults, 0 is all [default 50]",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what does not fit")


def check(options: argparse.Namespace) -> int:
    """``fsm-replay check``."""
    began = time.perf_counter()
    faults = Faults(options.limit)
    try:
        readers = open_traces(options.traces)
        with progress(readers) as step:
            replays = replay(readers, faults, step)
    except Unusable as error:
        return unusable(error)
    out = console()
    for reader, node in zip(readers, replays, strict=True):
        before = faults.count
        notes = node.finish(reader.cut, options.complete)
        if not options.quiet or (notes and faults.count == before):
            out.print(_summary(reader, node, notes))
    lines = sum(node.number for node in replays)
    seconds = time.perf_counter() - began
    if faults.count:
        noun = "fault" if faults.count == 1 else "faults"
        out.print(f"[red]{faults.count:,} {noun}[/] in {lines:,} lines")
        return FAULTS
    if not options.quiet:
        out.print(f"[green]fits[/]: {lines:,} lines in {seconds:.1f} s")
    return FITS


def _summary(reader: TraceReader, node: NodeReplay, notes: list[str]) -> str:
    answers = ", ".join(f"{count:,} {reason}" for reason, count in sorted(node.answers.items()))
    parts = [f"{node.number:,} lines", f"{node.requests:,} requests", answers or "no answers"]
    parts += [f"[yellow]{escape(note)}[/]" for note in notes]
    return f"{escape(reader.name)}  {node.node}  {' · '.join(parts)}"
