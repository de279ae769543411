"""Every pool of a replay but the pages: one unit a lease, so that counting is enough."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from fsm.ledger import QUARANTINE
from fsm.resources import RESOURCES, Resource
from fsm.trace import LeaseLine


class UnitBook:
    """How many units of each pool are held, and which are in quarantine."""

    def __init__(self, totals: Mapping[str, int], report: Callable[[str], None]) -> None:
        self._totals: Final = dict(totals)
        self._report = report
        self._held: Final[dict[str, int]] = dict.fromkeys(RESOURCES, 0)
        self._fenced: Final[dict[str, tuple[str, int]]] = {}
        """Units in quarantine by their owner."""
        self._most: Final[dict[str, int]] = {r: totals.get(r, 0) for r in RESOURCES}
        """How many may be held: what is not in quarantine."""

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        """What is in quarantine: owner, resource, units."""
        return ((owner, *fenced) for owner, fenced in self._fenced.items())

    def count(self, changes: Iterable[tuple[Resource, int]]) -> None:
        """A move takes (1) and drops (-1) units."""
        held, most = self._held, self._most
        for resource, change in changes:
            held[resource] = now = held[resource] + change
            if change > 0 and now > most[resource]:
                total = self._totals.get(resource, 0)
                fenced = total - most[resource]
                self._report(f"{resource}: {now} held and {fenced} quarantined of {total}")

    def lease(self, line: LeaseLine, holds: bool) -> None:
        """A unit is given up while something may still touch it, or that is over. ``holds``:
        its owner holds such a unit now."""
        resource, owner = line.resource, line.owner
        if resource not in self._totals:
            self._report(f"there is no pool {resource!r}")
        if line.what == "quarantine":
            if not holds:
                self._report(f"puts {resource} into quarantine and holds none")
            if line.units != 1:
                self._report(f"quarantine of {line.units} {resource}, of which a request has one")
            if f"{QUARANTINE}{owner}" in self._fenced:
                self._report(f"puts {resource} into quarantine twice")
            self._fenced[f"{QUARANTINE}{owner}"] = resource, line.units
            self._fence(resource, -line.units)
        elif line.what == "release" and owner in self._fenced:
            fenced, units = self._fenced.pop(owner)
            self._fence(fenced, units)
            if (fenced, units) != (resource, line.units):
                self._report(
                    f"releases {line.units} {resource}; {units} {fenced} are in quarantine"
                )
        else:
            self._report(f"{line.what} of {line.units} {resource} that are not in quarantine")

    def _fence(self, resource: str, units: int) -> None:
        """``units`` more may be held; fewer, if negative."""
        if resource in self._most:
            self._most[resource] += units
