"""What a live node says about itself: ``/requests``, ``/requests/{rid}`` and ``/ledger`` read
these."""

from __future__ import annotations

from engine.pages import Pages
from engine.request import Request
from engine.scheduler import Scheduler
from fsm.ledger import SlotLease


def request_summary(scheduler: Scheduler, request: Request, now: float) -> dict[str, object]:
    """One line of ``/requests``: where it is and how far."""
    return {
        "rid": request.rid,
        "life": request.life,
        "attempt": request.attempt,
        "phase": scheduler.chart.phase(request.state),
        "state": request.state,
        "age_s": round(now - request.arrived_at, 6),
        "prompt_tokens": request.prompt_len,
        "output_tokens": request.output_len,
        "holdings": sorted(request.leases),
    }


def request_detail(scheduler: Scheduler, request: Request, now: float) -> dict[str, object]:
    """Everything about one request, its journal included. ``deadlines`` are those that would end
    or move it where it is now, in seconds from ``now``."""
    holdings: dict[str, object] = {}
    for resource, lease in request.leases.items():
        holdings[resource] = lease.units
        if isinstance(lease, Pages):
            holdings[resource] = {"count": len(lease.table), "shared": lease.shared}
        elif isinstance(lease, SlotLease):
            holdings[resource] = {"slot": lease.slot}
    return {
        **request_summary(scheduler, request, now),
        "kit": sorted(request.kit),
        "holdings": holdings,
        "priority": request.priority,
        "session": request.session,
        "group": request.group,
        "max_new_tokens": request.max_new_tokens,
        "cached_tokens": request.cached_tokens,
        "retractions": request.retractions,
        "committed": request.committed,
        "launched": request.launched,
        "steps_in_flight": request.in_steps,
        "deadlines": {
            kind: round(left, 6) for kind, left in scheduler.deadlines_of(request).items()
        },
        "finish": request.finish.message or request.finish.type if request.finish else None,
        "span": request.span.as_dict() if request.span is not None else None,
        "journal": [entry._asdict() for entry in request.journal.entries()],
        "moves": request.journal.count,
    }


def find_request(scheduler: Scheduler, rid: str, now: float) -> dict[str, object] | None:
    """A live request, the members of a group, or a recently finished request; None if unknown."""
    roster = scheduler.roster
    members = scheduler.groups.members(rid)
    if members:
        return {"rid": rid, "members": [request_detail(scheduler, r, now) for r in members]}
    request = roster.live.get(rid) or roster.recent.get(rid)
    return request_detail(scheduler, request, now) if request is not None else None


def ledger_view(scheduler: Scheduler) -> dict[str, object]:
    """The ledger of this node (design: ``GET /ledger``)."""
    roster = scheduler.roster
    return {
        "at_rest": scheduler.at_rest,
        "pools": scheduler.ledger.snapshot(),
        "counts": {
            "live": len(roster.live),
            "not_done": len(roster.lives),
            "queued": len(roster.queue),
            "on_device": len(roster.device),
            "steps_in_flight": scheduler.steps_in_flight,
            "groups": len(scheduler.groups),
            "sessions": len(scheduler.sessions),
        },
        "tombstones": {"finished_rids": len(roster.recent)},
        "conserved": scheduler.ledger.conserved(),
    }
