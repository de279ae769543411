"""The trace of a node: one JSON object a line, every submission, move, lease change and answer.

``header`` names the node, its charts and pools; then ``submit``, ``move``, ``lease`` and
``answer`` in the order in which they happened, numbered by ``seq`` without gaps; then a
``footer`` on a clean end. No footer means truncated. ``docs/trace-format.md`` documents every
field; :mod:`fsm.replay` says what does not fit.

Pages are kept by double entry. Every line on which pages change hands carries ``units`` (how many
its owner gains or gives up), ``flow`` (by how much the free and the cached ones changed) and
``pool`` (the balance afterwards), so that a wrong number contradicts its neighbours."""

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import msgspec

TRACE_VERSION: Final = 2


class Flow(NamedTuple):
    """By how much two classes of pages changed; what they lost, somebody holds now."""

    free: int
    cached: int


class Balance(NamedTuple):
    """The page pool after a line. ``kept`` counts the pages that the prefix cache owns, alone
    (those are ``cached``) or together with requests."""

    free: int
    cached: int
    kept: int


class Cause(NamedTuple):
    """A line that others follow from. ``boot`` is the boot id of the process that wrote it; empty:
    the process that names it."""

    node: str
    seq: int
    boot: str = ""


STILL: Final = Flow(0, 0)
PAGES: Final = "pages"


class Header(msgspec.Struct, frozen=True, tag_field="kind", tag="header"):
    """First line. ``charts`` maps chart name to fingerprint, ``pools`` resource name to its
    total. ``time`` is the node's clock in seconds, as in every line."""

    version: int
    node: str
    boot_id: str
    roles: tuple[str, ...]
    charts: dict[str, str]
    pools: dict[str, int]
    time: float
    page_size: int


class SubmitLine(
    msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="submit", omit_defaults=True
):
    """A life begins, in its chart's initial state, holding ``taken``. ``cause`` and ``boot`` are
    those of a move: there where another node asked for it."""

    time: float
    node: str
    seq: int
    life: str
    rid: str
    kit: tuple[str, ...]
    taken: tuple[str, ...]
    prompt_tokens: int
    max_new_tokens: int
    cause: tuple[str, int] | None = None
    boot: str = ""


class MoveLine(
    msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="move", omit_defaults=True
):
    """One transition. ``cause`` is the (node, seq) of the line that caused it, where one did, and
    ``boot`` the boot id of that node's process, where it is not this one; ``tokens`` is the output
    delivered so far. ``units``, ``flow`` and ``pool`` are there when it takes pages, ``reason`` and
    ``status`` when it answers the client."""

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
    tokens: int = 0
    units: int = 0
    flow: Flow = STILL
    pool: Balance | None = None
    reason: str = ""
    status: int | None = None
    boot: str = ""


class LeaseLine(
    msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="lease", omit_defaults=True
):
    """Units change hands outside a move. ``what`` is take, pin, grow, cache, evict, quarantine or
    release; ``flow`` and ``pool`` are there for pages."""

    time: float
    node: str
    seq: int
    what: str
    owner: str
    units: int
    flow: Flow = STILL
    pool: Balance | None = None
    resource: str = PAGES


class AnswerLine(
    msgspec.Struct, frozen=True, gc=False, tag_field="kind", tag="answer", omit_defaults=True
):
    """The one terminal answer of a life, right after the move that leaves its last live state."""

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


Numbered: TypeAlias = SubmitLine | MoveLine | LeaseLine | AnswerLine | Footer
Line: TypeAlias = Header | Numbered
Sink: TypeAlias = Callable[[Line], None]


class Tracer:
    """Numbers the lines of one node and hands them to a sink. Without a sink it costs one
    comparison.

    ``pages`` reads the balance of the page pool; a tracer without one writes no balances.
    """

    def __init__(
        self,
        node: str,
        clock: Callable[[], float],
        sink: Sink | None,
        pages: Callable[[], Balance] | None = None,
    ) -> None:
        self.node: Final = node
        self.seq = 0
        self.cause: Cause | None = None
        """What the next submissions and moves follow from, until this is changed."""
        self._clock = clock
        self._sink = sink
        self._pages = pages
        self._before: Balance | None = None

    @property
    def active(self) -> bool:
        return self._sink is not None

    @property
    def last(self) -> Cause:
        """The newest line."""
        return Cause(self.node, self.seq)

    def watch(self, pages: Callable[[], Balance]) -> None:
        """Read balances with ``pages`` from now on: the pool may be younger than the tracer."""
        self._pages, self._before = pages, pages()

    def header(
        self,
        boot_id: str,
        roles: tuple[str, ...],
        charts: dict[str, str],
        pools: dict[str, int],
        page_size: int = 1,
    ) -> None:
        if self._sink is not None:
            time = round(self._clock(), 6)
            self._sink(
                Header(TRACE_VERSION, self.node, boot_id, roles, charts, pools, time, page_size)
            )

    def submit(
        self,
        life: str,
        rid: str,
        kit: tuple[str, ...],
        taken: tuple[str, ...],
        prompt_tokens: int,
        max_new_tokens: int,
    ) -> None:
        if self._sink is None:
            return
        cause, boot = _named(self.cause)
        self._sink(
            SubmitLine(
                *self._stamp(), life, rid, kit, taken, prompt_tokens, max_new_tokens, cause, boot
            )
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
        tokens: int = 0,
        units: int = 0,
        reason: str = "",
        status: int | None = None,
    ) -> None:
        """``units`` are the pages that the move takes; ``reason`` and ``status`` are of the answer
        that follows."""
        if self._sink is None:
            return
        flow, pool = self._flow() if units else (STILL, None)
        cause, boot = _named(self.cause)
        self.seq = seq = self.seq + 1  # not by _stamp: this is the hot one
        self._sink(
            MoveLine(
                round(self._clock(), 6),
                self.node,
                seq,
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
                cause,
                tokens,
                units,
                flow,
                pool,
                reason,
                status,
                boot,
            )
        )

    def lease(self, what: str, owner: str, units: int, resource: str = PAGES) -> None:
        if self._sink is not None:
            flow, pool = self._flow() if resource == PAGES else (STILL, None)
            self._sink(LeaseLine(*self._stamp(), what, owner, units, flow, pool, resource))

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

    def _flow(self) -> tuple[Flow, Balance | None]:
        """What the pool has become since the line before that moved pages."""
        before = self._before
        if self._pages is None or before is None:
            return STILL, None
        self._before = now = self._pages()
        free, cached = now.free - before.free, now.cached - before.cached
        return (Flow(free, cached) if free or cached else STILL), now


def _named(cause: Cause | None) -> tuple[tuple[str, int] | None, str]:
    """The fields ``cause`` and ``boot`` of a line."""
    return (None, "") if cause is None else ((cause.node, cause.seq), cause.boot)
