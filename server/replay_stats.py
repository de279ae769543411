"""``fsm-replay stats``: dwell times, resources and endings of traces."""

import argparse
import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsm.chart import Chart
from fsm.decide import BOOKS
from fsm.replay_join import join
from fsm.replay_links import labels
from fsm.trace_read import TraceReader, Unusable
from fsm.trace_stats import NodeStats, Sketch
from server.replay_files import (
    FITS,
    Commands,
    Faults,
    command,
    console,
    open_traces,
    output,
    progress,
    unusable,
)

HELP: Final = """\
Figures of traces: for each state how often it was entered and how long
requests stayed, for each resource its peak and the time it was held, for
requests the times to the first token and to the answer, and how they ended.

Quantiles are within 1 % of the value, in constant memory (a DDSketch)."""

EXAMPLES: Final = """\
  fsm-replay stats trace.jsonl
  fsm-replay stats trace.jsonl --json | jq '.[].states.decoding.p99_s'
  fsm-replay stats prefill-0.jsonl decode-0.jsonl --csv -o stats.csv"""

QUANTILES: Final = (("p50_s", 0.5), ("p90_s", 0.9), ("p99_s", 0.99))


def add(commands: Commands) -> None:
    parser = command(commands, "stats", stats, "dwell times, resources, endings", HELP, EXAMPLES)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, an object for each node")
    form.add_argument("--csv", action="store_true", help="as CSV: node, part, name, measure, value")
    output(parser, "the figures")


def stats(options: argparse.Namespace) -> int:
    """``fsm-replay stats``."""
    try:
        nodes = gather(open_traces(options.traces))
        names = labels([node.header for node in nodes])
        figures = {name: as_dict(node) for name, node in zip(names, nodes, strict=True)}
        if options.json:
            text = json.dumps(figures, indent=2) + "\n"
        elif options.csv:
            text = as_csv(figures)
        elif options.output is None:
            print_tables(console(), nodes)
            return FITS
        else:
            sink = io.StringIO()
            print_tables(Console(file=sink, width=100), nodes)
            text = sink.getvalue()
        if options.output is None:
            console().print(text, end="", markup=False)
        else:
            options.output.write_text(text, encoding="utf-8")
    except (Unusable, OSError) as error:
        return unusable(error)
    return FITS


def gather(readers: Sequence[TraceReader]) -> list[NodeStats]:
    """The figures of each trace."""
    nodes = [NodeStats(reader.header) for reader in readers]
    with progress(readers) as step:
        for count, (index, _, line) in enumerate(join(readers, Faults(0))):
            nodes[index].feed(line)
            if count % 4096 == 0:
                step()
    return nodes


def as_dict(node: NodeStats) -> dict[str, Any]:
    """Everything, for JSON. Names end in their unit: ``_s`` is seconds."""
    return {
        "requests": {
            "count": node.requests,
            "open": node.open,
            "output_tokens": node.tokens,
            "retractions": node.retractions,
            "evicted_pages": node.evicted,
            "seconds": round(node.seconds, 6),
        },
        "times": {
            "first_token": _sketch(node.first_token),
            "answer": _sketch(node.whole),
        },
        "states": {
            state: {"entries": node.entries[state], **_sketch(node.dwell.get(state, Sketch()))}
            for state in states_of(node)
        },
        "resources": {
            name: {
                "total": level.total,
                "peak": level.peak,
                "unit_seconds": round(level.unit_seconds, 6),
                "mean": round(level.unit_seconds / node.seconds, 3) if node.seconds else 0.0,
            }
            for name, level in node.levels.items()
        },
        "endings": {
            reason if status is None else f"{reason} {status}": {"count": count}
            for (reason, status), count in sorted(node.endings.items(), key=lambda e: -e[1])
        },
    }


def chart_of(node: NodeStats) -> Chart | None:
    """The chart of this build by which the node moved."""
    return next((BOOKS[name].chart for name in node.header.charts if name in BOOKS), None)


def states_of(node: NodeStats) -> list[str]:
    """States in the order of their chart, then those that no chart has."""
    chart = chart_of(node)
    known = [state.name for state in chart.states] if chart is not None else []
    return [*known, *sorted(node.entries.keys() - set(known))]


def as_csv(figures: dict[str, dict[str, Any]]) -> str:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(("node", "part", "name", "measure", "value"))
    for node, parts in figures.items():
        writer.writerows((node, *row) for row in _rows(parts))
    return sink.getvalue()


def _rows(parts: dict[str, Any]) -> Iterator[tuple[str, str, str, object]]:
    for part, names in parts.items():
        for name, value in names.items():
            if isinstance(value, dict):
                for measure, number in value.items():
                    yield part, name, measure, number
            else:
                yield part, "", name, value


def print_tables(out: Console, nodes: Sequence[NodeStats]) -> None:
    for name, node in zip(labels([node.header for node in nodes]), nodes, strict=True):
        rate = node.tokens / node.seconds if node.seconds else 0.0
        out.print(
            f"[bold]{escape(name)}[/]: {node.requests:,} requests, {node.open:,} open at the"
            f" end, {node.tokens:,} tokens in {node.seconds:.3f} s ({rate:,.0f} a second),"
            f" {node.retractions:,} retractions, {node.evicted:,} pages evicted"
        )
        table = _table("state", "entries", "p50", "p90", "p99", "max", "together")
        for state in states_of(node):
            sketch = node.dwell.get(state, Sketch())
            style = "" if node.entries[state] else "dim"
            table.add_row(state, f"{node.entries[state]:,}", *_times(sketch), style=style)
        table.add_section()
        for what, sketch in (("to first token", node.first_token), ("to answer", node.whole)):
            table.add_row(what, f"{sketch.count:,}", *_times(sketch))
        out.print(table)
        table = _table("resource", "of", "peak", "mean", "unit-seconds")
        for resource, level in node.levels.items():
            mean = level.unit_seconds / node.seconds if node.seconds else 0.0
            style = "" if level.peak else "dim"
            table.add_row(
                resource,
                f"{level.total:,}",
                f"{level.peak:,}",
                f"{mean:,.2f}",
                f"{level.unit_seconds:,.2f}",
                style=style,
            )
        out.print(table)
        table = _table("ending", "status", "answers")
        for (reason, status), count in node.endings.most_common():
            table.add_row(reason, "" if status is None else str(status), f"{count:,}")
        out.print(table)


def seconds(value: float) -> str:
    """A time for people, with three digits."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * factor:.3g} {unit}" if value else "0"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def _times(sketch: Sketch) -> list[str]:
    if not sketch.count:
        return [""] * 5
    quantiles = [seconds(sketch.quantile(q)) for _, q in QUANTILES]
    return [*quantiles, seconds(sketch.max), seconds(sketch.total)]


def _sketch(sketch: Sketch) -> dict[str, float]:
    quantiles = {name: round(sketch.quantile(q), 9) for name, q in QUANTILES}
    return {
        "count": sketch.count,
        **quantiles,
        "max_s": round(sketch.max, 6),
        "total_s": round(sketch.total, 6),
    }


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
