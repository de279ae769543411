"""The model of shared pages does what production's ``Kv`` does with pages, cache and locks.

Method: random walks of the model from seeds; what a step does to memory is done to an
:class:`engine.pages.Kv` of the same size as well. Which leaf goes is the cache's choice (the least
recently used one): the walk takes the step that evicts the same. After every step the balances, the
nodes of the cache, and the owners of every request's pages must agree."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from engine.pages import Kv, Pages, PrefixLock
from engine.prefix_cache import Node as CacheNode
from engine.request import Request
from fsm.explore_base import FREE, Hit, Step
from fsm.explore_shared import SharedModel
from fsm.explore_shared_base import GUEST, Life, Node
from fsm.explore_unified_draft import World
from fsm.ledger import QUARANTINE
from transport.messages import SamplingParams

PAGE = 4
FIRST = (1,) * PAGE
STEPS = 60
SURE = 0.9
"""Share of steps that lead on: otherwise every request is aborted before it grows."""


def own(who: int) -> tuple[int, ...]:
    """The second page of a request."""
    return (10 + who, *(20 + who,) * (PAGE - 1))


class Twin:
    """A ``Kv`` that is taken through the same steps."""

    def __init__(self, pages: int) -> None:
        self.kv = Kv(pages, PAGE, 8, prefix_cache=True)
        self.kv.use_weights("W0")
        self.requests = [self._request(who) for who in range(2)]
        self.leases: dict[int, tuple[Pages, PrefixLock]] = {}
        self.guest: list[int] = []

    @staticmethod
    def _request(who: int) -> Request:
        tokens = [*FIRST, own(who)[0]]
        kit: frozenset[Any] = frozenset({"pages", "prefix_locks"})
        return Request(f"r{who + 1}", f"r{who + 1}", tokens, SamplingParams(), kit, who, 0.0)

    def follow(self, label: str, world: World, before: Node, after: Node) -> None:
        """Do to memory what a step of the model did."""
        for who, (old, new) in enumerate(zip(before.lives, after.lives, strict=True)):
            self._follow_life(label, who, old, new)
        if label == "the prefix cache is flushed":
            self.kv.cache.flush()
        elif "changes weights" in label:
            self.kv.use_weights("W1")
        elif label.startswith("a guest"):
            taken = self.kv.take(GUEST, 1)
            assert taken is not None
            self.guest = taken
            if after.guest == "peer":
                self.kv.pool.share(taken[0], f"{QUARANTINE}{GUEST}")
        elif label.startswith("the guest's page"):
            if "loaded" in label:
                self.kv.keep(GUEST, FIRST, self.guest, 1)
            if before.guest == "peer":
                self.kv.pool.drop(self.guest[0], f"{QUARANTINE}{GUEST}")
            self.kv.drop(GUEST, self.guest)

    def _follow_life(self, label: str, who: int, old: Life, new: Life) -> None:
        request = self.requests[who]
        if new.long and not old.long:
            request.tokens = [*FIRST, *own(who), 30 + who]
        sampled = label.startswith(("token_committed", "last_token_committed"))
        if new.pages and not old.pages:
            pages, lock = self.kv.reserve(request)
            for lease in (pages, lock):
                lease.adopt()
            self.leases[who] = pages, lock
            request.committed = pages.shared * PAGE
        elif old.pages and who in self.leases:
            pages, lock = self.leases[who]
            if len(new.pages) > len(old.pages):
                assert pages.extend(1)
            if sampled and old.launched > new.launched and old.state in HOLDING:
                request.committed = (new.size - 1) * PAGE
                if old.state == "prefilling":
                    self.kv.cache_prompt(request, pages, lock)
            elif label == "chunk_committed" and old.launched > new.launched:
                request.committed = max(request.committed, PAGE)
            if not new.pages:
                lock.release()
                pages.release("cache")
                del self.leases[who]

    def differs(self, node: Node) -> str:
        """What is not as the model has it; empty if all is."""
        pool = self.kv.pool
        owners = Counter(tuple(sorted(pool.owners_of(page))) for page in range(pool.total))
        nodes = Counter(key[1] for key, _ in node.tree)
        if owners != Counter(node.owners):
            return f"{owners} own pages in production, {Counter(node.owners)} in the model"
        if self.nodes() != nodes:
            return f"{self.nodes()} are cached in production, {nodes} in the model"
        return ""

    def nodes(self) -> Counter[str]:
        """What the cache has, of whatever weights."""
        names = {FIRST: "A", own(0): "B1", own(1): "B2"}
        found: Counter[str] = Counter()
        waiting: list[CacheNode] = [self.kv.cache.root, *self.kv.cache._old_roots]
        while waiting:
            node = waiting.pop()
            found.update([names[node.key]] if node.parent is not None else [])
            waiting.extend(node.children.values())
        return found


HOLDING = ("prefilling", "decoding", "retracting", "holding")


def base(label: str) -> str:
    return label.partition(", evicting")[0]


def options(model: SharedModel, world: World, node: Node) -> list[tuple[Step, World]]:
    found = [(step, world) for step in model.steps(world, node)]
    for label, cost, after in model.events(world):
        hit: Hit | None = model.hit(label, world, node)
        if hit is not None:
            found.append((Step(label, cost, 0, after, hit.request, False, hit.violation), after))
    return found


def as_node(request: object) -> Node:
    assert isinstance(request, Node)
    return request


def walk(seed: int, pages: int, make: Callable[[], SharedModel]) -> Counter[str]:
    rng, model = Random(seed), make()
    world, node = model.begin()
    twin, done = Twin(pages), Counter[str]()
    for _ in range(STEPS):
        found = options(model, world, node)
        if not found:
            break
        sure = [
            option for option in found if option[0].cost == FREE or option[0].label == "retract"
        ]
        step, after = rng.choice(sure if sure and rng.random() < SURE else found)
        done[base(step.label)] += 1
        twin.follow(base(step.label), world, node, as_node(step.request))
        alike = [
            as_node(other.request)
            for other, _ in found
            if base(other.label) == base(step.label) and other.who == step.who
        ]
        fits = [node for node in alike if not twin.differs(node)]
        assert fits, f"seed {seed}, {step.label}: {twin.differs(as_node(step.request))}"
        assert twin.kv.audit() + twin.kv.pool.audit() == []
        world, node = after, fits[0]
    return done


@pytest.mark.parametrize("pages", [3, 4])
def test_production_and_model_agree_about_every_page(pages: int) -> None:
    done: Counter[str] = Counter()
    for seed in range(60):
        done += walk(seed, pages, lambda: SharedModel(pages=pages, guest=True, depth=2))
    for what in ("grows", "readmit, with B1 from the cache", "the prefix cache is flushed"):
        assert done[what], f"{what} never happened"
