"""The scheduler of a unified node: one process prefills and decodes."""

from __future__ import annotations

from typing import ClassVar, Final

from engine.accounts import Stats
from engine.basics import LifecycleBug, ModelFacts, Runner
from engine.core import SchedulerCore
from engine.deadlines import HELD_TIMEOUT_S
from engine.policy import Candidate, Holder, Need, admit, allot, displace, tokens_ahead
from engine.request import Request
from fsm.chart import Chart, Edge
from fsm.ledger import Exhausted, Lease
from fsm.resources import Resource
from fsm.rules import Message
from fsm.unified import BASE_KIT, UNIFIED

__all__ = ["LifecycleBug", "ModelFacts", "Runner", "Scheduler", "Stats"]

QUEUE_SCAN: Final = 32
"""Queued requests looked at in one step: its cost must not grow with the queue."""


class Scheduler(SchedulerCore):
    """All requests of one unified node."""

    role: ClassVar[str] = "unified"
    chart: ClassVar[Chart] = UNIFIED
    base_kit: ClassVar[frozenset[Resource]] = BASE_KIT
    queued: ClassVar[frozenset[str]] = frozenset({"prefetching", "waiting", "retracted"})
    on_device: ClassVar[frozenset[str]] = frozenset({"prefilling", "decoding"})

    held_timeout_s = HELD_TIMEOUT_S
    """How long a request may be held (seconds): a pause that nobody ends must not keep its client
    for ever."""

    def _extra_kit(self, prompt: list[int]) -> set[Resource]:
        stored = self.stored is not None and bool(self.stored.hits(prompt))
        return {"prefetches"} if stored else set()

    def _queue_up(self, request: Request, leases: dict[Resource, Lease]) -> str:
        if self.stored is None or "prefetches" not in request.kit:
            return "enqueue"
        leases["prefetches"] = self.stored.reserve(request)
        deadline = request.arrived_at + self.config.prefetch_timeout_s
        self._deadlines.set(deadline, "prefetch", request)
        return "prefetch"

    def _runnable(self) -> list[Request]:
        runnable = self._make_room()
        admitted = self._admit()
        # Who was displaced and admitted again in this very turn is in both.
        again = {request.life for request in admitted}
        return [request for request in runnable if request.life not in again] + admitted

    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        if edge.event == "quiesce" and edge.target in ("retracted", "held"):
            request.attempt += 1
            request.retractions += 1
            request.launched = request.committed = 0
            self.stats.retracted += 1
        if edge.target == "held":
            self._deadlines.set(self._clock() + self.held_timeout_s, "held", request)

    def retract(self, rid: str) -> bool:
        """Push one request out on purpose (fault hook, tests). False where it is not on the
        device."""
        request = self.roster.live.get(rid)
        if request is None or request.state not in self.on_device:
            return False
        self._retract(request, "forced")
        return True

    def _make_room(self) -> list[Request]:
        """Give every request on the device the pages of its next token; who gets none waits or
        gives way."""
        while True:
            requests = [r for r in self.roster.device if not r.withheld]
            needs = [
                Need(r.life, self._pages_short(r), 0 if r.is_prefill else -1) for r in requests
            ]
            # Whom a victim would free pages for is worth knowing only when somebody has to go: it
            # takes a look at every page of everybody.
            if sum(need.pages for need in needs) <= self.kv.available:
                for need, request in zip(needs, requests, strict=True):
                    if need.pages:
                        self._pages(request).extend(need.pages)  # before admission sees them
                return requests
            needs = [
                Need(n.life, n.pages, self.kv.exclusive(self._pages(r)))
                for n, r in zip(needs, requests, strict=True)
            ]
            allotment = allot(needs, self.kv.available, self._pages_coming())
            for life in allotment.victims:
                self._retract(self.roster.lives[life], "no pages")
            if not allotment.victims:
                run = set(allotment.run)
                for need, request in zip(needs, requests, strict=True):
                    if need.life in run and need.pages:
                        self._pages(request).extend(need.pages)  # before admission sees them
                return [r for r in requests if r.life in run]

    def _pages_short(self, request: Request) -> int:
        span = request.next_span(1, self.config.depth)
        if span is None or request.is_prefill:
            return 0  # a prompt has all its pages from the start
        return max(0, self.kv.pages_for(span[0] + 1) - len(self._pages(request).table))

    def _pages_coming(self) -> int:
        """Pages that requests on their way out will give back when their last step commits."""
        return sum(self.kv.exclusive(self._pages(request)) for request in self._leaving())

    def _leaving(self) -> list[Request]:
        """Requests on their way out: each gives a row and pages back without being told again."""
        leaving = {
            request.life: request
            for request in self.steps.requests
            if request.state in ("stopping", "retracting")
        }
        return list(leaving.values())

    def _retract(self, request: Request, why: str) -> None:
        self._fire(request, "retract", "scheduler", why)
        self._settle(request)

    def _admit(self) -> list[Request]:
        """Move queued requests to the device while rows, pages and the prompt budget last.

        Returns them: one that comes back from a retraction with all but its last token in the
        prefix cache goes on by decoding, in this very step, because nothing else would wake it.
        """
        if not self.roster.queue:
            return []
        prompts = self._prompts()
        candidates = {r.life: r for r in self.roster.queue.first(QUEUE_SCAN)}
        decoding = sum(not r.is_prefill for r in self.roster.device)
        admission = admit(
            (self._candidate(r, tokens_ahead(r.rank, prompts)) for r in candidates.values()),
            self.rows.free,
            self.kv.available,
            self.config.chunked_prefill_size,
            decoding,
            self.config.max_overtakes,
        )
        admitted = []
        for life in admission.admit:
            # One admission may have taken what the next one counted on: then that one waits.
            if not self._admit_one(candidates[life]):
                break
            admitted.append(candidates[life])
        for life in admission.passed:
            candidates[life].overtaken += 1
        ready = (r for r in candidates.values() if r.state != "prefetching" and not r.withheld)
        head = next(ready, None)
        if head is not None and not admission.admit and self._displace(head):
            return self._admit()  # nothing would wake the loop for the room that was made
        return admitted

    def _candidate(self, request: Request, ahead: int = 0) -> Candidate:
        # Matching a long prompt at every step would make a step cost as much as the queue holds.
        if request.estimate is None or request.estimate[0] != self.kv.cache.added:
            request.estimate = (self.kv.cache.added, *self.kv.cost(request))
        return Candidate(
            request.life,
            request.estimate[1],
            request.estimate[2],
            request.overtaken,
            request.state != "prefetching" and not request.withheld,
            ahead,
        )

    def _admit_one(self, request: Request) -> bool:
        try:
            pages, lock = self.kv.reserve(request)
        except Exhausted:
            request.estimate = None  # what it had counted on was evicted, or is in use no more
            return False
        row = self.rows.reserve(request.life)
        request.estimate = None
        request.launched = request.committed = pages.shared * self.config.page_size
        if request.attempt == 0:
            self._admitted(request, request.committed)
        self.steps.init_row(request, row)
        leases: dict[Resource, Lease] = {"rows": row, "pages": pages, "prefix_locks": lock}
        event = "admit" if request.state == "waiting" else "readmit"
        self._fire(request, event, "scheduler", "", leases)
        return True

    def _displace(self, head: Request) -> bool:
        """A waiting request of higher priority pushes out lower ones, if that makes it fit.

        Returns whether somebody left at once, because no launched step contained it."""
        if not any(r.priority < head.priority for r in self.roster.device):
            return False
        candidate = self._candidate(head)
        # Admission keeps a page free for each of those who decode; one that leaves needs none.
        holders = [
            Holder(r.life, r.priority, self.kv.exclusive(self._pages(r)) + (not r.is_prefill))
            for r in self.roster.device
        ]
        headroom = sum(not r.is_prefill for r in self.roster.device)
        missing = candidate.pages + headroom - self.kv.available - self._pages_coming()
        rows = 1 - self.rows.free - len(self._leaving())
        victims = [
            self.roster.lives[life] for life in displace(head.priority, missing, rows, holders)
        ]
        for victim in victims:
            self._retract(victim, f"displaced by {head.rid}")
        return any(victim.state == "retracted" for victim in victims)
