"""How bugs are planted: charts, tables, and functions around them that differ from production's in
one place."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsm import pauses, protocol
from fsm.chart import Chart, Edge, State
from fsm.decide import TABLES
from fsm.pauses import PauseMode
from fsm.protocol import Frames
from fsm.rules import Decision, Message, Table


class Unchecked(Chart):
    """A chart that may break the rules of :mod:`fsm.check`."""

    def __post_init__(self) -> None:
        pass


def _chart(chart: Chart, states: tuple[State, ...], edges: tuple[Edge, ...]) -> Chart:
    return Unchecked(chart.name, chart.initial, states, edges)


def leading(chart: Chart, source: str, event: str, **changes: Any) -> Chart:
    """The chart with one edge changed."""
    edges = tuple(
        replace(edge, **changes) if (edge.source, edge.event) == (source, event) else edge
        for edge in chart.edges
    )
    return _chart(chart, chart.states, edges)


def holding(chart: Chart, change: Callable[[State], tuple[Any, ...]], *names: str) -> Chart:
    """The chart with other holdings in some states."""
    states = tuple(
        replace(state, holds=change(state)) if state.name in names else state
        for state in chart.states
    )
    return _chart(chart, states, chart.edges)


def ruled(role: str, state: str, message: Message, decision: Decision) -> Table:
    """The table with one decision changed, for all facts."""
    table = dict(TABLES[role])
    cells = [cell for cell in table if cell[:2] == (state, message)]
    assert cells
    table.update(dict.fromkeys(cells, decision))
    return table


def without(kind: str, role: str, *sources: str) -> Callable[..., Frames]:
    """``on_moved`` that forgets one kind of frame."""

    def on_moved(of: protocol.Role, edge: Edge, cause: Message | None, met: bool) -> Frames:
        frames = protocol.on_moved(of, edge, cause, met)
        if of != role or (sources and edge.source not in sources):
            return frames
        return tuple(frame for frame in frames if frame != kind)

    return on_moved


def knows_its_peer(address: protocol.Address, room: str, peer: str | None) -> bool:
    """Who is met in a room that is used again is known by magic: hello is not what is looked at."""
    return address.room == room and (peer is not None or address.sender == "prefill")


def accepts_by_life(address: protocol.Address, room: str, life: str, peer: str | None) -> bool:
    return knows_its_peer(address, room, peer) and peer in (None, address.sender)


def accepts_by_room(address: protocol.Address, room: str, life: str, peer: str | None) -> bool:
    return knows_its_peer(address, room, peer)


def due_without(*states: str) -> Callable[..., Message | None]:
    def due(role: protocol.Role, state: str, **facts: bool) -> Message | None:
        return None if state in states else protocol.due(role, state, **facts)

    return due


def due_while_paused(role: protocol.Role, state: str, **facts: bool) -> Message | None:
    """What is held goes on in a pause that keeps KV."""
    return protocol.due(role, state, **(facts | {"stopped": False}))


def due_but_for_decoding(role: protocol.Role, state: str, **facts: bool) -> Message | None:
    message = protocol.due(role, state, **facts)
    return None if (state, message) == ("decoding", "paused") else message


def due_blind(role: protocol.Role, state: str, **facts: bool) -> Message | None:
    """Quiet is believed while writes are outstanding."""
    return protocol.due(role, state, **(facts | {"writing": False}))


def flush_unless(*ignored: str) -> Callable[..., bool]:
    def may_flush(chart: Chart, states: Any, paused: bool) -> bool:
        return protocol.may_flush(chart, [s for s in states if s not in ignored], paused)

    return may_flush


def one_room(current: bool) -> str:
    return "room"


def keeps_nothing(*arguments: Any) -> protocol.Knock:
    return protocol.knock(*arguments)._replace(keep=False)


def computes_in_place(role: str) -> Callable[[str, PauseMode | None], bool]:
    """One role goes on computing in a pause in place."""

    def is_frozen(of: str, mode: PauseMode | None) -> bool:
        return pauses.is_frozen(of, mode) and (of, mode) != (role, "in_place")

    return is_frozen
