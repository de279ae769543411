"""Lives begin: a request is made of a submission."""

from __future__ import annotations

from typing import Final

from engine.answers import Outbox
from engine.request import Request
from engine.spans import SpanBook
from fsm.ledger import Lease
from fsm.resources import Resource
from transport.messages import Submit


class Arrivals:
    """Mints the lives of one process, ``BOOT:1``, ``BOOT:2``, … in order of arrival."""

    def __init__(
        self, boot_id: str, eos_token_ids: tuple[int, ...], spans: SpanBook, outbox: Outbox
    ) -> None:
        self._boot_id: Final = boot_id
        self._eos: Final = frozenset(eos_token_ids)
        self._spans = spans
        self._outbox = outbox
        self._minted = 0

    def begin(
        self,
        message: Submit,
        rid: str,
        group: str | None,
        prompt: list[int],
        max_new_tokens: int,
        kit: set[Resource],
        now: float,
    ) -> tuple[Request, dict[Resource, Lease]]:
        """The request called ``rid``, on no chart yet, and the leases of a chart's initial state.

        ``prompt`` includes the session's history; ``kit`` is what the request needs at all; ``now``
        is in seconds on the node's clock."""
        self._minted += 1
        life = f"{self._boot_id}:{self._minted}"
        request = Request(
            life,
            rid,
            list(prompt),
            message.sampling,
            frozenset(kit),
            self._minted,
            now,
            message.priority,
            message.session,
            group,
        )
        request.max_new_tokens = max_new_tokens
        stop_ids = frozenset(message.sampling.stop_token_ids)
        request.stop_ids = stop_ids if message.sampling.ignore_eos else stop_ids | self._eos
        span = self._spans.open(life, f"request {rid}", now)
        span.span.attributes.update(
            {"gen_ai.request.id": rid, "gen_ai.usage.input_tokens": len(prompt)}
        )
        request.span = span.span
        return request, {"spans": span, "frontend_records": self._outbox.open(request)}
