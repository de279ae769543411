"""Bugs planted on purpose: each breaks one promise of the real classes, as a person might.

A bug is a patch. ``tests/engine/test_planted.py`` plants one, runs a check of this suite unchanged,
and shows that the check fails and who noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from engine import endings, policy, steps
from engine import scheduler as scheduler_module
from engine.answers import Outbox
from engine.batch import FEED, Batch, BatchItem, Sampled, StepResult
from engine.groups import GroupBook
from engine.hash_model import HashModel
from engine.pages import Kv, Pages
from engine.policy import Candidate
from engine.prefix_cache import Node as CacheNode
from engine.prefix_cache import PrefixCache
from engine.request import Request
from engine.roster import Roster
from engine.scheduler import Scheduler
from engine.sessions import Session, SessionBook
from engine.store import Prefetch, PrefetchBook
from engine.stored import StoredKv
from fsm import ledger
from fsm.chart import Move
from fsm.driver import DictDriver, Subject
from fsm.ledger import SlotPool
from fsm.trace import Tracer
from transport.messages import Finish, Output, Outputs

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Bug:
    """What was planted, the check that has to fail, and the words of whoever noticed."""

    plant: Plant
    check: str
    noticed: str


BUGS: Final[dict[str, Bug]] = {}


def bug(check: str, noticed: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[plant.__name__] = Bug(plant, check, noticed)
        return plant

    return register


# --- leases and the driver ------------------------------------------------------------------------


@bug("walks", r"Broken: (rest|audit).*rows|Broken: progress")
def an_edge_that_forgets_to_release(patch: pytest.MonkeyPatch) -> None:
    """The row is taken out of the request and not given back to its pool."""

    def release(self: DictDriver, subject: Subject, move: Move) -> None:
        for resource in move.drops:
            lease = subject.leases.pop(resource)
            if resource != "rows" or move.edge.source != "stopping":
                lease.release(move.edge.pages)

    patch.setattr(DictDriver, "_release", release)


@bug("walks", "LifecycleBug: .*: holds ")
def an_edge_that_keeps_a_lease(patch: pytest.MonkeyPatch) -> None:
    """Released, but the request still lists it."""

    def release(self: DictDriver, subject: Subject, move: Move) -> None:
        for resource in move.drops:
            lease = subject.leases[resource]
            lease.release(move.edge.pages)
            if resource != "spans":
                del subject.leases[resource]

    patch.setattr(DictDriver, "_release", release)


@bug("walks", "LeaseError: rows: .* gives back|LifecycleBug: .*rows: free and taken slots")
def a_row_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    original = SlotPool.give_back

    def give_back(self: SlotPool, owner: str, slot: int) -> None:
        original(self, owner, slot)
        self._free.append(slot)

    patch.setattr(SlotPool, "give_back", give_back)


# --- steps and pages ------------------------------------------------------------------------------


@bug("walks", "LifecycleBug: quiet for .*launched=True")
def a_page_freed_under_a_launched_step(patch: pytest.MonkeyPatch) -> None:
    """Whoever is stopped leaves at once."""

    def settle(self: Scheduler, request: Request) -> None:
        if request.state in ("stopping", "retracting"):
            self._deliver(request, "quiet")

    patch.setattr(Scheduler, "_settle", settle)


@bug("walks", "LifecycleBug: .*touches released pages")
def a_page_freed_under_a_launched_step_past_the_table(patch: pytest.MonkeyPatch) -> None:
    """The same, by somebody who does not ask ``decide``."""

    def settle(self: Scheduler, request: Request) -> None:
        if request.state in ("stopping", "retracting"):
            self._fire(request, "quiesce", "runner")

    patch.setattr(Scheduler, "_settle", settle)


@bug("walks", "LifecycleBug: .*touches released pages")
def counters_reset_while_a_result_is_due(patch: pytest.MonkeyPatch) -> None:
    """B31: a victim forgets the steps that still contain it."""

    def retract(self: Scheduler, request: Request, why: str) -> None:
        self._fire(request, "retract", "scheduler", why)
        request.in_steps = 0
        self._settle(request)

    patch.setattr(Scheduler, "_retract", retract)


@bug("walks", "Broken: (golden|token order)")
def a_wrong_position_after_a_retraction(patch: pytest.MonkeyPatch) -> None:
    """One token too many is taken for computed."""
    original = Scheduler._admit_one

    def admit_one(self: Scheduler, request: Request) -> bool:
        admitted = original(self, request)
        if admitted and request.attempt and request.launched + 2 < len(request.tokens):
            request.launched += 1
        return admitted

    patch.setattr(Scheduler, "_admit_one", admit_one)


@bug("walks", "Broken: (golden|token order)|LifecycleBug")
def a_retraction_that_forgets_what_was_said(patch: pytest.MonkeyPatch) -> None:
    """B32: the token list is cut, though it is the source for the recovery."""
    original = Scheduler._moved

    def moved(self: Scheduler, subject: Subject, move: Move, by: str, why: str) -> None:
        original(self, subject, move, by, why)
        if move.edge.target == "retracted":
            request = self.roster.lives[subject.life]
            del request.tokens[request.prompt_len + 1 :]

    patch.setattr(Scheduler, "_moved", moved)


@bug("property", "Broken: golden")
def a_feed_of_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    original = HashModel.execute

    def execute(self: HashModel, batch: Batch) -> StepResult:
        fed = [item.row for item, token in _single(batch) if token == FEED]
        if len(fed) > 1:
            a, b = self._rows[fed[0]], self._rows[fed[1]]
            a.last, b.last = b.last, a.last
        return original(self, batch)

    patch.setattr(HashModel, "execute", execute)


def _single(batch: Batch) -> list[tuple[BatchItem, int]]:
    return [
        (item, batch.tokens[batch.qo_indptr[index]])
        for index, item in enumerate(batch.items)
        if item.count == 1
    ]


@bug("walks", "Broken: rows")
def a_step_on_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    original = steps.build_batch

    def build(step: int, page_size: int, spans: Sequence[Any], rows: Any) -> Batch:
        if len(spans) > 1:
            spans = [spans[0]._replace(row=spans[1].row), *spans[1:]]
        return original(step, page_size, spans, rows)

    patch.setattr(steps, "build_batch", build)


# --- prefix cache ---------------------------------------------------------------------------------


@bug("prefix cache", "LeaseError: page .* is not owned by cache")
def a_double_free_in_the_prefix_cache(patch: pytest.MonkeyPatch) -> None:
    original = PrefixCache._remove

    def remove(self: PrefixCache, node: CacheNode) -> None:
        original(self, node)
        self._pool.drop(node.page, ledger.CACHE)

    patch.setattr(PrefixCache, "_remove", remove)


@bug("walks", r"free list differs|LeaseError: page \d+ was free and is owned")
def a_double_free_past_the_owners(patch: pytest.MonkeyPatch) -> None:
    """The page is put on the free list by hand as well."""
    original = PrefixCache._remove

    def remove(self: PrefixCache, node: CacheNode) -> None:
        original(self, node)
        self._pool._free.append(node.page)  # its owner count was right, so nobody raises

    patch.setattr(PrefixCache, "_remove", remove)


@bug("prefix cache", "AssertionError|LeaseError|KeyError")
def a_lock_that_skips_the_node_itself(patch: pytest.MonkeyPatch) -> None:
    """B26."""
    lock, unlock = PrefixCache.lock, PrefixCache.unlock

    def at_parent(node: CacheNode) -> CacheNode:
        return node.parent if node.parent is not None else node

    patch.setattr(PrefixCache, "lock", lambda self, n, o: lock(self, at_parent(n), o))
    patch.setattr(PrefixCache, "unlock", lambda self, n, o: unlock(self, at_parent(n), o))


@bug("b26", "AssertionError|LeaseError|LifecycleBug|Broken")
def a_lock_that_skips_the_node_itself_with_requests(patch: pytest.MonkeyPatch) -> None:
    a_lock_that_skips_the_node_itself(patch)


@bug("prefix cache", "AssertionError|KeyError|LeaseError")
def an_eviction_of_a_locked_leaf(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PrefixCache,
        "_evictable",
        staticmethod(lambda node: node.parent is not None and not node.children),
    )


@bug("prefix cache", "AssertionError|KeyError")
def an_eviction_of_the_most_recently_used(patch: pytest.MonkeyPatch) -> None:
    """No page is lost, only the wrong one goes first."""
    original = PrefixCache._touch

    def touch(self: PrefixCache, node: CacheNode) -> None:
        original(self, node)
        node.stamp = -self._clock
        self._offer(node)

    patch.setattr(PrefixCache, "_touch", touch)


@bug("walks", "Broken: golden")
def a_prefix_cached_beyond_the_committed_tokens(patch: pytest.MonkeyPatch) -> None:
    """B23: pages whose text is known and whose KV nobody has computed."""
    original = Kv.give_back

    def give_back(self: Kv, lease: Pages, disposition: Any) -> None:
        lease.request.committed = min(len(lease.request.tokens), lease.capacity)
        original(self, lease, disposition)

    patch.setattr(Kv, "give_back", give_back)


@bug("walks", "Broken|LifecycleBug|LeaseError")
def a_match_that_leaves_nothing_to_compute(patch: pytest.MonkeyPatch) -> None:
    """The last page is shared although its last token's logits are wanted."""
    original = PrefixCache.match

    def match(self: PrefixCache, tokens: Sequence[int], limit: int) -> Any:
        return original(self, tokens, limit + 1)

    patch.setattr(PrefixCache, "match", match)


@bug(
    "walks",
    "LifecycleBug: .*(is not its own|touches released|locked and owned by nobody)|LeaseError",
)
def a_shared_page_that_is_not_owned(patch: pytest.MonkeyPatch) -> None:
    """B26's other half: matched pages are used and not claimed."""
    original = ledger.PagePool.share

    def share(self: ledger.PagePool, page: int, owner: str) -> None:
        if owner == ledger.CACHE:
            original(self, page, owner)

    patch.setattr(ledger.PagePool, "share", share)


@bug("reservation", "AssertionError")
def a_failed_reservation_that_leaves_something(patch: pytest.MonkeyPatch) -> None:
    """Invariant 7: a lock is taken before it is known whether the pages are there."""
    original = Kv.reserve

    def reserve(self: Kv, request: Request, headroom: int = 0) -> Any:
        try:
            return original(self, request, headroom)
        except ledger.Exhausted:
            self.locks.take(request.life)
            raise

    patch.setattr(Kv, "reserve", reserve)


# --- answers --------------------------------------------------------------------------------------


@bug("walks", "Broken: one terminal")
def an_answer_sent_twice(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._retired

    def retired(self: Scheduler, request: Request) -> None:
        original(self, request)
        if request.finish is not None and request.finish.type == "abort":
            self._replies.append(Outputs([Output(request.rid, 0, finish=request.finish)]))

    patch.setattr(Scheduler, "_retired", retired)


@bug("walks", "Broken: one terminal")
def an_answer_never_sent(patch: pytest.MonkeyPatch) -> None:
    """Who is aborted in the queue has no tokens, and nobody tells him."""

    def answer(self: Outbox, request: Request) -> None:
        self.pool.give_back(request.life, 1)
        self._answered.add(request.life)
        if request.output_len or request.finish is None or request.finish.type != "abort":
            self._draft(request, request.output_len)

    patch.setattr(Outbox, "answer", answer)


@bug("walks", "LeaseError: a token for .* after its answer|Broken: (one terminal|token order)")
def a_late_token_after_the_answer(patch: pytest.MonkeyPatch) -> None:
    """B13, B24: what was sampled before the abort is delivered after it."""
    original = Scheduler._commit_item

    def commit(self: Scheduler, item: BatchItem, request: Request, sampled: Sampled) -> None:
        answered = request.state == "stopping"
        original(self, item, request, sampled)
        if answered and sampled.token is not None:
            request.tokens.append(sampled.token)
            self.outbox.token(request, sampled)

    patch.setattr(Scheduler, "_commit_item", commit)


@bug("walks", "Broken: (reason|golden)")
def a_stop_token_that_counts_before_the_minimum(patch: pytest.MonkeyPatch) -> None:
    original = endings.ending

    def ending(request: Request, token: int) -> Finish | None:
        if token in request.stop_ids and request.output_len + 1 < request.sampling.min_new_tokens:
            return Finish(type="stop", matched=token)
        return original(request, token)

    patch.setattr(endings, "ending", ending)


@bug("walks", "Broken: (reason|golden)")
def a_stop_token_that_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """B92's opposite: nothing but the length ends anybody."""

    def ending(request: Request, token: int) -> Finish | None:
        if request.output_len + 1 >= request.max_new_tokens:
            return Finish(type="length", length=request.max_new_tokens)
        return None

    patch.setattr(endings, "ending", ending)


@bug("walks", "Broken: one terminal")
def a_rid_that_is_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    """B06: the live index keeps who was answered."""
    original = Roster.retired

    def retired(self: Roster, request: Request) -> bool:
        accepted = original(self, request)
        if accepted and request.retractions:
            self.live[request.rid] = request
        return accepted

    patch.setattr(Roster, "retired", retired)


@bug("walks", "Broken: trace")
def a_trace_without_its_answer(patch: pytest.MonkeyPatch) -> None:
    original = Tracer.answer

    def answer(self: Tracer, life: str, rid: str, reason: str, *rest: Any) -> None:
        if reason != "abort":
            original(self, life, rid, reason, *rest)

    patch.setattr(Tracer, "answer", answer)


# --- sessions, groups, stores ---------------------------------------------------------------------


@bug("b111", "AssertionError|Broken|LeaseError")
def a_session_turn_that_is_not_ended_by_an_abort(patch: pytest.MonkeyPatch) -> None:
    original = SessionBook.end_turn

    def end_turn(self: SessionBook, session: Session, request: Request) -> None:
        if request.finish is not None and request.finish.type == "abort":
            self.pool.give_back(request.life, 1)  # the ledger is happy, the session is stuck
        else:
            original(self, session, request)

    patch.setattr(SessionBook, "end_turn", end_turn)


@bug("walks", "Broken: golden")
def a_session_history_extended_by_an_aborted_turn(patch: pytest.MonkeyPatch) -> None:
    """B111: roll-back is forgotten."""
    original = SessionBook.end_turn

    def end_turn(self: SessionBook, session: Session, request: Request) -> None:
        original(self, session, request)
        session.history = list(request.tokens)

    patch.setattr(SessionBook, "end_turn", end_turn)


@bug("walks", "Broken: rest: lives .*groups|KeyError")
def a_group_that_is_never_forgotten(patch: pytest.MonkeyPatch) -> None:
    """B07: the map of children only grows."""

    def leave(self: GroupBook, request: Request) -> None:
        del self._members[request.group or ""][request.life]
        self.pool.give_back(request.life, 1)

    patch.setattr(GroupBook, "leave", leave)


@bug("walks", "Broken: (rest|progress|trace).*group_members|LifecycleBug|Broken: progress")
def a_group_membership_that_leaks(patch: pytest.MonkeyPatch) -> None:
    def leave(self: GroupBook, request: Request) -> None:
        members = self._members[request.group or ""]
        del members[request.life]
        if not members:
            del self._members[request.group or ""]
            self.pool.give_back(request.life, 1)  # only the last one gives its place back

    patch.setattr(GroupBook, "leave", leave)


@bug("walks", "Broken: (rest|progress)")
def a_prefetch_unit_that_leaks(patch: pytest.MonkeyPatch) -> None:
    """B104: a read that was given up is never counted as over."""
    original = PrefetchBook.over

    def over(self: PrefetchBook, ticket: int) -> Prefetch | None:
        if ticket not in self._held:
            return None
        return original(self, ticket)

    patch.setattr(PrefetchBook, "over", over)


@bug("failed copy", "Broken: golden|AssertionError")
def loaded_pages_in_the_cache_before_they_are_written(patch: pytest.MonkeyPatch) -> None:
    """A copy that fails leaves pages that nobody has computed."""
    original = StoredKv._end_import

    def end_import(self: StoredKv, done: Any, copied: bool) -> Any:
        return original(self, done, True)

    patch.setattr(StoredKv, "_end_import", end_import)


@bug("walks", "LifecycleBug: .*locked and owned by nobody|Exhausted")
def a_copy_out_that_owns_only_what_it_copies(patch: pytest.MonkeyPatch) -> None:
    """The pages before them are locked and counted as evictable."""
    patch.setattr(PrefixCache, "path", staticmethod(lambda node: []))


# --- policy ---------------------------------------------------------------------------------------


@bug("thrash", "AssertionError: .*retractions")
def an_admission_that_ignores_headroom(patch: pytest.MonkeyPatch) -> None:
    """Who is admitted is pushed out at the next token, again and again."""
    original = policy.admit

    def admit(
        queue: Any, rows: int, pages: int, budget: int, headroom: int, max_overtakes: int
    ) -> Any:
        return original(queue, rows, pages, budget, -999, max_overtakes)

    patch.setattr(scheduler_module, "admit", admit)


@bug("starvation", "AssertionError|Broken: progress")
def an_admission_that_starves_the_large(patch: pytest.MonkeyPatch) -> None:
    """Small requests overtake for ever."""
    original = policy.admit

    def admit(queue: Any, *rest: Any) -> Any:
        return original([_fresh(candidate) for candidate in queue], *rest)

    patch.setattr(scheduler_module, "admit", admit)


def _fresh(candidate: Candidate) -> Candidate:
    return candidate._replace(overtaken=0)


@bug("livelock", "Broken: progress")
def a_displacement_among_equals(patch: pytest.MonkeyPatch) -> None:
    """Two that do not fit together push each other out, and neither ends its prompt."""

    def displace(self: Scheduler, head: Request) -> bool:
        victims = [r for r in self.roster.device if r.priority <= head.priority][-1:]
        for victim in victims:
            self._retract(victim, "displaced")
        return any(victim.state == "retracted" for victim in victims)

    patch.setattr(Scheduler, "_displace", displace)


@bug("walks", "Broken: budget")
def a_chunk_beyond_the_budget(patch: pytest.MonkeyPatch) -> None:
    """B19: the continuing chunk ignores what others have used."""
    original = Request.next_span

    def next_span(self: Request, budget: int, depth: int) -> Any:
        return original(self, max(budget, 4), depth)

    patch.setattr(Request, "next_span", next_span)


@bug("displacement", "AssertionError")
def a_displacement_that_does_not_see_rows_that_are_coming(patch: pytest.MonkeyPatch) -> None:
    original = policy.displace

    def displace(priority: int, pages: int, rows: int, holders: Any) -> tuple[str, ...]:
        return original(priority, pages, 1, holders)

    patch.setattr(scheduler_module, "displace", displace)


@bug("walks", "Broken: progress: nobody would wake the loop")
def room_that_nobody_uses_at_once(patch: pytest.MonkeyPatch) -> None:
    """The device is empty after a displacement, and nothing comes back to go on."""
    original = Scheduler._displace

    def displace(self: Scheduler, head: Request) -> bool:
        original(self, head)
        return False

    patch.setattr(Scheduler, "_displace", displace)


@bug("walks", "Broken: token order: .* beside ")
def log_probabilities_that_survive_a_retraction_twice(patch: pytest.MonkeyPatch) -> None:
    """B29: more of them than tokens."""
    original = Outbox.token

    def token(self: Outbox, request: Request, sampled: Sampled) -> None:
        original(self, request, sampled)
        if request.retractions and request.sampling.logprobs:
            self._draft(request, request.output_len - 1).logprobs.append(0.0)

    patch.setattr(Outbox, "token", token)
