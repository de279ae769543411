"""A request's decode life: memory is granted to the prefill peer, which writes the prompt's KV
into it.

Theory of operation
-------------------

``meeting`` has said hello and waits for the peer's. ``waiting`` knows the
peer and waits for capacity: pages for the whole prompt and every token it may generate, a row,
and a metadata slot. Reserving them is the ``grant``; from then on, in ``receiving``, somebody
else writes into our pages. What the slot contains is written last, so a slot that names the room
proves that everything before it has arrived: ``landed``.

While ``receiving``, no end may free anything: the peer is told, and ``draining`` keeps pages,
slot, receiver and room until the wire is quiet (invariant 4). Draining pages are in the class
*quarantined*.

Memory pressure and pauses take different ways out. ``retracting`` waits for launched steps *and*
for the copy of its KV to host memory; ``retracted`` resumes from that copy, through ``restoring``.
A copy that has been launched cannot be recalled: it touches host pages as a step touches pages of
the device. So an end while one is under way leads to ``cancelling``, which keeps both, and a pause
waits until the copy is made, or restored, and drops it then. A pause that drops KV
(``retract`` mode, before a change of weights) goes through ``holding`` to ``held``, which has
nothing but its tokens; ``rebuild`` opens a fresh room, and the same life is met, granted and
received once more, one attempt later. KV that lands after a change of weights was computed under
the old ones; it is not used (``outdated``).

The last token that a rebuilt request had emitted is replayed, not sampled again.
"""

from typing import Final

from fsm.chart import Chart, Edge, State
from fsm.resources import Resource
from fsm.unified import DOOR, QUEUED

MEETING: Final[tuple[Resource, ...]] = ("rooms", *QUEUED)
ON_DEVICE: Final[tuple[Resource, ...]] = ("pages", "rows")
RECEIVING: Final[tuple[Resource, ...]] = ("pages", "metadata_slots", "receivers", "rooms")

DECODE: Final = Chart(
    name="decode",
    initial="arrived",
    states=(
        State("arrived", "intake", "live", DOOR, "being validated; owns nothing but its answer"),
        State(
            "meeting",
            "bootstrapped",
            "live",
            MEETING,
            "its room is open; waits for prefill's hello",
        ),
        State("waiting", "bootstrapped", "live", MEETING, "the peer is known; queued for memory"),
        State(
            "receiving",
            "transferring",
            "live",
            ("rows", *RECEIVING, *QUEUED),
            "granted; prefill writes into its pages",
        ),
        State(
            "decoding",
            "decoding",
            "live",
            (*ON_DEVICE, *QUEUED),
            "its KV is here; generating, or waiting for its first step",
        ),
        State(
            "retracting",
            "retracted",
            "live",
            (*ON_DEVICE, "host_pages", *QUEUED),
            "chosen as a victim; a launched step or the copy to the host still touches its pages",
        ),
        State(
            "retracted", "retracted", "live", ("host_pages", *QUEUED), "its KV is in host memory"
        ),
        State(
            "restoring",
            "retracted",
            "live",
            (*ON_DEVICE, "host_pages", *QUEUED),
            "readmitted; its KV is being copied back from host memory",
        ),
        State(
            "holding",
            "held",
            "live",
            (*ON_DEVICE, *QUEUED),
            "paused; a launched step still touches its pages, its token still counts",
        ),
        State("held", "held", "live", QUEUED, "paused without KV; its tokens are kept"),
        State(
            "stopping",
            "retired",
            "stopping",
            ON_DEVICE,
            "answered; a launched step may still touch its pages",
        ),
        State(
            "cancelling",
            "retired",
            "stopping",
            (*ON_DEVICE, "host_pages"),
            "answered; a launched step or a copy may still touch its pages, on device and host",
        ),
        State(
            "draining",
            "retired",
            "draining",
            RECEIVING,
            "answered; prefill may still write into its pages",
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
        Edge("met", "meeting", "waiting", ("peer",), "prefill said hello"),
        Edge("abort", "meeting", "done", ("client", "peer"), "given up on either side"),
        Edge("expire", "meeting", "done", ("clock",), "the peer was not met in time"),
        Edge(
            "lost",
            "meeting",
            "done",
            ("peer",),
            "the peer is gone, refuses, or does not know the room",
        ),
        Edge(
            "finish",
            "meeting",
            "done",
            ("server",),
            "rebuilding; a stop string was found in what it had sent",
        ),
        Edge(
            "grant",
            "waiting",
            "receiving",
            ("scheduler",),
            "pages, row and slot are there: the peer is told",
        ),
        Edge("abort", "waiting", "done", ("client", "peer"), "given up on either side"),
        Edge("expire", "waiting", "done", ("clock",), "no memory in time"),
        Edge("lost", "waiting", "done", ("peer",), "the peer is gone or does not know the room"),
        Edge(
            "finish",
            "waiting",
            "done",
            ("server",),
            "rebuilding; a stop string was found in what it had sent",
        ),
        Edge(
            "landed",
            "receiving",
            "decoding",
            ("peer",),
            "everything is here, the slot names the room",
        ),
        Edge(
            "outdated",
            "receiving",
            "held",
            ("peer",),
            "it landed under other weights",
            pages="discard",
        ),
        Edge("abort", "receiving", "draining", ("client", "peer"), "given up on either side"),
        Edge("expire", "receiving", "draining", ("clock",), "the transfer took too long"),
        Edge(
            "lost",
            "receiving",
            "draining",
            ("wire", "peer"),
            "the wire failed, or the peer is gone",
        ),
        Edge(
            "finish",
            "receiving",
            "draining",
            ("server",),
            "rebuilding; a stop string was found in what it had sent",
        ),
        Edge(
            "finish",
            "decoding",
            "stopping",
            ("runner", "server"),
            "end of sequence, stop or length",
        ),
        Edge("abort", "decoding", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "decoding", "stopping", ("clock",), "a deadline passed"),
        Edge(
            "fail",
            "decoding",
            "stopping",
            ("runner", "scheduler"),
            "its step failed, or it cannot be backed up",
        ),
        Edge("retract", "decoding", "retracting", ("scheduler",), "its pages are needed elsewhere"),
        Edge("hold", "decoding", "holding", ("scheduler",), "paused: its KV will be dropped"),
        Edge(
            "quiesce",
            "retracting",
            "retracted",
            ("runner",),
            "no launched step contains it, and the copy is made",
            pages="backup",
        ),
        Edge(
            "finish",
            "retracting",
            "cancelling",
            ("runner", "server"),
            "the late token was its last",
        ),
        Edge("abort", "retracting", "cancelling", ("client",), "aborted or disconnected"),
        Edge("expire", "retracting", "cancelling", ("clock",), "a deadline passed"),
        Edge("fail", "retracting", "cancelling", ("runner",), "its last step or the copy failed"),
        Edge(
            "readmit",
            "retracted",
            "restoring",
            ("scheduler",),
            "there is room: to be restored from the host",
        ),
        Edge("hold", "retracted", "held", ("scheduler",), "paused: the copy will be outdated"),
        Edge(
            "finish",
            "retracted",
            "done",
            ("server",),
            "a stop string was found in what it had sent",
        ),
        Edge("abort", "retracted", "done", ("client",), "aborted or disconnected"),
        Edge("expire", "retracted", "done", ("clock",), "a deadline passed"),
        Edge(
            "restored",
            "restoring",
            "decoding",
            ("runner",),
            "the copy is back: it computes again",
        ),
        Edge(
            "finish",
            "restoring",
            "cancelling",
            ("server",),
            "a stop string was found in what it had sent",
        ),
        Edge("abort", "restoring", "cancelling", ("client",), "aborted or disconnected"),
        Edge("expire", "restoring", "cancelling", ("clock",), "a deadline passed"),
        Edge("fail", "restoring", "cancelling", ("runner",), "the copy failed"),
        Edge(
            "quiesce",
            "holding",
            "held",
            ("runner",),
            "no launched step contains it any more",
            pages="discard",
        ),
        Edge("finish", "holding", "stopping", ("runner", "server"), "the late token was its last"),
        Edge("abort", "holding", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "holding", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "holding", "stopping", ("runner",), "its last step failed"),
        Edge(
            "rebuild",
            "held",
            "meeting",
            ("scheduler",),
            "continued: prefill is asked to recompute it",
        ),
        Edge("finish", "held", "done", ("server",), "a stop string was found in what it had sent"),
        Edge("abort", "held", "done", ("client",), "aborted or disconnected"),
        Edge("expire", "held", "done", ("clock",), "held for too long"),
        Edge(
            "quiesce",
            "stopping",
            "done",
            ("runner",),
            "no launched step contains it any more",
            pages="discard",
        ),
        Edge(
            "quiesce",
            "cancelling",
            "done",
            ("runner",),
            "no launched step and no copy contains it any more",
            pages="discard",
        ),
        Edge("silence", "draining", "done", ("wire", "peer"), "the wire is quiet", pages="discard"),
    ),
)

BASE_KIT: Final[frozenset[Resource]] = frozenset({*DOOR, "rows", *RECEIVING, "host_pages"})
"""What every request needs on a decode node."""
