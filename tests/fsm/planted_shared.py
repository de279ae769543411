"""Bugs planted in what two requests share on a unified node, which exploration must find by a
counterexample of minimal length: see :mod:`tests.fsm.planted`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fsm.chart import Chart
from fsm.explore import Explorer
from fsm.explore_base import Budget, Violation
from fsm.explore_shared import SharedModel
from fsm.explore_shared_base import FENCE, SharedDesign
from fsm.explore_shared_pages import Books, Key, Tree
from fsm.ledger import PagePool
from fsm.unified import UNIFIED
from tests.fsm.planting import flush_unless, holding, leading


@dataclass(frozen=True)
class PlantedShared:
    """A bug, the smallest run that shows it, what the run and what a replay of the counterexample
    must say (nothing where every move is legal), and the length of the counterexample."""

    name: str
    make: Callable[[bool], SharedModel]
    budget: Budget
    says: str
    length: int
    replay: str = ""

    @property
    def model(self) -> SharedModel:
        return self.make(self.budget.rebuilds > 0)

    @cached_property
    def violation(self) -> Violation | None:
        """What the run finds."""
        return Explorer(self.model, 1, self.budget).run().violation


class FreesWithTheFirst(PagePool):
    """A shared page is given up by every request as soon as one of them does."""

    def drop(self, page: int, owner: str) -> bool:
        for other in self.owners_of(page) & ({"r1", "r2"} - {owner}):
            super().drop(page, other)
        return super().drop(page, owner)


class TakesFenced(PagePool):
    """What a peer may still write into counts as free for one that grows."""

    def take(self, owner: str, count: int) -> list[int]:
        fenced = [page for page in range(self.total) if FENCE in self.owners_of(page)]
        if not fenced or len(self.pages_of(owner)) < 2:
            return super().take(owner, count)
        self.share(fenced[0], owner)
        return fenced[:1]


class CountsTwice(PagePool):
    """A page that is shared leaves the free ones once more."""

    def share(self, page: int, owner: str) -> None:
        super().share(page, owner)
        if len(self.owners_of(page)) == 3:
            self._count["held"] += 1


def _leaves(tree: Tree, locks: tuple[Key | None, ...]) -> list[Key]:
    """Locks begin at the parent of what is used (B26)."""
    parents = {(key[0], "A") for key, _ in tree if key[1] != "A"}
    return [key for key, _ in tree if key not in parents]


def _without(resource: str, *states: str) -> Chart:
    return holding(UNIFIED, lambda s: tuple(r for r in s.holds if r != resource), *states)


def _with(resource: Any, *states: str) -> Chart:
    return holding(UNIFIED, lambda s: (*s.holds, resource), *states)


ALONE, A1, R1 = Budget(), Budget(aborts=1), Budget(rebuilds=1)


Make = Callable[[bool], SharedModel]
"""The model, with or without pauses."""


def _alone(pages: int = 4, guest: bool = False, **changes: Any) -> Make:
    design = replace(SharedDesign(), **changes)
    return lambda pauses: SharedModel(design, pages=pages, guest=guest, pauses=pauses)


def _group(**changes: Any) -> Make:
    design = replace(SharedDesign(), **changes)
    return lambda pauses: SharedModel(design, "group", pauses=pauses)


def _session(**changes: Any) -> Make:
    design = replace(SharedDesign(), **changes)
    return lambda pauses: SharedModel(design, "session", pauses=pauses)


PLANTED_SHARED = (
    PlantedShared(
        "a shared page is freed with its first owner",
        _alone(books=Books(FreesWithTheFirst)),
        ALONE,
        "r2: its table has page 0, which it does not own",
        7,
    ),
    PlantedShared(
        "a page that a request uses is evicted",
        _alone(pages=3, evictable=_leaves),
        ALONE,
        "is evicted, which r1 owns",
        9,
        "evict",
    ),
    PlantedShared(
        "a request grows into a page that a peer may still write",
        _alone(guest=True, books=Books(TakesFenced)),
        ALONE,
        "into which a peer may still write",
        8,
        "grow",
    ),
    PlantedShared(
        "the books of a pool count a shared page twice",
        _alone(books=Books(CountsTwice)),
        ALONE,
        "books say",
        4,
    ),
    PlantedShared(
        "a cached prompt is not locked by who goes on using it",
        _alone(relocks=lambda old, new: False),
        ALONE,
        "is evicted, which r1 owns",
        9,
        "evict",
    ),
    PlantedShared(
        "a prefix of other weights is found",
        _alone(matches=lambda key, weights: True),
        R1,
        "KV is found that was computed under other weights",
        7,
    ),
    PlantedShared(
        "KV that was kept in place is shared",
        _alone(may_cache=lambda kv, node: True),
        R1,
        "pages go to the prefix cache that were computed under other weights",
        5,
    ),
    PlantedShared(
        "weights change under pages in a pause that keeps KV",
        _alone(may_flush=flush_unless("prefilling", "decoding")),
        R1,
        "weights change under the pages of r1, prefilling",
        3,
    ),
    PlantedShared(
        "weights change under who is holding, in a pause that drops KV",
        _alone(may_flush=flush_unless("holding")),
        R1,
        "weights change under the pages of r1, holding",
        5,
    ),
    PlantedShared(
        "an abort releases shared pages under a launched step",
        _alone(chart=leading(UNIFIED, "decoding", "abort", target="done", pages="cache")),
        A1,
        "a launched step touches pages that were released in done",
        6,
        "fingerprint",
    ),
    PlantedShared(
        "the memory that ran out is waited for by both",
        _alone(gives_way=lambda stuck: False),
        ALONE,
        "never come to rest",
        12,
    ),
    PlantedShared(
        "an abort of a group reaches its first member only",
        _group(aborts=lambda members: members[:1]),
        A1,
        "r2 was aborted, and is still waiting",
        2,
    ),
    PlantedShared(
        "a victim leaves its group, which ends early, and then twice",
        _group(chart=_without("group_members", "retracting", "retracted")),
        ALONE,
        "the group has not ended with its last member, and only then",
        5,
        "group_members",
    ),
    PlantedShared(
        "a group waits for steps of members that have answered",
        _group(chart=_with("group_members", "stopping")),
        ALONE,
        "answered, and is still in its group",
        4,
        "group_members",
    ),
    PlantedShared(
        "a victim gives its session's turn back",
        _session(chart=_without("session_turns", "retracting", "retracted")),
        ALONE,
        "two turns of one session are in flight",
        5,
        "session_turns",
    ),
    PlantedShared(
        "an answered request keeps its session's turn",
        _session(chart=_with("session_turns", "stopping")),
        ALONE,
        "answered, and still has its session's turn",
        4,
        "session_turns",
    ),
)
