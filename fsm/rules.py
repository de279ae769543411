"""The form of decision rules, and how they become a total table.

A *rule* says what one message does in some states, for some facts. A role's rules are expanded to
one decision for every state, message and combination of facts; a gap, an overlap, or an event
that the chart does not have there is refused when the module is imported.

A decision has an *effect*:

``fire``      fire ``event``; what the message carries (a token) counts
``keep``      stay; what the message carries counts
``drop``      late or duplicate: nothing counts and nothing changes
``finished``  the sender is told that this request has already finished
``refuse``    the message makes no sense here and only a bug of ours can have sent it
"""

from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, NamedTuple, TypeAlias

from fsm.chart import Actor, Chart

Effect: TypeAlias = Literal["fire", "keep", "drop", "finished", "refuse"]

Message: TypeAlias = Literal[
    # From whoever speaks for the client, and from the clock.
    "abort",  # the request is to end
    "expired",  # a deadline of the state it is in, or of the client, has passed
    "stop_matched",  # the server found a stop string in what was sent
    # From the runner: what a step, or a copy, did. A step that contained the request has committed.
    "chunk_committed",  # a part of the prompt; nothing was sampled
    "token_committed",  # a token that does not end the request
    "last_token_committed",  # a token that ends it
    "step_failed",  # the step, or the copy, raised; nothing of it counts
    "quiet",  # no launched step or copy contains the request any more
    # From the store.
    "prefetch_loaded",  # the stored pages are in the prefix cache
    "prefetch_failed",  # the store failed, or what it loaded is of no use any more
    "prefetch_expired",  # the deadline of a prefetch has passed (told by the clock)
    # From the operator.
    "paused",  # generation is paused, and KV is to be dropped
    "continued",  # generation goes on
    # From the peer of a prefill/decode pair, and from the wire between them.
    "peer_hello",  # the peer has this room, and these limits, layout and weights
    "peer_grant",  # decode has reserved pages and a slot (to prefill)
    "peer_done",  # everything is written, the slot last (to decode)
    "peer_landed",  # decode has everything (to prefill)
    "peer_abort",  # the peer's life has ended before the hand-over
    "peer_failed",  # so it has, because a step or a write of it failed (to decode)
    "peer_reject",  # the peer refused the request at its door
    "peer_gone",  # the peer's process is gone, or does not know the room: it writes no more
    "peer_missed",  # the peer's heartbeats are missing; it may be frozen, and come back
    "wire_failed",  # a write failed, or was fenced
    "wire_quiet",  # the wire will not touch this request's pages any more
]


class Facts(NamedTuple):
    """What a table may look at besides state and message. A role uses some of them."""

    stale: bool = False
    """The message belongs to an earlier attempt of this life."""
    launched: bool = False
    """A launched step still contains the request (after the message's own step was counted off)."""
    outdated: bool = False
    """What has landed was computed under other weights than the node's, or into a pause that
    drops KV."""


class Decision(NamedTuple):
    effect: Effect
    event: str | None = None
    by: Actor = "scheduler"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: in these states this message does this. ``None`` for a fact means either."""

    states: tuple[str, ...]
    message: Message
    decision: Decision
    why: str
    stale: bool | None = None
    launched: bool | None = None
    outdated: bool | None = None

    def covers(self, facts: Facts) -> bool:
        return all(
            wanted is None or wanted == fact
            for wanted, fact in zip((self.stale, self.launched, self.outdated), facts, strict=True)
        )


REFUSE: Final = Decision("refuse")
DROP: Final = Decision("drop")
KEEP: Final = Decision("keep")
FINISHED: Final = Decision("finished")

Table: TypeAlias = dict[tuple[str, Message, Facts], Decision]


class TableError(ValueError):
    """Rules that do not cover every case exactly once, or that name an edge the chart does not
    have."""


@dataclass(frozen=True, slots=True)
class RuleBook:
    """The rules of one role: which messages it can get, which facts it looks at."""

    chart: Chart
    messages: tuple[Message, ...]
    facts: tuple[str, ...]
    rules: tuple[Rule, ...]

    def combinations(self) -> tuple[Facts, ...]:
        """Every combination of the facts that this role looks at; the others stay false."""
        return tuple(
            Facts(**dict(zip(self.facts, bits, strict=True)))
            for bits in product((False, True), repeat=len(self.facts))
        )


def compile_table(book: RuleBook) -> Table:
    """Expand ``book`` to one decision for each state, message and facts.

    Raises :class:`TableError`."""
    table: Table = {}
    chart, combinations = book.chart, book.combinations()
    for rule in book.rules:
        for state, facts in product(rule.states, combinations):
            if not rule.covers(facts):
                continue
            key = (state, rule.message, facts)
            if key in table:
                raise TableError(f"two rules for {key}")
            table[key] = rule.decision
            event = rule.decision.event
            if event is None:
                continue
            edge = chart.table.get((state, event))
            if edge is None:
                raise TableError(f"{state} on {rule.message}: the chart has no {event!r} there")
            if rule.decision.by not in edge.by:
                raise TableError(
                    f"{state} on {rule.message}: {rule.decision.by} may not cause {event!r}"
                )
    for state, message, facts in product(chart.by_name, book.messages, combinations):
        if (state, message, facts) not in table:
            raise TableError(f"no rule for {state}, {message}, {facts}")
    return table
