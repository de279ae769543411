"""Every state meets every event, on the driver and on its oracle.

Method: a card is walked to a state with real leases from real pools; then an event is fired as it
should be, or wrongly in one way. What must happen follows from the chart's rows alone."""

from itertools import product

import pytest

from fsm.chart import Move
from fsm.driver import Driver, IllegalEvent, Subject
from fsm.ledger import Lease
from fsm.resources import RESOURCES, Resource
from fsm.unified import BASE_KIT, UNIFIED
from tests.support.subjects import DRIVERS, KITS, Bench, Card, Make

STATES = tuple(UNIFIED.by_name)
EVENTS = (*UNIFIED.events, "no such event")
ACTORS = ("intake", "scheduler", "runner", "client", "server", "clock", "store", "wire", "peer")
FULL_KIT = KITS[-1]

by_driver = pytest.mark.parametrize("make", DRIVERS, ids=["transitions", "dict"])


def test_the_kits_are_all_that_a_unified_node_can_freeze() -> None:
    """Every resource of the chart is in the largest kit, and the base kit is the smallest."""
    assert UNIFIED.resources == FULL_KIT
    assert min(KITS, key=len) == BASE_KIT
    assert len(set(KITS)) == 8


@by_driver
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_every_state_meets_every_event(make: Make, state: str, event: str) -> None:
    """For every kit: a legal event moves to its target with the target's holdings; an illegal one
    changes nothing at all."""
    for kit in KITS:
        bench = Bench(make, kit).walk_to(state)
        edge = UNIFIED.table.get((state, event))
        before = bench.snapshot()
        assert bench.driver.allows(bench.card, event) == (edge is not None)
        if edge is None:
            with pytest.raises(IllegalEvent):
                bench.driver.fire(bench.card, event, "scheduler")
            assert bench.snapshot() == before
            continue
        bench.fire(event)
        assert bench.card.state == edge.target
        assert bench.card.leases.keys() == UNIFIED.holds[edge.target] & kit
        assert bench.holdings() == UNIFIED.holds[edge.target] & kit
        assert all(lease.stage == "held" for lease in bench.card.leases.values())
        entry = bench.card.journal.entries()[-1]
        assert entry[:5] == (1.5, event, state, edge.target, edge.by[0])


def test_both_drivers_do_the_same() -> None:
    """Every pair of events from the initial state, every kit: same states, leases and journals."""
    for kit, first, second in product(KITS, UNIFIED.events, UNIFIED.events):
        outcomes = []
        for make in DRIVERS:
            bench = Bench(make, kit)
            seen: list[object] = []
            for event in (first, second):
                try:
                    bench.fire(event)
                except IllegalEvent as refusal:
                    seen.append(str(refusal))
            seen += [bench.card.state, sorted(bench.card.leases), bench.card.journal.entries()]
            outcomes.append([*seen, bench.holdings()])
        assert outcomes[0] == outcomes[1]


@by_driver
@pytest.mark.parametrize("actor", ACTORS)
def test_only_the_actors_of_an_edge_may_cause_it(make: Make, actor: str) -> None:
    for edge in UNIFIED.edges:
        bench = Bench(make, FULL_KIT).walk_to(edge.source)
        move = bench.driver.move(bench.card, edge.event)
        leases = bench.reserve(*move.takes)
        before = bench.snapshot()
        if actor in edge.by:
            bench.driver.fire(bench.card, edge.event, actor, "because", leases)
            assert bench.card.journal.entries()[-1].by == actor
            continue
        with pytest.raises(IllegalEvent, match=f"cannot be caused by '{actor}'"):
            bench.driver.fire(bench.card, edge.event, actor, "because", leases)
        assert bench.snapshot() == before
        assert all(lease.stage == "reserved" for lease in leases.values())


@by_driver
def test_an_edge_takes_exactly_its_leases(make: Make) -> None:
    """One lease too few or too many, for every edge: refused, and nothing has changed."""
    for edge in UNIFIED.edges:
        bench = Bench(make, FULL_KIT).walk_to(edge.source)
        takes = bench.driver.move(bench.card, edge.event).takes
        extra: Resource = next(r for r in RESOURCES if r not in takes)
        wrong = [set(takes) - {resource} for resource in takes] + [{*takes, extra}]
        for resources in wrong:
            leases = bench.reserve(*resources)
            before = bench.snapshot()
            with pytest.raises(IllegalEvent, match="takes"):
                bench.driver.fire(bench.card, edge.event, edge.by[0], "", leases)
            assert bench.snapshot() == before
            for lease in leases.values():
                lease.cancel()


@by_driver
@pytest.mark.parametrize("fault", ["held already", "another resource", "another owner"])
def test_a_lease_that_cannot_be_adopted_is_refused_before_anything_changes(
    make: Make, fault: str
) -> None:
    """Adopting cannot fail, so a driver looks first: stage, resource and owner of what it gets."""
    bench = Bench(make, FULL_KIT).walk_to("waiting")
    leases = bench.reserve("rows", "pages", "prefix_locks")
    if fault == "held already":
        leases["rows"].adopt()
    elif fault == "another resource":
        leases["rows"] = bench.pools["pages"].reserve("card")
    else:
        leases["rows"] = bench.pools["rows"].reserve("somebody")
    before = bench.snapshot()
    with pytest.raises(IllegalEvent, match="rows"):
        bench.driver.fire(bench.card, "admit", "scheduler", "", leases)
    assert bench.snapshot() == before
    assert leases["pages"].stage == "reserved"


@by_driver
def test_holdings_that_differ_from_the_state_are_refused(make: Make) -> None:
    """Somebody took a lease away behind the driver's back: no move hides it."""
    bench = Bench(make).walk_to("decoding")
    taken = bench.card.leases.pop("rows")
    before = bench.snapshot()
    with pytest.raises(IllegalEvent, match="where its state holds"):
        bench.driver.fire(bench.card, "abort", "client")
    assert bench.snapshot() == before
    assert taken.stage == "held"


@by_driver
def test_a_lease_released_behind_the_drivers_back_stops_the_move_before_it_starts(
    make: Make,
) -> None:
    bench = Bench(make).walk_to("stopping")
    bench.card.leases["rows"].release()
    before = bench.snapshot()
    with pytest.raises(IllegalEvent, match="rows"):
        bench.driver.fire(bench.card, "quiesce", "runner")
    assert bench.snapshot() == before
    assert bench.card.leases["pages"].stage == "held"


@by_driver
def test_a_state_that_the_chart_does_not_know_is_an_illegal_event(make: Make) -> None:
    bench = Bench(make)
    bench.card.state = "nowhere"
    before = bench.snapshot()
    with pytest.raises(IllegalEvent, match="nowhere"):
        bench.driver.fire(bench.card, "abort", "client")
    assert bench.snapshot() == before


@by_driver
def test_a_life_begins_with_exactly_the_leases_of_the_initial_state(make: Make) -> None:
    bench = Bench(make)
    driver = make(UNIFIED, lambda: 0.0, None)
    wanted = tuple(UNIFIED.holds["arrived"])
    for resources in (wanted[:1], (*wanted, "rows"), ()):
        card = Card(BASE_KIT)
        leases = bench.reserve(*resources)
        with pytest.raises(IllegalEvent, match="begins with"):
            driver.begin(card, leases)
        assert card.state == ""
        assert not card.leases
        assert all(lease.stage == "reserved" for lease in leases.values())
    with pytest.raises(IllegalEvent):
        driver.begin(bench.card, bench.reserve(*wanted))  # it has begun already


@by_driver
def test_leases_are_released_in_the_order_of_the_vocabulary_with_the_edges_disposition(
    make: Make,
) -> None:
    """Memory first and the client's answer last; pages learn where they go."""
    released: list[tuple[str, str | None]] = []

    class Noted(Lease):
        def _give_back(self, disposition: str | None) -> None:
            released.append((self.resource, disposition))

    card = Card(FULL_KIT)
    driver = make(UNIFIED, lambda: 0.0, None)
    noted = {r: Noted(r, "card") for r in FULL_KIT}
    driver.begin(card, {r: noted[r] for r in UNIFIED.holds["arrived"]})
    for event, by in (("enqueue", "intake"), ("admit", "scheduler"), ("abort", "client")):
        takes = driver.move(card, event).takes
        driver.fire(card, event, by, "", {r: noted[r] for r in takes})
    assert [name for name, _ in released] == [
        "session_turns",
        "group_members",
        "spans",
        "frontend_records",
    ]
    released.clear()
    driver.fire(card, "quiesce", "runner")
    assert [name for name, _ in released] == ["prefix_locks", "pages", "rows"]
    assert dict(released)["pages"] == "cache"


@by_driver
def test_an_observer_sees_every_move_after_it_was_made(make: Make) -> None:
    seen: list[tuple[str, str, str, str]] = []

    def observe(subject: Subject, move: Move, by: str, why: str) -> None:
        seen.append((subject.state, move.edge.event, by, why))

    bench = Bench(make, observer=observe).walk_to("waiting")
    bench.driver.fire(bench.card, "abort", "client", "left")
    with pytest.raises(IllegalEvent):
        bench.driver.fire(bench.card, "abort", "client")
    assert seen == [("waiting", "enqueue", "intake", ""), ("done", "abort", "client", "left")]


def test_the_machine_of_the_driver_has_the_charts_transitions_and_no_others() -> None:
    """No automatic transitions, no wildcards, no conditions: the library knows the table only."""
    machine = Driver(UNIFIED, lambda: 0.0)._machine
    found = {
        (source, name, transition.dest)
        for name, event in machine.events.items()
        for source, transitions in event.transitions.items()
        for transition in transitions
    }
    assert found == {(e.source, e.event, e.target) for e in UNIFIED.edges}
    assert not machine.has_queue
    assert machine.models == []


def test_a_disagreement_of_library_and_chart_is_an_illegal_event_and_changes_nothing() -> None:
    """The oracle's check passes and the machine refuses: it must not get half-way."""
    bench = Bench(Driver, observer=lambda *_: None).walk_to("waiting")  # a driver of its own
    assert isinstance(bench.driver, Driver)
    bench.driver._machine.events["abort"].transitions.pop("waiting")
    before = bench.snapshot()
    with pytest.raises(IllegalEvent):
        bench.driver.fire(bench.card, "abort", "client")
    assert bench.snapshot() == before
