"""The structural rules of a chart, run when it is built: a chart that breaks one cannot be
imported.

The rules are those of a good statechart library (python-statemachine refuses trap states and
exits from final states at definition time), plus our own about abort and about pages."""

from collections import Counter
from typing import TYPE_CHECKING

from fsm.resources import PHASES, RESOURCES

if TYPE_CHECKING:
    from fsm.chart import Chart


class ChartError(ValueError):
    """A chart breaks a structural rule; the message names the chart, the rule and the rows."""


def check(chart: "Chart") -> None:
    """Raise :class:`ChartError` with every broken rule of ``chart``."""
    faults = [*_names(chart)]
    if not faults:  # the rules below look states up by name
        faults = [*_states(chart), *_edges(chart), *_reachability(chart)]
    if faults:
        raise ChartError(f"chart {chart.name!r}: " + "; ".join(faults))


def _names(chart: "Chart") -> list[str]:
    faults = []
    names = Counter(state.name for state in chart.states)
    faults += [f"state {name!r} is defined {n} times" for name, n in names.items() if n > 1]
    if chart.initial not in names:
        faults.append(f"initial state {chart.initial!r} does not exist")
    for edge in chart.edges:
        faults += [
            f"edge {edge.source} --{edge.event}--> {edge.target}: state {end!r} does not exist"
            for end in (edge.source, edge.target)
            if end not in names
        ]
    pairs = Counter((edge.source, edge.event) for edge in chart.edges)
    faults += [
        f"event {event!r} has {n} targets in state {source!r}"
        for (source, event), n in pairs.items()
        if n > 1
    ]
    return faults


def _states(chart: "Chart") -> list[str]:
    faults = []
    exits = Counter(edge.source for edge in chart.edges)
    aborts = {edge.source for edge in chart.edges if edge.event == "abort"}
    for state in chart.states:
        if state.phase not in PHASES:
            faults.append(f"state {state.name!r} has the unknown phase {state.phase!r}")
        unknown = set(state.holds) - set(RESOURCES)
        if unknown:
            faults.append(f"state {state.name!r} holds unknown resources {sorted(unknown)}")
        if len(set(state.holds)) != len(state.holds):
            faults.append(f"state {state.name!r} names a resource twice")
        if (state.phase == "retired") != (state.kind != "live"):
            faults.append(f"state {state.name!r}: exactly the states that are not live are retired")
        if state.kind == "done":
            if exits[state.name]:
                faults.append(f"final state {state.name!r} has an exit")
            if state.holds:
                faults.append(f"final state {state.name!r} holds {list(state.holds)}")
        elif not exits[state.name]:
            faults.append(f"state {state.name!r} has no exit")
        if state.kind == "live":
            if state.name not in aborts:
                faults.append(f"live state {state.name!r} does not accept abort")
            if "frontend_records" not in state.holds and state.phase != "transferring":
                # A prefill that is sending has acknowledged; the outcome is its peer's to give.
                faults.append(f"live state {state.name!r} does not owe its client an answer")
        elif "frontend_records" in state.holds:
            faults.append(f"retired state {state.name!r} still owes its client an answer")
    return faults


def _edges(chart: "Chart") -> list[str]:
    faults = []
    for edge in chart.edges:
        label = f"edge {edge.source} --{edge.event}--> {edge.target}"
        before, after = chart.holds[edge.source], chart.holds[edge.target]
        drops_pages = "pages" in before and "pages" not in after
        if drops_pages and edge.pages is None:
            faults.append(f"{label} drops pages and does not say where they go")
        if not drops_pages and edge.pages is not None:
            faults.append(f"{label} names a disposition but drops no pages")
        if not edge.by:
            faults.append(f"{label} is caused by nobody")
        if edge.event == "abort" and "client" not in edge.by:
            faults.append(f"{label} cannot be caused by the client")
        if not chart.is_live(edge.source) and chart.is_live(edge.target):
            faults.append(f"{label} leads from a retired state back to a live one")
        if "frontend_records" in after - before:
            faults.append(f"{label} leads from an answered state to one that owes an answer")
        if not edge.why:
            faults.append(f"{label} has no reason")
    return faults


def _reachability(chart: "Chart") -> list[str]:
    forward = _closure({chart.initial}, {(e.source, e.target) for e in chart.edges})
    faults = [f"state {s.name!r} cannot be reached" for s in chart.states if s.name not in forward]
    done = {state.name for state in chart.states if state.kind == "done"}
    if not done:
        return [*faults, "there is no final state"]
    backward = _closure(done, {(e.target, e.source) for e in chart.edges})
    return faults + [
        f"no path leads from state {s.name!r} to a final state"
        for s in chart.states
        if s.name not in backward
    ]


def _closure(start: set[str], arcs: set[tuple[str, str]]) -> set[str]:
    seen, frontier = set(start), set(start)
    while frontier:
        frontier = {b for a, b in arcs if a in frontier} - seen
        seen |= frontier
    return seen
