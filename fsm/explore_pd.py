"""The model of a prefill/decode pair that exploration walks: what one request can do.

Every move is ``decide`` and ``chart.move``, everything around a move is :mod:`fsm.protocol`; what
is modelled here is only the world: frames that keep their order but may be lost, repeated or late,
a one-sided wire, launched steps and copies, clients, memory of which there is one unit for each
node, processes that die. Who is admitted, granted, retracted or readmitted is free choice.

One request is one decode life and a *leg* for each time it was sent over: a prefill life, its wire
and its control channel. Each rebuild opens another leg, in a fresh room. What a step does to the
decode life and one leg does not depend on the other legs, so it is computed once for each such
pair, and put together here.

The canonical form forgets what cannot matter any more: earlier legs that are over, their order, and
frames that nobody will accept."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from fsm import pauses, protocol
from fsm.chart import Chart
from fsm.decide import TABLES
from fsm.decode import DECODE
from fsm.explore_base import MIXED
from fsm.pauses import PauseMode
from fsm.prefill import PREFILL
from fsm.protocol import Address
from fsm.resources import Resource
from fsm.rules import Message, Table

Frame: TypeAlias = tuple[str, int]
"""A kind, and what it carries: a *hello* the weights of its node; a *done* those of its KV; an
*abort* ``FAILED`` where a step or a write failed. ``gone`` is no frame: it is the closed socket,
behind which nothing of the old process can arrive."""

FAILED: Final = 1

GONE: Final[Frame] = ("gone", 0)

IDLE, BUSY, LAST, WRITTEN = range(4)
"""The wire of a leg: no write outstanding; a chunk is; the rest and then the slot are; all is
written."""

ABSENT: Final = "absent"
"""The request has not arrived on this node."""
DEAD: Final = "gone"
"""The process died, and its life with it."""
OVER: Final = ("done", DEAD)
HANDED_OVER: Final = ("decoding", "retracting", "retracted", "restoring", "holding", "held")
"""Decode's states once its KV has landed."""
NO_ROOM: Final = (ABSENT, "arrived")
"""A frame for its room is answered at the door."""


class World(NamedTuple):
    """What both nodes and all requests share."""

    prefill_pause: PauseMode | None = None
    decode_pause: PauseMode | None = None
    prefill_weights: int = 0
    decode_weights: int = 0
    slot_dirty: bool = False
    """The metadata slot names a room."""


class Leg(NamedTuple):
    """A prefill life, its wire, and the control channel between it and decode."""

    state: str = ABSENT
    launched: int = 0
    wire: int = IDLE
    note: Frame | None = None
    """In no room: what was said to its door. Meeting: the hello that it has had. Done: refused."""
    answers: int = 0
    weights: int = 0
    """Those that its KV was computed under; ``MIXED`` where they were changed in place."""
    failed: bool = False
    """A step or a write of it failed: what decode is told is an error."""
    to_decode: tuple[Frame, ...] = ()
    to_prefill: tuple[Frame, ...] = ()

    @property
    def met(self) -> bool:
        return self.state not in NO_ROOM and (self.state != "meeting" or self.note is not None)

    @property
    def is_over(self) -> bool:
        """Nothing can come of it any more."""
        return (
            self.state in OVER and self.wire == IDLE and not self.to_decode and not self.to_prefill
        )


class Core(NamedTuple):
    """A decode life."""

    state: str = ABSENT
    launched: int = 0
    copying: bool = False
    emitted: bool = False
    """Its client has had a token."""
    answers: int = 0
    weights: int = 0
    """Those that its KV was computed under; ``MIXED`` where they were changed in place."""
    knocked: bool = False
    """The process that it had said hello to has died, and it has said hello to the next one."""

    @property
    def met(self) -> bool:
        """It knows the prefill life of its room."""
        return self.state not in (ABSENT, "arrived", "meeting")


class Life(NamedTuple):
    """A request: its decode life, its current leg, and those of earlier rooms that are not over."""

    core: Core = Core()
    leg: Leg = Leg()
    earlier: tuple[Leg, ...] = ()


PREFILL_POOLS: Final[tuple[Resource, ...]] = ("rows", "pages")
DECODE_POOLS: Final[tuple[Resource, ...]] = ("rows", "pages", "metadata_slots", "host_pages")
"""Memory of which there is one unit."""


@dataclass(frozen=True)
class Design:
    """What is explored: charts, tables and protocol. Tests plant bugs by replacing parts."""

    prefill: Chart = PREFILL
    decode: Chart = DECODE
    prefill_table: Table = field(default_factory=lambda: TABLES["prefill"])
    decode_table: Table = field(default_factory=lambda: TABLES["decode"])
    accepts: Callable[[Address, str, str, str | None], bool] = protocol.accepts
    on_moved: Callable[..., protocol.Frames] = protocol.on_moved
    on_reply: Callable[..., protocol.Frames] = protocol.on_reply
    on_refused: Callable[..., protocol.Frames] = protocol.on_refused
    on_written: Callable[[str], protocol.Frames] = protocol.on_written
    on_new_weights: Callable[..., protocol.Frames] = protocol.on_new_weights
    standing: Callable[..., protocol.Frames] = protocol.standing
    relies_on_peer: Callable[..., bool] = protocol.relies_on_peer
    knock: Callable[..., protocol.Knock] = protocol.knock
    is_proof: Callable[[Message], bool] = protocol.is_proof
    due: Callable[..., Message | None] = protocol.due
    may_write: Callable[[str], bool] = protocol.may_write
    names: Callable[[int], int] = lambda kv: 0 if kv == MIXED else kv
    """The weights that a *done* names, of KV computed under ``kv``: those that it was begun under
    (:class:`engine.pages.Pages`)."""
    is_outdated: Callable[[int, int, bool], bool] = lambda landed, weights, paused: (
        protocol.is_outdated(str(landed), str(weights), paused)
    )
    replays_first_token: Callable[[int], bool] = protocol.replays_first_token
    clears_slot: Callable[..., bool] = protocol.clears_slot
    may_flush: Callable[..., bool] = protocol.may_flush
    may_cache: Callable[[int, int], bool] = lambda kv, node: kv == node
    """Whether KV computed under weights ``kv`` goes to the prefix cache of a node that computes
    under ``node`` (:meth:`engine.pages.Kv.give_back`)."""
    after_pause: Callable[[PauseMode | None, PauseMode], PauseMode] = pauses.after_pause
    is_frozen: Callable[[str, PauseMode | None], bool] = pauses.is_frozen
    admits: Callable[[PauseMode | None], bool] = pauses.admits
    drops_kv: Callable[[PauseMode | None], bool] = pauses.drops_kv
    room_of: Callable[[bool], str] = lambda current: "room" if current else "earlier room"
    """The room of the current leg and of those before: a rebuild opens a fresh one."""


PRODUCTION: Final = Design()
