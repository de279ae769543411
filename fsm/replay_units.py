"""Every pool of a replay but the pages: one unit a lease, so that counting is enough."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from fsm.ledger import QUARANTINE
from fsm.trace import LeaseLine


class UnitBook:
    """How many units of each pool are held, and which are in quarantine."""

    def __init__(self, totals: Mapping[str, int], report: Callable[[str], None]) -> None:
        self._totals: Final = dict(totals)
        self._report = report
        self._held: Final[Counter[str]] = Counter()
        self._fenced: Final[dict[str, tuple[str, int]]] = {}
        """Units in quarantine by their owner."""
        self._quarantined: Final[Counter[str]] = Counter()

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        """What is in quarantine: owner, resource, units."""
        return ((owner, *fenced) for owner, fenced in self._fenced.items())

    def count(self, resource: str, change: int) -> None:
        """One unit is taken or dropped by a move."""
        held = self._held[resource] = self._held[resource] + change
        if change > 0 and held + self._quarantined[resource] > self._totals.get(resource, 0):
            fenced = self._quarantined[resource]
            self._report(
                f"{resource}: {held} held and {fenced} quarantined of"
                f" {self._totals.get(resource, 0)}"
            )

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
            self._quarantined[resource] += line.units
        elif line.what == "release" and owner in self._fenced:
            fenced, units = self._fenced.pop(owner)
            self._quarantined[fenced] -= units
            if (fenced, units) != (resource, line.units):
                self._report(
                    f"releases {line.units} {resource}; {units} {fenced} are in quarantine"
                )
        else:
            self._report(f"{line.what} of {line.units} {resource} that are not in quarantine")
