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
from typing import Any, Final

from fsm.explore_base import NO_BUDGET, Budget, Hit, Model, Progress, Request, Result, Step
from fsm.explore_space import (
    BUDGET_BITS,
    BUDGET_MASK,
    ENV_BITS,
    ENV_MASK,
    LOW,
    REQUEST_BITS,
    REQUEST_MASK,
    Arc,
    Found,
    Space,
)


class Explorer(Space):
    """One exploration: a model, a number of requests, and a budget."""

    def __init__(
        self,
        model: Model[Any, Any],
        requests: int = 1,
        budget: Budget = NO_BUDGET,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(model, requests, budget)
        self.result: Final = Result(model.name, requests, budget)
        self._progress = progress

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
        except Found as found_one:
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

        Raises :class:`Found`."""
        budget = state & BUDGET_MASK
        env = (state >> BUDGET_BITS) & ENV_MASK
        spend = self._spend[budget]
        low = (state >> LOW) & REQUEST_MASK
        fair: list[int] = []
        other: list[int] = []
        if self._requests == 1:
            arcs = self._arcs.get((low << ENV_BITS) | env) or self._compile(env, low)
            rests = arcs.rests
            fair += [arc[4] | budget for arc in arcs.fair]
            for arc in arcs.other:
                left = spend[arc[0]]
                if left >= 0:
                    other.append(arc[4] | left)
            if arcs.suspect:
                self._suspect(arcs.suspect, -1, budget)
        else:
            high = state >> (LOW + REQUEST_BITS)
            hits, rests = [], True
            for rid, mate in ((high, low), (low, high)):
                claimed, mate_low = self._claims[mate], mate << LOW
                mate_high = mate_low << REQUEST_BITS
                arcs = self._arcs.get((rid << ENV_BITS) | env) or self._compile(env, rid)
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
            env = (arc[4] >> BUDGET_BITS) & ENV_MASK
            ids = [arc[2], mate] if mate >= 0 else [arc[2]]
            what = step.violation or "without any fault, only a heartbeat can help here"
            raise Found(step.label, self._pack(ids, env, left), what)

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
                raise Found(label, state, first.violation or second.violation)
            (other if cost else fair).append(state)

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
            ids.add((state >> LOW) & REQUEST_MASK)
            if self._requests == 2:
                ids.add(state >> (LOW + REQUEST_BITS))
        return {self._all[rid] for rid in ids}

    @staticmethod
    def _path(order: list[int], parents: "array[int]", position: int) -> list[int]:
        path = [position]
        while path[-1]:
            path.append(parents[path[-1]])
        return [order[p] for p in reversed(path)]
