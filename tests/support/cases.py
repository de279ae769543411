"""Cases of the central property: every request's output is that of the request alone.

A case is a node's shape, requests, and what happens while they run. Nothing in it may change a
token, a log-probability or a reason."""

from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from tests.support import checkers
from tests.support.checkers import Broken
from tests.support.node import Client, Node, Shape
from tests.support.stores import MemoryStore
from transport.messages import SamplingParams, Submit

ALPHABET = 3
"""Few different tokens, so that prompts share prefixes by themselves."""


@dataclass(frozen=True, slots=True)
class Case:
    """``retract_every``: every so many turns somebody is pushed out; 0 is never. ``gap``: turns
    between two arrivals. ``stored``: tokens of the first prompt that the store has; -1 is no
    store."""

    shape: Shape
    requests: tuple[Submit, ...]
    retract_every: int = 0
    gap: int = 0
    stored: int = -1
    turns_of: int = 0
    """How many further turns a session has after the requests; 0 is no session."""
    seed: int = 0


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    page_size = draw(st.sampled_from([1, 4, 16]))
    return Shape(
        page_size=page_size,
        pages=-(-draw(st.sampled_from([48, 64, 200])) // page_size),
        chunk=draw(st.sampled_from([1, 2, 5, 16, 64])),
        depth=draw(st.sampled_from([1, 2])),
        rows=draw(st.integers(1, 6)),
        cache=draw(st.booleans()),
        prefetch_timeout_s=60.0,
    )


@st.composite
def submissions(draw: st.DrawFn, number: int) -> Submit:
    length = draw(st.one_of(st.integers(1, 32), st.sampled_from([1, 4, 15, 16, 17, 32])))
    prompt = draw(st.lists(st.integers(0, ALPHABET - 1), min_size=length, max_size=length))
    new = draw(st.integers(0, 15))
    sampling = SamplingParams(
        max_new_tokens=new,
        min_new_tokens=draw(st.integers(0, min(2, new))),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 3)),
        eos_at=draw(st.sampled_from([-1, -1, 0, 5])),
        ignore_eos=draw(st.booleans()),
        logprobs=True,
        top_logprobs=2,
        token_ids_logprob=(0, 200),
    )
    return Submit(f"r{number}", prompt, sampling, priority=draw(st.integers(0, 2)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 6))
    return Case(
        shape=draw(shapes()),
        requests=tuple(draw(submissions(number)) for number in range(count)),
        retract_every=draw(st.sampled_from([0, 0, 2, 5])),
        gap=draw(st.integers(0, 3)),
        stored=draw(st.sampled_from([-1, 0, 8, 32])),
        turns_of=draw(st.sampled_from([0, 0, 2])),
        seed=draw(st.integers(0, 99)),
    )


def check(case: Case) -> Node:
    """Run a case; every request must be answered in full with its golden output."""
    store = MemoryStore() if case.stored >= 0 else None
    if store is not None and case.shape.cache:
        store.fill(case.shape.page_size, case.requests[0].prompt[: case.stored])
    node = Node(case.shape, store)
    rnd = Random(case.seed)
    for message in case.requests:
        node.submit(message)
        for _ in range(case.gap):
            turn(node, store, case, rnd)
    finish(node, store, case, rnd)
    if case.turns_of:
        node.open_session("s")
    for number in range(case.turns_of):
        first = case.requests[0]
        client = node.ask(f"turn{number}", first.prompt[:5], 3, session="s", logprobs=True)
        finish(node, store, case, rnd)
        complete(node, client)
    for client in node.clients:
        complete(node, client)
    checkers.check_empty(node)
    return node


def turn(node: Node, store: MemoryStore | None, case: Case, rnd: Random) -> None:
    if store is not None and rnd.random() < 0.5:
        store.finish(1)
    if case.retract_every and node.turns % case.retract_every == 0:
        live = sorted(node.scheduler.roster.live)
        if live:
            node.scheduler.retract(rnd.choice(live))
    node.turn()


def finish(node: Node, store: MemoryStore | None, case: Case, rnd: Random) -> None:
    for _ in range(3000):
        if node.scheduler.at_rest and not node.runner.work:
            break
        # Pushed out every other turn, nobody could ever end: the disturbance has an end.
        turn(node, store, case if node.turns < 150 else Case(case.shape, ()), rnd)
    else:
        raise Broken("progress", node.describe())
    node.flush()
    checkers.check_rest(node)


def complete(node: Node, client: Client) -> None:
    """Nobody interfered with its end: the whole golden output, and its own reason."""
    want = node.golden(client)
    logprobs = want.logprobs if client.sampling.logprobs else []
    if client.tokens != want.tokens or client.logprobs != logprobs:
        raise Broken("golden", f"{client.rid}: {client.tokens}, not {want.tokens}")
    reason = "stop" if want.stopped is not None else "length"
    if client.reason != reason:
        raise Broken("reason", f"{client.rid}: {client.finish}, not {reason}")
