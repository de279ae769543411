"""Deadlines: events of the clock that ask whether they still mean anything."""

import pytest

from engine.deadlines import Deadlines, TimerKind
from engine.scheduler import Scheduler
from fsm.unified import UNIFIED
from tests.support.node import Node, Shape
from tests.support.requests import request
from tests.support.stores import MemoryStore

KINDS: tuple[TimerKind, ...] = ("prefetch", "waiting", "running", "client")


def test_timers_come_due_in_order_of_time_then_of_setting() -> None:
    deadlines, requests = Deadlines(UNIFIED, Scheduler.queued), [request(str(i)) for i in range(4)]
    for r, when in zip(requests, (3.0, 1.0, 3.0, 9.0), strict=True):
        r.state = "waiting"
        deadlines.set(when, "client", r)
    assert (deadlines.next, deadlines.due(0.5)) == (1.0, None)
    due = []
    while (timer := deadlines.due(3.0)) is not None:
        due.append(timer.request.life)
    assert due == ["1", "0", "2"]
    assert deadlines.next == 9.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("state", UNIFIED.by_name)
def test_a_timer_applies_only_where_its_deadline_counts(kind: TimerKind, state: str) -> None:
    r = request()
    r.state = state
    expected = {
        "prefetch": state == "prefetching",
        "waiting": state in ("prefetching", "waiting", "retracted"),
        "running": UNIFIED.is_live(state),
        "client": UNIFIED.is_live(state),
    }
    deadlines = Deadlines(UNIFIED, Scheduler.queued)
    deadlines.set(1.0, kind, r)
    assert (deadlines.due(1.0) is not None) == expected[kind]


def test_the_wait_for_admission_is_over_when_it_was_admitted_once() -> None:
    """A retraction does not start it anew: its time counts against the running deadline."""
    r = request()
    deadlines = Deadlines(UNIFIED, Scheduler.queued)
    r.state = "waiting"
    deadlines.set(1.0, "waiting", r)
    r.state, r.attempt = "retracted", 1
    assert deadlines.due(2.0) is None
    assert deadlines.next is None


# --- with the scheduler ---------------------------------------------------------------------------


def test_a_request_that_arrives_in_a_pause_keeps_its_time_from_its_arrival() -> None:
    """Not from the beginning of the pause, which would be more than it was promised."""
    early, late = request("early"), request("late", arrived_at=90.0)
    early.state = late.state = "waiting"
    deadlines = Deadlines(UNIFIED, Scheduler.queued)
    deadlines.set(13.0, "waiting", early)
    deadlines.freeze(10.0)
    deadlines.set(95.0, "waiting", late)
    assert deadlines.of(early, 99.0) == {"waiting": 3.0}
    assert deadlines.of(late, 99.0) == {"waiting": 5.0}
    deadlines.thaw(100.0)
    due = [
        (when, timer.request.life)
        for when in (102, 103, 104, 105)
        if (timer := deadlines.due(when))
    ]
    assert due == [(103, "early"), (105, "late")]


def test_who_is_not_admitted_in_time_is_refused_with_503() -> None:
    node = Node(Shape(rows=1, waiting_timeout_s=0.02))
    node.ask("a", [1], 100)
    late = node.ask("b", [2], 4)
    node.until("b ends", lambda: late.finish is not None)
    assert late.finish is not None
    assert (late.finish.status, late.finish.type) == (503, "abort")
    assert "waiting timeout" in late.finish.message
    assert node.now == pytest.approx(0.021, abs=0.002)
    node.abort("a")
    node.settle()


def test_a_running_request_ends_at_its_deadline() -> None:
    node = Node(Shape(running_timeout_s=0.02))
    client = node.ask("a", [1], 100)
    node.settle()
    assert client.finish is not None
    assert (client.finish.status, len(client.tokens) > 5) == (503, True)


@pytest.mark.parametrize("shown", [True, False])
def test_the_clients_own_deadline_returns_what_there_is(shown: bool) -> None:
    """With tokens it is a partial answer, without them a 503."""
    node = Node(Shape(rows=1))
    blocker = node.ask("x", [9], 100) if not shown else None
    client = node.ask("a", [1], 100, deadline_s=0.02)
    node.until("a ends", lambda: client.finish is not None)
    assert client.finish is not None
    assert client.finish.message == "deadline exceeded"
    assert client.finish.status == (None if shown else 503)
    assert bool(client.tokens) == shown
    if blocker is not None:
        node.abort("x")
    node.settle()


def test_a_prefetch_that_is_late_becomes_a_miss() -> None:
    """B101: the request runs; the read is quarantined until it is really over (B104)."""
    store = MemoryStore()
    store.fill(4, list(range(16)))
    node = Node(Shape(prefetch_timeout_s=0.01), store)
    client = node.ask("a", list(range(16)), 4)
    assert node.state("a") == "prefetching"
    node.until("a ends", lambda: client.finish is not None)
    assert (client.reason, client.cached) == ("length", 0)
    assert node.scheduler.ledger["prefetches"].counts().quarantined == 1
    assert not node.scheduler.at_rest
    store.finish()
    node.settle()


def test_the_next_deadline_is_when_the_loop_has_to_wake() -> None:
    node = Node(Shape(waiting_timeout_s=0.5))
    assert node.scheduler.next_deadline() is None
    node.ask("a", [1], deadline_s=0.2)
    assert node.scheduler.next_deadline() == pytest.approx(0.2)
    node.settle()
