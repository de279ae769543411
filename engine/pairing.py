"""What a life knows of the other half of its request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from transport.messages import Finish
from transport.wire import Process


def boot_of(life: str) -> str:
    """The boot id of the process that a life is on; empty where there is none."""
    return life.rpartition(":")[0]


@dataclass(slots=True)
class Pairing:
    """One life's side of a room. A rebuild opens another one."""

    room: str
    node: str = ""
    """The peer's node; decode knows it from the request, prefill from the hello."""
    life: str | None = None
    """The peer's life; None before the two have met."""
    reason: str = ""
    """Why this side ended before the hand-over, for the peer."""
    status: int | None = None
    line: int = 0
    """The newest line about this life in its node's trace; 0 if there is none."""

    siblings: tuple[str, ...] = ()
    """Rooms of the other members of a group that is refused as a whole."""

    knocked_again: bool = False
    """The peer's door was found closed before the two had met, and hello was said once more."""

    # Decode: a rebuild.
    tried: set[str] = field(default_factory=set)
    """Prefill nodes that were asked to compute it again, and are gone."""

    # Prefill: the transfer.
    target: array[int] = field(default_factory=lambda: array("q"))
    """The peer's pages, in token order."""
    slot: int = -1
    record: bytes = b""
    """What goes into the slot, known when the prompt is committed. On decode: what was read from
    it."""
    sent: int = 0
    """Pages whose writes were started."""
    writes: set[int] = field(default_factory=set)
    """Tickets of writes that are outstanding."""
    sealed: bool = False
    """The write of the slot, the last one, was started."""
    written: bool = False
    """It has completed."""

    def ends(self, finish: Finish) -> None:
        """This side ends; what the peer is told is the first reason."""
        if not self.reason:
            self.reason, self.status = finish.message or finish.type, finish.status

    @property
    def met(self) -> bool:
        return self.life is not None

    @property
    def process(self) -> Process:
        """Whose pages :attr:`target` are. Only after the two have met."""
        return Process(self.node, boot_of(self.life or ""))
