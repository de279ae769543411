"""A request inside the engine: its tokens, its counters and its place on the chart.

Three counters over positions say everything about computation:

- ``launched``: KV of positions below it is computed by steps that were launched;
- ``committed``: KV of positions below it is computed by steps that were committed;
- ``len(tokens)``: tokens that are known (prompt and delivered output).

A position past the known tokens is a *feed*: its input is the token that the step before it
samples. So ``launched - len(tokens) + 1``, where positive, is the number of sampled tokens still
to be committed, and one rule (:meth:`Request.next_span`) plans prefill, decode, depth 2 and the
recomputation after a retraction alike."""

from typing import Final

from engine.pairing import Pairing
from engine.spans import Span
from fsm.journal import Journal
from fsm.ledger import Lease
from fsm.resources import Resource
from transport.messages import Finish, SamplingParams


class Request:
    """One life, from intake to done. Identity equality; ``state`` is written by the driver only."""

    __slots__ = (
        "admitted_at",
        "arrived_at",
        "attempt",
        "cached_tokens",
        "client_deadline",
        "committed",
        "estimate",
        "final_output_len",
        "finish",
        "first_token_at",
        "group",
        "in_steps",
        "journal",
        "kit",
        "launched",
        "leases",
        "life",
        "max_new_tokens",
        "order",
        "overtaken",
        "pairing",
        "priority",
        "prompt_len",
        "retractions",
        "rid",
        "sampling",
        "session",
        "span",
        "state",
        "stop_ids",
        "tokens",
        "withheld",
    )

    state: str
    """Written by the driver, at intake first."""

    def __init__(
        self,
        life: str,
        rid: str,
        prompt: list[int],
        sampling: SamplingParams,
        kit: frozenset[Resource],
        order: int,
        arrived_at: float,
        priority: int = 0,
        session: str | None = None,
        group: str | None = None,
    ) -> None:
        self.life: Final = life
        self.rid: Final = rid
        self.kit: Final = kit
        self.order: Final = order
        self.priority: Final = priority
        self.arrived_at: Final = arrived_at
        self.session: Final = session
        self.group: Final = group
        self.sampling: Final = sampling

        self.leases: dict[Resource, Lease] = {}
        self.journal = Journal()
        self.span: Span | None = None

        self.tokens = prompt
        self.prompt_len = len(prompt)
        self.max_new_tokens = sampling.max_new_tokens
        self.stop_ids: frozenset[int] = frozenset()

        self.attempt = 0
        self.launched = 0
        self.committed = 0
        self.in_steps = 0
        """Launched steps that contain this request; it is quiet at zero."""
        self.cached_tokens = 0
        self.retractions = 0
        self.overtaken = 0
        self.estimate: tuple[int, int, int] | None = None
        """(pages ever cached, pages, tokens): what admission would cost, as of then."""
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.client_deadline: float | None = None
        self.finish: Finish | None = None
        self.final_output_len: int | None = None
        self.pairing: Pairing | None = None
        """With a peer: the room, and what is known of the other half."""
        self.withheld = False
        """A fault hook or a test keeps it out of steps."""

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller is served first: higher priority, then earlier arrival."""
        return (-self.priority, self.order)

    @property
    def output_len(self) -> int:
        if self.final_output_len is not None:
            return self.final_output_len
        return len(self.tokens) - self.prompt_len

    def forget(self) -> None:
        """It is done: what is remembered of it must not cost memory by its length."""
        self.final_output_len = self.output_len
        self.tokens = []

    @property
    def feeds(self) -> int:
        """Sampled tokens that are not committed yet."""
        return max(0, self.launched - len(self.tokens) + 1)

    @property
    def is_prefill(self) -> bool:
        """Known text is left to compute (its last token counts only if nothing was generated
        yet)."""
        left = len(self.tokens) - self.launched
        return left > 1 or (left == 1 and self.output_len == 0)

    def next_span(self, budget: int, depth: int) -> tuple[int, int, bool] | None:
        """What the next step should compute for this request: (start, count, sample), or None.

        ``budget`` limits prompt tokens; a decode is one token and always fits. ``depth`` limits
        feeds."""
        known = len(self.tokens)
        start = self.launched
        if self.is_prefill:
            count = min(known - start, budget)
            return (start, count, start + count == known) if count > 0 else None
        if self.feeds >= depth or self.output_len + self.feeds >= self.max_new_tokens:
            return None
        return start, 1, True
