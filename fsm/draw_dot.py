"""A chart as dot text: a box for each phase, a node for each state, an arrow for each move.

Nearly every live state has four or five edges that end it early, all to the same few states. As
arrows they would cross everything else, so they stand in the foot of their state, in the colour of
the state that they lead to. What is left to draw is the life of a request.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape, unescape
from itertools import groupby, pairwise
from typing import Final

from fsm.chart import Edge, Kind, State, ordered
from fsm.colours import INK, PHASE_COLOURS, QUIET, tint
from fsm.draw_base import Drawing, Usage
from fsm.resources import PHASE_MEANING, PHASES

FONT: Final = "Helvetica,Arial,sans-serif"
SPINE: Final = "#0b6bcb"
UNUSED: Final = "#7b8794"
COLOURS: Final[dict[Kind, tuple[str, str]]] = {  # fill and border
    "live": ("#ffffff", "#52606d"),
    "stopping": ("#fdecc8", "#d29922"),
    "draining": ("#fbd9cf", "#c9553b"),
    "done": ("#e4e7eb", "#7b8794"),
}
WIDTH: Final = 30
"""Characters in a line of a node: three nodes side by side fit a page of documentation."""
LABEL: Final = 22
"""Characters in a line of a label: one that is as long has its actors below its event."""
SMALL: Final = "9"


def to_dot(drawing: Drawing, usage: Usage | None = None) -> str:
    """The chart; with ``usage``, what requests did on it."""
    chart, spine = drawing.chart, drawing.spine()
    graph = {
        "label": f"<{_heading(drawing, usage)}>",
        "labelloc": "t",
        "bgcolor": "white",
        "pad": "0.1",
    }
    graph |= {"fontname": FONT, "fontsize": "10", "fontcolor": INK}
    graph |= {"nodesep": "0.2", "ranksep": "0.1", "newrank": "true"}
    node = {"shape": "box", "style": "rounded,filled", "fontname": FONT, "fontcolor": INK}
    node |= {"fontsize": SMALL, "margin": "0.05,0.04"}
    edge = {"fontname": FONT, "fontsize": "10", "fontcolor": INK, "color": INK, "arrowsize": "0.7"}
    start = {"shape": "circle", "width": "0.12", "fillcolor": INK, "style": "filled", "label": ""}
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
        inside = [_node(s, drawing, usage) for s in chart.states if s.phase == phase]
        if inside:
            colour = PHASE_COLOURS[phase]
            box = {"label": f"<<b>{phase}</b>>", "labeljust": "l", "fontcolor": QUIET}
            box |= {"style": "rounded,filled", "margin": "6", "tooltip": PHASE_MEANING[phase]}
            if phase == "retired":  # the usual life comes in from above, at the left
                box["labeljust"] = "r"
            box |= {"fillcolor": tint(colour, 0.22), "color": tint(colour, 0.8)}
            lines += [
                "",
                f"  subgraph {_quoted(f'cluster_{phase}')} {{",
                f"    graph {_attributes(box)}",
            ]
            lines += [*(f"    {line}" for line in inside), "  }"]
    lines.append("")
    rank = {state.name: number for number, state in enumerate(chart.states)}
    moves = [edge for edge in chart.edges if not drawing.early(edge)]
    moves.sort(key=lambda e: (rank[e.source], rank[e.target]))
    for _, parallel in groupby(moves, key=lambda e: (e.source, e.target)):
        lines.append(f"  {_arrow(tuple(parallel), spine, usage)}")
    lines += ["", *(f"  {line}" for line in _places(drawing))]
    return "\n".join([*lines, "}", ""])


def _places(drawing: Drawing) -> Iterator[str]:
    """Rows from top to bottom, and in each the states from left to right, by invisible edges."""
    for row in drawing.rows:
        unseen = " [style=invis]" if len(row) > 1 else ""
        yield f"{{ rank=same; {' -> '.join(map(_quoted, row))}{unseen} }}"
    for (above, *_), (below, *_) in pairwise(drawing.rows):
        yield f"{_quoted(above)} -> {_quoted(below)} [style=invis, weight=0]"


def _heading(drawing: Drawing, usage: Usage | None) -> str:
    """Title, fingerprint and legend as one HTML label, which cannot overlap the picture."""
    chart = drawing.chart
    kinds = [
        f'<td bgcolor="{fill}" color="{border}" border="1" style="rounded">&#160;{kind}&#160;</td>'
        for kind, (fill, border) in COLOURS.items()
        if any(state.kind == kind for state in chart.states)
    ]
    if usage is None:
        legend = [
            _coloured("<b>→ the usual life</b>", SPINE),
            f"event {_small(_coloured('who causes it', QUIET))}",
            "<i>held?</i>&#160;if the request needs one",
        ]
        foot = "abort&#160;· <b>→ stopping</b>"
        kinds.append(f'<td bgcolor="{COLOURS["stopping"][0]}" style="rounded">{foot}</td>')
        kinds.append('<td align="left">an early end</td>')
    else:
        legend = [
            _coloured("entries ×&#160;&#160;median … 99th percentile", SPINE),
            _coloured("<b>→ taken</b>", SPINE),
            _coloured("→ not taken", UNUSED),
        ]
    heading = usage.caption if usage is not None else drawing.title
    title = f'<font point-size="15"><b>{escape(heading)}</b></font>&#160;&#160;'
    mark = _coloured(f"chart {escape(chart.name)} · {chart.fingerprint}", QUIET)
    said = "&#160;&#160;&#160;&#160;".join(legend)
    colours = f'<table border="0" cellspacing="5" cellpadding="2"><tr>{"".join(kinds)}</tr></table>'
    return _table([f"<td>{part}</td>" for part in (title + mark, colours, said)], padding=3)


def _node(state: State, drawing: Drawing, usage: Usage | None) -> str:
    """Name, holdings, and in a foot the events that end a life here."""
    kit, holds = drawing.kit, ordered(frozenset(state.holds))
    held = _lines([(resource, resource) for resource in holds if resource in kit], ", ")
    optional = _lines([(f"{r}?", f"{r}?") for r in holds if r not in kit], ", ")
    held += [f"<i>{line}</i>" for line in optional]
    rows = [f'<td><font point-size="12"><b>{escape(state.name)}</b></font></td>']
    rows += [f"<td>{line}</td>" for line in held or ["nothing"]]
    fill, border = COLOURS[state.kind]
    never = usage is not None and state.name not in usage.states
    if usage is not None:
        said = escape(usage.states.get(state.name, "never"))
        rows.insert(1, f"<td>{_coloured(said, UNUSED if never else SPINE)}</td>")
    early = [e for e in drawing.chart.edges if e.source == state.name and drawing.early(e)]
    for target, edges in groupby(early, key=lambda e: e.target):
        kind = drawing.chart.by_name[target].kind
        foot = _table(f"<td>{line}</td>" for line in _foot(tuple(edges), target, usage))
        look = f'bgcolor="{COLOURS[kind][0]}" style="rounded" cellpadding="3"'
        rows.append(f"<td {look}>{foot}</td>")
    label = {"label": f"<{_table(rows)}>", "fillcolor": fill, "color": border, "tooltip": state.doc}
    if state.kind == "live":
        label["width"] = "2.2"
    if state.kind == "done":
        label["peripheries"] = "2"
    if never:
        label |= {"color": UNUSED, "fontcolor": UNUSED, "style": "rounded,filled,dashed"}
    return f"{_quoted(state.name)} {_attributes(label)}"


def _foot(edges: Iterable[Edge], target: str, usage: Usage | None) -> list[str]:
    items = []
    for edge in edges:
        actors = ", ".join(edge.by)
        plain, item = f"{edge.event} {actors}", f"{edge.event} {_coloured(actors, QUIET)}"
        if usage is not None:
            count = usage.edges.get((edge.source, edge.event), 0)
            plain, item = f"{count:,} {edge.event}", _counted(edge.event, count)
        items.append((plain, item))
    return _lines([*items, (f"→ {target}", f"<b>→ {target}</b>")], "&#160;· ")


def _arrow(edges: tuple[Edge, ...], spine: tuple[Edge, ...], usage: Usage | None) -> str:
    """All moves between one pair of states that are no early ends. The spine is bold."""
    usual = any(edge in spine for edge in edges)
    rows = []
    for edge in edges:
        name = edge.event
        if usage is not None:
            text = _counted(edge.event, usage.edges.get((edge.source, edge.event), 0))
        else:
            if edge in spine:
                name = f'<font color="{SPINE}"><b>{name}</b></font>'
            actors = ", ".join(edge.by)
            between = " " if len(edge.event + actors) < LABEL else '&#160;<br align="left"/>&#160;'
            text = f"{name}{between}{_small(_coloured(actors, QUIET))}"
        rows.append(f'<td align="left" balign="left" width="84">&#160;{text}&#160;</td>')
    look = {"label": f"<{_table(rows, padding=1)}>"}
    look["tooltip"] = "; ".join(f"{edge.event}: {edge.why}" for edge in edges)
    if usual:
        look |= {"color": SPINE, "penwidth": "2.4", "weight": "20"}
    if usage is not None:
        look |= _used(sum(usage.edges.get((edge.source, edge.event), 0) for edge in edges))
    return f"{_quoted(edges[0].source)} -> {_quoted(edges[0].target)} {_attributes(look)}"


def _counted(event: str, count: int) -> str:
    return f"<b>{count:,}</b>&#160;{event}" if count else _coloured(event, UNUSED)


def _used(count: int) -> dict[str, str]:
    """An arrow grows with the order of magnitude of what went along it."""
    if not count:
        return {"color": UNUSED, "style": "dashed", "penwidth": "1"}
    return {"color": SPINE, "penwidth": f"{1 + 0.7 * len(str(count)):.1f}"}


def _coloured(markup: str, colour: str) -> str:
    return f'<font color="{colour}">{markup}</font>'


def _small(markup: str) -> str:
    return f'<font point-size="{SMALL}">{markup}</font>'


def _table(cells: Iterable[str], padding: int = 0) -> str:
    rows = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f'<table border="0" cellspacing="0" cellpadding="{padding}">{rows}</table>'


def _lines(words: Sequence[tuple[str, str]], between: str) -> list[str]:
    """Markup in lines of at most :data:`WIDTH` characters; a word is (as it is read, markup)."""
    lines, room = list[str](), 0
    for plain, markup in words:
        needed = len(unescape(between)) + len(plain)
        if lines and needed <= room:
            lines[-1] += between + markup
            room -= needed
        else:
            lines.append(markup)
            room = WIDTH - len(plain)
    return lines


def _attributes(values: Mapping[str, str]) -> str:
    """A dot attribute list; a value in angle brackets is HTML and is not quoted."""
    pairs = (f"{k}={v if v.startswith('<') else _quoted(v)}" for k, v in values.items())
    return f"[{', '.join(pairs)}]"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
