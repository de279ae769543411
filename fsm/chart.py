"""A chart: the frozen table of states, edges and holdings of one role.

A chart is data. Nothing in it can be called; :mod:`fsm.check` verifies its structure when it is
built, a driver (:mod:`fsm.driver`) moves requests along it, and everything else (diagrams,
exploration, replay) reads it.

What a request owns is a function of its state: ``chart.holds[state]``, intersected with the
request's *kit* (the resources that this request needs at all, frozen at intake). What an edge
takes and drops is the difference of the two states' holdings, so no edge can forget to release
anything."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias

from fsm.check import check
from fsm.resources import RESOURCES, Disposition, Phase, Resource

Kind: TypeAlias = Literal["live", "stopping", "draining", "done"]
"""``live`` accepts an abort. ``stopping`` (a launched step) and ``draining`` (a peer's wire) are
answered, but what they hold may still be touched. ``done`` holds nothing."""

Actor: TypeAlias = Literal[
    "intake", "scheduler", "runner", "client", "server", "clock", "store", "wire", "peer"
]


@dataclass(frozen=True, slots=True)
class State:
    """One state: its phase, its class, what it holds, and what it is like to be in it."""

    name: str
    phase: Phase
    kind: Kind
    holds: tuple[Resource, ...]
    doc: str


@dataclass(frozen=True, slots=True)
class Edge:
    """One move: ``event`` takes a request from ``source`` to ``target``; ``by`` may cause it, for
    the reason ``why``.

    ``pages`` says where the KV pages go, on exactly those edges that drop them.
    """

    event: str
    source: str
    target: str
    by: tuple[Actor, ...]
    why: str
    pages: Disposition | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """An edge as seen by one kit: what must be reserved before, and what is released on the way."""

    edge: Edge
    takes: tuple[Resource, ...]
    drops: tuple[Resource, ...]


@dataclass(frozen=True)
class Chart:
    """States and edges of one role, checked when built (:class:`fsm.check.ChartError` names the
    broken rule)."""

    name: str
    initial: str
    states: tuple[State, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        check(self)

    @cached_property
    def by_name(self) -> Mapping[str, State]:
        return MappingProxyType({state.name: state for state in self.states})

    @cached_property
    def holds(self) -> Mapping[str, frozenset[Resource]]:
        return MappingProxyType({state.name: frozenset(state.holds) for state in self.states})

    @cached_property
    def table(self) -> Mapping[tuple[str, str], Edge]:
        """(state, event) → edge."""
        return MappingProxyType({(edge.source, edge.event): edge for edge in self.edges})

    @cached_property
    def events(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(edge.event for edge in self.edges))

    @cached_property
    def resources(self) -> frozenset[Resource]:
        return frozenset[Resource]().union(*self.holds.values())

    def state(self, name: str) -> State:
        return self.by_name[name]

    def phase(self, name: str) -> Phase:
        return self.by_name[name].phase

    def is_live(self, name: str) -> bool:
        return self.by_name[name].kind == "live"

    def move(self, state: str, event: str, kit: frozenset[Resource]) -> Move | None:
        """The move that ``event`` makes from ``state`` for a request with this kit; None if there
        is no edge."""
        edge = self.table.get((state, event))
        if edge is None:
            return None
        before, after = self.holds[edge.source] & kit, self.holds[edge.target] & kit
        return Move(edge, ordered(after - before), ordered(before - after))

    @cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits over the rows that matter: states with phase, class and holdings, and
        edges with target and disposition. Peers exchange it; diagrams and traces carry it. Prose
        does not change it."""
        rows = [f"{self.name} {self.initial}"]
        rows += sorted(
            f"state {s.name} {s.phase} {s.kind} {','.join(sorted(s.holds))}" for s in self.states
        )
        rows += sorted(
            f"edge {e.source} {e.event} {e.target} {','.join(sorted(e.by))} {e.pages or '-'}"
            for e in self.edges
        )
        return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:12]


_RANK = {resource: rank for rank, resource in enumerate(RESOURCES)}


def ordered(resources: frozenset[Resource]) -> tuple[Resource, ...]:
    """Resources in release order (:data:`fsm.resources.RESOURCES`)."""
    return tuple(sorted(resources, key=_RANK.__getitem__))
