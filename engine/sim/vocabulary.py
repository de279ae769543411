"""Every command of the scenario language with its options, as one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.sim.values import (
    Kind,
    duration,
    integer,
    name,
    names,
    natural,
    number,
    offset,
    one_of,
    pause_mode,
    prefix,
    span,
    statuses,
    stop,
    switch,
    token_list,
)
from fsm.resources import RESOURCES


@dataclass(frozen=True, slots=True)
class Verb:
    """One command: how it is written, how many plain words it takes, and its options."""

    name: str
    usage: str
    least: int
    most: int
    options: Mapping[str, Kind] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options."""


CLUSTER: Final[Mapping[str, Kind]] = {
    "unified": natural,
    "prefill": natural,
    "decode": natural,
    "router": natural,
    "pages": natural,
    "page_size": natural,
    "rows": natural,
    "chunk": natural,
    "depth": natural,
    "queue": natural,
    "metadata": natural,
    "context": natural,
    "overtakes": natural,
    "prefix_cache": switch,
    "weights": name,
    "step": duration,
    "token": duration,
    "copy": duration,
    "detok": duration,
    "waiting_timeout": duration,
    "running_timeout": duration,
    "store": switch,
    "store_latency": duration,
    "prefetch_timeout": duration,
    "prefetches": natural,
    "sessions": natural,
    "trace": one_of("full", "moves", "answers"),
    "prefill_pages": natural,
    "decode_pages": natural,
    "unified_pages": natural,
    "prefill_rows": natural,
    "decode_rows": natural,
    "unified_rows": natural,
    "prefill_page_size": natural,
    "decode_page_size": natural,
    "host_pages": natural,
    "wire_latency": duration,
    "wire_page": duration,
    "latency": duration,
    "jitter": duration,
    "loss": number,
    "duplication": number,
    "retries": natural,
    "meeting_timeout": duration,
    "transfer_timeout": duration,
    "held_timeout": duration,
    "ranks": natural,
    "rank_delay": duration,
    "seed": natural,
}

SUBMIT: Final[Mapping[str, Kind]] = {
    "prompt": span,
    "max_tokens": span,
    "min_tokens": natural,
    "n": integer,
    "priority": integer,
    "session": name,
    "stop": stop,
    "stop_token_ids": token_list,
    "prefix": prefix,
    "eos": natural,
    "temperature": number,
    "top_p": number,
    "top_logprobs": integer,
    "seed": integer,
    "deadline": duration,
    "rid": name,
    "to": name,
    "room": name,
}

DEADLINES: Final = ("meeting", "transfer", "waiting", "running", "held")
CLUSTER_ALIASES: Final[Mapping[str, str]] = {
    alias: f"{each}_timeout" for each in DEADLINES for alias in (each, f"{each}_deadline")
}

EXPECT: Final[Mapping[str, Kind]] = {
    "phase": name,
    "state": name,
    "finished": name,
    "status": statuses,
    "tokens": natural,
    "message": name,
    "matched": name,
    "within": duration,
    "aborted": names,
    "unknown": names,
    "flushed": one_of("yes", "no"),
    "updated": one_of("yes", "no"),
    "closed": one_of("yes", "no"),
    "error": name,
    "session": name,
    "on": name,
    **dict.fromkeys(RESOURCES, natural),
}

_ANY: Final = 1_000

VERBS: Final[dict[str, Verb]] = {
    verb.name: verb
    for verb in (
        Verb("requires", "requires FEATURE…", 1, _ANY),
        Verb(
            "cluster",
            "cluster unified=1|prefill=1 decode=1 router=1 [OPTION=VALUE…]",
            0,
            0,
            CLUSTER,
            aliases=CLUSTER_ALIASES,
        ),
        Verb(
            "submit",
            "submit RID prompt=N max_tokens=N [OPTION=VALUE…]",
            1,
            1,
            SUBMIT,
            frozenset({"stream", "logprobs", "ignore_eos"}),
            {"timeout": "deadline"},
        ),
        Verb(
            "run",
            "run DURATION, run until idle, or run until RID PHASE|finished|state=S|tokens=N",
            1,
            3,
            {
                "phase": name,
                "state": name,
                "tokens": natural,
                "finished": name,
                "on": name,
                "within": duration,
            },
        ),
        Verb("step", "step NODE", 1, 1),
        Verb(
            "hold", "hold step|commit|schedule|store|wire NODE [chunk=K]", 1, 2, {"chunk": natural}
        ),
        Verb("release", "release step|commit|schedule|store|wire|pages NODE", 1, 2),
        Verb(
            "fail",
            "fail step|copy|store NODE, or fail wire RID [count=N]",
            2,
            2,
            {"count": natural},
        ),
        Verb(
            "delay",
            "delay message KIND from NODE to NODE by=DURATION, delay wire RID by=DURATION, "
            "or delay rank NODE RANK by=DURATION",
            2,
            6,
            {"count": natural, "by": duration},
        ),
        Verb(
            "drop",
            "drop message KIND from NODE to NODE [count=N], or drop plan NODE RANK [count=N]",
            3,
            6,
            {"count": natural},
        ),
        Verb(
            "duplicate",
            "duplicate message KIND from NODE to NODE [count=N], or duplicate plan NODE RANK "
            "[count=N]",
            3,
            6,
            {"count": natural},
        ),
        Verb("corrupt", "corrupt plan NODE RANK [count=N]", 3, 3, {"count": natural}),
        Verb(
            "pause",
            "pause NODE [mode=abort|retract|in_place]",
            1,
            1,
            {"mode": pause_mode},
        ),
        Verb("continue", "continue NODE", 1, 1),
        Verb("weights", "weights NODE NAME [in_place]", 2, 2, {}, frozenset({"in_place"})),
        Verb("kill", "kill NODE, or kill rank NODE RANK", 1, 3),
        Verb("restart", "restart NODE", 1, 1),
        Verb("freeze", "freeze NODE", 1, 1),
        Verb("thaw", "thaw NODE", 1, 1),
        Verb("partition", "partition NODE NODE", 2, 2),
        Verb("heal", "heal", 0, 0),
        Verb("skew", "skew NODE by=DURATION", 1, 1, {"by": offset}),
        Verb(
            "abort",
            "abort RID… [at=NODE], abort all [at=NODE], or abort RID… unseen",
            1,
            _ANY,
            {"at": name},
            frozenset({"unseen"}),
        ),
        Verb("disconnect", "disconnect RID…", 1, _ANY),
        Verb("retract", "retract RID [maybe]", 1, 1, {}, frozenset({"maybe"})),
        Verb("preempt", "preempt RID [maybe]", 1, 1, {}, frozenset({"maybe"})),
        Verb("exhaust", "exhaust pages NODE leave=N", 2, 2, {"leave": natural}),
        Verb("restore", "restore pages NODE", 2, 2),
        Verb("flush", "flush NODE", 1, 1),
        Verb("drain", "drain NODE [grace=DURATION]", 1, 1, {"grace": duration}),
        Verb(
            "open",
            "open session NAME [capacity=N] [timeout=DURATION]",
            2,
            2,
            {"capacity": natural, "timeout": duration},
        ),
        Verb("close", "close session NAME", 2, 2),
        Verb("expect", "expect …", 1, _ANY, EXPECT),
    )
}
