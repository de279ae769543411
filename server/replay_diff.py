"""``fsm-replay diff``: how two traces differ in structure."""

import argparse
from pathlib import Path
from typing import Final

from fsm.trace_diff import Pairing, Way, Ways, differences, pairing
from fsm.trace_read import TraceReader, Unusable
from server.replay_files import (
    FAULTS,
    FITS,
    Commands,
    at_least,
    command,
    console,
    progress,
    unusable,
)

HELP: Final = """\
Compare two traces request by request: the edges they took, in order, and how
they ended. Times, pages and ids that differ from run to run are ignored. Of
each request that differs, the first difference is printed as 'RID after WHAT
WAS THE SAME: LEFT | RIGHT'.

Requests are paired by rid, or by their order if the traces share few rids."""

EXAMPLES: Final = """\
  fsm-replay diff before.jsonl after.jsonl
  fsm-replay diff --by order monday.jsonl.gz tuesday.jsonl.gz"""


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "diff",
        diff,
        "compare the structure of two traces",
        HELP,
        EXAMPLES,
        ("left", "right"),
        "0 alike · 1 they differ",
    )
    parser.add_argument(
        "--by",
        choices=("rid", "order"),
        help="how requests are paired [default by what the rids allow]",
    )
    parser.add_argument(
        "--limit",
        type=at_least(0),
        default=50,
        metavar="N",
        help="print the first N differences, 0 is all [default 50]",
    )


def diff(options: argparse.Namespace) -> int:
    """``fsm-replay diff``."""
    out = console()
    try:
        left, right = (_read(path) for path in (options.left, options.right))
    except Unusable as error:
        return unusable(error)
    by: Pairing = options.by or pairing(left, right)
    count = 0
    for count, difference in enumerate(differences(left, right, by), 1):
        if not options.limit or count <= options.limit:
            out.print(str(difference), markup=False)
        elif count == options.limit + 1:
            out.print(f"[dim]… those after the first {options.limit} are counted[/]")
    paired = f"{len(left):,} and {len(right):,} requests, paired by {by}"
    if count:
        out.print(f"[red]{count:,} differ[/]: {paired}")
        return FAULTS
    out.print(f"[green]alike[/]: {paired}")
    return FITS


def _read(path: Path) -> list[Way]:
    reader, ways = TraceReader(path), Ways()
    with progress([reader]) as step:
        for _, lines in reader:
            for line in lines:
                ways.feed(line)
            step()
    return ways.ways()
