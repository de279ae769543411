"""Bugs planted on purpose, in every part that a simulation runs: each has to be found by some
seed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from engine.batch import PagesDone
from engine.core import SchedulerCore
from engine.decode_scheduler import DecodeScheduler
from engine.frontend import FrontendRecord, FrontendTable, Member
from engine.pages import Kv, Pages
from engine.paired import PairedScheduler
from engine.pairing import Pairing
from engine.prefix_cache import Node, PrefixCache
from engine.request import Request
from engine.rooms import Rooms
from engine.routing import Action, Record, Router
from engine.scheduler import Scheduler
from engine.slots import LocalSlots
from fsm import protocol
from fsm.chart import Edge
from fsm.ledger import CountPool, PagePool, SlotPool
from fsm.resources import Disposition
from fsm.rules import Message
from transport.control import PeerDone, PeerFrame
from transport.messages import Finish, Output

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Plant:
    """One bug, and the cluster on which it is looked for (any, if empty)."""

    name: str
    apply: Patch
    shape: str = ""


def _no_audit(patch: pytest.MonkeyPatch) -> None:
    """The engine's own audit must not be the one that finds it."""
    patch.setattr(SchedulerCore, "audit", lambda self: [])


def steps_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    _no_audit(patch)

    def settle(scheduler: Scheduler, request: Request) -> None:
        if (request.state, "quiesce") in scheduler.chart.table:
            scheduler._fire(request, "quiesce", "runner")

    patch.setattr(Scheduler, "_settle", settle)


def pages_stay_behind(patch: pytest.MonkeyPatch) -> None:
    _no_audit(patch)
    back = Kv.give_back

    def forget(kv: Kv, lease: Pages, disposition: Disposition | None) -> None:
        if len(lease.table) != 3:
            back(kv, lease, disposition)

    patch.setattr(Kv, "give_back", forget)


def stale_token_counts(patch: pytest.MonkeyPatch) -> None:
    """A token is delivered twice after a retraction."""
    after = Scheduler._after

    def twice(scheduler: Scheduler, request: Request, edge: Edge, cause: Message | None) -> None:
        after(scheduler, request, edge, cause)
        if request.state == "retracted" and request.output_len > 1:
            del request.tokens[-1]

    patch.setattr(Scheduler, "_after", twice)


def prefix_matches_too_much(patch: pytest.MonkeyPatch) -> None:
    """Where no page holds the wanted tokens, one that begins alike is taken."""
    match = PrefixCache.match

    def loose(cache: PrefixCache, tokens: Sequence[int], limit: int) -> tuple[Node, array[int]]:
        node, pages = match(cache, tokens, limit)
        if not pages:
            for key, child in cache.root.children.items():
                if limit >= len(key) and key[0] == tokens[0]:
                    return child, array("q", [child.page])
        return node, pages

    patch.setattr(PrefixCache, "match", loose)


def cache_survives_weights(patch: pytest.MonkeyPatch) -> None:
    """What was cached under other weights is found again (invariant 9)."""
    patch.setattr(PrefixCache, "flush", lambda cache: 0)
    patch.setattr(Kv, "use_weights", lambda kv, digest: None)


def decode_room_is_kept(patch: pytest.MonkeyPatch) -> None:
    _no_audit(patch)
    close = Rooms.close

    def keep(rooms: Rooms, life: str, room: str) -> None:
        if life.startswith("prefill"):
            close(rooms, life, room)
        else:
            del rooms._requests[room]

    patch.setattr(Rooms, "close", keep)


def wire_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Decode frees pages while prefill may still write into them (B55)."""
    _no_audit(patch)
    settle = PairedScheduler._settle

    def hasty(scheduler: PairedScheduler, request: Request) -> None:
        settle(scheduler, request)
        if isinstance(scheduler, DecodeScheduler) and request.state == "draining":
            scheduler._fire(request, "silence", "peer")

    patch.setattr(PairedScheduler, "_settle", hasty)


def source_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Prefill frees pages that its own wire still reads."""
    _no_audit(patch)
    due = protocol.due

    def hasty(
        role: protocol.Role,
        state: str,
        *,
        launched: bool = False,
        writing: bool = False,
        paused: bool = False,
    ) -> Message | None:
        return due(role, state, launched=launched, paused=paused)

    patch.setattr(protocol, "due", hasty)


def done_is_said_too_early(patch: pytest.MonkeyPatch) -> None:
    """Decode is told that all is written while it is not, and believes it without looking at the
    room in its slot, which keeps what the last owner had (B82)."""
    patch.setattr(LocalSlots, "clear", lambda slots, slot: None)
    hear = DecodeScheduler._hear

    def credulous(
        scheduler: DecodeScheduler,
        request: Request,
        pairing: Pairing,
        node: str,
        message: Message,
        frame: PeerFrame,
    ) -> None:
        if isinstance(frame, PeerDone) and request.state == "receiving":
            pairing.record = scheduler._slots.read(scheduler.metadata.slot_of(request))
            if pairing.record:
                PairedScheduler._hear(scheduler, request, pairing, node, message, frame)
            return
        hear(scheduler, request, pairing, node, message, frame)

    def early(role: protocol.Role, state: str, met: bool, written: bool) -> protocol.Frames:
        return ("done",) if (role, state) == ("prefill", "prefilling") else ()

    patch.setattr(DecodeScheduler, "_hear", credulous)
    patch.setattr(protocol, "standing", early)


def abort_is_not_forwarded(patch: pytest.MonkeyPatch) -> None:
    """Prefill's end is not told to decode (B54), neither at once nor with a heartbeat."""
    moved, standing = protocol.on_moved, protocol.standing
    patch.setattr(
        protocol,
        "on_moved",
        lambda *args: tuple(f for f in moved(*args) if f not in ("abort", "quiet")),
    )
    patch.setattr(
        protocol, "standing", lambda *args: tuple(f for f in standing(*args) if f != "abort")
    )
    patch.setattr(protocol, "relies_on_peer", lambda *args: False)
    patch.setattr(PairedScheduler, "_listen", lambda scheduler, now: None)
    patch.setattr(protocol.Doors, "knock", lambda doors, kind, address: ())


def last_token_is_sampled_again(patch: pytest.MonkeyPatch) -> None:
    """A rebuilt request emits its last token twice (S3.2)."""
    patch.setattr(protocol, "replays_first_token", lambda emitted: False)


def outdated_kv_is_used(patch: pytest.MonkeyPatch) -> None:
    """KV of other weights serves a token."""
    patch.setattr(protocol, "is_outdated", lambda landed, weights, paused: False)


def restored_pages_are_shuffled(patch: pytest.MonkeyPatch) -> None:
    """The copy of a retracted request comes back in the wrong order."""
    done = DecodeScheduler.pages_done

    def swapped(scheduler: DecodeScheduler, result: PagesDone) -> None:
        blobs = result.blobs
        if blobs and len(blobs) > 1:
            blobs[0], blobs[1] = blobs[1], blobs[0]
        done(scheduler, result)

    patch.setattr(DecodeScheduler, "pages_done", swapped)


def router_forgets_a_decrement(patch: pytest.MonkeyPatch) -> None:
    """Counts at a worker rise for ever when a client leaves (B94)."""

    def keep(router: Router, record: Record, node: str) -> None:
        lease = record.open.pop(node)
        if node.endswith("-1") or record.shown:
            lease.release()

    patch.setattr(Router, "_close", keep)


def router_drops_one_half(patch: pytest.MonkeyPatch) -> None:
    """A client that leaves is told to decode only (B67): prefill's call stays open."""
    drop_all = Router._drop_all

    def one(router: Router, record: Record) -> list[Action]:
        return [a for a in drop_all(router, record) if not a.node.startswith("prefill")]

    patch.setattr(Router, "_drop_all", one)


def router_waits_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    """A worker that is lost takes its calls with it into silence (B97)."""
    patch.setattr(Router, "lost", lambda router, node: [])
    answered = Router.answered

    def good(router: Router, node: str, rid: str, attempt: int, finish: Finish) -> list[Action]:
        return [] if finish.status == 503 else answered(router, node, rid, attempt, finish)

    patch.setattr(Router, "answered", good)


def record_shows_tokens_after_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Member, "visible", property(lambda member: len(member.tokens)))
    deliver = Member.deliver

    def more(member: Member, output: Output) -> list[int]:
        if member.terminal is not None:
            member.tokens += output.tokens
        return deliver(member, output)

    patch.setattr(Member, "deliver", more)


def records_never_settle(patch: pytest.MonkeyPatch) -> None:
    retire = FrontendTable.retire_if_settled

    def lazy(table: FrontendTable, record: FrontendRecord) -> bool:
        ends = [m.terminal.finish.type for m in record.members if m.terminal is not None]
        return "abort" not in ends and retire(table, record)

    patch.setattr(FrontendTable, "retire_if_settled", lazy)


def pool_gives_back_one_too_few(patch: pytest.MonkeyPatch) -> None:
    _no_audit(patch)

    def drop(pool: SlotPool, owner: str, slot: int) -> None:
        del pool._owner[slot]
        if slot or len(pool._free) != pool.total - 1:
            pool._free.append(slot)

    patch.setattr(SlotPool, "give_back", drop)


def page_is_dropped_for_all(patch: pytest.MonkeyPatch) -> None:
    """Giving up a shared page frees it under the others."""
    _no_audit(patch)
    drop = PagePool.drop

    def everybodys(pool: PagePool, page: int, owner: str) -> bool:
        for other in sorted(pool.owners_of(page) - {owner, "cache"}):
            drop(pool, page, other)
        return drop(pool, page, owner)

    patch.setattr(PagePool, "drop", everybodys)


def counts_are_lost(patch: pytest.MonkeyPatch) -> None:
    _no_audit(patch)

    def back(pool: CountPool, owner: str, units: int) -> None:
        del pool._held[owner]
        pool._held_units -= units - (pool.name == "receivers")

    patch.setattr(CountPool, "give_back", back)


PLANTS = [
    Plant("steps_are_not_waited_for", steps_are_not_waited_for, "unified"),
    Plant("pages_stay_behind", pages_stay_behind),
    Plant("stale_token_counts", stale_token_counts, "unified"),
    Plant("prefix_matches_too_much", prefix_matches_too_much, "unified"),
    Plant("cache_survives_weights", cache_survives_weights),
    Plant("decode_room_is_kept", decode_room_is_kept, "1+1"),
    Plant("wire_is_not_waited_for", wire_is_not_waited_for, "1+1"),
    Plant("source_is_not_waited_for", source_is_not_waited_for, "1+1"),
    Plant("done_is_said_too_early", done_is_said_too_early, "1+1"),
    Plant("abort_is_not_forwarded", abort_is_not_forwarded, "1+1"),
    Plant("last_token_is_sampled_again", last_token_is_sampled_again, "1+1"),
    Plant("outdated_kv_is_used", outdated_kv_is_used, "1+1"),
    Plant("restored_pages_are_shuffled", restored_pages_are_shuffled, "1+1"),
    Plant("router_forgets_a_decrement", router_forgets_a_decrement, "2+2"),
    Plant("router_drops_one_half", router_drops_one_half, "1+1"),
    Plant("router_waits_for_the_dead", router_waits_for_the_dead, "pool"),
    Plant("record_shows_tokens_after_the_end", record_shows_tokens_after_the_end),
    Plant("records_never_settle", records_never_settle),
    Plant("pool_gives_back_one_too_few", pool_gives_back_one_too_few),
    Plant("page_is_dropped_for_all", page_is_dropped_for_all),
    Plant("counts_are_lost", counts_are_lost, "1+1"),
]
