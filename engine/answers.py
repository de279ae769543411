"""What leaves the scheduler for clients: tokens as they commit, and the one terminal answer of
each request.

The obligation to answer is a resource, ``frontend_records``: a lease taken at intake, held by
every live state and by no other. Releasing it *is* sending the terminal answer, so a request is
answered exactly when it leaves its last live state, whatever edge it leaves by, and cannot be
answered twice (invariant 3)."""

from typing import Final

from engine.batch import Sampled
from engine.request import Request
from fsm.ledger import CountPool, Lease, LeaseError
from fsm.resources import Disposition
from transport.messages import Output, TopLogprobs


class AnswerLease(Lease):
    """One request's claim to one terminal answer, whose content is ``request.finish``."""

    __slots__ = ("_outbox", "request")

    def __init__(self, outbox: "Outbox", request: Request) -> None:
        super().__init__("frontend_records", request.life)
        self._outbox = outbox
        self.request: Final = request

    def _give_back(self, disposition: Disposition | None) -> None:
        self._outbox.answer(self.request)


class _Draft:
    """One request's share of the frame being written."""

    __slots__ = ("chosen", "index", "logprobs", "request", "tokens", "top")

    def __init__(self, request: Request, index: int) -> None:
        self.request = request
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopLogprobs] = []
        self.chosen: list[TopLogprobs] = []

    def output(self, answered: bool, weight_version: str) -> Output:
        request, sampling = self.request, self.request.sampling
        return Output(
            rid=request.rid,
            index=self.index,
            tokens=self.tokens,
            logprobs=self.logprobs if sampling.logprobs else None,
            top_logprobs=self.top if sampling.top_logprobs else None,
            chosen_logprobs=self.chosen if sampling.token_ids_logprob else None,
            finish=request.finish if answered else None,
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_tokens,
            retractions=request.retractions,
            weight_version=weight_version,
        )


class Outbox:
    """Collects the outputs of one turn of the loop, so that they leave in one frame."""

    def __init__(self, limit: int) -> None:
        self.pool: Final = CountPool("frontend_records", limit)
        self.weight_version = "default"
        self._drafts: dict[str, _Draft] = {}
        self._answered: set[str] = set()
        self.answers = 0

    def open(self, request: Request) -> AnswerLease:
        """Raises :class:`fsm.ledger.Exhausted` beyond the limit of open requests."""
        self.pool.take(request.life)
        return AnswerLease(self, request)

    def token(self, request: Request, sampled: Sampled) -> None:
        """Deliver the token that was just appended to ``request``."""
        if request.life in self._answered:
            raise LeaseError(f"a token for {request.rid} after its answer")
        draft = self._draft(request, request.output_len - 1)
        draft.tokens.append(request.tokens[-1])
        if request.sampling.logprobs:
            draft.logprobs.append(sampled.logprob if sampled.logprob is not None else 0.0)
            draft.top.append(sampled.top_logprobs or [])
            draft.chosen.append(sampled.chosen_logprobs or [])

    def answer(self, request: Request) -> None:
        """The terminal answer. Called by the lease, and by nothing else."""
        if request.finish is None:
            raise LeaseError(f"{request.rid} leaves its last live state without a reason")
        self.pool.give_back(request.life, 1)
        self._draft(request, request.output_len)
        self._answered.add(request.life)
        self.answers += 1

    def flush(self) -> list[Output]:
        """Everything since the last flush, in order of first mention."""
        if not self._drafts:
            return []
        out = [
            draft.output(life in self._answered, self.weight_version)
            for life, draft in self._drafts.items()
        ]
        self._drafts.clear()
        self._answered.clear()
        return out

    def _draft(self, request: Request, index: int) -> _Draft:
        draft = self._drafts.get(request.life)
        if draft is None:
            draft = self._drafts[request.life] = _Draft(request, index)
        return draft
