"""Who is there: the nodes that a paired node works with, by what is heard of them.

Nodes, processes and rooms are names here. What silence, a new process or a missing room means for
a request is decided in :mod:`engine.presence`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from fsm.protocol import MISSES

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = (MISSES + 0.5) * HEARTBEAT_S
"""Two heartbeats are missing, and the third is late."""


@dataclass(slots=True)
class Peer:
    """A node that this one works with."""

    boot_id: str
    heard_at: float
    silent: bool = False
    """Not heard for :data:`SILENCE_S`, and its requests were told."""
    paused: bool = False
    missing: dict[str, int] = field(default_factory=dict)
    """Rooms of ours that its last heartbeats did not list: how often in a row."""


class Peers:
    """Every node that was heard of and has not closed its door. Iterates over their names, in the
    order in which they were met. Times are seconds on the node's clock."""

    def __init__(self) -> None:
        self._peers: Final[dict[str, Peer]] = {}
        self._next_beat = 0.0

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, node: str) -> bool:
        return node in self._peers

    def __iter__(self) -> Iterator[str]:
        return iter(self._peers)

    def heard(self, node: str, boot_id: str, now: float) -> bool:
        """The process ``boot_id`` is there: from now on its silence is noticed. Returns whether
        another process was there before; it writes no more."""
        peer = self._peers.get(node)
        succeeded = peer is not None and peer.boot_id != boot_id
        if peer is None or succeeded:
            self._peers[node] = Peer(boot_id, now)
        else:
            peer.heard_at, peer.silent = now, False
        return succeeded

    def closed(self, node: str) -> None:
        """The node is gone, or was never there."""
        self._peers.pop(node, None)

    def answers(self, node: str) -> bool:
        """Whether the node was heard of, and is neither gone nor silent."""
        peer = self._peers.get(node)
        return peer is not None and not peer.silent

    # --- silence ---

    def beat_is_due(self, now: float) -> bool:
        """Whether a heartbeat is to be sent now; the next one is due a period later."""
        if now < self._next_beat:
            return False
        self._next_beat = now + HEARTBEAT_S
        return True

    def somebody_falls_silent(self, now: float) -> bool:
        """Whether :meth:`silent` has news."""
        return any(not p.silent and now - p.heard_at >= SILENCE_S for p in self._peers.values())

    def silent(self, now: float) -> list[str]:
        """Nodes that were not heard for too long: frozen, or cut off."""
        silent = []
        for node, peer in self._peers.items():
            if now - peer.heard_at >= SILENCE_S:
                peer.silent = True
                silent.append(node)
        return silent

    @property
    def next_due(self) -> float:
        """When there is something to say or to notice."""
        alarms = [p.heard_at + SILENCE_S for p in self._peers.values() if not p.silent]
        return min([self._next_beat, *alarms])

    # --- heartbeats ---

    def paused(self, node: str) -> bool:
        """Whether the node's last heartbeat said that generation is paused there."""
        peer = self._peers.get(node)
        return peer is not None and peer.paused

    def stands(
        self, node: str, paused: bool, known: Container[str], relied_on: Iterable[str]
    ) -> list[str]:
        """A heartbeat of ``node`` lists the rooms ``known`` to it; ours with it are ``relied_on``.
        Returns those that it has not known for too long."""
        peer = self._peers.get(node)
        if peer is None:
            return []
        before = peer.missing
        peer.paused = paused
        peer.missing = {room: before.get(room, 0) + 1 for room in relied_on if room not in known}
        return [room for room, times in peer.missing.items() if times >= MISSES]
