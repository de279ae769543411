"""Charts as pictures and tables: dot text, Markdown, and SVG where the system has Graphviz.

``python -m fsm.draw docs/statecharts`` (``make charts``) writes what is committed there. Everything
is drawn from the frozen table, never from a running machine. Dot text and Markdown depend on the
charts alone, so a test compares them byte for byte; an SVG also varies with the version of
Graphviz, so it only has to carry its chart's fingerprint.

A new chart is a new line in :data:`DRAWINGS`.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from fsm import decode, draw_joint, prefill, unified
from fsm.chart import Actor, Chart, Edge, Kind, State
from fsm.resources import (
    DISPOSITION_MEANING,
    PHASE_MEANING,
    PHASES,
    RESOURCE_MEANING,
    RESOURCES,
    Resource,
)


class DrawingError(RuntimeError):
    """No picture: Graphviz is missing or fails, or a drawing does not fit its chart."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart, and what a picture of it needs to know besides."""

    chart: Chart
    title: str
    theory: str
    """Markdown: why the chart is as it is (the docstring of its module)."""
    kit: frozenset[Resource]
    """What every request on this chart needs; whatever else it holds is marked as optional."""
    usual: tuple[str, ...]
    """The events of an uneventful life, from the initial state on: the spine of the picture."""

    def spine(self) -> tuple[Edge, ...]:
        """The edges of the usual life; :class:`DrawingError` if the chart lacks one of them."""
        state, edges = self.chart.initial, list[Edge]()
        for event in self.usual:
            edge = self.chart.table.get((state, event))
            if edge is None:
                raise DrawingError(f"{self.chart.name}: no {event!r} in {state!r} for a usual life")
            edges.append(edge)
            state = edge.target
        return tuple(edges)


@dataclass(frozen=True, slots=True)
class Usage:
    """What requests did on a chart, to be drawn on it: whatever they did not do turns grey."""

    caption: str
    states: Mapping[str, str]
    """State → what to say about it; a state that was never entered is not there."""
    edges: Mapping[tuple[str, str], int]
    """(state, event) → how often."""


DRAWINGS: Final[tuple[Drawing, ...]] = (
    Drawing(
        unified.UNIFIED,
        "A request on a unified node",
        unified.__doc__ or "",
        unified.BASE_KIT,
        ("enqueue", "admit", "prefilled", "finish", "quiesce"),
    ),
    Drawing(
        prefill.PREFILL,
        "A request on a prefill node",
        prefill.__doc__ or "",
        prefill.BASE_KIT,
        ("enqueue", "granted", "admit", "prefilled", "landed"),
    ),
    Drawing(
        decode.DECODE,
        "A request on a decode node",
        decode.__doc__ or "",
        decode.BASE_KIT,
        ("enqueue", "met", "grant", "landed", "finish", "quiesce"),
    ),
)

KIND_MEANING: Final[dict[Kind, str]] = {
    "live": "its client is still owed an answer; accepts an abort",
    "stopping": "answered, but a launched step may still touch its pages",
    "draining": "answered, but a peer's wire may still touch its pages",
    "done": "answered, and holds nothing",
}

ACTOR_MEANING: Final[dict[Actor, str]] = {
    "intake": "the engine's check of limits, ids and queue length, at arrival",
    "scheduler": "the plan of the next step",
    "runner": "the outcome of a launched step",
    "client": "an abort, or a connection that went away",
    "server": "the detokenizer, which found a stop string",
    "clock": "a deadline",
    "store": "stored KV, loaded or missed",
    "wire": "the transfer of KV between two nodes",
    "peer": "a message of the other node",
}

# --- dot ------------------------------------------------------------------------------------------

FONT: Final = "Helvetica,Arial,sans-serif"
INK: Final = "#1f2933"
QUIET: Final = "#7b8794"
SPINE: Final = "#0b6bcb"
COLOURS: Final[dict[Kind, tuple[str, str]]] = {  # fill and border
    "live": ("#e8f2fd", "#4a90d9"),
    "stopping": ("#fdecc8", "#d29922"),
    "draining": ("#fbd9cf", "#c9553b"),
    "done": ("#e4e7eb", "#7b8794"),
}
HOLD_WIDTH: Final = 26
"""Characters in a line of holdings: a node is then about as wide as two edge labels."""


UNUSED: Final = "#b8c1cb"


def to_dot(drawing: Drawing, usage: Usage | None = None) -> str:
    """A box for each phase, a node for each state, one arrow for each pair of states."""
    chart, spine = drawing.chart, drawing.spine()
    graph = {
        "label": f"<{_heading(drawing, usage)}>",
        "labelloc": "t",
        "bgcolor": "white",
        "pad": "0.2",
    }
    graph |= {"fontname": FONT, "fontsize": "12", "fontcolor": INK}
    graph |= {"nodesep": "0.18", "ranksep": "0.4"}
    node = {"shape": "box", "style": "rounded,filled", "fontname": FONT, "fontcolor": INK}
    node |= {"fontsize": "14", "margin": "0.12,0.03"}
    edge = {"fontname": FONT, "fontsize": "12", "fontcolor": INK, "color": INK, "arrowsize": "0.7"}
    start = {"shape": "circle", "width": "0.14", "fillcolor": INK, "style": "filled", "label": ""}
    lines = [
        f"digraph {_quoted(chart.name)} {{",
        f"  graph {_attributes(graph)}",
        f"  node {_attributes(node)}",
        f"  edge {_attributes(edge)}",
        "",
        f'  "" {_attributes(start)}',
        f'  "" -> {_quoted(chart.initial)}',
    ]
    for phase in PHASES:
        inside = [_node(s, drawing.kit, usage) for s in chart.states if s.phase == phase]
        if inside:
            box = {"label": phase, "labeljust": "l", "fontsize": "12", "fontcolor": "#616e7c"}
            box |= {"style": "rounded,filled", "color": "#f1f4f7", "tooltip": PHASE_MEANING[phase]}
            lines += [
                "",
                f"  subgraph {_quoted(f'cluster_{phase}')} {{",
                f"    graph {_attributes(box)}",
            ]
            lines += [*(f"    {line}" for line in inside), "  }"]
    lines.append("")
    rank = {state.name: number for number, state in enumerate(chart.states)}
    edges = sorted(chart.edges, key=lambda e: (rank[e.source], rank[e.target]))
    for _, parallel in groupby(edges, key=lambda e: (e.source, e.target)):
        lines.append(f"  {_arrow(tuple(parallel), spine, usage)}")
    return "\n".join([*lines, "}", ""])


def _heading(drawing: Drawing, usage: Usage | None) -> str:
    """Title, fingerprint and legend as one HTML label, which cannot overlap the picture."""
    chart = drawing.chart
    legend = [
        f'<td bgcolor="{fill}" color="{border}" border="1" style="rounded">  {kind}  </td>'
        for kind, (fill, border) in COLOURS.items()
        if any(state.kind == kind for state in chart.states)
    ]
    if usage is None:
        legend += [
            f'<td><font color="{SPINE}"><b>→ the usual life</b></font></td>',
            f'<td><font color="{QUIET}">→ an early end</font></td>',
            "<td><i>held?</i>  if the request needs one</td>",
        ]
    else:
        legend += [
            f'<td><font color="{SPINE}">entries ×   median … 99th percentile</font></td>',
            f'<td><font color="{SPINE}"><b>→ taken</b></font></td>',
            f'<td><font color="{UNUSED}">→ not taken</font></td>',
        ]
    heading = usage.caption if usage is not None else drawing.title
    title = f'<font point-size="18"><b>{escape(heading)}</b></font>'
    mark = f"   chart {escape(chart.name)} · {chart.fingerprint}"
    return (
        '<table border="0" cellborder="0" cellspacing="6" cellpadding="3">'
        f'<tr><td colspan="{len(legend)}">{title}<font color="{QUIET}">{mark}</font></td></tr>'
        f"<tr>{''.join(legend)}</tr></table>"
    )


def _node(state: State, kit: frozenset[Resource], usage: Usage | None) -> str:
    held = _lines([resource for resource in state.holds if resource in kit])
    held += [f"<i>{line}</i>" for line in _lines([f"{r}?" for r in state.holds if r not in kit])]
    rows = [f'<td cellpadding="2"><b>{escape(state.name)}</b></td>']
    rows += [f'<td><font point-size="11">{line}</font></td>' for line in held or ["nothing"]]
    fill, border = COLOURS[state.kind]
    if usage is not None:
        said = escape(usage.states.get(state.name, "never"))
        colour = SPINE if state.name in usage.states else UNUSED
        rows.insert(1, f'<td><font color="{colour}">{said}</font></td>')
    label = {"label": f"<{_table(rows)}>", "fillcolor": fill, "color": border, "tooltip": state.doc}
    if state.kind == "done":
        label["peripheries"] = "2"
    if usage is not None and state.name not in usage.states:
        label |= {"fillcolor": "white", "color": UNUSED, "fontcolor": UNUSED}
    return f"{_quoted(state.name)} {_attributes(label)}"


def _arrow(edges: tuple[Edge, ...], spine: tuple[Edge, ...], usage: Usage | None) -> str:
    """All edges of one pair of states. The spine is bold; what ends a life early is quiet."""
    usual = any(edge in spine for edge in edges)
    quiet = usual or any(edge.event == "abort" for edge in edges)
    rows = []
    for edge in edges:
        name, actors = escape(edge.event), escape(", ".join(edge.by))
        if usage is not None:
            count = usage.edges.get((edge.source, edge.event), 0)
            colour = INK if count else UNUSED
            text = f"<b>{count:,}</b> {name}" if count else name
            rows.append(f'<td align="left">  <font color="{colour}">{text}</font></td>')
            continue
        if edge in spine:
            name = f'<font color="{SPINE}"><b>{name}</b></font>'
        elif quiet:
            name = f'<font color="{QUIET}">{name}</font>'
        rows.append(
            f'<td align="left">  {name} <font point-size="11" color="{QUIET}">{actors}</font></td>'
        )
    look = {"label": f"<{_table(rows, padding=1)}>"}
    look["tooltip"] = "; ".join(f"{edge.event}: {edge.why}" for edge in edges)
    if usual:
        look |= {"color": SPINE, "penwidth": "2.4", "weight": "20"}
    elif quiet:
        look |= {"color": QUIET}
    if usage is not None:
        look |= _used(sum(usage.edges.get((edge.source, edge.event), 0) for edge in edges))
    return f"{_quoted(edges[0].source)} -> {_quoted(edges[0].target)} {_attributes(look)}"


def _used(count: int) -> dict[str, str]:
    """An arrow grows with the order of magnitude of what went along it."""
    if not count:
        return {"color": UNUSED, "style": "dashed", "penwidth": "1"}
    return {"color": SPINE, "penwidth": f"{1 + 0.7 * len(str(count)):.1f}"}


def _table(cells: Iterable[str], padding: int = 0) -> str:
    rows = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f'<table border="0" cellspacing="0" cellpadding="{padding}">{rows}</table>'


def _lines(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if lines and len(f"{lines[-1]}, {word}") <= HOLD_WIDTH:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines


def _attributes(values: Mapping[str, str]) -> str:
    """A dot attribute list; a value in angle brackets is HTML and is not quoted."""
    pairs = (f"{k}={v if v.startswith('<') else _quoted(v)}" for k, v in values.items())
    return f"[{', '.join(pairs)}]"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def to_svg(dot: str) -> str:
    """Render dot text. :class:`DrawingError` if the system has no Graphviz, or if it fails."""
    import graphviz  # only drawing needs it

    try:
        return str(graphviz.Source(dot).pipe(format="svg", encoding="utf-8"))
    except graphviz.ExecutableNotFound as error:
        raise DrawingError(
            "drawing needs the program `dot`: install your system's Graphviz"
            " (Debian, Ubuntu: apt-get install graphviz; macOS: brew install graphviz)"
        ) from error
    except graphviz.CalledProcessError as error:
        raise DrawingError(f"`dot` failed: {error.stderr}") from error


# --- Markdown -------------------------------------------------------------------------------------

READ_FIRST: Final = "How to read it, and what the words mean: [README](README.md)."
GENERATED: Final = "<!-- Written by `make charts` from fsm/: change the chart, not this page. -->"


def to_markdown(drawing: Drawing) -> str:
    """The page of one chart: picture, theory, states, edges, every state against every event."""
    chart, everything = drawing.chart, frozenset(RESOURCES)
    states = [
        (f"`{s.name}`", s.phase, s.kind, _held(s.holds, drawing.kit), s.doc) for s in chart.states
    ]
    edges = []
    for edge in chart.edges:
        move = chart.move(edge.source, edge.event, everything)
        assert move is not None, edge
        takes, drops = (_held(resources, drawing.kit) for resources in (move.takes, move.drops))
        row = (f"**{edge.event}**", f"`{edge.source}`", f"`{edge.target}`", ", ".join(edge.by))
        edges.append((*row, takes, drops, edge.pages or "", edge.why))
    targets = {key: f"`{edge.target}`" for key, edge in chart.table.items()}
    names = [state.name for state in chart.states]
    matrix = [(f"**{e}**", *(targets.get((s, e), "·") for s in names)) for e in chart.events]
    return "\n".join(
        [
            f"# {drawing.title}",
            "",
            GENERATED,
            "",
            f"Chart `{chart.name}`, fingerprint `{chart.fingerprint}`. {READ_FIRST}",
            "",
            f"![{drawing.title}]({chart.name}.svg)",
            "",
            drawing.theory.strip(),
            "",
            "## States",
            "",
            *_grid(("State", "Phase", "Class", "Holds", "What it is like"), states),
            "",
            "## Edges",
            "",
            "What an edge takes and drops is the difference between what its two states hold.",
            "",
            *_grid(("Event", "From", "To", "By", "Takes", "Drops", "Pages go to", "Why"), edges),
            "",
            "## Every state meets every event",
            "",
            "A cell is where the event leads. A dot is an illegal event: it changes nothing.",
            "",
            *_grid(("", *(f"`{name}`" for name in names)), matrix),
            "",
        ]
    )


def to_index(drawings: Iterable[Drawing]) -> str:
    """The page about all charts: how to read them, their pictures, and a glossary."""
    glossary: tuple[tuple[str, Mapping[Any, str]], ...] = (
        ("Phase", {phase: PHASE_MEANING[phase] for phase in PHASES}),
        ("Class", KIND_MEANING),
        ("Resource", {resource: RESOURCE_MEANING[resource] for resource in RESOURCES}),
        ("Pages go to", DISPOSITION_MEANING),
        ("By", ACTOR_MEANING),
    )
    pictures = [
        line
        for d in drawings
        for line in (
            "",
            f"### [{d.title}]({d.chart.name}.md)",
            "",
            f"[![{d.title}]({d.chart.name}.svg)]({d.chart.name}.md)",
        )
    ]
    words = [
        line
        for name, meanings in glossary
        for line in ("", *_grid((name, "Meaning"), [(f"`{k}`", v) for k, v in meanings.items()]))
    ]
    return "\n".join(
        [f"# Statecharts\n\n{GENERATED}\n\n{HOW_TO_READ}", *pictures, PAIRS, GLOSSARY, *words, ""]
    )


HOW_TO_READ: Final = """\
Every request is a machine on one of these charts, and the charts are the code: frozen tables in
`fsm/`, checked when they are imported, run by one driver, and drawn here.

- A **box** is a phase, the public name of where a request is. A **node** is a state; it belongs to
  one phase.
- Below its name stands what a request **holds** in that state. An *italic name with a question
  mark?* is held only by requests that need one: a session's turn by a turn of a session, and so on.
- An **arrow** is labelled, on its right, with its events and who may cause them. The blue ones are
  the life of most requests; the grey ones end it early.
- What an arrow **takes and drops** is nowhere written by hand. It is the difference between what
  its two states hold, so no arrow can forget to release something.
- Where an arrow drops KV pages, its row in the table says where they go.
- The heading carries the chart's **fingerprint**, which traces and peers quote.

## The charts"""

PAIRS: Final = f"""
## The pair

With prefill and decode on separate nodes, a request is on two charts at once.
[{draw_joint.TITLE}]({draw_joint.PAGE}) shows which states may coexist, and what a client is
shown then."""

GLOSSARY: Final = """
## The words

Resources are listed in the order in which an arrow releases them."""


def _held(resources: Iterable[Resource], kit: frozenset[Resource]) -> str:
    return ", ".join(r if r in kit else f"*{r}?*" for r in resources)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


# --- files ----------------------------------------------------------------------------------------


def texts(drawings: Sequence[Drawing] = DRAWINGS) -> dict[str, str]:
    """What depends on the charts alone: file name → text, for every page and every dot file."""
    files = {"README.md": to_index(drawings)}
    files[draw_joint.PAGE] = draw_joint.to_markdown(GENERATED)
    for drawing in drawings:
        files[f"{drawing.chart.name}.dot"] = to_dot(drawing)
        files[f"{drawing.chart.name}.md"] = to_markdown(drawing)
    return files


def write(folder: Path, drawings: Sequence[Drawing] = DRAWINGS) -> list[Path]:
    """Write pages, dot text and pictures; nothing at all if a picture cannot be made."""
    files = texts(drawings)
    for drawing in drawings:
        files[f"{drawing.chart.name}.svg"] = to_svg(files[f"{drawing.chart.name}.dot"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sorted(files.items()):
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in sorted(files)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fsm.draw", description="Write every chart as .dot, .svg and .md."
    )
    parser.add_argument("folder", type=Path, help="where to write; created if it does not exist")
    try:
        written = write(parser.parse_args(arguments).folder)
    except (DrawingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
