"""The page about the charts, in Markdown: how to read them, each chart, the pair, the words.

It is read from top to bottom, in a column as wide as GitHub's. So no table here has a column for
each state: what is too wide for the column is a picture, or is listed by event.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from fsm import draw_joint
from fsm.chart import Actor, Edge, Kind, ordered
from fsm.draw_base import Drawing, grid
from fsm.resources import (
    DISPOSITION_MEANING,
    PHASE_MEANING,
    PHASES,
    RESOURCE_MEANING,
    RESOURCES,
    Resource,
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

GENERATED: Final = "<!-- Written by `make charts` from fsm/: change the chart, not this page. -->"

INTRODUCTION: Final = """\
Every request is a machine on one of these charts, and the charts are the code: frozen tables in
`fsm/`, checked when they are imported, run by one driver, and drawn here. This page says, for each
chart, what a request holds in each state, which events move it, and who causes them. Numbers like
B19 and S0.1 stand for [scenarios](../scenarios.md), and *invariant 4* for one of the
[ten rules](../invariants.md) that always hold."""

HOW_TO_READ: Final = """\
## How to read a chart

- A coloured **box** is a phase: the public name of where a request is, and its colour in a
  [timeline](../../README.md#from-a-served-request-to-a-picture). A **node** in it is a state.
- Below its name stands what a request **holds** in that state. An *italic name with a question
  mark?* is held only by requests that need one: a session's turn by a turn of a session, and so on.
- A node's colour is its **class**. White is *live*: the client is owed an answer. Amber is
  *stopping* and red is *draining*: answered, but something may still touch the pages. Grey is
  *done*: nothing is held.
- An **arrow** is labelled with its event and, in grey, with who causes it. The blue ones are the
  life of most requests.
- The **foot** of a live state lists the events that end a life there early, and the state that
  they lead to, in its colour. They are edges like all others; as arrows they would hide them.
- What an edge **takes and drops** is nowhere written by hand. It is the difference between what
  its two states hold, so no edge can forget to release something.
- The heading carries the chart's **fingerprint**, which traces and peers quote."""

GLOSSARY: Final = """\
## The words

Resources are listed in the order in which an edge releases them."""


def to_page(drawings: Sequence[Drawing]) -> str:
    """The whole page; its pictures are ``NAME.svg`` of each chart, and ``joint.svg``."""
    titles = [d.title for d in drawings]
    titles = ["How to read a chart", *titles, draw_joint.TITLE, "The words"]
    contents = " · ".join(f"[{title}](#{_anchor(title)})" for title in titles)
    parts = ["# Statecharts", GENERATED, INTRODUCTION, contents, HOW_TO_READ]
    for drawing in drawings:
        parts += _chart(drawing)
    parts += draw_joint.to_markdown()
    parts += [GLOSSARY, *_glossary(), _elsewhere(drawings)]
    return "\n\n".join(parts) + "\n"


def _chart(drawing: Drawing) -> Iterator[str]:
    chart = drawing.chart
    yield f"## {drawing.title}"
    yield f"Chart `{chart.name}`, fingerprint `{chart.fingerprint}` ([dot]({chart.name}.dot))."
    yield f"![{drawing.title}]({chart.name}.svg)"
    yield re.sub(r"(?m)^(.+)\n-+$", r"### \1", drawing.theory.strip()).replace("``", "`")
    yield "### What each state holds"
    rows = []
    for state in chart.states:
        holds = _held(ordered(frozenset(state.holds)), drawing.kit)
        rows.append((f"`{state.name}`", state.phase, state.kind, holds or "nothing", state.doc))
    yield grid(("State", "Phase", "Class", "Holds", "What it is like"), rows)
    yield "### Each edge and its cause"
    yield (
        "State by state, with who causes an event, and why it happens. **+** is taken, **−** is"
        " dropped. An event that is not listed for a state is illegal there, and changes nothing."
    )
    yield grid(("From", "To", "Event", "Takes and drops"), _edges(drawing))
    yield "### Each event and where it leads"
    yield grid(("Event", "Leads"), _events(drawing))


def _edges(drawing: Drawing) -> Iterator[tuple[str, ...]]:
    """A row for all edges that do the same between the same states, in the order of the states; a
    state is named in its first row."""
    chart = drawing.chart
    for state in chart.states:
        name = f"`{state.name}`"
        rows: dict[tuple[str, str], list[Edge]] = {}
        for edge in chart.edges:
            if edge.source == state.name:
                rows.setdefault((edge.target, _changes(drawing, edge)), []).append(edge)
        for (target, changes), edges in rows.items():
            events = "<br>".join(f"**{e.event}** ({', '.join(e.by)}): {e.why}" for e in edges)
            yield name, f"`{target}`", events, changes
            name = ""


def _changes(drawing: Drawing, edge: Edge) -> str:
    move = drawing.chart.move(edge.source, edge.event, frozenset(RESOURCES))
    assert move is not None, edge
    parts = []
    if move.takes:
        parts.append(f"**+** {_held(move.takes, drawing.kit)}")
    if move.drops:
        parts.append(f"**−** {_held(move.drops, drawing.kit)}")
    if edge.pages:
        parts.append(f"pages go to *{edge.pages}*")
    return "<br>".join(parts) or "nothing"


def _events(drawing: Drawing) -> Iterator[tuple[str, str]]:
    chart = drawing.chart
    for event in chart.events:
        edges = [edge for edge in chart.edges if edge.event == event]
        edges.sort(key=lambda edge: edge.target)
        yield f"**{event}**", "; ".join(_leads(edges))


def _leads(edges: Iterable[Edge]) -> Iterator[str]:
    for target, parallel in groupby(edges, key=lambda edge: edge.target):
        yield f"{', '.join(f'`{edge.source}`' for edge in parallel)} → `{target}`"


def _glossary() -> Iterator[str]:
    tables: tuple[tuple[str, Mapping[Any, str]], ...] = (
        ("Phase", {phase: PHASE_MEANING[phase] for phase in PHASES}),
        ("Class", KIND_MEANING),
        ("Resource", {resource: RESOURCE_MEANING[resource] for resource in RESOURCES}),
        ("Pages go to", DISPOSITION_MEANING),
        ("By", ACTOR_MEANING),
    )
    for head, meanings in tables:
        yield grid((head, "Meaning"), ((f"`{word}`", said) for word, said in meanings.items()))


def _elsewhere(drawings: Iterable[Drawing]) -> str:
    held = frozenset[Resource]().union(*(drawing.chart.resources for drawing in drawings))
    others = ", ".join(f"`{resource}`" for resource in RESOURCES if resource not in held)
    return f"Held by no state of these charts so far: {others}."


def _held(resources: Iterable[Resource], kit: frozenset[Resource]) -> str:
    return ", ".join(r if r in kit else f"*{r}?*" for r in resources)


def _anchor(title: str) -> str:
    """What GitHub makes of a heading of plain words."""
    return title.lower().replace(" ", "-")
