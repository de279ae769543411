"""The part of a scheduler that moves requests: pools, chart, driver, and the indexes that follow.

The lowest of a scheduler's layers (:mod:`engine.core` says which there are). What something does to
a request is not decided here but in :func:`fsm.decide.decide`. Whoever is built on this gathers
facts and delivers messages, and everything takes one way:

:meth:`Lifecycle._deliver` asks ``decide``; :meth:`Lifecycle._apply` fires what it says; the driver
moves the request, and the leases that its states hold; :meth:`Lifecycle._moved` lets the indexes
(queue, device, live rids), the trace and the role follow; :meth:`Lifecycle._settle` delivers what
is due then. Intake and policy, which no message decides, reserve leases and call
:meth:`Lifecycle._fire`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Final

from engine.accounts import Accounts
from engine.answers import Outbox
from engine.basics import LifecycleBug, Parts
from engine.deadlines import Deadlines
from engine.groups import GroupBook
from engine.intake import Limits
from engine.pages import Kv, Pages
from engine.request import Request
from engine.roster import Roster
from engine.sessions import SessionBook
from engine.spans import SpanBook
from engine.steps import Steps
from engine.stored import StoredKv
from fsm import pauses
from fsm.chart import Actor, Chart, Edge, Move
from fsm.decide import decide
from fsm.driver import Driver, Subject
from fsm.ledger import Lease, Ledger, Pool, SlotLease, SlotPool
from fsm.pauses import PauseMode
from fsm.resources import Resource
from fsm.rules import Decision, Facts, Message
from fsm.trace import Tracer
from transport.messages import Finish


class Lifecycle(ABC):
    """All requests of one node, and everything they can hold."""

    role: ClassVar[str]
    chart: ClassVar[Chart]
    base_kit: ClassVar[frozenset[Resource]]
    queued: ClassVar[frozenset[str]]
    """States in which a request is in the queue, by rank."""
    on_device: ClassVar[frozenset[str]]
    """States in which a step may be planned for a request."""

    def __init__(self, parts: Parts) -> None:
        config, model, kv_pages = parts.config, parts.model, parts.kv_pages
        clock, runner, store, trace = parts.clock, parts.runner, parts.store, parts.trace
        self.config: Final = config
        self.model: Final = model
        self.boot_id: Final = parts.boot_id
        self.node: Final = parts.node or f"{self.role}-0"
        self.weights = model.weights_digest
        """Digest of the weights that compute now."""
        self._clock = clock
        self._runner = runner
        self.tracer: Final = Tracer(self.node, clock, trace)
        context = config.context_length or model.context_length
        self.limits: Final = Limits(model.vocab_size, context, kv_pages * config.page_size)

        rows = config.max_running_requests
        open_limit = 2 * rows + config.max_queued_requests + 1
        self.rows: Final = SlotPool("rows", rows)
        self.kv: Final = Kv(
            kv_pages,
            config.page_size,
            rows + config.max_prefetches,
            config.prefix_cache,
            self.tracer.lease if trace is not None else None,
        )
        self.tracer.watch(self.kv.balance)
        self.kv.use_weights(self.weights)
        self.pause_mode: PauseMode | None = None
        self.sessions: Final = SessionBook(config.max_sessions)
        self.groups: Final = GroupBook(open_limit)
        self.spans: Final = SpanBook(open_limit)
        self.outbox: Final = Outbox(open_limit)
        pools: list[Pool] = [
            self.rows,
            self.kv.pool,
            self.kv.locks,
            self.sessions.pool,
            self.groups.pool,
            self.spans.pool,
            self.outbox.pool,
        ]
        self.stored: StoredKv | None = None
        if store is not None:
            self.stored = StoredKv(
                store,
                self.kv,
                model.weights_digest,
                config.dtype,
                model.kv_layout,
                config.max_prefetches,
                runner.launch,
                partial(self.tracer.lease, resource="prefetches") if trace is not None else None,
            )
            pools.append(self.stored.prefetches)
        pools.extend(self._role_pools())
        self.ledger: Final = Ledger(pools)
        self.driver: Final = Driver(self.chart, clock, self._moved)
        self.roster: Final = Roster(self.queued, self.on_device)
        self.accounts: Final = Accounts(self.tracer, clock)
        self.stats: Final = self.accounts.stats
        self.steps: Final = Steps(runner, config.page_size, config.depth)
        self._deadlines = Deadlines(self.chart, self.queued)
        self._cause: Message | None = None
        self.tracer.header(
            self.boot_id,
            (self.role,),
            {self.chart.name: self.chart.fingerprint},
            {pool.name: pool.counts().total for pool in pools},
            config.page_size,
        )

    # --- hooks of a role ---

    def _role_pools(self) -> list[Pool]:
        """Pools that only this role has."""
        return []

    @abstractmethod
    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        """Bookkeeping of the role after a move, before the answer is accounted for. ``cause`` is
        the message that was decided; None for intake and policy."""

    # --- pauses ---

    @property
    def frozen(self) -> bool:
        """Nothing is launched."""
        return pauses.is_frozen(self.role, self.pause_mode)

    @property
    def drops_kv(self) -> bool:
        """The pause gives all KV back."""
        return pauses.drops_kv(self.pause_mode)

    # --- moving requests ---

    def _decide(self, request: Request, message: Message, facts: Facts) -> Decision:
        decision = decide(self.chart, request.state, message, facts)
        if decision.effect == "refuse":
            raise LifecycleBug(f"{message} for {request.rid} in {request.state} ({facts})")
        return decision

    def _deliver(self, request: Request, message: Message, finish: Finish | None = None) -> None:
        """Something arrived for a request: decide, and apply."""
        decision = self._decide(request, message, Facts(launched=request.in_steps > 0))
        self._apply(request, message, decision, finish)

    def _apply(
        self, request: Request, message: Message, decision: Decision, finish: Finish | None
    ) -> None:
        if decision.effect != "fire" or decision.event is None:
            return
        if "frontend_records" in self.driver.move(request, decision.event).drops:
            request.finish = finish
        why = finish.message if finish else ""
        self._fire(request, decision.event, decision.by, why, cause=message)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        """Whoever waits for launched steps leaves as soon as none contains it, and whoever was
        held comes back as soon as generation goes on."""
        if request.in_steps == 0 and (request.state, "quiesce") in self.chart.table:
            self._deliver(request, "quiet")
        elif request.state == "held" and self.pause_mode is None:
            self._deliver(request, "continued")

    def _fire(
        self,
        request: Request,
        event: str,
        by: Actor,
        why: str = "",
        leases: dict[Resource, Lease] | None = None,
        cause: Message | None = None,
    ) -> None:
        self.spans.now = self.sessions.now = self._clock()
        self._cause = cause
        self.driver.fire(request, event, by, why, leases or {})

    def _moved(self, subject: Subject, move: Move, by: str, why: str) -> None:
        """Keep the indexes equal to the states; the driver calls this after every move."""
        request = self.roster.lives[subject.life]
        source, target = move.edge.source, move.edge.target
        self.roster.moved(request, source, target)
        self.accounts.moved(request, move, by, why)
        self._after(request, move.edge, self._cause)
        if "frontend_records" in move.drops:
            self.accounts.answered(request)
        if self.chart.is_live(source) and not self.chart.is_live(target):
            self._retired(request)
        if self.config.checks:
            faults = self.audit()
            if faults:
                raise LifecycleBug(f"after {move.edge}: " + "; ".join(faults[:5]))

    def _retired(self, request: Request) -> None:
        if self.roster.retired(request):
            self.accounts.retired(request)

    def _row(self, request: Request) -> SlotLease:
        row = request.leases["rows"]
        if not isinstance(row, SlotLease):
            raise LifecycleBug(f"{request.rid} in {request.state} has no row")
        return row

    def _pages(self, request: Request) -> Pages:
        pages = request.leases["pages"]
        if not isinstance(pages, Pages):
            raise LifecycleBug(f"{request.rid} in {request.state} has no pages")
        return pages

    # --- what must hold ---

    @property
    def at_rest(self) -> bool:
        """Invariant 8: nothing live, nothing held, nothing that could still be touched."""
        return (
            not self.roster.lives
            and not self.steps
            and (self.stored is None or self.stored.at_rest)
            and self.ledger.at_rest
        )

    def audit(self) -> list[str]:
        """Every invariant that can be checked from inside, from scratch; empty when all hold."""
        faults = self.ledger.audit() + self.kv.audit() + self.roster.audit()
        faults += self.steps.audit(self.kv.pool)
        for request in self.roster.lives.values():
            holds = self.chart.holds[request.state] & request.kit
            if request.leases.keys() != holds:
                faults.append(f"{request.rid} in {request.state}: holds {sorted(request.leases)}")
            pages = request.leases.get("pages")
            if isinstance(pages, Pages):
                faults += [
                    f"{request.rid}: page {page} is not its own"
                    for page in pages.table
                    if request.life not in self.kv.pool.owners_of(page)
                ]
        return faults

    def _now(self) -> float:
        now = self._clock()
        self.spans.now = self.sessions.now = now
        return now
