"""Requests of the engine's unit tests: real ones, without a scheduler."""

from collections.abc import Sequence

from engine.request import Request
from fsm.unified import BASE_KIT
from transport.messages import SamplingParams


def request(
    life: str = "boot:1",
    prompt: Sequence[int] = (1, 2, 3),
    *,
    rid: str = "",
    order: int = 1,
    arrived_at: float = 0.0,
    priority: int = 0,
    session: str | None = None,
    group: str | None = None,
    sampling: SamplingParams | None = None,
) -> Request:
    """A request that nobody has accepted yet."""
    return Request(
        life,
        rid or life,
        list(prompt),
        sampling or SamplingParams(max_new_tokens=8),
        BASE_KIT,
        order,
        arrived_at,
        priority,
        session,
        group,
    )
