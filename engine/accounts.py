"""What is told of requests besides their answers: trace lines, spans, and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.basics import LifecycleBug
from engine.request import Request
from fsm.chart import Move
from fsm.trace import Tracer


@dataclass(slots=True)
class Stats:
    """Counters since start, for metrics."""

    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retracted: int = 0
    aborted: int = 0
    finished: int = 0
    refused: int = 0


class Accounts:
    """Writes down what happens to requests, in the trace and in each one's span."""

    def __init__(self, tracer: Tracer, clock: Callable[[], float]) -> None:
        self.stats: Final = Stats()
        self._tracer = tracer
        self._clock = clock

    def moved(self, request: Request, move: Move, by: str, why: str) -> None:
        """``request`` has made ``move``."""
        edge = move.edge
        if request.span is not None:
            request.span.events.append((self._clock(), edge.target))
        if not self._tracer.active:
            return
        finish = request.finish if "frontend_records" in move.drops else None
        self._tracer.move(
            request.life,
            request.attempt,
            request.rid,
            edge.event,
            by,
            edge.source,
            edge.target,
            move.takes,
            move.drops,
            why,
            request.output_len,
            request.leases["pages"].units if "pages" in move.takes else 0,
            finish.type if finish is not None else "",
            finish.status if finish is not None else None,
        )

    def answered(self, request: Request) -> None:
        """``request`` has its terminal answer."""
        finish = request.finish
        if finish is None:
            raise LifecycleBug(f"{request.rid} was answered without a reason")
        if request.span is not None:
            request.span.status = finish.message or finish.type
            request.span.attributes["gen_ai.usage.output_tokens"] = request.output_len
        self._tracer.answer(
            request.life,
            request.rid,
            finish.type,
            request.output_len,
            finish.status,
            finish.message,
        )

    def retired(self, request: Request) -> None:
        """``request`` had been accepted, and is answered."""
        if request.finish is not None and request.finish.type == "abort":
            self.stats.aborted += 1
        else:
            self.stats.finished += 1
