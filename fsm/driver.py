"""The only writer of a request's state.

``fire`` moves a request along one edge of its chart and binds its leases to the states: the
leases that the edge takes must have been reserved by the caller (that part may fail, before
anything has changed), they are adopted on entry, and the leases that the edge drops are released
on exit. Adopting and releasing cannot fail.

Two drivers share that logic. :class:`Driver` runs on one plain ``transitions.Machine`` for the
chart: no models, no conditions, no queue, no automatic transitions. :class:`DictDriver` is a
dictionary lookup; it is the oracle in tests and what replay uses. Both turn every kind of refusal
(an event that is illegal here, an unknown event, an unknown state, the wrong leases) into
:class:`IllegalEvent`, after which nothing has changed.

``transitions`` 0.9.3: an exception in ``before_state_change`` leaves everything as it was; one in
an entry callback would not, so all checks sit before. Its logger writes at INFO for every
transition; it is raised to WARNING here."""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from transitions import EventData, Machine, MachineError

from fsm.chart import Chart, Move
from fsm.journal import Entry, Journal
from fsm.ledger import Lease
from fsm.resources import Resource

logging.getLogger("transitions").setLevel(logging.WARNING)


class IllegalEvent(RuntimeError):  # noqa: N818 - named as the field names it
    """The event cannot be fired here, or was fired with the wrong leases. Nothing has changed."""


class Subject(Protocol):
    """What a driver knows of a request."""

    @property
    def life(self) -> str: ...

    @property
    def kit(self) -> frozenset[Resource]: ...

    state: str
    leases: dict[Resource, Lease]
    journal: Journal


Observer = Callable[[Subject, Move, str, str], None]
"""Called after every move with (subject, move, by, why): traces, metrics, invariant checks."""

NO_LEASES: Final[Mapping[Resource, Lease]] = {}


class DictDriver:
    """A chart driven by a dictionary lookup."""

    def __init__(
        self, chart: Chart, clock: Callable[[], float], observer: Observer | None = None
    ) -> None:
        self.chart: Final = chart
        self._clock = clock
        self._observer = observer
        self._moves: dict[tuple[str, str, frozenset[Resource]], Move] = {}

    def begin(self, subject: Subject, leases: Mapping[Resource, Lease]) -> None:
        """A request enters the chart's initial state with exactly the leases that this state
        holds."""
        wanted = self.chart.holds[self.chart.initial] & subject.kit
        if leases.keys() != wanted or subject.leases:
            raise IllegalEvent(
                f"begins with {sorted(leases)}, the initial state holds {sorted(wanted)}"
            )
        _check_reserved(subject, leases, f"{self.chart.name}: begin")
        self._begin(subject)
        self._adopt(subject, leases)

    def move(self, subject: Subject, event: str) -> Move:
        """The move that ``event`` would make now: its ``takes`` are what the caller has to
        reserve."""
        key = (subject.state, event, subject.kit)
        move = self._moves.get(key)
        if move is None:
            move = self.chart.move(*key)
            if move is None:
                raise IllegalEvent(f"{self.chart.name}: no {event!r} in state {subject.state!r}")
            self._moves[key] = move
        return move

    def allows(self, subject: Subject, event: str) -> bool:
        return (subject.state, event) in self.chart.table

    def fire(
        self,
        subject: Subject,
        event: str,
        by: str,
        why: str = "",
        leases: Mapping[Resource, Lease] = NO_LEASES,
    ) -> Move:
        """Move ``subject`` along one edge. Raises :class:`IllegalEvent`, and then nothing has
        changed."""
        move = self.move(subject, event)
        self._check(subject, move, by, leases)
        self._trigger(subject, move, leases)
        edge = move.edge
        subject.journal.add(Entry(self._clock(), event, edge.source, edge.target, by, why))
        if self._observer is not None:
            self._observer(subject, move, by, why)
        return move

    def _begin(self, subject: Subject) -> None:
        subject.state = self.chart.initial

    def _trigger(self, subject: Subject, move: Move, leases: Mapping[Resource, Lease]) -> None:
        self._release(subject, move)
        subject.state = move.edge.target
        self._adopt(subject, leases)

    def _check(
        self, subject: Subject, move: Move, by: str, leases: Mapping[Resource, Lease]
    ) -> None:
        edge = move.edge
        label = f"{self.chart.name}: {edge.source} --{edge.event}--> {edge.target}"
        if by not in edge.by:
            raise IllegalEvent(f"{label} cannot be caused by {by!r}, only by {edge.by}")
        if leases.keys() != set(move.takes):
            raise IllegalEvent(f"{label} takes {list(move.takes)}, was given {sorted(leases)}")
        held = self.chart.holds[edge.source] & subject.kit
        if subject.leases.keys() != held:
            raise IllegalEvent(
                f"{label}: holds {sorted(subject.leases)} where its state holds {sorted(held)}"
            )
        _check_reserved(subject, leases, label)
        for resource in move.drops:
            if subject.leases[resource].stage != "held":
                stage = subject.leases[resource].stage
                raise IllegalEvent(f"{label} drops {resource}, which is {stage}")

    def _release(self, subject: Subject, move: Move) -> None:
        for resource in move.drops:
            subject.leases.pop(resource).release(move.edge.pages)

    def _adopt(self, subject: Subject, leases: Mapping[Resource, Lease]) -> None:
        for resource, lease in leases.items():
            lease.adopt()
            subject.leases[resource] = lease


def _check_reserved(subject: Subject, leases: Mapping[Resource, Lease], label: str) -> None:
    """Adopting cannot fail, so whatever could fail it is found before anything has changed."""
    for resource, lease in leases.items():
        if (lease.resource, lease.owner, lease.stage) != (resource, subject.life, "reserved"):
            raise IllegalEvent(
                f"{label}: {resource} is {lease.stage} {lease.resource} of {lease.owner}"
            )


class Driver(DictDriver):
    """A chart driven by one plain ``transitions.Machine``."""

    def __init__(
        self, chart: Chart, clock: Callable[[], float], observer: Observer | None = None
    ) -> None:
        super().__init__(chart, clock, observer)
        self._machine = Machine(
            model=None,
            states=[
                {"name": s.name, "on_exit": [self._on_exit], "on_enter": [self._on_enter]}
                for s in chart.states
            ],
            initial=chart.initial,
            transitions=[
                {"trigger": e.event, "source": e.source, "dest": e.target} for e in chart.edges
            ],
            send_event=True,
            auto_transitions=False,
        )

    def _begin(self, subject: Subject) -> None:
        self._machine.set_state(self.chart.initial, subject)

    def _trigger(self, subject: Subject, move: Move, leases: Mapping[Resource, Lease]) -> None:
        event = move.edge.event
        try:
            self._machine.events[event].trigger(subject, subject=subject, move=move, leases=leases)
        except MachineError as error:  # unreachable while chart and machine agree: tests prove it
            raise IllegalEvent(
                f"{self.chart.name}: {event!r} in {subject.state!r}: {error}"
            ) from error

    def _on_exit(self, data: EventData) -> None:
        self._release(data.kwargs["subject"], data.kwargs["move"])

    def _on_enter(self, data: EventData) -> None:
        self._adopt(data.kwargs["subject"], data.kwargs["leases"])
