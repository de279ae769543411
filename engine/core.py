"""What the schedulers of all roles share: intake, messages, deadlines, steps, and firing.

A scheduler is the only one who fires transitions. It is deterministic and does no IO. Time, the
runner, the store and the sink of the trace are handed in, so the same class runs in production
(:mod:`engine.loop`), in scenarios and in simulation (:mod:`engine.sim`).

One turn of the loop is

1. hand over every message that arrived, :meth:`tick` the clock, :meth:`poll_store`,
   :meth:`pages_done`;
2. :meth:`commit` every step that has come back, in launch order;
3. :meth:`launch` while a step may be launched (``depth`` in flight at most);
4. :meth:`flush` what clients are to be told.

What something does to a request is not decided here but in :func:`fsm.decide.decide`; who
computes and who gives way is decided in :mod:`engine.policy`. A scheduler gathers facts, applies
the answers by firing events, and keeps the indexes (queue, device, live rids), which follow from
the states and are updated in one place, :meth:`_moved`.

A role is a subclass: its chart, its kit, and four hooks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Literal, Protocol, TypeAlias

from engine import endings
from engine.answers import Outbox
from engine.batch import (
    Batch,
    BatchItem,
    PageExport,
    PageImport,
    PagesDone,
    RowInit,
    Sampled,
    StepResult,
)
from engine.batching import Span, build_batch
from engine.config import EngineConfig
from engine.deadlines import Deadlines, Timer
from engine.groups import GroupBook, member_of
from engine.intake import MAX_GROUP, Limits, Refusal, check_submission
from engine.pages import Kv, Pages, PrefixLock
from engine.request import Request
from engine.roster import Roster
from engine.sessions import SessionBook, SessionError
from engine.spans import SpanBook
from engine.store import PageStore
from engine.stored import StoredKv
from fsm.chart import Actor, Chart, Edge, Move
from fsm.decide import decide
from fsm.driver import Driver, Subject
from fsm.ledger import Lease, Ledger, Pool, SlotLease, SlotPool
from fsm.resources import Resource
from fsm.rules import Decision, Facts, Message
from fsm.trace import Sink, Tracer
from transport.messages import (
    FILL,
    Abort,
    CloseSession,
    Drain,
    Finish,
    FromEngine,
    Load,
    OpenSession,
    Outputs,
    Reply,
    StopMatched,
    Submit,
)


class LifecycleBug(AssertionError):  # noqa: N818 - it names what it is
    """An invariant is broken. Never an operating error: the process must not go on."""


PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]


class Runner(Protocol):
    """Takes work in order and returns at once; results come back through the loop."""

    def launch(self, work: Batch | PageExport | PageImport) -> None: ...


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the scheduler knows of the model."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    weights_digest: str
    kv_layout: str = ""
    """How a page is laid out, in words; equal only where pages can be exchanged."""


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


class SchedulerCore(ABC):
    """All requests of one node of some role."""

    role: ClassVar[str]
    chart: ClassVar[Chart]
    base_kit: ClassVar[frozenset[Resource]]
    queued: ClassVar[frozenset[str]]
    """States in which a request is in the queue, by rank."""
    on_device: ClassVar[frozenset[str]]
    """States in which a step may be planned for a request."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelFacts,
        kv_pages: int,
        clock: Callable[[], float],
        runner: Runner,
        store: PageStore | None = None,
        boot_id: str = "boot",
        node: str = "",
        trace: Sink | None = None,
    ) -> None:
        self.config: Final = config
        self.model: Final = model
        self.boot_id: Final = boot_id
        self.node: Final = node or f"{self.role}-0"
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
        self.stats: Final = Stats()

        self._deadlines = Deadlines(self.chart, self.queued)
        self._drain_deadline: float | None = None
        self.draining = False
        self._in_flight: deque[tuple[Batch, tuple[Request, ...]]] = deque()
        self._rows_taken: list[RowInit] = []
        self._replies: list[FromEngine] = []
        self._cause: Message | None = None
        self._lives_minted = 0
        self._steps = 0
        self.tracer.header(
            boot_id,
            (self.role,),
            {self.chart.name: self.chart.fingerprint},
            {pool.name: pool.counts().total for pool in pools},
            config.page_size,
        )

    # --- hooks of a role ---

    def _role_pools(self) -> list[Pool]:
        """Pools that only this role has."""
        return []

    def _extra_kit(self, prompt: list[int]) -> set[Resource]:
        """What an accepted request with ``prompt`` needs besides the base kit."""
        return set()

    def _check_pair(self, message: Submit) -> None:
        """Raise :class:`~engine.intake.Refusal` for what a role with peers cannot pair."""

    def _accepting(self, message: Submit) -> None:
        """Every check has passed; nothing of ``message`` exists yet."""

    def _paired(self, request: Request, message: Submit) -> None:
        """Note what a role with peers needs to know of a request."""

    def _enqueued(self, request: Request) -> None:
        """The request is in its first state after intake."""

    def _postponed(self, timer: Timer) -> bool:
        """Whether a deadline that is due does not count yet, and was set again."""
        return False

    @abstractmethod
    def _queue_up(self, request: Request, leases: dict[Resource, Lease]) -> str:
        """Reserve what the first state after intake holds besides session and group; the event."""

    @abstractmethod
    def _runnable(self) -> list[Request]:
        """Requests whose next span may be computed now; admissions and victims are settled here."""

    @abstractmethod
    def _after(self, request: Request, edge: Edge, cause: Message | None) -> None:
        """Bookkeeping of the role after a move, before the answer is accounted for. ``cause`` is
        the message that was decided; None for intake and policy."""

    # --- what arrives ---

    def submit(self, message: Submit) -> None:
        """Intake: validate, then queue, or refuse at the door. All members of a group or none."""
        now = self._now()
        group = message.rid if message.n > 1 else None
        members = min(message.n, MAX_GROUP)  # more are refused below, and must not be listed
        rids = [f"{message.rid}#{i}" for i in range(members)] if group else [message.rid]
        refusal: Refusal | None = None
        prompt, max_new = message.prompt, 0
        try:
            self._check_ids(message, rids)
            self._check_pair(message)
            if message.session is not None:
                prompt = self._session_prompt(message)
            max_new = check_submission(message, prompt, self.limits)
            if message.session is not None:
                fill = message.limit_is_default or message.sampling.max_new_tokens == FILL
                max_new = self.sessions.check_turn(message.session, len(prompt), max_new, fill)
            self._check_room(len(rids))
        except Refusal as error:
            refusal = error
        except SessionError as error:
            refusal = Refusal(f"session_params: {error}")
        if refusal is None:
            self._accepting(message)
        for index, rid in enumerate(rids if refusal is None else [message.rid]):
            member = member_of(message, index)
            request = self._arrive(member, rid, group, prompt, max_new, now, refusal is None)
            self.tracer.cause = self.tracer.last
            if refusal is not None:
                self._refuse(request, refusal)
            else:
                self._enqueue(request, message.deadline_s, now)
            self.tracer.cause = None

    def abort(self, message: Abort) -> None:
        """End requests by exact rid, group rid, or all; reply with what became of each rid."""
        outcome: dict[str, list[str]] = {"aborted": [], "finished": [], "unknown": []}
        wanted = list(self.roster.live) if message.all else list(message.rids)
        for rid in wanted:
            requests = self.groups.members(rid) or [r for r in [self.roster.live.get(rid)] if r]
            for request in requests:
                self._deliver(request, "abort", endings.aborted(request, message.cause))
            if requests:
                outcome["aborted"].append(rid)
            elif rid in self.roster.recent or f"{rid}#0" in self.roster.recent:
                outcome["finished"].append(rid)
            else:
                outcome["unknown"].append(rid)
        if message.query:
            self._replies.append(Reply(message.query, outcome))

    def stop_matched(self, message: StopMatched) -> None:
        """The server found a stop string. Tokens past it never reached the client and do not
        count."""
        request = self.roster.live.get(message.rid)
        if request is None:
            late = self.roster.recent.get(message.rid)
            if late is not None and late.session is not None and message.tokens > 0:
                self.sessions.trim_last_turn(late, message.tokens)
            return
        if not 1 <= message.tokens <= request.output_len:
            return  # a stop in tokens that were never sent: the server is confused, nothing is lost
        finish = Finish(type="stop", matched=message.matched)
        decision = self._decide(request, "stop_matched", Facts(launched=request.in_steps > 0))
        if decision.effect == "fire":
            del request.tokens[request.prompt_len + message.tokens :]
            self._apply(request, "stop_matched", decision, finish)

    def open_session(self, message: OpenSession) -> None:
        self.sessions.now = self._now()
        data: dict[str, object] = {"session": message.session}
        capacity = min(message.capacity or self.limits.context_length, self.limits.context_length)
        try:
            self.sessions.open(message.session, capacity, message.timeout_s)
        except SessionError as error:
            data = {"error": str(error), "status": 400}
        self._replies.append(Reply(message.query, data))

    def close_session(self, message: CloseSession) -> None:
        data: dict[str, object] = {"closed": True}
        try:
            turn = self.sessions.close(message.session)
            if turn is not None:
                self._deliver(turn, "abort", endings.aborted(turn, "api"))
        except SessionError as error:
            data = {"closed": False, "error": str(error), "status": 400}
        self._replies.append(Reply(message.query, data))

    def drain(self, message: Drain) -> None:
        """Refuse what comes, finish what is here, and after the grace end the rest."""
        self.draining = True
        deadline = self._now() + message.grace_s
        if self._drain_deadline is None or deadline < self._drain_deadline:
            self._drain_deadline = deadline
        self.tick()

    def reply(self, query: int, data: object) -> None:
        """Answer a question that somebody else knows the answer to, in order with everything
        else."""
        self._replies.append(Reply(query, data))

    def retract(self, rid: str) -> bool:
        """Push one request out on purpose (fault hook, tests). False where it cannot be."""
        return False

    def flush_cache(self) -> tuple[bool, str]:
        """Empty the prefix cache; refused while any request has KV, or a step is in flight."""
        holders = sum("pages" in r.leases for r in self.roster.lives.values())
        if holders or self._in_flight:
            return False, f"Cache not flushed: {holders} requests have KV in use."
        freed = self.kv.cache.flush()
        return True, f"Cache flushed: {freed} pages."

    # --- pauses and weights ---

    @property
    def frozen(self) -> bool:
        """Nothing is launched."""
        return self.pause_mode is not None

    @property
    def drops_kv(self) -> bool:
        """The pause gives all KV back."""
        return self.pause_mode in ("abort", "retract")

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. ``abort`` ends every request; ``in_place`` keeps all as it is;
        ``retract`` gives all KV back and keeps the tokens. Submissions are queued, and visible,
        meanwhile.

        Idempotent. A second pause in another mode can go further, and takes nothing back.
        """
        now = self._now()
        if self.pause_mode in (None, "in_place"):
            self.pause_mode = mode
        self._deadlines.freeze(now)
        if mode == "abort":
            self.abort(Abort(all=True))
        elif mode == "retract":
            for request in list(self.roster.lives.values()):
                self._paused(request)

    def resume(self) -> None:
        """Generate again. Idempotent."""
        now = self._now()
        self.pause_mode = None
        self._deadlines.thaw(now)
        for request in list(self.roster.lives.values()):
            self._settle(request)

    def use_weights(self, digest: str, in_place: bool = False) -> tuple[bool, str]:
        """Compute under other weights from now on, if no KV of the old ones is in use.

        With ``in_place`` requests go on with the KV they have; nothing of it is shared or kept, and
        nothing that was cached is found again (invariant 9).
        """
        flushed, why = self.flush_cache()
        if not flushed and not in_place:
            return False, why
        self.weights = digest
        self.kv.use_weights(digest)
        if self.stored is not None:
            self.stored.use_weights(digest)
        return True, f"Weights: {digest}."

    def _paused(self, request: Request) -> None:
        """A pause that drops KV reaches a request."""
        self._deliver(request, "paused")

    # --- time ---

    def tick(self) -> None:
        """Fire every deadline that has passed."""
        now = self._now()
        while (timer := self._deadlines.due(now)) is not None:
            if timer.kind == "prefetch":
                self._deliver(timer.request, "prefetch_failed")
            elif not self._postponed(timer):
                finish = endings.expired(timer.request, timer.kind)
                self._deliver(timer.request, "expired", finish)
        for name in self.sessions.expired(now):
            self.sessions.close(name)
        if self._drain_deadline is not None and self._drain_deadline <= now and self.roster.live:
            self.abort(Abort(all=True, cause="drain"))

    def next_deadline(self) -> float | None:
        """When :meth:`tick` has something to do next (seconds on the node's clock)."""
        times = [t for t in (self._deadlines.next, self.sessions.next_expiry) if t is not None]
        if self._drain_deadline is not None and self.roster.live:
            times.append(self._drain_deadline)
        return min(times, default=None)

    def deadlines_of(self, request: Request) -> dict[str, float]:
        """The deadlines that apply to a request where it is: kind → seconds left."""
        now = self._now()
        left = self._deadlines.of(request, now)
        if self._drain_deadline is not None and self.chart.is_live(request.state):
            left["drain"] = self._drain_deadline - now
        return left

    # --- steps ---

    @property
    def can_launch(self) -> bool:
        return len(self._in_flight) < self.config.depth

    @property
    def steps_in_flight(self) -> int:
        return len(self._in_flight)

    def launch(self) -> Batch | None:
        """Plan one step and hand it to the runner; None when there is nothing to compute."""
        if not self.can_launch or self.frozen:
            return None
        spans = self._plan(self._runnable())
        if not spans:
            return None
        self._steps += 1
        batch = build_batch(self._steps, self.config.page_size, spans, tuple(self._rows_taken))
        self._rows_taken.clear()
        for span in spans:
            span.request.launched = span.start + span.length
            span.request.in_steps += 1
        self._in_flight.append((batch, tuple(span.request for span in spans)))
        self._runner.launch(batch)
        return batch

    def commit(self, result: StepResult) -> None:
        """A launched step has come back; steps come back in launch order."""
        if not self._in_flight or self._in_flight[0][0].step != result.step:
            raise LifecycleBug(f"step {result.step} came back out of order")
        batch, requests = self._in_flight.popleft()
        self._now()
        self.stats.steps += 1
        for index, (item, request) in enumerate(zip(batch.items, requests, strict=True)):
            request.in_steps -= 1
            error = result.error if result.error is not None else result.sampled[index].error
            if error is not None:
                self._commit_failure(item, request, error)
            else:
                self._commit_item(item, request, result.sampled[index])
            self._settle(request)

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

    # --- what leaves ---

    def flush(self) -> list[FromEngine]:
        """Outputs of this turn in one frame, then replies."""
        out: list[FromEngine] = []
        outputs = self.outbox.flush()
        if outputs:
            out.append(Outputs(outputs))
        out.extend(self._replies)
        self._replies.clear()
        return out

    @property
    def at_rest(self) -> bool:
        """Invariant 8: nothing live, nothing held, nothing that could still be touched."""
        return (
            not self.roster.lives
            and not self._in_flight
            and (self.stored is None or self.stored.at_rest)
            and self.ledger.at_rest
        )

    def load(self) -> Load:
        counts = self.kv.pool.counts()
        stats = self.stats
        return Load(
            running=len(self.roster.device),
            waiting=len(self.roster.queue),
            tokens_used=counts.held * self.config.page_size,
            tokens_total=counts.total * self.config.page_size,
            steps=stats.steps,
            generated_tokens=stats.generated_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            retracted=stats.retracted,
            aborted=stats.aborted,
            at_rest=self.at_rest,
            retracted_now=sum(r.state == "retracted" for r in self.roster.lives.values()),
            held_now=sum(r.state == "held" for r in self.roster.lives.values()),
        )

    def audit(self) -> list[str]:
        """Every invariant that can be checked from inside, from scratch; empty when all hold."""
        faults = self.ledger.audit() + self.kv.audit() + self.roster.audit()
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
        for batch, requests in self._in_flight:
            for index, request in enumerate(requests):
                loose = [
                    page
                    for page in batch.pages_of(index)
                    if request.life not in self.kv.pool.owners_of(page)
                ]
                if loose:
                    faults.append(
                        f"step {batch.step} touches released pages {loose} of {request.rid}"
                    )
        return faults

    # --- intake ---

    def _check_ids(self, message: Submit, rids: Iterable[str]) -> None:
        rid = message.rid
        if not rid:
            raise Refusal("rid: is empty")
        if rid in self.groups or any(r in self.roster.live for r in (rid, *rids)):
            raise Refusal(
                f"rid: {rid!r} is the id of a live request; ids may be reused once it ended"
            )

    def _session_prompt(self, message: Submit) -> list[int]:
        if message.n > 1:
            raise Refusal("n: a session takes one sample a turn")
        return self.sessions.history(message.session or "") + message.prompt

    def _check_room(self, members: int) -> None:
        if self.draining:
            raise Refusal("the server is shutting down", 503)
        if len(self.roster.queue) + members > self.config.max_queued_requests + self.rows.free:
            raise Refusal("The request queue is full.", 503)

    def _arrive(
        self,
        message: Submit,
        rid: str,
        group: str | None,
        prompt: list[int],
        max_new_tokens: int,
        now: float,
        accepted: bool,
    ) -> Request:
        self._lives_minted += 1
        life = f"{self.boot_id}:{self._lives_minted}"
        kit = set(self.base_kit)
        if accepted:
            if message.session is not None:
                kit.add("session_turns")
            if group is not None:
                kit.add("group_members")
            kit |= self._extra_kit(prompt)
        request = Request(
            life,
            rid,
            list(prompt),
            message.sampling,
            frozenset(kit),
            self._lives_minted,
            now,
            message.priority,
            message.session,
            group,
        )
        request.max_new_tokens = max_new_tokens
        self._paired(request, message)
        stop_ids = set(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            stop_ids |= set(self.model.eos_token_ids)
        request.stop_ids = frozenset(stop_ids)
        span = self.spans.open(life, f"request {rid}", now)
        span.span.attributes.update(
            {"gen_ai.request.id": rid, "gen_ai.usage.input_tokens": len(prompt)}
        )
        request.span = span.span
        self.roster.lives[life] = request
        leases: dict[Resource, Lease] = {
            "spans": span,
            "frontend_records": self.outbox.open(request),
        }
        self.driver.begin(request, leases)
        if accepted:
            self.roster.live[rid] = request
        self.tracer.submit(
            life, rid, tuple(sorted(kit)), tuple(leases), len(prompt), max_new_tokens
        )
        return request

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        request.finish = refusal.finish
        self.stats.refused += 1
        self._fire(request, "reject", "intake", str(refusal))

    def _enqueue(self, request: Request, deadline_s: float | None, now: float) -> None:
        leases: dict[Resource, Lease] = {}
        if request.session is not None:
            leases["session_turns"] = self.sessions.reserve(request)
        if request.group is not None:
            leases["group_members"] = self.groups.reserve(request)
        event = self._queue_up(request, leases)
        self._fire(request, event, "intake", "", leases)
        if self.config.waiting_timeout_s is not None:
            self._deadlines.set(now + self.config.waiting_timeout_s, "waiting", request)
        if deadline_s is not None:
            request.client_deadline = now + deadline_s
            self._deadlines.set(request.client_deadline, "client", request)
        self._enqueued(request)

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
        if request.span is not None:
            request.span.events.append((self._clock(), target))
        answers = "frontend_records" in move.drops
        if self.tracer.active:
            self._trace(request, move, by, why, request.finish if answers else None)
        self._after(request, move.edge, self._cause)
        if answers:
            self._answered(request)
        if self.chart.is_live(source) and not self.chart.is_live(target):
            self._retired(request)
        if self.config.checks:
            faults = self.audit()
            if faults:
                raise LifecycleBug(f"after {move.edge}: " + "; ".join(faults[:5]))

    def _trace(
        self, request: Request, move: Move, by: str, why: str, finish: Finish | None
    ) -> None:
        self.tracer.move(
            request.life,
            request.attempt,
            request.rid,
            move.edge.event,
            by,
            move.edge.source,
            move.edge.target,
            move.takes,
            move.drops,
            why,
            request.output_len,
            request.leases["pages"].units if "pages" in move.takes else 0,
            finish.type if finish is not None else "",
            finish.status if finish is not None else None,
        )

    def _answered(self, request: Request) -> None:
        finish = request.finish
        if finish is None:
            raise LifecycleBug(f"{request.rid} was answered without a reason")
        if request.span is not None:
            request.span.status = finish.message or finish.type
            request.span.attributes["gen_ai.usage.output_tokens"] = request.output_len
        self.tracer.answer(
            request.life,
            request.rid,
            finish.type,
            request.output_len,
            finish.status,
            finish.message,
        )

    def _retired(self, request: Request) -> None:
        if self.roster.retired(request):
            if request.finish is not None and request.finish.type == "abort":
                self.stats.aborted += 1
            else:
                self.stats.finished += 1

    # --- planning a step ---

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

    def _init_row(self, request: Request, row: SlotLease) -> None:
        """The runner is to know the request's history, before the next step."""
        self._rows_taken.append(
            RowInit(
                row.slot,
                list(request.tokens),
                request.prompt_len,
                request.sampling,
                tuple(sorted(request.stop_ids)),
            )
        )

    def _admitted(self, request: Request, cached_tokens: int) -> None:
        """The request is on the device for the first time: its running time begins."""
        request.admitted_at = self._clock()
        request.cached_tokens = cached_tokens
        self.stats.cached_tokens += request.cached_tokens
        self.stats.prompt_tokens += request.prompt_len
        if self.config.running_timeout_s is not None:
            deadline = request.admitted_at + self.config.running_timeout_s
            self._deadlines.set(deadline, "running", request)

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

    # --- committing a step ---

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

    def _now(self) -> float:
        now = self._clock()
        self.spans.now = self.sessions.now = now
        return now
