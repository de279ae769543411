"""The trace of a node: one JSON object a line, every submission, move, lease change and answer.

``header`` names the node, its charts and pools; then ``submit``, ``move``, ``lease`` and
``answer`` in the order in which they happened, numbered by ``seq`` without gaps; then a
``footer`` on a clean end. No footer means truncated."""

from collections.abc import Callable
from typing import Final, TypeAlias

import msgspec

TRACE_VERSION: Final = 1


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """First line. ``charts`` maps chart name to fingerprint, ``pools`` resource name to its
    total."""

    version: int
    node: str
    boot_id: str
    roles: tuple[str, ...]
    charts: dict[str, str]
    pools: dict[str, int]


class SubmitLine(msgspec.Struct, frozen=True, tag_field="kind", tag="submit", omit_defaults=True):
    """A life begins, in its chart's initial state, holding ``taken``."""

    time: float
    node: str
    seq: int
    life: str
    rid: str
    kit: tuple[str, ...]
    taken: tuple[str, ...]
    prompt_tokens: int
    max_new_tokens: int


class MoveLine(msgspec.Struct, frozen=True, tag_field="kind", tag="move", omit_defaults=True):
    """One transition. ``cause`` is the (node, seq) of the line that caused it, where one did."""

    time: float
    node: str
    seq: int
    life: str
    attempt: int
    rid: str
    event: str
    by: str
    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    taken: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    why: str = ""
    cause: tuple[str, int] | None = None


class LeaseLine(msgspec.Struct, frozen=True, tag_field="kind", tag="lease", omit_defaults=True):
    """Pages change hands outside a move: grow, cache, evict, quarantine, release."""

    time: float
    node: str
    seq: int
    what: str
    owner: str
    units: int


class AnswerLine(msgspec.Struct, frozen=True, tag_field="kind", tag="answer", omit_defaults=True):
    """The one terminal answer of a life."""

    time: float
    node: str
    seq: int
    life: str
    rid: str
    reason: str
    tokens: int
    status: int | None = None
    message: str = ""


class Footer(msgspec.Struct, frozen=True, tag_field="kind", tag="footer"):
    """Last line of a clean end."""

    time: float
    node: str
    seq: int
    at_rest: bool


Line: TypeAlias = Header | SubmitLine | MoveLine | LeaseLine | AnswerLine | Footer
Sink: TypeAlias = Callable[[Line], None]


class Tracer:
    """Numbers the lines of one node and hands them to a sink. Without a sink it costs one
    comparison."""

    def __init__(self, node: str, clock: Callable[[], float], sink: Sink | None) -> None:
        self.node: Final = node
        self._clock = clock
        self._sink = sink
        self.seq = 0

    @property
    def active(self) -> bool:
        return self._sink is not None

    def header(
        self, boot_id: str, roles: tuple[str, ...], charts: dict[str, str], pools: dict[str, int]
    ) -> None:
        if self._sink is not None:
            self._sink(Header(TRACE_VERSION, self.node, boot_id, roles, charts, pools))

    def submit(
        self,
        life: str,
        rid: str,
        kit: tuple[str, ...],
        taken: tuple[str, ...],
        prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        if self._sink is not None:
            self._sink(
                SubmitLine(*self._stamp(), life, rid, kit, taken, prompt_tokens, max_new_tokens)
            )

    def move(
        self,
        life: str,
        attempt: int,
        rid: str,
        event: str,
        by: str,
        source: str,
        target: str,
        taken: tuple[str, ...],
        dropped: tuple[str, ...],
        why: str,
    ) -> None:
        if self._sink is not None:
            self._sink(
                MoveLine(
                    *self._stamp(),
                    life,
                    attempt,
                    rid,
                    event,
                    by,
                    source,
                    target,
                    taken,
                    dropped,
                    why,
                )
            )

    def lease(self, what: str, owner: str, units: int) -> None:
        if self._sink is not None:
            self._sink(LeaseLine(*self._stamp(), what, owner, units))

    def answer(
        self, life: str, rid: str, reason: str, tokens: int, status: int | None, message: str
    ) -> None:
        if self._sink is not None:
            self._sink(AnswerLine(*self._stamp(), life, rid, reason, tokens, status, message))

    def footer(self, at_rest: bool) -> None:
        if self._sink is not None:
            self._sink(Footer(*self._stamp(), at_rest))

    def _stamp(self) -> tuple[float, str, int]:
        self.seq += 1
        return round(self._clock(), 6), self.node, self.seq
