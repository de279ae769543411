"""What the schedulers of all roles share: requests come in, are answered, paused, and expire.

A scheduler is the only one who fires transitions. It is deterministic and does no IO. Time, the
runner, the store and the sink of the trace are handed in, so the same class runs in production
(:mod:`engine.loop`), in scenarios and in simulation (:mod:`engine.sim`).

One turn of the loop is

1. hand over every message that arrived, :meth:`tick` the clock, :meth:`poll_store`,
   :meth:`pages_done`;
2. :meth:`commit` every step that has come back, in launch order;
3. :meth:`launch` while a step may be launched (``depth`` in flight at most);
4. :meth:`flush` what clients are to be told.

It is built in three layers, each of which knows only the ones below: :mod:`engine.lifecycle` moves
requests, :mod:`engine.stepping` computes them, and this module listens and answers. Who computes
and who gives way is decided in :mod:`engine.policy`. A role is a subclass: its chart, its kit, and
its hooks. :mod:`engine.scheduler` is the unified one; those of a pair, with three more layers
between, begin in :mod:`engine.paired`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from engine import endings
from engine.arrivals import Arrivals
from engine.basics import LifecycleBug, ModelFacts, Parts, Runner
from engine.deadlines import Timer
from engine.groups import member_of
from engine.intake import MAX_GROUP, Refusal, check_submission
from engine.request import Request
from engine.sessions import SessionError
from engine.stepping import Stepping
from fsm import pauses
from fsm.ledger import Lease
from fsm.pauses import PauseMode
from fsm.resources import Resource
from fsm.rules import Facts
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

__all__ = ["LifecycleBug", "ModelFacts", "PauseMode", "Runner", "SchedulerCore"]


class SchedulerCore(Stepping):
    """A scheduler but for what its role makes of it."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.draining = False
        self._drain_deadline: float | None = None
        self._arrivals = Arrivals(self.boot_id, self.model.eos_token_ids, self.spans, self.outbox)
        self._replies: list[FromEngine] = []

    # --- hooks of a role ---

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
        origin = self.tracer.cause
        for index, rid in enumerate(rids if refusal is None else [message.rid]):
            member = member_of(message, index)
            request = self._arrive(member, rid, group, prompt, max_new, now, refusal is None)
            self.tracer.cause = self.tracer.last
            if refusal is not None:
                self._refuse(request, refusal)
            else:
                self._enqueue(request, message.deadline_s, now)
            self.tracer.cause = origin

    def abort(self, message: Abort) -> None:
        """End requests by exact rid, group rid, or all; reply with what became of each rid.

        A client that left before it was shown the end of a turn has not had this turn."""
        outcome: dict[str, list[str]] = {"aborted": [], "finished": [], "unknown": []}
        wanted = list(self.roster.live) if message.all else list(message.rids)
        for rid in wanted:
            requests = self._meant(rid)
            for request in requests:
                self._deliver(request, "abort", endings.aborted(request, message.cause))
            if requests:
                outcome["aborted"].append(rid)
            elif rid in self.roster.recent or f"{rid}#0" in self.roster.recent:
                outcome["finished"].append(rid)
                if message.cause in ("disconnect", "slow_reader") and rid in self.roster.recent:
                    self.sessions.drop_last_turn(self.roster.recent[rid])
            else:
                outcome["unknown"].append(rid)
        if message.query:
            self._replies.append(Reply(message.query, outcome))

    def _meant(self, rid: str) -> list[Request]:
        """Live requests that a client calls ``rid``: one, or the members of a group."""
        return self.groups.members(rid) or [r for r in [self.roster.live.get(rid)] if r]

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
        if holders or self.steps:
            return False, f"Cache not flushed: {holders} requests have KV in use."
        freed = self.kv.cache.flush()
        return True, f"Cache flushed: {freed} pages."

    # --- pauses and weights ---

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating. ``abort`` ends every request; ``in_place`` keeps all as it is;
        ``retract`` gives all KV back and keeps the tokens. Submissions are queued, and visible,
        meanwhile.

        Idempotent. A second pause in another mode can go further, and takes nothing back.
        """
        now = self._now()
        self.pause_mode = pauses.after_pause(self.pause_mode, mode)
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
                self._deliver(timer.request, "prefetch_expired")
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
        kit = set(self.base_kit)
        if accepted:
            if message.session is not None:
                kit.add("session_turns")
            if group is not None:
                kit.add("group_members")
            kit |= self._extra_kit(prompt)
        request, leases = self._arrivals.begin(
            message, rid, group, prompt, max_new_tokens, kit, now
        )
        self._paired(request, message)
        self.roster.lives[request.life] = request
        self.driver.begin(request, leases)
        if accepted:
            self.roster.live[rid] = request
        self.tracer.submit(
            request.life, rid, tuple(sorted(kit)), tuple(leases), len(prompt), max_new_tokens
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
