"""What the server and the engine say to each other: typed, bounded, versioned records.

Two directions share one pair of sockets (``transport.channel``). Everything is ``msgspec``: no
pickle, no free-form dictionaries except in answers to queries, whose contents are for people and
dashboards.

Text never crosses this seam. The server tokenizes and detokenizes; the engine sees token ids. A
stop string that the server's detokenizer finds is reported as :class:`StopMatched` with a token
count."""

from typing import Literal, TypeAlias

import msgspec

PROTOCOL_VERSION = 1

FILL = -1
"""``max_new_tokens`` of a request that may go on for as long as context, pool and session allow."""

FinishType = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one request's tokens are chosen. Validated by the server, and again by the engine's
    intake.

    ``temperature`` below 1e-6 means greedy. ``top_k`` of -1 and ``top_p`` of 1 mean off. ``seed``
    is always set (the server draws one when the client gave none), because the randomness of a
    token is a hash of (seed, absolute position): nothing to save, nothing to restore.

    Order of operations on the logits of one position, each skipped when it has no effect:
    repetition penalty (over prompt and output), presence and frequency penalties (over output),
    ``logit_bias``, the mask that forbids every end-of-sequence and stop token until
    ``min_new_tokens`` were generated; then greedy, or temperature, top-k, top-p, min-p and the
    draw. Reported log-probabilities are those of the model after penalties, bias and masks and
    before temperature."""

    max_new_tokens: int = 128
    """Output tokens at most, or :data:`FILL`."""
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    eos_at: int = -1
    """Hash model only: the output index at which it samples its end-of-sequence token; -1 is
    never."""


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why and how a request ended. ``status`` is the HTTP status of an error, and None where the
    answer is 200."""

    type: FinishType
    matched: int | str | None = None
    """The token id or stop string that ended a ``stop``."""
    message: str = ""
    status: int | None = None
    err_type: str | None = None
    length: int | None = None
    """The limit that ended a ``length``."""


# --- server to engine ---


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One prompt to complete ``n`` times. With n > 1 the members are ``rid#0`` … ``rid#n-1``, and
    are admitted or refused together; ``rid`` then names the group (an abort of it ends every
    member)."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    session: str | None = None
    deadline_s: float | None = None
    """The client's own end-to-end deadline, in seconds from arrival."""
    room: str = ""
    """With prefill and decode apart: what introduces the two halves of this request."""
    prefill: str = ""
    """For decode: the node that computes the prompt."""
    limit_is_default: bool = False
    """The client named no limit: ``max_new_tokens`` is lowered where context or session hold less,
    instead of refused."""


class Abort(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """End requests by exact rid (a group's rid ends all its members), or all of them. Answered by
    a :class:`Reply` with ``{"aborted": [...], "finished": [...], "unknown": [...]}`` when
    ``query`` is set."""

    rids: tuple[str, ...] = ()
    all: bool = False
    query: int = 0
    cause: Literal["api", "disconnect", "drain", "slow_reader"] = "api"


class StopMatched(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer found a stop string that is complete with the first ``tokens`` output
    tokens."""

    rid: str
    tokens: int
    matched: str


class OpenSession(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Answered by a Reply: ``{"session": id}``, or ``{"error": message, "status": 400}``."""

    query: int
    session: str
    capacity: int | None = None
    """Longest history in tokens; None is the context length."""
    timeout_s: float | None = None
    """Close the session by itself when no turn arrived for so long."""


class CloseSession(msgspec.Struct, frozen=True, tag=True):
    """Answered by a Reply: ``{"closed": bool}``. A turn in flight is aborted."""

    query: int
    session: str


class Query(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A question about the engine, answered by a Reply. ``what`` is one of ``requests``,
    ``request`` (by rid), ``ledger``, ``load``, ``info``, ``flush`` (drop the prefix cache:
    ``{"flushed": bool, "message": …}``)."""

    query: int
    what: Literal["requests", "request", "ledger", "load", "info", "flush"]
    rid: str = ""


class Drain(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Admit nothing more. After ``grace_s`` the rest is ended, and the engine exits when it is at
    rest."""

    grace_s: float = 0.0


class DebugHook(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Fault hooks, accepted only with ``--debug``: ``hold_step`` / ``release_step`` (between
    launch and commit), ``retract`` (rid). Answered by a Reply."""

    query: int
    hook: Literal["hold_step", "release_step", "retract"]
    rid: str = ""


ToEngine: TypeAlias = (
    Submit | Abort | StopMatched | OpenSession | CloseSession | Query | Drain | DebugHook
)


# --- engine to server ---


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of an engine process, when its model is loaded and it serves."""

    version: int
    boot_id: str
    model: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    max_prompt_tokens: int
    """The longest prompt that the KV pool and the context can ever hold (with room for one output
    token)."""
    info: dict[str, object]
    """Configuration and sizes for ``/server_info``: JSON values only."""


TopLogprobs: TypeAlias = list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """New tokens of one request, and its end. Tokens carry their output index, so a lost or
    repeated one shows.

    ``finish`` is set on the last Output of a request, exactly once. A refused request gets one
    Output without tokens whose finish has a status."""

    rid: str
    index: int
    """Output index of ``tokens[0]``: how many tokens this request had before."""
    tokens: list[int] = []
    logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    chosen_logprobs: list[TopLogprobs] | None = None
    """For ``token_ids_logprob``: per token, the (id, log-probability) pairs asked for."""
    finish: Finish | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    weight_version: str = "default"


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one commit, in one frame."""

    outputs: list[Output]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a query; ``data`` holds JSON values only."""

    query: int
    data: object


class Load(msgspec.Struct, frozen=True, tag=True):
    """A periodic summary (4 per second while busy, 1 when idle) for metrics and heartbeats."""

    running: int
    waiting: int
    tokens_used: int
    tokens_total: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    retracted: int
    aborted: int
    at_rest: bool
    retracted_now: int = 0
    """Requests that were pushed out and wait to come back; ``retracted`` counts retractions."""
    held_now: int = 0
    """Requests that a pause keeps."""


class Stopped(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The last message of an engine that exits on purpose."""

    reason: str
    error: str = ""


FromEngine: TypeAlias = Hello | Outputs | Reply | Load | Stopped
