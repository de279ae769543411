"""Indexes over requests equal their states, and ranks decide who is first."""

import random

import pytest

from engine.request import Request
from engine.roster import RECENT_LIMIT, Ranked, Roster, RosterError
from engine.scheduler import Scheduler
from fsm.unified import UNIFIED
from tests.support.requests import request


def enter(roster: Roster, r: Request) -> None:
    roster.lives[r.life] = r
    roster.live[r.rid] = r
    r.state = "arrived"


def move(roster: Roster, r: Request, target: str) -> None:
    source, r.state = r.state, target
    roster.moved(r, source, target)


def test_higher_priority_then_earlier_arrival_is_first() -> None:
    ranked = Ranked()
    requests = [request(str(i), order=i, priority=i % 3) for i in range(12)]
    random.Random(1).shuffle(requests)
    for r in requests:
        ranked.add(r)
    assert [r.life for r in ranked] == [
        "2",
        "5",
        "8",
        "11",
        "1",
        "4",
        "7",
        "10",
        "0",
        "3",
        "6",
        "9",
    ]
    assert [r.life for r in ranked.first(2)] == ["2", "5"]
    for r in requests:
        ranked.remove(r)
        assert r not in list(ranked)
    assert len(ranked) == 0


def test_removing_whom_the_index_does_not_hold_is_a_bug() -> None:
    ranked = Ranked()
    ranked.add(request("a", order=1))
    for stranger in (request("b", order=2), request("twin", order=1)):
        with pytest.raises(RosterError, match=stranger.rid):
            ranked.remove(stranger)


def test_queue_and_device_follow_every_edge_of_the_chart() -> None:
    for edge in UNIFIED.edges:
        roster, r = Roster(Scheduler.queued, Scheduler.on_device), request("a")
        enter(roster, r)
        if edge.source != "arrived":
            move(roster, r, edge.source)
        move(roster, r, edge.target)
        assert [x.life for x in roster.queue] == (
            ["a"] if edge.target in ("prefetching", "waiting", "retracted") else []
        )
        assert [x.life for x in roster.device] == (
            ["a"] if edge.target in ("prefilling", "decoding") else []
        )
        assert ("a" in roster.lives) == (edge.target != "done")
        assert roster.audit() == []


def test_a_retracted_request_returns_to_its_old_place() -> None:
    roster = Roster(Scheduler.queued, Scheduler.on_device)
    requests = [request(str(i), order=i) for i in range(4)]
    for r in requests:
        enter(roster, r)
        move(roster, r, "waiting")
    for state in ("prefilling", "retracting", "retracted"):
        move(roster, requests[1], state)
    assert [r.life for r in roster.queue] == ["0", "1", "2", "3"]


def test_the_audit_notices_an_index_that_differs() -> None:
    roster, r = Roster(Scheduler.queued, Scheduler.on_device), request("a")
    enter(roster, r)
    move(roster, r, "waiting")
    r.state = "decoding"
    assert len(roster.audit()) == 2


def test_only_accepted_requests_are_remembered_and_only_the_newest() -> None:
    roster = Roster(Scheduler.queued, Scheduler.on_device)
    assert not roster.retired(request("refused"))
    for number in range(RECENT_LIMIT + 5):
        r = request(str(number))
        enter(roster, r)
        assert roster.retired(r)
        assert not roster.retired(r)
    assert len(roster.recent) == RECENT_LIMIT
    assert "4" not in roster.recent
    assert str(RECENT_LIMIT + 4) in roster.recent
    assert not roster.live
