"""A request's prefill life: the prompt is computed here, its KV is written into the decode peer's
pages.

Theory of operation
-------------------

The same request arrives at prefill and decode, in either order. ``meeting``
waits for the peer's ``hello`` and its ``grant``, which says that decode has reserved pages and a
metadata slot; until then this life holds nothing scarce. A grant makes it ``waiting``: runnable,
in its place by rank.

Chunks are written while later chunks compute. When the prompt is committed, the client of *this*
node gets its 200: an acknowledgement with one token, because routers read the whole prefill
answer before they forward the first byte of decode's. ``sending`` is therefore live (it accepts
an abort, in both directions) and owes no answer: the outcome belongs to decode, and this life
ends with ``landed``, ``lost`` or an abort.

Two things may still touch pages after the end: a launched step, and the wire, which reads them.
They are waited for in that order, ``stopping`` and ``draining``, and only ``silence`` (the wire
is quiet: it said so, its process is gone, or a fence makes its writes impossible) drops pages.
Time alone never does."""

from typing import Final

from fsm.chart import Chart, Edge, State
from fsm.resources import Resource
from fsm.unified import DOOR, MEMORY, QUEUED

MEETING: Final[tuple[Resource, ...]] = ("rooms", *QUEUED)
WIRE: Final[tuple[Resource, ...]] = ("prefix_locks", "pages", "senders", "rooms")

PREFILL: Final = Chart(
    name="prefill",
    initial="arrived",
    states=(
        State("arrived", "intake", "live", DOOR, "being validated; owns nothing but its answer"),
        State(
            "meeting",
            "bootstrapped",
            "live",
            MEETING,
            "its room is open; waits for decode's hello and grant",
        ),
        State(
            "waiting",
            "bootstrapped",
            "live",
            MEETING,
            "decode has reserved memory; queued for admission",
        ),
        State(
            "prefilling",
            "prefilling",
            "live",
            (*MEMORY, "senders", *MEETING),
            "its prompt is being computed, and chunks that are ready are written to decode",
        ),
        State(
            "sending",
            "transferring",
            "live",
            (*WIRE, "spans"),
            "its client has the acknowledgement; the rest of its KV is on the wire",
        ),
        State(
            "stopping",
            "retired",
            "stopping",
            (*MEMORY, "senders", "rooms"),
            "answered; a launched step may still touch its pages, and so may the wire",
        ),
        State(
            "draining", "retired", "draining", WIRE, "answered; the wire may still read its pages"
        ),
        State("done", "retired", "done", (), "answered, and holds nothing"),
    ),
    edges=(
        Edge(
            "reject",
            "arrived",
            "done",
            ("intake",),
            "a limit, an id, or a full queue: no room is opened",
        ),
        Edge("abort", "arrived", "done", ("client",), "the client gave up"),
        Edge("enqueue", "arrived", "meeting", ("intake",), "accepted"),
        Edge("granted", "meeting", "waiting", ("peer",), "decode has reserved pages and a slot"),
        Edge("abort", "meeting", "done", ("client", "peer"), "given up on either side"),
        Edge("expire", "meeting", "done", ("clock",), "the peer was not met in time"),
        Edge(
            "lost",
            "meeting",
            "done",
            ("peer",),
            "the peer is gone, refuses, or does not know the room",
        ),
        Edge("admit", "waiting", "prefilling", ("scheduler",), "row, pages and budget are there"),
        Edge("abort", "waiting", "done", ("client", "peer"), "given up on either side"),
        Edge("expire", "waiting", "done", ("clock",), "a deadline passed in the queue"),
        Edge(
            "lost",
            "waiting",
            "done",
            ("peer",),
            "the peer is gone, refuses, or does not know the room",
        ),
        Edge(
            "prefilled",
            "prefilling",
            "sending",
            ("runner",),
            "the prompt is committed: acknowledged with a token",
        ),
        Edge("abort", "prefilling", "stopping", ("client", "peer"), "given up on either side"),
        Edge("expire", "prefilling", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "prefilling", "stopping", ("runner",), "its step failed"),
        Edge(
            "lost",
            "prefilling",
            "stopping",
            ("wire", "peer"),
            "the wire failed, or the peer is gone",
        ),
        Edge("landed", "sending", "done", ("peer",), "decode has everything", pages="cache"),
        Edge("abort", "sending", "draining", ("client", "peer"), "given up on either side"),
        Edge("expire", "sending", "draining", ("clock",), "the transfer took too long"),
        Edge(
            "lost", "sending", "draining", ("wire", "peer"), "the wire failed, or the peer is gone"
        ),
        Edge(
            "quiesce",
            "stopping",
            "draining",
            ("runner",),
            "no launched step contains it",
        ),
        Edge("silence", "draining", "done", ("wire",), "the wire is quiet", pages="cache"),
    ),
)

BASE_KIT: Final[frozenset[Resource]] = frozenset({*DOOR, *MEMORY, "rooms", "senders"})
"""What every request needs on a prefill node."""
