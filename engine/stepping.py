"""The part of a scheduler that computes: steps are planned, launched and committed.

The layer on :mod:`engine.lifecycle`. A role says whom to compute (:meth:`Stepping._runnable`);
:mod:`engine.steps` has what is on the device.

A step is committed when it comes back, which may be after its requests have ended: what a result
still means is decided as everything else is."""

from __future__ import annotations

from abc import abstractmethod

from engine import endings
from engine.basics import LifecycleBug
from engine.batch import Batch, BatchItem, PagesDone, Sampled, StepResult
from engine.batching import Span
from engine.lifecycle import Lifecycle
from engine.pages import PrefixLock
from engine.policy import Prompt
from engine.request import Request
from fsm.rules import Facts, Message
from transport.messages import Finish


class Stepping(Lifecycle):
    """A lifecycle whose requests are computed."""

    @abstractmethod
    def _runnable(self) -> list[Request]:
        """Requests whose next span may be computed now; admissions and victims are settled here."""

    @property
    def can_launch(self) -> bool:
        return not self.steps.full

    @property
    def steps_in_flight(self) -> int:
        return len(self.steps)

    def launch(self) -> Batch | None:
        """Plan one step and hand it to the runner; None when there is nothing to compute."""
        if not self.can_launch or self.frozen:
            return None
        spans = self._plan(self._runnable())
        return self.steps.launch(spans) if spans else None

    def commit(self, result: StepResult) -> None:
        """A launched step has come back; steps come back in launch order."""
        self._now()
        for item, request, sampled in self.steps.take(result):
            if sampled.error is not None:
                self._commit_failure(item, request, sampled.error)
            else:
                self._commit_item(item, request, sampled)
            self._settle(request)
        self.stats.steps += 1

    def pages_done(self, done: PagesDone) -> None:
        """A copy of pages to or from the store has run on the device."""
        if self.stored is None:
            return
        self._now()
        over = self.stored.copied(done)
        if over is not None:
            lease, loaded = over
            self._deliver(lease.request, "prefetch_loaded" if loaded else "prefetch_failed")

    def poll_store(self) -> None:
        """Take what the store has finished."""
        if self.stored is None:
            return
        self._now()
        for lease in self.stored.poll():
            self._deliver(lease.request, "prefetch_failed")

    # --- planning ---

    def _prompts(self) -> list[Prompt]:
        """What is left of the prompts on the device."""
        return [
            Prompt(r.rank, len(r.tokens) - r.launched) for r in self.roster.device if r.is_prefill
        ]

    def _plan(self, runnable: list[Request]) -> list[Span]:
        """Decodes first, then prompt chunks within the budget."""
        budget = self.config.chunked_prefill_size
        decodes = [r for r in runnable if r.state in self.on_device and not r.is_prefill]
        prefills = [r for r in self.roster.device if r.is_prefill and not r.withheld]
        spans = []
        for request in (*decodes, *prefills):
            span = request.next_span(budget, self.config.depth)
            if span is None:
                continue
            if request.is_prefill:
                budget -= span[1]
            row = self._row(request).slot
            spans.append(Span(request, row, self._pages(request).table, *span))
        return spans

    def _admitted(self, request: Request, cached_tokens: int) -> None:
        """The request is on the device for the first time: its running time begins."""
        request.admitted_at = self._clock()
        request.cached_tokens = cached_tokens
        self.stats.cached_tokens += request.cached_tokens
        self.stats.prompt_tokens += request.prompt_len
        if self.config.running_timeout_s is not None:
            deadline = request.admitted_at + self.config.running_timeout_s
            self._deadlines.set(deadline, "running", request)

    # --- committing ---

    def _commit_item(self, item: BatchItem, request: Request, sampled: Sampled) -> None:
        facts = Facts(item.attempt != request.attempt, request.in_steps > 0)
        finish: Finish | None = None
        message: Message = "chunk_committed"
        if item.sample:
            if sampled.token is None:
                raise LifecycleBug(f"{request.rid}: a step that samples returned no token")
            message, finish = self._outcome(request, sampled.token)
        decision = self._decide(request, message, facts)
        if decision.effect not in ("fire", "keep"):
            return
        request.committed = item.start + item.count
        if sampled.token is not None and request.max_new_tokens > 0:
            self._append(request, sampled)
        if item.sample and request.state == "prefilling":
            self._prompt_committed(request, sampled)
        self._apply(request, message, decision, finish)

    def _outcome(self, request: Request, token: int) -> tuple[Message, Finish | None]:
        """What a sampled token means for a request: whether it ends it, and how."""
        finish = endings.ending(request, token)
        return ("last_token_committed" if finish else "token_committed"), finish

    def _append(self, request: Request, sampled: Sampled) -> None:
        """Deliver a token."""
        if sampled.token is None:
            raise LifecycleBug(f"{request.rid}: no token to deliver")
        request.tokens.append(sampled.token)
        self.stats.generated_tokens += 1
        if request.first_token_at is None:
            request.first_token_at = self._clock()
        self.outbox.token(request, sampled)

    def _commit_failure(self, item: BatchItem, request: Request, error: str) -> None:
        facts = Facts(item.attempt != request.attempt, request.in_steps > 0)
        decision = self._decide(request, "step_failed", facts)
        self._apply(request, "step_failed", decision, endings.failed(error))

    def _prompt_committed(self, request: Request, sampled: Sampled) -> None:
        """The prompt's KV is committed, with its first token: share it, and store it."""
        lock = request.leases["prefix_locks"]
        if isinstance(lock, PrefixLock):
            self.kv.cache_prompt(request, self._pages(request), lock)
            pages = self._pages(request)
            if self.stored is not None and pages.weights == self.weights:
                self.stored.export(request, lock, pages.table)
