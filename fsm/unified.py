"""A request's life on a unified node, where one process prefills and decodes.

Theory of operation
-------------------

``arrived`` owns two things only, the obligation to answer and an open span,
because that is all a request owns while it is being validated. A refusal therefore retires at the
door with nothing to clean up (S0.1, S0.3): there is no stub that walks through the engine to be
refused later.

``waiting`` and ``prefetching`` hold no memory that computes: a queue of any length costs pages to
nobody.

Admission takes the row, the pages of the whole prompt and the prefix lock together, so a prefill
never runs out of memory half-way (B19). Decoding grows its pages one by one (``lease.extend``),
and that may fail; then somebody is retracted.

A step is launched and committed later, and between the two the device touches pages that the
scheduler knows only by number. So nothing that holds pages is ever left directly: an end leads to
``stopping`` and a retraction to ``retracting``, and only ``quiesce``, which the scheduler fires
when no launched step contains the request any more, drops pages. In ``stopping`` the client
already has its answer (late results are dropped); in ``retracting`` it has not (late results are
delivered, and may even end the request).

Pages leave to the prefix cache in every case: what is inserted is exactly the full pages of
committed tokens, and those are valid whatever ended the request. Where the cache is switched off,
that disposition frees them.

A pause that drops KV leads through ``holding`` to ``held`` in the same way; when generation goes
on, a held request is ``retracted``, and computed again in its turn.
"""

from typing import Final

from fsm.chart import Chart, Edge, State
from fsm.resources import Resource

DOOR: Final[tuple[Resource, ...]] = ("spans", "frontend_records")
QUEUED: Final[tuple[Resource, ...]] = ("session_turns", "group_members", *DOOR)
MEMORY: Final[tuple[Resource, ...]] = ("prefix_locks", "pages", "rows")

UNIFIED: Final = Chart(
    name="unified",
    initial="arrived",
    states=(
        State("arrived", "intake", "live", DOOR, "being validated; owns nothing but its answer"),
        State(
            "prefetching",
            "bootstrapped",
            "live",
            ("prefetches", *QUEUED),
            "queued, while stored KV of its prompt is being loaded",
        ),
        State("waiting", "bootstrapped", "live", QUEUED, "queued for admission"),
        State(
            "prefilling",
            "prefilling",
            "live",
            (*MEMORY, *QUEUED),
            "its prompt (after a retraction: prompt and output) is being computed in chunks",
        ),
        State(
            "decoding",
            "decoding",
            "live",
            (*MEMORY, *QUEUED),
            "generating; pages grow as it does",
        ),
        State(
            "retracting",
            "retracted",
            "live",
            (*MEMORY, *QUEUED),
            "chosen as a victim; a launched step still touches its pages, its token still counts",
        ),
        State(
            "retracted",
            "retracted",
            "live",
            QUEUED,
            "its pages are given back; its tokens are kept, and recomputed when there is room",
        ),
        State(
            "holding",
            "held",
            "live",
            (*MEMORY, *QUEUED),
            "paused; a launched step still touches its pages, and its token still counts",
        ),
        State("held", "held", "live", QUEUED, "paused without KV; its tokens are kept"),
        State(
            "stopping",
            "retired",
            "stopping",
            MEMORY,
            "answered; a launched step may still touch its pages",
        ),
        State("done", "retired", "done", (), "answered, and holds nothing"),
    ),
    edges=(
        Edge("reject", "arrived", "done", ("intake",), "a limit, an id, a session or a full queue"),
        Edge("abort", "arrived", "done", ("client",), "the client gave up"),
        Edge("enqueue", "arrived", "waiting", ("intake",), "accepted"),
        Edge(
            "prefetch",
            "arrived",
            "prefetching",
            ("intake",),
            "accepted; part of it is in the store",
        ),
        Edge("loaded", "prefetching", "waiting", ("store",), "the pages are in the prefix cache"),
        Edge(
            "missed", "prefetching", "waiting", ("store", "clock"), "failed or late: runs as a miss"
        ),
        Edge(
            "abort",
            "prefetching",
            "done",
            ("client",),
            "aborted or disconnected; the load is cancelled",
        ),
        Edge("expire", "prefetching", "done", ("clock",), "a deadline passed in the queue"),
        Edge("admit", "waiting", "prefilling", ("scheduler",), "row, pages and budget are there"),
        Edge("abort", "waiting", "done", ("client",), "aborted or disconnected in the queue"),
        Edge("expire", "waiting", "done", ("clock",), "a deadline passed in the queue"),
        Edge(
            "prefilled",
            "prefilling",
            "decoding",
            ("runner",),
            "the prompt is committed, with a token",
        ),
        Edge(
            "finish", "prefilling", "stopping", ("runner", "server"), "its first token was its last"
        ),
        Edge(
            "retract", "prefilling", "retracting", ("scheduler",), "its pages are needed elsewhere"
        ),
        Edge("abort", "prefilling", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "prefilling", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "prefilling", "stopping", ("runner",), "its step failed"),
        Edge(
            "finish",
            "decoding",
            "stopping",
            ("runner", "server"),
            "end of sequence, stop or length",
        ),
        Edge("retract", "decoding", "retracting", ("scheduler",), "its pages are needed elsewhere"),
        Edge("abort", "decoding", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "decoding", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "decoding", "stopping", ("runner",), "its step failed"),
        Edge(
            "quiesce",
            "retracting",
            "retracted",
            ("runner",),
            "no launched step contains it any more",
            pages="cache",
        ),
        Edge(
            "finish", "retracting", "stopping", ("runner", "server"), "the late token was its last"
        ),
        Edge("abort", "retracting", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "retracting", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "retracting", "stopping", ("runner",), "its last step failed"),
        Edge("hold", "prefilling", "holding", ("scheduler",), "paused: its KV is given back"),
        Edge("hold", "decoding", "holding", ("scheduler",), "paused: its KV is given back"),
        Edge(
            "quiesce",
            "holding",
            "held",
            ("runner",),
            "no launched step contains it any more",
            pages="cache",
        ),
        Edge("finish", "holding", "stopping", ("runner", "server"), "the late token was its last"),
        Edge("abort", "holding", "stopping", ("client",), "aborted or disconnected"),
        Edge("expire", "holding", "stopping", ("clock",), "a deadline passed"),
        Edge("fail", "holding", "stopping", ("runner",), "its last step failed"),
        Edge("resume", "held", "retracted", ("scheduler",), "generation goes on"),
        Edge("finish", "held", "done", ("server",), "a stop string was found in what it had sent"),
        Edge("abort", "held", "done", ("client",), "aborted or disconnected"),
        Edge("expire", "held", "done", ("clock",), "a deadline passed"),
        Edge("readmit", "retracted", "prefilling", ("scheduler",), "there is room again"),
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
            "quiesce",
            "stopping",
            "done",
            ("runner",),
            "no launched step contains it any more",
            pages="cache",
        ),
    ),
)

BASE_KIT: Final[frozenset[Resource]] = frozenset({*DOOR, *MEMORY})
"""What every request needs; a session, a group and a prefetch add to it."""
