"""The vocabulary of exploration: budgets, steps, models, results.

A *model* (:mod:`fsm.explore_pd_model`, :mod:`fsm.explore_unified`) says what one request can do,
:mod:`fsm.explore` walks everything that one or two of them can do together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, TypeVar

from fsm.chart import Chart
from fsm.resources import Resource
from fsm.trace import Balance

Cost: TypeAlias = int
FREE: Final[Cost] = 0
FAULT: Final[Cost] = 1
ABORT: Final[Cost] = 2
DEADLINE: Final[Cost] = 3
REBUILD: Final[Cost] = 4
UNSURE: Final[Cost] = 5
"""What a step costs: nothing (and then progress may count on it), one unit of a budget, or nothing
but without being sure to come: an operator's command, a refusal, a retraction, a stop string."""


MIXED: Final = 2
"""Weights of KV that was kept when those of its node were changed in place: what is computed from
then on is of the new ones. Nodes compute under 0, and after a change under 1."""


class Budget(NamedTuple):
    """How much may go wrong in one run; each at most 3."""

    faults: int = 0
    aborts: int = 0
    deadlines: int = 0
    rebuilds: int = 0

    def __str__(self) -> str:
        return f"F{self.faults} A{self.aborts} D{self.deadlines} R{self.rebuilds}"


NO_BUDGET: Final = Budget()

Request: TypeAlias = Any
Environment: TypeAlias = Any
"""Hashable, and each model's own."""


class Moved(NamedTuple):
    """An edge that a life takes in a step."""

    role: str
    current: bool
    """It is the decode life, or the prefill life that shares its room now."""
    event: str
    by: str
    why: str
    who: int = 0
    units: int = 1
    """Pages that it takes, if it takes any."""
    pool: Balance | None = None
    """The page pool after it, in models that number pages."""
    size: int = 1
    """Pages that its prompt and the tokens it has had need."""


class Leased(NamedTuple):
    """Pages change hands outside a move."""

    role: str
    what: str
    owner: int | str
    """A request, or somebody who is none."""
    units: int
    pool: Balance


Event: TypeAlias = Moved | Leased
"""What a step does that a trace would say."""


class Step(NamedTuple):
    """What one request may do."""

    label: str
    cost: Cost
    needs: int
    """Pools of which it must get the last unit: bits as in :meth:`Model.claims`."""
    environment: Environment
    request: Request
    repair: bool = False
    """Only a heartbeat brings it about. Without a fault before, that is a violation."""
    violation: str = ""
    moves: tuple[Event, ...] = ()
    who: int = 0
    """Which request it is of, in a model that has several in one; -1: of the node."""


class Hit(NamedTuple):
    """What an event of a whole node does to one request."""

    request: Request
    violation: str = ""
    moves: tuple[Event, ...] = ()


_Environment = TypeVar("_Environment")
_Request = TypeVar("_Request")


class Traced(NamedTuple):
    """What a trace says of a node before anything happens there."""

    chart: Chart
    kit: frozenset[Resource]
    """Of every request."""
    pages: int | None = None
    """Pages of the node, in models that number them; otherwise every life has one of its own."""
    prompt_pages: int = 1


class Model(Protocol[_Environment, _Request]):
    """One role, or pair of roles."""

    @property
    def name(self) -> str: ...

    @property
    def nodes(self) -> Mapping[str, Traced]:
        """Role → the node that a counterexample is traced on."""
        ...

    def begin(self) -> tuple[_Environment, _Request]: ...

    def steps(self, environment: _Environment, request: _Request) -> list[Step]: ...

    def claims(self, request: _Request) -> int:
        """The contended pools that this request holds the last unit of, one bit each."""
        ...

    def events(self, environment: _Environment) -> list[tuple[str, Cost, _Environment]]:
        """What may hit the nodes as a whole: (label, cost, environment after it)."""
        ...

    def hit(self, label: str, environment: _Environment, request: _Request) -> Hit | None:
        """What such an event does to a request; None if the request forbids it. ``environment``
        is the one before it."""
        ...

    def at_rest(self, environment: _Environment, request: _Request) -> bool: ...

    def describe(self, environment: _Environment, requests: Sequence[_Request]) -> str:
        """One line for people."""
        ...


@dataclass(frozen=True, slots=True)
class Taken:
    """One step of a counterexample: who, what, and the joint state after it."""

    who: int
    """Index of the request; -1 for an event of a node."""
    label: str
    after: str
    moves: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True)
class Violation:
    """What is broken, and a shortest sequence of steps that breaks it."""

    what: str
    start: str
    steps: tuple[Taken, ...]

    def __str__(self) -> str:
        width = len(str(len(self.steps)))
        lines = [f"{self.what}", f"{'':{width}}  {self.start}"]
        for number, step in enumerate(self.steps, 1):
            who = f"r{step.who + 1}: " if step.who >= 0 else ""
            lines += [f"{number:{width}}  {who}{step.label}", f"{'':{width}}    {step.after}"]
        return "\n".join(lines)


@dataclass(slots=True)
class Result:
    """What one exploration came to."""

    model: str
    requests: int
    budget: Budget
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    complete: bool = False
    violation: Violation | None = None
    seen: frozenset[Request] = field(default_factory=frozenset)
    """Every state that one request can be in."""

    @property
    def rate(self) -> float:
        """States a second."""
        return self.states / self.seconds if self.seconds else 0.0


Progress: TypeAlias = Callable[[Result, int], None]
"""Called now and then with the result so far and the number of states waiting."""
