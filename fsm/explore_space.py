"""States as integers, compiled steps, and the way back from an integer to what people read."""

from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, Final, NamedTuple, TypeAlias

from fsm.explore_base import (
    Budget,
    Cost,
    Environment,
    Event,
    Hit,
    Model,
    Moved,
    Request,
    Step,
    Taken,
    Violation,
)

BUDGET_BITS: Final = 8
ENV_BITS: Final = 10
REQUEST_BITS: Final = 22
LOW: Final = BUDGET_BITS + ENV_BITS
BUDGET_MASK: Final = (1 << BUDGET_BITS) - 1
ENV_MASK: Final = (1 << ENV_BITS) - 1
REQUEST_MASK: Final = (1 << REQUEST_BITS) - 1


class Found(Exception):  # noqa: N818 - it is how a search ends
    """A step of the state being expanded is a violation."""

    def __init__(self, label: str, after: int, what: str) -> None:
        self.label, self.after, self.what = label, after, what


Arc: TypeAlias = tuple[Cost, int, int, int, int]
"""(cost, needs, request after it, and the same shifted to the place of the higher and of the lower
request of a pair, each with the environment after it)."""


class Arcs(NamedTuple):
    """The compiled steps of one request in one environment."""

    fair: list[Arc]
    """Those that can be counted on."""
    other: list[Arc]
    suspect: list[tuple[Arc, Step]]
    """Violations, and repairs, which are violations as long as nothing went wrong."""
    hits: list[Hit | None]
    """What the events of a node do to it, in their order; a request of a pair only."""
    rests: bool


class Space:
    """Requests, environments and budgets of one exploration, by number."""

    def __init__(self, model: Model[Any, Any], requests: int, budget: Budget) -> None:
        if requests not in (1, 2):
            raise ValueError("one or two requests")
        self.model: Final[Model[Any, Any]] = model
        self._requests = requests
        self._env_ids: dict[Environment, int] = {}
        self._envs: list[Environment] = []
        self._ids: dict[Request, int] = {}
        self._all: list[Request] = []
        self._claims: list[int] = []
        self._arcs: dict[int, Arcs] = {}
        self._events: dict[int, list[tuple[Cost, int, str]]] = {}
        self._spend = _spending(budget)
        self._whole = _budget_code(budget)

    # --- compiled steps ---

    def _compile(self, env: int, rid: int) -> Arcs:
        environment, request = self._envs[env], self._all[rid]
        arcs = Arcs([], [], [], [], self.model.at_rest(environment, request))
        known: set[tuple[Cost, int]] = set()
        steps = self.model.steps(environment, request)
        hits = [self.model.hit(label, environment, request) for _, _, label in self._of_node(env)]
        if self._requests == 1:
            for (cost, after, label), hit in zip(self._events[env], hits, strict=True):
                if hit is not None:
                    steps.append(
                        Step(
                            label,
                            cost,
                            0,
                            self._envs[after],
                            hit.request,
                            False,
                            hit.violation,
                            hit.moves,
                        )
                    )
        else:
            for hit in hits:
                if hit is not None:
                    self._intern(hit.request)
            arcs.hits.extend(hits)
        for step in steps:
            target, after = self._intern(step.request), self._env(step.environment)
            as_low = (target << LOW) | (after << BUDGET_BITS)
            as_high = (target << (LOW + REQUEST_BITS)) | (after << BUDGET_BITS)
            arc = (step.cost, step.needs, target, as_high, as_low)
            if step.violation:
                arcs.suspect.append((arc, step))
                continue
            if (target == rid and after == env) or (step.cost, as_low) in known:
                continue
            if step.repair:
                arcs.suspect.append((arc, step))
            known.add((step.cost, as_low))
            (arcs.other if step.cost else arcs.fair).append(arc)
        self._arcs[(rid << ENV_BITS) | env] = arcs
        return arcs

    def _of_node(self, env: int) -> list[tuple[Cost, int, str]]:
        """Events of a whole node: (cost, environment after, label)."""
        events = self._events.get(env)
        if events is None:
            events = self._events[env] = [
                (cost, self._env(after), label)
                for label, cost, after in self.model.events(self._envs[env])
            ]
        return events

    def _intern(self, request: Request) -> int:
        rid = self._ids.get(request)
        if rid is None:
            rid = self._ids[request] = len(self._all)
            self._all.append(request)
            self._claims.append(self.model.claims(request))
        return rid

    def _env(self, environment: Environment) -> int:
        env = self._env_ids.get(environment)
        if env is None:
            env = self._env_ids[environment] = len(self._envs)
            self._envs.append(environment)
        return env

    @staticmethod
    def _pack(ids: Sequence[int], env: int, budget: int) -> int:
        packed = 0
        for rid in sorted(ids, reverse=True):
            packed = (packed << REQUEST_BITS) | rid
        return (packed << LOW) | (env << BUDGET_BITS) | budget

    def _unpack(self, state: int) -> tuple[int, tuple[int, ...]]:
        """(environment, requests)."""
        env = (state >> BUDGET_BITS) & ENV_MASK
        shifts = (LOW + REQUEST_BITS * n for n in range(self._requests))
        ids = [(state >> shift) & REQUEST_MASK for shift in shifts]
        return env, tuple(reversed(ids))

    # --- counterexamples ---

    def _violation(self, path: list[int], found: Found | None) -> Violation:
        """Walk the path again, with a fixed name for each request: in a state they are sorted."""
        env, ids = self._unpack(path[0])
        names = list(ids)
        start, steps = self._text(env, names), list[Taken]()
        for before, after in pairwise(path):
            steps.append(self._again(before, after, names, None))
        if found is not None:
            steps.append(self._again(path[-1], found.after, names, found.label))
            return Violation(found.what, start, tuple(steps))
        what = "from here on it can never come to rest: a deadlock, a livelock or a leak"
        return Violation(what, start, tuple(steps))

    def _again(self, before: int, after: int, names: list[int], label: str | None) -> Taken:
        """The step between two states; ``names`` becomes what the requests are after it.
        ``label``: the step is the one that is wrong."""
        env, _ = self._unpack(before)
        environment, spend = self._envs[env], self._spend[before & BUDGET_MASK]
        for who, rid in enumerate(names):
            others = names[:who] + names[who + 1 :]
            claimed = self._claims[others[0]] if others else 0
            for step in self.model.steps(environment, self._all[rid]):
                left = spend[step.cost]
                if left < 0 or step.needs & claimed or label not in (None, step.label):
                    continue
                if label is None and step.violation:
                    continue
                target = self._intern(step.request)
                state = self._pack([target, *others], self._env(step.environment), left)
                if state == after:
                    names[who] = target
                    said = who if self._requests == 2 else step.who
                    moves = self._named(who, step.moves)
                    return Taken(said, step.label, self._text_of(after, names), moves)
        for cost, target_env, event in self._of_node(env):
            hits = [self.model.hit(event, environment, self._all[rid]) for rid in names]
            struck = [hit for hit in hits if hit is not None]
            if spend[cost] < 0 or len(struck) < len(names) or label not in (None, event):
                continue
            targets = [self._intern(hit.request) for hit in struck]
            if self._pack(targets, target_env, spend[cost]) == after:
                names[:] = targets
                moves = tuple(
                    move for who, hit in enumerate(struck) for move in self._named(who, hit.moves)
                )
                return Taken(-1, event, self._text_of(after, names), moves)
        raise AssertionError("a state without the step that led to it")

    def _named(self, who: int, moves: tuple[Event, ...]) -> tuple[Event, ...]:
        """Moves with their request's name. A model that has several requests in one names them."""
        if self._requests == 1:
            return moves
        return tuple(m._replace(who=who) if isinstance(m, Moved) else m for m in moves)

    def _text_of(self, state: int, names: Sequence[int]) -> str:
        env, _ = self._unpack(state)
        return self._text(env, names)

    def _text(self, env: int, names: Sequence[int]) -> str:
        return self.model.describe(self._envs[env], [self._all[rid] for rid in names])


def _budget_code(budget: Budget) -> int:
    code = 0
    for shift, value in zip((0, 2, 4, 6), budget, strict=True):
        if not 0 <= value <= 3:
            raise ValueError("a budget is 0 to 3")
        code |= value << shift
    return code


def _spending(budget: Budget) -> dict[int, tuple[int, ...]]:
    """budget code → budget code after a step of each cost; -1 where it cannot be paid."""
    table = {}
    for left in product(*(range(value + 1) for value in budget)):
        code = _budget_code(Budget(*left))
        paid = (code - (1 << shift) if left[n] else -1 for n, shift in enumerate((0, 2, 4, 6)))
        table[code] = (code, *paid, code)
    return table
