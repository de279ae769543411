"""Requests of the fsm tests: only what a driver knows of a request, on pools of any size."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from fsm.chart import Chart
from fsm.driver import DictDriver, Driver, Observer, Subject
from fsm.journal import Journal
from fsm.ledger import CountPool, Lease
from fsm.resources import RESOURCES, Resource
from fsm.unified import BASE_KIT, UNIFIED

Make = Callable[[Chart, Callable[[], float], Observer | None], DictDriver]
DRIVERS: tuple[Make, ...] = (Driver, DictDriver)
OPTIONAL: tuple[Resource, ...] = ("session_turns", "group_members", "prefetches")
KITS: tuple[frozenset[Resource], ...] = tuple(
    BASE_KIT | {r for bit, r in enumerate(OPTIONAL) if number >> bit & 1}
    for number in range(2 ** len(OPTIONAL))
)


class Card(Subject):
    """A request as a driver sees it."""

    life = "card"

    def __init__(self, kit: frozenset[Resource]) -> None:
        self._kit = kit
        self.state = ""
        self.leases: dict[Resource, Lease] = {}
        self.journal = Journal()

    @property
    def kit(self) -> frozenset[Resource]:
        return self._kit


@lru_cache
def _shared(make: Make, chart: Chart) -> DictDriver:
    """A driver knows no request, so that cards without an observer can share it."""
    return make(chart, lambda: 1.5, None)


class Bench:
    """One chart, one driver, one card, and a pool for every resource of the vocabulary."""

    def __init__(
        self,
        make: Make = Driver,
        kit: frozenset[Resource] = BASE_KIT,
        chart: Chart = UNIFIED,
        observer: Observer | None = None,
    ) -> None:
        self.chart = chart
        self.pools = {resource: CountPool(resource, 8) for resource in RESOURCES}
        self.driver = make(chart, lambda: 1.5, observer) if observer else _shared(make, chart)
        self.card = Card(kit)
        self.driver.begin(self.card, self.reserve(*(chart.holds[chart.initial] & kit)))

    def reserve(self, *resources: Resource) -> dict[Resource, Lease]:
        return {resource: self.pools[resource].reserve(self.card.life) for resource in resources}

    def fire(self, event: str) -> None:
        """Fire a legal event, with the leases it takes, by whoever may cause it."""
        move = self.driver.move(self.card, event)
        self.driver.fire(self.card, event, move.edge.by[0], "", self.reserve(*move.takes))

    def walk_to(self, state: str) -> "Bench":
        """Fire the shortest legal sequence that ends in ``state``."""
        for event in path_to(self.chart, state, self.card.kit):
            self.fire(event)
        return self

    def snapshot(self) -> dict[str, Any]:
        """Everything that a refused event must leave alone."""
        leases: Mapping[Resource, Lease] = self.card.leases
        return {
            "state": self.card.state,
            "leases": {name: (id(lease), lease.stage) for name, lease in leases.items()},
            "journal": (self.card.journal.count, self.card.journal.entries()),
            "pools": {name: pool.owners() for name, pool in self.pools.items()},
        }

    def holdings(self) -> set[str]:
        """What the pools say the card holds."""
        return {name for name, pool in self.pools.items() if pool.owners().get("card")}


def path_to(chart: Chart, state: str, kit: frozenset[Resource]) -> list[str]:
    """The shortest sequence of events from the initial state; the empty one for that state."""
    paths: dict[str, list[str]] = {chart.initial: []}
    frontier = [chart.initial]
    for here in frontier:
        for edge in chart.edges:
            if edge.source == here and edge.target not in paths:
                paths[edge.target] = [*paths[here], edge.event]
                frontier.append(edge.target)
    return paths[state]
