"""``fsm-replay timeline``: traces as a picture."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fsm.replay_clocks import Clocks
from fsm.replay_faults import Fault
from fsm.replay_join import join
from fsm.timeline import Timeline, View
from fsm.timeline_svg import draw
from fsm.trace_read import Unusable
from server.replay_files import (
    FITS,
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
Draw traces as SVG: a lane for each request on each node, its phases coloured,
answers and retractions marked, the page pools below. A browser shows states,
times and reasons where the mouse points. Of many requests, a page is drawn;
choose others by --page, --rid and the times."""

EXAMPLES: Final = """\
  fsm-replay timeline trace.jsonl -o trace.svg
  fsm-replay timeline trace.jsonl --since 10 --until 12.5 -o busy.svg
  fsm-replay timeline prefill-0.jsonl decode-0.jsonl --rid 'chat-7*' -o pair.svg"""


def add(commands: Commands) -> None:
    parser = command(commands, "timeline", timeline, "draw requests over time", HELP, EXAMPLES)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the picture [default TRACE.svg in the current folder]",
    )
    parser.add_argument(
        "--rid", action="append", default=[], help="these requests only; * and ? are wild"
    )
    parser.add_argument(
        "--since",
        type=float,
        default=0.0,
        metavar="S",
        help="from S seconds after the start on [default 0]",
    )
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        metavar="S",
        help="up to S seconds after the start [default the end]",
    )
    parser.add_argument(
        "--limit", type=at_least(1), default=60, metavar="N", help="lanes in a picture [default 60]"
    )
    parser.add_argument(
        "--page",
        type=at_least(1),
        default=1,
        metavar="N",
        help="which N lanes [default 1, the first]",
    )


def timeline(options: argparse.Namespace) -> int:
    """``fsm-replay timeline``."""
    view = View(
        tuple(options.rid),
        options.since,
        options.until,
        options.limit,
        options.page,
    )
    try:
        clocks = _clocks(options.traces)
        readers = open_traces(options.traces)
        headers = [reader.header for reader in readers]
        picture = Timeline(headers, view, clocks.shifts(), clocks.drift())
        with progress(readers) as step:
            for count, (index, _, line) in enumerate(join(readers, Faults(0))):
                picture.feed(index, line)
                if count % 4096 == 0:
                    step()
        title = ", ".join(Path(reader.name).name for reader in readers)
        path = options.output or Path(_stem(options.traces[0]) + ".svg")
        path.write_text(draw(picture, title), encoding="utf-8")
    except (Unusable, OSError) as error:
        return unusable(error)
    shown = min(picture.matching, view.kept) - view.limit * (view.page - 1)
    pages = -(-picture.matching // view.limit)
    more = f", page {view.page} of {pages}" if pages > 1 else ""
    console().print(f"{path}: {max(0, shown)} of {picture.matching} requests{more}", markup=False)
    return FITS


def _clocks(traces: Sequence[Path]) -> Clocks:
    """What the causes say about the clocks: where there are several, the traces are read twice."""
    readers = open_traces(traces)
    clocks = Clocks([reader.header for reader in readers])
    if len(readers) == 1:
        readers[0].close()
        return clocks
    with progress(readers) as step:
        for count, (index, _, line) in enumerate(join(readers, _told_later)):
            clocks.feed(index, line)
            if count % 4096 == 0:
                step()
    return clocks


def _told_later(fault: Fault) -> None:
    """The second reading finds the same faults."""


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
