"""Explicit-state exploration: every state that charts, rules and protocol can reach, breadth first.

A *model* (:mod:`fsm.explore_pd`, :mod:`fsm.explore_unified`) says what one request can do; requests
meet only in what they claim of shared memory, in events that hit a whole node, and in the budgets
for faults. So a request's steps are computed once for each of its states and composed here, which
is what makes 10⁵ states a second possible in Python.

A state is one integer: the requests (interned, and sorted, because they are alike), the
environment of the nodes (interned), and the budgets left. States are expanded in breadth-first
order, so the first violation found is reached by a shortest sequence of steps.

Besides what a model finds wrong in a step, every state must be able to come to rest by steps that
are neither faults, aborts, deadlines nor operator's commands: no deadlock, no livelock under
fairness, retired reachable from everywhere."""

import gc
import time
from array import array
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any, Final, NamedTuple, TypeAlias

from fsm.explore_base import (
    NO_BUDGET,
    Budget,
    Cost,
    Environment,
    Hit,
    Model,
    Progress,
    Request,
    Result,
    Step,
    Taken,
    Violation,
)

_BUDGET_BITS: Final = 8
_ENV_BITS: Final = 10
_REQUEST_BITS: Final = 22
_LOW: Final = _BUDGET_BITS + _ENV_BITS
_BUDGET_MASK: Final = (1 << _BUDGET_BITS) - 1
_ENV_MASK: Final = (1 << _ENV_BITS) - 1
_REQUEST_MASK: Final = (1 << _REQUEST_BITS) - 1


class _Found(Exception):  # noqa: N818 - it is how a search ends
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


class Explorer:
    """One exploration: a model, a number of requests, and a budget."""

    def __init__(
        self,
        model: Model[Any, Any],
        requests: int = 1,
        budget: Budget = NO_BUDGET,
        progress: Progress | None = None,
    ) -> None:
        if requests not in (1, 2):
            raise ValueError("one or two requests")
        self.model: Final[Model[Any, Any]] = model
        self.result: Final = Result(model.name, requests, budget)
        self._requests = requests
        self._progress = progress
        self._env_ids: dict[Environment, int] = {}
        self._envs: list[Environment] = []
        self._ids: dict[Request, int] = {}
        self._all: list[Request] = []
        self._claims: list[int] = []
        self._arcs: dict[int, Arcs] = {}
        self._events: dict[int, list[tuple[Cost, int, str]]] = {}
        self._spend = _spending(budget)
        self._whole = _budget_code(budget)

    # --- the search ---

    def run(self, limit: int | None = None) -> Result:
        """Explore everything, or up to ``limit`` states. ``result.complete`` says which."""
        started, result = time.perf_counter(), self.result
        environment, request = self.model.begin()
        rid = self._intern(request)
        first = self._pack([rid] * self._requests, self._env(environment), self._whole)
        index: dict[int, int] = {first: 0}
        order, parents = [first], array("I", [0])
        edges, offsets = array("I"), array("Q", [0])  # of fair steps, for the check of rest
        resting: list[int] = []
        position, level_end, transitions = 0, 1, 0
        collecting = gc.isenabled()
        gc.disable()  # nothing here is garbage, and looking for it would take a third of the time
        try:
            while position < len(order):
                if position == level_end:
                    level_end = len(order)
                    result.depth += 1
                    self._update(started, order, transitions)
                    if self._progress is not None:
                        self._progress(result, level_end - position)
                if limit is not None and len(order) > limit:
                    break
                fair, other, rests = self._successors(order[position])
                if rests:
                    resting.append(position)
                transitions += len(fair) + len(other)
                for state in fair:
                    found = index.setdefault(state, len(order))
                    if found == len(order):
                        order.append(state)
                        parents.append(position)
                    edges.append(found)
                offsets.append(len(edges))
                for state in other:
                    if state not in index:
                        index[state] = len(order)
                        order.append(state)
                        parents.append(position)
                position += 1
            else:
                result.complete = True
                index.clear()
                stuck = self._stuck(len(order), resting, edges, offsets)
                if stuck is not None:
                    path = self._path(order, parents, stuck)
                    result.violation = self._violation(path, None)
        except _Found as found_one:
            path = self._path(order, parents, position)
            result.violation = self._violation(path, found_one)
        finally:
            if collecting:
                gc.enable()
        self._update(started, order, transitions)
        result.seen = frozenset(self._seen(order))
        return result

    def _update(self, started: float, order: list[int], transitions: int) -> None:
        self.result.states, self.result.transitions = len(order), transitions
        self.result.seconds = time.perf_counter() - started

    def _successors(self, state: int) -> tuple[list[int], list[int], bool]:
        """The states after one step: those that can be counted on, and the others; and whether
        everything is at rest.

        Raises :class:`_Found`."""
        budget = state & _BUDGET_MASK
        env = (state >> _BUDGET_BITS) & _ENV_MASK
        spend = self._spend[budget]
        low = (state >> _LOW) & _REQUEST_MASK
        fair: list[int] = []
        other: list[int] = []
        if self._requests == 1:
            arcs = self._arcs.get((low << _ENV_BITS) | env) or self._compile(env, low)
            rests = arcs.rests
            fair += [arc[4] | budget for arc in arcs.fair]
            for arc in arcs.other:
                left = spend[arc[0]]
                if left >= 0:
                    other.append(arc[4] | left)
            if arcs.suspect:
                self._suspect(arcs.suspect, -1, budget)
        else:
            high = state >> (_LOW + _REQUEST_BITS)
            hits, rests = [], True
            for rid, mate in ((high, low), (low, high)):
                claimed, mate_low = self._claims[mate], mate << _LOW
                mate_high = mate_low << _REQUEST_BITS
                arcs = self._arcs.get((rid << _ENV_BITS) | env) or self._compile(env, rid)
                for _, needs, target, as_high, as_low in arcs.fair:
                    if needs & claimed:
                        continue
                    if target >= mate:
                        fair.append(as_high | mate_low | budget)
                    else:
                        fair.append(mate_high | as_low | budget)
                for cost, needs, target, as_high, as_low in arcs.other:
                    left = spend[cost]
                    if left < 0 or needs & claimed:
                        continue
                    if target >= mate:
                        other.append(as_high | mate_low | left)
                    else:
                        other.append(mate_high | as_low | left)
                if arcs.suspect:
                    self._suspect(arcs.suspect, mate, budget)
                rests = rests and arcs.rests
                hits.append(arcs.hits)
                if rid == mate:
                    hits.append(arcs.hits)
                    break  # alike: the second one's steps are the first one's
            self._node_events(env, (high, low), hits, budget, fair, other)
        return fair, other, rests

    def _suspect(self, arcs: list[tuple[Arc, Step]], mate: int, budget: int) -> None:
        faultless = budget & 3 == self._whole & 3
        claimed = self._claims[mate] if mate >= 0 else 0
        for arc, step in arcs:
            left = self._spend[budget][arc[0]]
            if left < 0 or arc[1] & claimed or not (step.violation or faultless):
                continue
            env = (arc[4] >> _BUDGET_BITS) & _ENV_MASK
            ids = [arc[2], mate] if mate >= 0 else [arc[2]]
            what = step.violation or "without any fault, only a heartbeat can help here"
            raise _Found(step.label, self._pack(ids, env, left), what)

    def _node_events(
        self,
        env: int,
        before: tuple[int, int],
        hits: list[list[Hit | None]],
        budget: int,
        fair: list[int],
        other: list[int],
    ) -> None:
        spend = self._spend[budget]
        for (cost, after, label), first, second in zip(self._events[env], *hits, strict=True):
            left = spend[cost]
            if left < 0 or first is None or second is None:
                continue
            ids = [self._ids[first.request], self._ids[second.request]]
            if after == env and ids == list(before):
                continue  # it changed nothing, and cost something
            state = self._pack(ids, after, left)
            if first.violation or second.violation:
                raise _Found(label, state, first.violation or second.violation)
            (other if cost else fair).append(state)

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
            as_low = (target << _LOW) | (after << _BUDGET_BITS)
            as_high = (target << (_LOW + _REQUEST_BITS)) | (after << _BUDGET_BITS)
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
        self._arcs[(rid << _ENV_BITS) | env] = arcs
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
            packed = (packed << _REQUEST_BITS) | rid
        return (packed << _LOW) | (env << _BUDGET_BITS) | budget

    def _unpack(self, state: int) -> tuple[int, tuple[int, ...]]:
        """(environment, requests)."""
        env = (state >> _BUDGET_BITS) & _ENV_MASK
        shifts = (_LOW + _REQUEST_BITS * n for n in range(self._requests))
        ids = [(state >> shift) & _REQUEST_MASK for shift in shifts]
        return env, tuple(reversed(ids))

    # --- rest ---

    def _stuck(
        self, total: int, resting: list[int], edges: "array[int]", offsets: "array[int]"
    ) -> int | None:
        """The first state that cannot come to rest by steps that are sure to come.

        Backward reachability, without the edges turned round: most steps lead to a later state, so
        one pass from the last state to the first settles nearly everything."""
        good = bytearray(total)
        for position in resting:
            good[position] = 1
        waiting: Sequence[int] = range(total - 1, -1, -1)
        while True:
            left: list[int] = []
            for position in waiting:
                if good[position]:
                    continue
                for after in edges[offsets[position] : offsets[position + 1]]:
                    if good[after]:
                        good[position] = 1
                        break
                else:
                    left.append(position)
            if not left:
                return None
            if len(left) == len(waiting):
                # The first in which nothing can happen says more than the first that leads there.
                dead = (n for n in reversed(left) if offsets[n] == offsets[n + 1])
                return next(dead, left[-1])
            waiting = left

    def _seen(self, order: list[int]) -> set[Request]:
        ids: set[int] = set()
        for state in order:
            ids.add((state >> _LOW) & _REQUEST_MASK)
            if self._requests == 2:
                ids.add(state >> (_LOW + _REQUEST_BITS))
        return {self._all[rid] for rid in ids}

    # --- counterexamples ---

    @staticmethod
    def _path(order: list[int], parents: "array[int]", position: int) -> list[int]:
        path = [position]
        while path[-1]:
            path.append(parents[path[-1]])
        return [order[p] for p in reversed(path)]

    def _violation(self, path: list[int], found: _Found | None) -> Violation:
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
        environment, spend = self._envs[env], self._spend[before & _BUDGET_MASK]
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
                    return Taken(who, step.label, self._text_of(after, names), step.moves)
        for cost, target_env, event in self._of_node(env):
            hits = [self.model.hit(event, environment, self._all[rid]) for rid in names]
            struck = [hit for hit in hits if hit is not None]
            if spend[cost] < 0 or len(struck) < len(names) or label not in (None, event):
                continue
            targets = [self._intern(hit.request) for hit in struck]
            if self._pack(targets, target_env, spend[cost]) == after:
                names[:] = targets
                moves = tuple(
                    move._replace(who=who) for who, hit in enumerate(struck) for move in hit.moves
                )
                return Taken(-1, event, self._text_of(after, names), moves)
        raise AssertionError("a state without the step that led to it")

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
