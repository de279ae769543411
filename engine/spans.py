"""Trace spans: one record for each request, opened at intake and closed with the real reason.

The record carries OpenTelemetry's GenAI attribute names, so that an exporter only has to copy it.
It is a resource like any other: a lease holds it open, and the transition that answers the client
closes it (S0.3)."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from fsm.ledger import CountPool, Lease
from fsm.resources import Disposition

RECENT_LIMIT: Final = 256


@dataclass(slots=True)
class Span:
    """Times are seconds on the node's clock; ``events`` are (time, name)."""

    name: str
    start: float
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    events: list[tuple[float, str]] = field(default_factory=list)
    end: float | None = None
    status: str = ""

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "start": self.start,
            "end": self.end,
            "status": self.status,
            "attributes": self.attributes,
            "events": [list(event) for event in self.events],
        }


class SpanLease(Lease):
    """Keeps a span open; closing it records why the request ended."""

    __slots__ = ("_book", "span")

    def __init__(self, book: "SpanBook", owner: str, span: Span) -> None:
        super().__init__("spans", owner)
        self._book = book
        self.span: Final = span

    def _give_back(self, disposition: Disposition | None) -> None:
        self._book.close(self.owner, self.span)


class SpanBook:
    """Open spans, counted, and the newest closed ones for the live pages and an exporter."""

    def __init__(self, limit: int) -> None:
        self.pool: Final = CountPool("spans", limit)
        self.recent: deque[Span] = deque(maxlen=RECENT_LIMIT)
        self.now = 0.0

    def open(self, owner: str, name: str, now: float) -> SpanLease:
        """Raises :class:`fsm.ledger.Exhausted` beyond the limit of open requests."""
        self.pool.take(owner)
        return SpanLease(self, owner, Span(name, now))

    def close(self, owner: str, span: Span) -> None:
        span.end = self.now
        self.recent.append(span)
        self.pool.give_back(owner, 1)
