"""The vocabulary: phases, resources, and the four ways in which pages leave a request.

The order of :data:`RESOURCES` is the order in which leases are released by a transition: memory
first, then what the next turn or member waits for, and the client's answer last, so that whoever
reads the answer finds everything else already given back."""

from typing import Final, Literal, TypeAlias

Phase: TypeAlias = Literal[
    "intake",
    "bootstrapped",
    "prefilling",
    "transferring",
    "decoding",
    "retracted",
    "held",
    "retired",
]

PHASES: Final[tuple[Phase, ...]] = (
    "intake",
    "bootstrapped",
    "prefilling",
    "transferring",
    "decoding",
    "retracted",
    "held",
    "retired",
)

PHASE_MEANING: Final[dict[Phase, str]] = {
    "intake": "arrived and being validated; not admitted",
    "bootstrapped": "accepted, waiting for its turn (with a peer: being met, or granted memory)",
    "prefilling": "its prompt is being computed, in one or several chunks",
    "transferring": "its KV moves from prefill to decode",
    "decoding": "generating, one token a step",
    "retracted": "pushed out by memory pressure or priority; will resume",
    "held": "paused with its KV dropped; will be rebuilt",
    "retired": "the client has its one terminal answer",
}

Resource: TypeAlias = Literal[
    "rows",
    "pages",
    "prefix_locks",
    "metadata_slots",
    "rooms",
    "senders",
    "receivers",
    "host_pages",
    "prefetches",
    "session_turns",
    "group_members",
    "spans",
    "grammar_jobs",
    "frontend_records",
    "router_records",
]

RESOURCES: Final[tuple[Resource, ...]] = (
    "prefix_locks",
    "pages",
    "rows",
    "metadata_slots",
    "senders",
    "receivers",
    "rooms",
    "host_pages",
    "prefetches",
    "grammar_jobs",
    "session_turns",
    "group_members",
    "spans",
    "router_records",
    "frontend_records",
)

RESOURCE_MEANING: Final[dict[Resource, str]] = {
    "rows": "a row of the batch: per-request sampling state in the runner",
    "pages": "KV pages, shared prefix included",
    "prefix_locks": "a lock on the deepest prefix-cache node whose pages it uses",
    "metadata_slots": "a slot for first token and logprobs at the hand-over",
    "rooms": "the number that introduces a prefill and a decode life to each other",
    "senders": "the right to write into a peer's pages",
    "receivers": "a peer may write into its pages",
    "host_pages": "a copy of its KV in host memory",
    "prefetches": "an operation that loads stored KV before admission",
    "session_turns": "the one turn in flight of its streaming session",
    "group_members": "its membership in a group of parallel samples",
    "spans": "its open trace span",
    "grammar_jobs": "a grammar being compiled, or its matcher",
    "frontend_records": "the obligation to give its client one terminal answer",
    "router_records": "the router's count of requests in flight",
}

Disposition: TypeAlias = Literal["cache", "discard", "backup", "quarantine"]

DISPOSITION_MEANING: Final[dict[Disposition, str]] = {
    "cache": "full pages of committed tokens go to the prefix cache, the rest is freed",
    "discard": "freed",
    "backup": "freed, after a copy in host memory was made",
    "quarantine": "kept out of use until the wire is quiet",
}
