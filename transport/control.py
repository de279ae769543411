"""Control frames between a prefill and a decode node: small, typed, bounded, versioned.

A *room* only introduces a pair. Every frame names the life that sends it and, once known, the
life that is meant; a node on which that life is over drops it, so an acknowledgement is never
taken for one of another life in the same room.

``msgspec`` carries them; a frame that does not decode fails its peer's request, not the thread
that read it. What the frames mean is in ``fsm.protocol``."""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from transport.messages import SamplingParams

CONTROL_VERSION = 1

KvTerms: TypeAlias = tuple[str, int, str, str, str]
"""Layout, page size, dtype, weights digest and chart fingerprints: what two peers must agree on."""


MAX_NAME: Final = 256
"""Characters in the name of a node or a process."""
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The line of the sender's trace that a frame follows from: line ``seq`` of the process
    ``boot_id`` of ``node``. What the receiver does about the frame names it as its cause."""

    node: _Name
    boot_id: _Name
    seq: Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class _Frame(msgspec.Struct, frozen=True, tag_field="kind", omit_defaults=True, kw_only=True):
    """The envelope. ``receiver`` is None before the peer's life is known; ``origin`` is the newest
    line about the sender, None if its node writes no trace."""

    room: str
    sender: str
    receiver: str | None = None
    origin: Origin | None = None


class PeerHello(_Frame, frozen=True, tag="hello"):
    """``sender`` waits for the other half of the room. Sent on arrival, and as the answer to a
    hello."""

    node: str
    role: Literal["prefill", "decode"]
    terms: KvTerms
    max_prompt_tokens: int


class PeerGrant(_Frame, frozen=True, tag="grant"):
    """Decode has reserved ``pages`` and metadata ``slot``: prefill may write."""

    pages: list[int]
    slot: int


class PeerDone(_Frame, frozen=True, tag="done"):
    """Prefill has written everything, the slot last. The KV was begun under ``weights``, whatever
    prefill computes under by now; all of it was, unless they were changed in place on the way."""

    weights: str


class PeerLanded(_Frame, frozen=True, tag="landed"):
    """Decode has everything; prefill's pages may go."""


class PeerReject(_Frame, frozen=True, tag="reject"):
    """The room was refused at the door."""

    message: str = ""
    status: int | None = None


class PeerAbort(_Frame, frozen=True, tag="abort"):
    """The sender's life has ended before the hand-over; its reason is the other side's, too."""

    message: str = ""
    status: int | None = None


class PeerQuiet(_Frame, frozen=True, tag="quiet"):
    """The sender will never write into the receiver's pages again."""


PeerFrame: TypeAlias = (
    PeerHello | PeerGrant | PeerDone | PeerLanded | PeerReject | PeerAbort | PeerQuiet
)


class Heartbeat(msgspec.Struct, frozen=True, tag_field="kind", tag="heartbeat", omit_defaults=True):
    """Once a second: the rooms that are live with this peer, and whether generation is paused.
    ``origin`` is the newest line of the node's trace."""

    node: str
    boot_id: str
    rooms: list[str]
    paused: bool = False
    origin: Origin | None = None


class Recompute(msgspec.Struct, frozen=True, tag_field="kind", tag="recompute", omit_defaults=True):
    """Decode asks prefill to compute ``tokens`` (prompt and output) again, in a fresh room.
    ``origin`` is the newest line about the request."""

    room: str
    rid: str
    tokens: list[int]
    sampling: SamplingParams
    """How the next token is chosen: one that had emitted nothing yet takes it."""
    node: str
    priority: int = 0
    origin: Origin | None = None


ControlFrame: TypeAlias = PeerFrame | Heartbeat | Recompute


class SlotRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What prefill writes into a metadata slot: the first token, and what a client may ask about
    it.

    It carries the room, so that a slot that was not written yet, or belongs to somebody else,
    shows."""

    room: str
    token: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    chosen_logprobs: list[tuple[int, float]] | None = None
    cached_tokens: int = 0
