"""What a prefill and a decode scheduler do *around* their tables: whom they tell what, and when.

The charts say where a life may go, :func:`fsm.decide.decide` says what a message does to it, and
this module says what follows on the control channel. It is pure, and it is what exploration
explores: the schedulers of both roles call these functions and add nothing of their own.

How a scheduler uses it
-----------------------

1.  **A frame arrives.** :func:`accepts` decides by lives, never by the room alone, whether it is
    for the life that has the room. If so, :data:`READS` names the message it is for ``decide``.
    If no life of this node is meant, :func:`knock` says what is answered at the door, and whether
    the frame is kept for a request that may still arrive (:class:`Doors` holds both, bounded).
2.  **decide → fire.** After every move, send :func:`on_moved`. With *keep* and *finished*, send
    :func:`on_reply`.
3.  **A proof is offered again.** A message that ends a life and also proves that the wire is silent
    (:func:`is_proof`) is decided again while it fires: it first leads to ``draining`` and then out
    of it.
4.  **What is due is delivered.** At the end of every turn, for each life that moved or whose facts
    changed, deliver :func:`due` until it is None. Nothing depends on an edge that was seen only
    once.
5.  **The wire.** Writes start only where :func:`may_write`. When the last one (the metadata slot)
    has completed, send :func:`on_written`. ``due`` asks whether writes are outstanding.
6.  **Each heartbeat** (1 s) lists the rooms of the lives that hold ``rooms``. For each life, send
    :func:`standing` again: a frame that was lost is repaired within one heartbeat. If a room that
    :func:`relies_on_peer` is missing in two consecutive heartbeats of the peer, deliver
    ``peer_gone``.
7.  **The peer.** A closed socket, a new boot id and an unknown room are ``peer_gone``: its process,
    or that life, cannot write any more. Two missed heartbeats are only ``peer_missed``: a frozen
    process may wake up and go on writing, so nothing is released for it. After ``peer_gone`` of a
    process, call :meth:`Doors.forget`.
8.  **Landing.** :func:`is_outdated` is the fact of the same name; :func:`replays_first_token` says
    whether the slot's token was emitted before; :func:`clears_slot` says when a slot is zeroed,
    which is before its lease is released.
9.  **Flush and weights.** Only where :func:`may_flush`. After a change of weights, send
    :func:`on_new_weights` for every life.

Frames between two lives keep their order. Any of them may be lost, repeated or late."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from fsm.chart import Chart, Edge
from fsm.decode import DECODE
from fsm.prefill import PREFILL
from fsm.rules import Effect, Message

Role: TypeAlias = Literal["prefill", "decode"]
FrameKind: TypeAlias = Literal["hello", "grant", "done", "landed", "reject", "abort", "quiet"]

CHARTS: Final[Mapping[Role, Chart]] = {"prefill": PREFILL, "decode": DECODE}

READS: Final[Mapping[Role, Mapping[FrameKind, Message]]] = {
    "prefill": {
        "hello": "peer_hello",
        "grant": "peer_grant",
        "landed": "peer_landed",
        "reject": "peer_reject",
        "abort": "peer_abort",
    },
    "decode": {
        "hello": "peer_hello",
        "done": "peer_done",
        "reject": "peer_reject",
        "abort": "peer_abort",
        "quiet": "wire_quiet",
    },
}
"""The message that a frame is for the role that receives it. A kind that is not listed does not
travel in that direction: a malformed frame."""

READS_FAILURE: Final[Mapping[Role, Message]] = {"prefill": "peer_abort", "decode": "peer_failed"}
"""The message that an *abort* is which tells of a failure (status 500). Decode's client is still
owed an answer, and gets an error; prefill's has its answer by the time decode can fail."""

MISSES: Final = 2
"""Consecutive heartbeats without a room, or heartbeat periods without a heartbeat."""

# --- addresses ------------------------------------------------------------------------------------


class Address(NamedTuple):
    """The envelope of a frame."""

    room: str
    sender: str
    """The life that sends; of a refusal at the door: the life that never got further."""
    receiver: str | None
    """The life that is meant; None in what is sent before the peer's life is known."""


def accepts(address: Address, room: str, life: str, peer: str | None) -> bool:
    """Whether a frame is for ``life``, which is in ``room`` now and has met ``peer`` (None: not
    yet). A life that is rebuilt is in a new room, so whatever its old peer still says is not for
    it; a room used twice cannot make an acknowledgement count for the wrong life."""
    return (
        address.room == room
        and address.receiver in (None, life)
        and (peer is None or address.sender == peer)
    )


class Terms(NamedTuple):
    """What two peers must agree on, compared at hello."""

    layout: str
    page_size: int
    dtype: str
    weights: str
    charts: str


def compares_terms(state: str) -> bool:
    """Whether a hello is compared in this state: only the first one. Later, a repeated hello may
    name weights that have changed since, and says nothing about KV that is on its way; what lands
    is looked at by :func:`is_outdated`."""
    return state == "meeting"


def mismatch(ours: Terms, theirs: Terms) -> str | None:
    """Why these peers cannot work together, both values named; None if they can. The node that
    notices delivers ``peer_reject`` to its own life and sends *reject* with this reason. Asked
    only where :func:`compares_terms`."""
    for name, mine, other in zip(Terms._fields, ours, theirs, strict=True):
        if mine != other:
            return f"{name} differs: {mine} here, {other} at the peer"
    return None


# --- what is said ---------------------------------------------------------------------------------

Frames: TypeAlias = tuple[FrameKind, ...]
NOTHING: Final[Frames] = ()
BY_THE_PEER: Final[frozenset[Message]] = frozenset({"peer_abort", "peer_failed", "peer_reject"})
"""Ends that the peer reported itself: it need not be told."""
ENDS: Final = ("abort", "expire", "fail", "lost", "finish")

_ON_EVENT: Final[Mapping[tuple[Role, str], Frames]] = {
    ("decode", "enqueue"): ("hello",),
    ("decode", "rebuild"): ("hello",),
    ("decode", "grant"): ("grant",),
    ("decode", "landed"): ("landed",),
    ("decode", "outdated"): ("landed",),  # the KV was not used, but the hand-over is complete
    ("decode", "reject"): ("reject",),
    ("prefill", "silence"): ("quiet",),
}
_TOLD: Final[Mapping[Role, frozenset[str]]] = {
    "decode": frozenset({"arrived", "meeting", "waiting", "receiving"}),
    "prefill": frozenset({"meeting", "waiting", "prefilling", "sending"}),
}
"""States whose end the peer is told: those before the hand-over. Decode knows prefill's address
from the request, so it can say so even before the two have met."""


def on_moved(role: Role, edge: Edge, cause: Message | None, met: bool) -> Frames:
    """What the peer is told after a move, in this order.

    ``cause`` is the message that ``decide`` was asked about (None: policy or intake); ``met``
    says whether this life knows its peer's (decode sends to its prefill's address anyway, prefill
    has nobody to tell before)."""
    if role == "prefill" and not met:
        return NOTHING  # a decode that says hello later is answered at the door
    frames = _ON_EVENT.get((role, edge.event), NOTHING)
    if edge.event in ENDS and edge.source in _TOLD[role]:
        if cause not in BY_THE_PEER:
            frames = (*frames, "abort")
        if role == "prefill" and edge.target == "done":
            frames = (*frames, "quiet")  # nothing was written, and nothing will be
    return frames


def on_reply(
    role: Role, state: str, message: Message, effect: Effect, refused: bool = False
) -> Frames:
    """What the peer is told when its message did not move the life: an answer to *hello* while
    meeting, and the news that this life has ended to whoever does not know it. ``refused``: it was
    refused at the door."""
    if role == "prefill" and effect == "keep" and message == "peer_hello":
        return ("hello",)
    if effect != "finished" or message == "abort":
        return NOTHING
    if role == "decode" or state != "done":
        return ("abort",)
    if refused:
        return ("reject",)
    return next((_OVER[kind] for kind in _OVER if READS[role][kind] == message), NOTHING)


def on_written(state: str) -> Frames:
    """What prefill says when its last write, that of the metadata slot, has completed."""
    return ("done",) if state == "sending" else NOTHING


def on_new_weights(role: Role, state: str) -> Frames:
    """What a life says when its node's weights have changed: a hello that is not answered yet
    names the old ones."""
    return ("hello",) if role == "decode" and state == "meeting" else NOTHING


def standing(role: Role, state: str, met: bool, written: bool) -> Frames:
    """What a life in this state says again with every heartbeat, until it leaves the state.
    ``written``: the last write has completed (prefill). The receiver drops what it knows."""
    if role == "decode":
        return _STANDING_DECODE.get(state, NOTHING)
    if state == "sending":
        return ("done",) if written else NOTHING
    return ("abort",) if met and state in ("stopping", "draining") else NOTHING


_STANDING_DECODE: Final[Mapping[str, Frames]] = {
    "meeting": ("hello",),
    "receiving": ("grant",),
    "draining": ("abort",),
}


def relies_on_peer(role: Role, state: str, met: bool) -> bool:
    """Whether a room that the peer does not know (two heartbeats long) ends this life: it has met
    its peer and its hand-over is not complete."""
    return met and "rooms" in CHARTS[role].holds[state]


# --- what is due ----------------------------------------------------------------------------------


def is_proof(message: Message) -> bool:
    """Whether the message proves that nothing will be written any more. It is decided again while
    it fires."""
    return message in ("wire_quiet", "peer_gone")


def due(
    role: Role,
    state: str,
    *,
    launched: bool = False,
    writing: bool = False,
    paused: bool = False,
    stopped: bool = False,
) -> Message | None:
    """The message that a life in this state has coming from its own node, now.

    ``launched``: a step or a copy contains it. ``writing``: writes of it are outstanding (prefill).
    ``paused``: the node is paused, and drops KV (decode). ``stopped``: it is paused in whatever
    mode; what was held, because it landed under other weights, is not rebuilt before generation
    goes on: until then the peer may compute under the old ones, and refuse it."""
    if role == "prefill":
        if state == "stopping" and not launched:
            return "quiet"
        return "wire_quiet" if state == "draining" and not writing else None
    if state in _QUIESCING and not launched:
        return "quiet"
    if paused:
        return "paused" if state in ("decoding", "retracted") else None
    return "continued" if state == "held" and not stopped else None


_QUIESCING: Final = frozenset({"retracting", "holding", "restoring", "stopping", "cancelling"})


def may_write(state: str) -> bool:
    """Whether a write to the peer's pages may be started in this state of a prefill life."""
    return state in ("prefilling", "sending")


# --- landing, flush, weights ----------------------------------------------------------------------


def is_outdated(landed_weights: str, weights: str, paused: bool) -> bool:
    """The fact ``outdated`` of *done*: what has landed was begun under other weights
    (``landed_weights``) than the node's, or lands into a pause that drops KV. KV that was finished
    under newer ones, because prefill's were changed in place, is used where it was begun: who asked
    for that wants requests to go on. A node that has the newer ones never takes it."""
    return paused or landed_weights != weights


def replays_first_token(emitted: int) -> bool:
    """Whether the token that comes with landed KV is the last one that the client already has: it
    was computed again, so it is taken from the request, and neither sampled nor sent."""
    return emitted > 0


def clears_slot(chart: Chart, edge: Edge) -> bool:
    """Whether the metadata slot is zeroed on this edge, before its lease is released."""
    dropped = chart.holds[edge.source] - chart.holds[edge.target]
    return "metadata_slots" in dropped


def may_flush(chart: Chart, states: Iterable[str], paused: bool) -> bool:
    """Whether the prefix cache may be dropped, or weights changed: no life has KV that somebody
    touches, or that would serve a token. While paused, decode's transfers do not count: what lands
    is not used."""
    return not any(
        {"pages", "host_pages"} & chart.holds[state] and not (paused and state == "receiving")
        for state in states
    )


# --- doors ----------------------------------------------------------------------------------------


_OVER: Final[Mapping[FrameKind, Frames]] = {
    "hello": ("abort",),
    "grant": ("abort", "quiet"),
    "abort": ("quiet",),
}
"""What prefill answers when its life is over: nothing is outstanding, and nothing will be."""


class Knock(NamedTuple):
    """What a frame for nobody leads to."""

    reply: Frames
    keep: bool
    """It is offered to the request of that room when it is accepted."""


def knock(
    kind: FrameKind, receiver: str | None, tombstone: FrameKind | None, role: Role = "prefill"
) -> Knock:
    """A frame for which :func:`accepts` found no life on this node, which is ``role``.

    ``tombstone``: how the life of that room ended (*reject* at the door, *abort* otherwise); None
    if the room has not been heard of. Decode keeps nothing, because prefill speaks only when
    spoken to, and says only that the life is over to whoever says hello to it."""
    if role == "decode":
        return Knock(("abort",) if kind == "hello" else NOTHING, False)
    if receiver is not None:  # for a life that is over, of this boot or of an earlier one
        return Knock(_OVER.get(kind, NOTHING), False)
    if tombstone is not None:
        return Knock((tombstone,) if kind == "hello" else NOTHING, False)
    return Knock(NOTHING, kind in ("hello", "abort", "reject"))


def on_refused(early: FrameKind | None, how: FrameKind) -> Frames:
    """What a prefill life that ends in ``arrived`` says to a decode that had knocked before
    (``early``): *reject* at the door, *abort* if its client gave up."""
    return (how,) if early == "hello" else NOTHING


_Said = TypeVar("_Said")
_Words = TypeVar("_Words")
_Value = TypeVar("_Value")


class Doors(Generic[_Said, _Words]):
    """A node's bounded memory of rooms without a life: what was said before the request arrived
    (prefill), and how lives ended that somebody may still ask for. Whatever belongs to a frame
    (``said``) or to an ending (``words``) is kept with it, and not looked at."""

    def __init__(self, capacity: int, role: Role = "prefill") -> None:
        """``capacity`` in rooms, of each kind; the oldest is forgotten first."""
        self.capacity: Final = capacity
        self.role: Final = role
        self._early: OrderedDict[str, tuple[FrameKind, Address, _Said]] = OrderedDict()
        self._ended: OrderedDict[str, tuple[FrameKind, _Words]] = OrderedDict()

    def knock(self, kind: FrameKind, address: Address, said: _Said) -> Frames:
        """A frame for nobody: what is answered."""
        ended = self._ended.get(address.room)
        tombstone = ended[0] if ended is not None else None
        outcome = knock(kind, address.receiver, tombstone, self.role)
        if outcome.keep:  # the last word counts
            self._put(self._early, address.room, (kind, address, said))
        return outcome.reply

    def arrived(self, room: str) -> tuple[FrameKind, Address, _Said] | None:
        """What was said to this room before its request arrived: it is delivered right after
        ``enqueue``. If the request is refused, :func:`on_refused` answers it."""
        self._ended.pop(room, None)
        return self._early.pop(room, None)

    def ended(self, room: str, how: FrameKind, words: _Words) -> None:
        """The life of this room has ended: *reject* at the door, *abort* otherwise."""
        self._put(self._ended, room, (how, words))

    def words(self, room: str) -> _Words | None:
        """The words of the ending of this room; None if it has not ended, or is forgotten."""
        ended = self._ended.get(room)
        return ended[1] if ended is not None else None

    def forget(self, gone: Callable[[Address, _Said], bool]) -> None:
        """A peer's process is gone: what its lives had said to rooms without a life counts no
        more, so that no request meets a life that cannot answer."""
        for room, (_, address, said) in list(self._early.items()):
            if gone(address, said):
                del self._early[room]

    def counts(self) -> dict[str, int]:
        return {"early_frames": len(self._early), "ended_rooms": len(self._ended)}

    def _put(self, book: OrderedDict[str, _Value], room: str, value: _Value) -> None:
        book[room] = value
        book.move_to_end(room)
        while len(book) > self.capacity:
            book.popitem(last=False)
