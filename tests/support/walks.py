"""Seeded walks: a node, and a list of things that happen to it.

A walk is data. It is generated from its seed alone, and every action can be applied in any state
of the node, so any part of a walk is a walk: a failing one is cut down to the few actions that
matter, and prints them beside its seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from engine.core import PauseMode
from engine.hash_model import EOS
from fsm.driver import IllegalEvent
from fsm.ledger import Exhausted, LeaseError
from tests.support import checkers
from tests.support.checkers import Broken
from tests.support.node import Client, Node, Shape
from tests.support.stores import MemoryStore
from transport.messages import Abort, Drain, SamplingParams, Submit

Kind = Literal[
    "submit",  # value: a Submit
    "turns",  # value: how many
    "hold",  # turns in which nothing commits and nothing is launched
    "abort",  # one live rid, by its number
    "disconnect",
    "abort_all",
    "abort_unknown",
    "stop",  # a stop string in what one client was shown, live or just answered
    "retract",
    "fail",  # the oldest launched step
    "store",  # some operations of the store end well
    "store_fails",
    "store_forgets",
    "wait",  # value: seconds
    "open",  # value: a session
    "close",
    "flush",  # the prefix cache
    "pause",  # in some mode
    "resume",
    "drain",  # value: seconds of grace
]


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    value: Submit | str | float | int = 0


@dataclass(frozen=True, slots=True)
class Walk:
    """Where it happens and what happens."""

    seed: int
    shape: Shape
    store: bool
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, store={self.store}, {self.shape}"]
        return "\n  ".join([*lines, *(f"{a.kind} {a.value}" for a in self.actions)])


WEIGHTS: Final[dict[Kind, int]] = {
    "submit": 30,
    "turns": 40,
    "hold": 3,
    "abort": 8,
    "disconnect": 3,
    "abort_all": 1,
    "abort_unknown": 1,
    "stop": 4,
    "retract": 8,
    "fail": 2,
    "store": 8,
    "store_fails": 2,
    "store_forgets": 1,
    "wait": 3,
    "open": 2,
    "close": 1,
    "flush": 1,
    "pause": 3,
    "resume": 4,
    "drain": 0,
}


def make_walk(seed: int, length: int = 45) -> Walk:
    """The walk of ``seed``. Prompts begin like one of two texts; a store knows parts of both."""
    rnd = random.Random(seed)
    page_size = rnd.choice([1, 4, 16])
    smallest = -(-24 // page_size) + 1
    shape = Shape(
        pages=rnd.choice([smallest, 2 * smallest, 4 * smallest]),
        page_size=page_size,
        chunk=rnd.choice([3, 8, 32]),
        depth=rnd.choice([1, 2]),
        rows=rnd.choice([2, 4, 8]),
        queued=rnd.choice([4, 64]),
        cache=rnd.random() < 0.8,
        overtakes=rnd.choice([0, 2, 64]),
        prefetches=rnd.choice([1, 4]),
        waiting_timeout_s=rnd.choice([None, None, 0.02]),
        running_timeout_s=rnd.choice([None, None, 0.05]),
        prefetch_timeout_s=rnd.choice([0.005, 0.5]),
    )
    bases = texts(seed, shape)
    kinds = rnd.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length)
    actions = []
    for number, kind in enumerate(kinds):
        actions.append(_action(kind, number, rnd, shape, bases))
        if kind == "pause" and rnd.random() < 0.5:  # while launched steps are still out
            actions.append(_action(rnd.choice(["fail", "wait"]), number, rnd, shape, bases))
    if rnd.random() < 0.2:
        actions.append(Action("drain", rnd.choice([0.0, 0.005, 1.0])))
    return Walk(seed, shape, rnd.random() < 0.5, tuple(actions))


def _action(
    kind: Kind, number: int, rnd: random.Random, shape: Shape, bases: list[list[int]]
) -> Action:
    if kind == "submit":
        return Action(kind, _submit(number, rnd, shape, bases))
    if kind in ("turns", "hold"):
        return Action(kind, rnd.randrange(1, 5))
    if kind == "wait":
        return Action(kind, rnd.choice([0.003, 0.03, 0.6]))
    if kind in ("open", "close"):
        return Action(kind, rnd.choice(["s0", "s1"]))
    return Action(kind, rnd.randrange(1 << 16))


def _submit(number: int, rnd: random.Random, shape: Shape, bases: list[list[int]]) -> Submit:
    size = shape.page_size
    border = size * rnd.randrange(1, 4) + rnd.choice([-1, 0, 1])
    length = rnd.choice([rnd.randrange(1, 24), border, shape.pool_tokens - 1, 1])
    prompt = rnd.choice(bases)[: rnd.randrange(length + 1)][:length]
    prompt += [rnd.randrange(256) for _ in range(length - len(prompt))]
    new = rnd.choice([0, 1, 2, rnd.randrange(1, 20)])
    session = rnd.choice(["s0", "s1"]) if rnd.random() < 0.2 else None
    sampling = SamplingParams(
        max_new_tokens=new,
        min_new_tokens=rnd.choice([0, 0, min(2, new)]),
        temperature=rnd.choice([0.0, 1.0]),
        seed=rnd.randrange(4),
        eos_at=rnd.choice([-1, -1, 3]),
        ignore_eos=rnd.random() < 0.2,
        stop_token_ids=tuple(rnd.sample(range(256), rnd.choice([0, 0, 40]))),
        logprobs=rnd.random() < 0.3,
        top_logprobs=2,
        token_ids_logprob=(7, EOS),
    )
    return Submit(
        rid=f"r{number}" if rnd.random() < 0.95 else f"r{rnd.randrange(number + 1)}",
        prompt=prompt[:6] if session else prompt,
        sampling=sampling,
        n=rnd.choice([2, 3]) if session is None and rnd.random() < 0.15 else 1,
        priority=rnd.choice([0, 0, 0, 1, 2]),
        session=session,
        deadline_s=rnd.choice([None, None, None, None, 0.02]),
    )


def texts(seed: int, shape: Shape) -> list[list[int]]:
    rnd = random.Random(~seed)
    return [[rnd.randrange(256) for _ in range(shape.pool_tokens)] for _ in range(2)]


def start(walk: Walk) -> Node:
    """The node of a walk; its store begins with the first pages of every text."""
    if not walk.store:
        return Node(walk.shape)
    store = MemoryStore()
    for pages, text in enumerate(texts(walk.seed, walk.shape), 1):
        store.fill(walk.shape.page_size, text[: pages * walk.shape.page_size])
    return Node(walk.shape, store)


def apply(node: Node, store: MemoryStore | None, action: Action) -> None:
    """Let one thing happen."""
    scheduler, value = node.scheduler, action.value
    number = value if isinstance(value, int) else 0
    live = sorted(scheduler.roster.live)
    match action.kind:
        case "submit":
            assert isinstance(value, Submit)
            node.submit(value)
        case "turns":
            for _ in range(number):
                node.turn()
        case "hold":
            node.now += number / 1000
            scheduler.tick()
            scheduler.poll_store()
            node.launch()
        case "abort" | "disconnect" if live:
            rid = live[number % len(live)]
            cause: Literal["api", "disconnect"] = "api"
            if action.kind == "disconnect":
                cause = "disconnect"
            node.abort(rid.partition("#")[0] if number % 3 == 0 else rid, cause=cause)
        case "abort_all":
            scheduler.abort(Abort(all=True, query=1))
        case "abort_unknown":
            node.abort("nobody", *(c.rid for c in node.clients[:2]))
        case "stop":
            _stop(node, number)
        case "retract" if live:
            scheduler.retract(live[number % len(live)])
        case "fail":
            node.commit(error="planted")
        case "store" if store is not None:
            store.finish(1 + number % 3)
        case "store_fails" if store is not None:
            store.finish(1, error="planted")
        case "store_forgets" if store is not None and store.kept:
            store.forget(sorted(store.kept)[number % len(store.kept)])
        case "wait":
            assert isinstance(value, float)
            node.now += value
        case "open":
            node.open_session(str(value), timeout_s=None)
        case "close":
            node.close_session(str(value))
        case "flush":
            scheduler.flush_cache()
        case "pause":
            modes: tuple[PauseMode, ...] = ("retract", "retract", "in_place", "abort")
            scheduler.pause(modes[number % 4])
        case "resume":
            scheduler.resume()
        case "drain":
            assert isinstance(value, float)
            scheduler.drain(Drain(value))
    node.flush()
    if action.kind != "turns":
        checkers.check_turn(node)


def _stop(node: Node, number: int) -> None:
    shown = [c for c in node.clients[-8:] if c.tokens and _is_current(node, c)]
    if shown:
        client = shown[number % len(shown)]
        node.stop(client, 1 + number % len(client.tokens))


def _is_current(node: Node, client: Client) -> bool:
    """Its rid still means this client: a server never reports a stop of anybody else."""
    return node.open.get(client.rid, client) is client and not any(
        other.rid == client.rid for other in node.clients if other is not client
    )


def run(walk: Walk) -> Node:
    """Take a walk to rest; any failure is a bug."""
    node = start(walk)
    store = _store_of(walk, node)
    for action in walk.actions:
        apply(node, store, action)
    node.scheduler.resume()
    node.flush()
    limit = 400 + 40 * sum(_work(client) for client in node.clients)
    for _ in range(limit):
        if node.scheduler.at_rest and not node.runner.work:
            break
        if store is not None:
            store.finish()
        node.turn()
    else:
        raise Broken("progress", f"no rest after {limit} turns: {node.describe()}")
    checkers.check_rest(node)
    checkers.check_empty(node)
    return node


def _store_of(walk: Walk, node: Node) -> MemoryStore | None:
    stored = node.scheduler.stored
    if stored is None:
        return None
    store = stored._store
    assert isinstance(store, MemoryStore)
    return store


def _work(client: Client) -> int:
    return len(client.prompt) + client.sampling.max_new_tokens


FAILURES: Final = (AssertionError, LeaseError, Exhausted, IllegalEvent, LookupError)
"""What a broken engine raises: checkers, its own audit, its ledger, its driver, its indexes."""


def failure(walk: Walk) -> Exception | None:
    try:
        run(walk)
    except FAILURES as error:
        return error
    return None


def shrink(walk: Walk, error: Exception, tries: int = 300) -> Walk:
    """The fewest actions (about) that fail in the same way."""

    def fails(actions: Sequence[Action]) -> bool:
        found = failure(replace(walk, actions=tuple(actions)))
        return type(found) is type(error)

    actions = list(walk.actions)
    step = max(1, len(actions) // 2)
    while step and tries > 0:
        index = 0
        while index < len(actions) and tries > 0:
            fewer = actions[:index] + actions[index + step :]
            tries -= 1
            if fails(fewer):
                actions = fewer
            else:
                index += step
        step //= 2
    return replace(walk, actions=tuple(actions))


def check(seed: int) -> Node:
    """Run the walk of ``seed``; a failure carries its seed and a short reproduction."""
    walk = make_walk(seed)
    try:
        return run(walk)
    except FAILURES as error:
        error.add_note(f"walk of seed {seed}, cut down: {shrink(walk, error)}")
        raise
