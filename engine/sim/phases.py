"""Where requests are, by the trace lines of every node: the phase that a client is shown.

A request on one node has the phase of its state. One that is split has two states, and the joint
table says what is shown (:mod:`fsm.joint`).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from engine.sim.book import Book
from engine.sim.deployment import Cluster
from fsm.decode import DECODE
from fsm.joint import ABSENT, GONE, phase_of
from fsm.trace import MoveLine, SubmitLine


@dataclass(slots=True)
class Place:
    """One request: its state on either side, and the phases it has been in."""

    prefill: str = ABSENT
    decode: str = ABSENT
    phase: str = ""
    history: list[tuple[int, str, float]] = field(default_factory=list)
    """(number of the trace line, phase, seconds)."""


class Phases:
    """Follows the trace of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.places: Final[dict[str, Place]] = {}
        self._cluster = cluster
        self._read = 0

    def update(self) -> None:
        """Take in what was written since the last call."""
        lines = self._cluster.lines
        while self._read < len(lines):
            book, line = lines[self._read]
            self._read += 1
            if isinstance(line, SubmitLine):
                self._at(book, line.life, book.chart.initial, line.time)
            elif isinstance(line, MoveLine):
                self._at(book, line.life, line.target, line.time)

    def now(self, name: str) -> str | None:
        self.update()
        place = self.places.get(name)
        return place.phase if place is not None else None

    def reached(self, name: str, phases: Collection[str], since: int) -> bool:
        """Whether the request is, or after line ``since`` was, in one of ``phases``."""
        self.update()
        place = self.places.get(name)
        if place is None:
            return False
        return place.phase in phases or any(
            phase in phases for line, phase, _ in reversed(place.history) if line > since
        )

    def since(self, name: str, phase: str) -> float | None:
        """When the request was first in ``phase``, in seconds; None if it never was."""
        self.update()
        history = self.places[name].history if name in self.places else []
        return next((time for _, each, time in history if each == phase), None)

    def _at(self, book: Book, life: str, state: str, time: float) -> None:
        name = book.lives[life].name.partition("@")[0]
        place = self.places.setdefault(name, Place())
        if book.chart.name == "unified":
            phase = str(book.chart.phase(state))
        else:
            if book.chart.name == "prefill":
                place.prefill = state
            else:
                place.decode = state
            phase = self._joint(place, book, state)
        place.phase = phase
        place.history.append((self._read, phase, time))

    @staticmethod
    def _joint(place: Place, book: Book, state: str) -> str:
        try:
            return str(phase_of(place.prefill, place.decode))
        except ValueError:  # one side of an earlier attempt, or of a process that is gone
            if place.decode in (ABSENT, GONE):
                return str(book.chart.phase(state))
            return str(DECODE.phase(place.decode))
