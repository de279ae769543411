"""``fsm-replay chart``: the statechart, with what requests did on it."""

import argparse
from pathlib import Path
from typing import Final

from fsm.draw import to_svg
from fsm.draw_base import DRAWINGS, DrawingError, Usage
from fsm.draw_dot import to_dot
from fsm.replay_links import labels
from fsm.trace_read import Unusable
from fsm.trace_stats import NodeStats
from server.replay_files import FITS, UNUSABLE, Commands, command, console, open_traces, unusable
from server.replay_stats import gather, seconds

HELP: Final = """\
Draw the statechart of a trace with counts on its arrows, and entries and
dwell times (median and 99th percentile) in its states. What no request did is
grey. Needs the program `dot` (Graphviz); --dot writes the text that `dot`
would read."""

EXAMPLES: Final = """\
  fsm-replay chart trace.jsonl -o trace-chart.svg
  fsm-replay chart --dot trace.jsonl -o trace-chart.dot"""


def add(commands: Commands) -> None:
    parser = command(
        commands, "chart", chart, "draw the statechart with counts and times", HELP, EXAMPLES
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the picture, or, of several nodes, FILE-NODE for each [default NODE-chart.svg]",
    )
    parser.add_argument("--dot", action="store_true", help="write dot text, not SVG")


def chart(options: argparse.Namespace) -> int:
    """``fsm-replay chart``."""
    suffix = ".dot" if options.dot else ".svg"
    try:
        nodes = gather(open_traces(options.traces))
        for name, node in zip(labels([node.header for node in nodes]), nodes, strict=True):
            path = options.output or Path(f"{name}-chart{suffix}")
            if options.output is not None and len(nodes) > 1:
                path = path.with_name(f"{path.stem}-{name}{path.suffix}")
            text = dot(node)
            path.write_text(text if options.dot else to_svg(text), encoding="utf-8")
            console().print(f"{path}: {node.requests:,} requests", markup=False)
    except (Unusable, OSError) as error:
        return unusable(error)
    except DrawingError as error:
        console(stderr=True).print(str(error), markup=False)
        return UNUSABLE
    return FITS


def dot(node: NodeStats) -> str:
    """The dot text of the chart of ``node``. Raises :class:`Unusable` if no chart is known."""
    drawing = next((d for d in DRAWINGS if d.chart.name in node.header.charts), None)
    if drawing is None:
        raise Unusable(f"no chart of {', '.join(node.header.charts)} is known to this build")
    states = {}
    for state, entries in node.entries.items():
        states[state] = f"{entries:,} ×"
        sketch = node.dwell.get(state)
        if sketch is not None and sketch.max:
            median, high = seconds(sketch.quantile(0.5)), seconds(sketch.quantile(0.99))
            states[state] += f"   {median} … {high}"
    caption = f"{node.header.node}: {node.requests:,} requests in {seconds(node.seconds)}"
    return to_dot(drawing, Usage(caption, states, node.edges))
