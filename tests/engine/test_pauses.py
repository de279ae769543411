"""Pauses in all three modes and a change of weights on a unified node.

Golden under other weights is computed from token ids alone: what comes after the change is what a
fresh engine under the new weights says to prompt and output so far."""

import pytest
from msgspec import structs

from engine.deadlines import HELD_TIMEOUT_S
from tests.support.node import Client, Node, Shape
from tests.support.oracle import golden
from transport.messages import SamplingParams


def running(count: int, rows: int = 4) -> tuple[Node, list[Client]]:
    """``count`` requests on a node with ``rows`` rows, everybody who fits decoding."""
    node = Node(Shape(pages=64, page_size=4, chunk=32, rows=rows))
    clients = [node.ask(f"r{i}", range(i, i + 12), 20, seed=i) for i in range(count)]
    while sum(len(client.tokens) >= 3 for client in clients) < min(rows, count):
        node.turn()
    return node, clients


def finish(node: Node) -> None:
    """To rest, without the checkers that take every token for one of the first weights."""
    for _ in range(2000):
        if node.scheduler.at_rest and not node.runner.work:
            return
        node.now += 0.001
        node.scheduler.tick()
        node.commit()
        while node.scheduler.launch() is not None:
            pass
        node.flush()
    raise AssertionError(node.describe())


def use(node: Node, weights: str, in_place: bool = False) -> bool:
    done, _ = node.scheduler.use_weights(f"hash:{weights}", in_place)
    if done:
        node.model.load_weights(weights)
    return done


def drain_steps(node: Node) -> None:
    """Commit what was launched before the pause."""
    while node.commit():
        node.flush()


def test_b39_a_pause_that_drops_kv_lets_flush_and_weights_through() -> None:
    """Four running and four queued: all finish, and what comes after the change is the new
    weights'."""
    node, clients = running(8)
    node.scheduler.pause("retract")
    drain_steps(node)
    before = [list(client.tokens) for client in clients]
    states = {r.state for r in node.scheduler.roster.lives.values()}
    assert states == {"held", "waiting"}
    assert node.scheduler.kv.pool.counts().held == 0
    assert node.scheduler.flush_cache()[0]
    assert node.scheduler.kv.cache.pages == 0
    assert use(node, "W2")
    assert node.scheduler.launch() is None
    node.scheduler.resume()
    finish(node)
    for client, old in zip(clients, before, strict=True):
        left = structs.replace(client.sampling, max_new_tokens=20 - len(old))
        want = golden(client.prompt + old, left, 4096, "W2").tokens
        assert client.reason == "length"
        assert client.tokens == old + want


def test_b40_an_in_place_change_shares_nothing_of_the_old_weights() -> None:
    node, clients = running(1)
    node.scheduler.pause("in_place")
    drain_steps(node)
    assert not node.scheduler.flush_cache()[0]  # B47: refused with a reason, and nothing changed
    assert clients[0].finish is None
    assert not use(node, "W2")
    assert use(node, "W2", in_place=True)
    node.scheduler.resume()
    other = node.ask("same prefix", clients[0].prompt, 6)
    finish(node)
    assert clients[0].reason == "length"
    late = node.ask("after", clients[0].prompt, 6)
    finish(node)
    want = golden(other.prompt, other.sampling, 4096, "W2").tokens
    assert (other.tokens, other.cached) == (want, 0)
    assert late.tokens == want
    assert late.cached == 8  # of what was computed under W2
    assert node.scheduler.audit() == []


def test_b14_b44_a_pause_that_aborts_answers_everybody_and_queues_what_comes() -> None:
    node, clients = running(6)
    node.scheduler.pause("abort")
    node.flush()
    assert {client.reason for client in clients} == {"abort"}
    late = node.ask("late", range(9), 4)
    assert node.scheduler.launch() is None
    assert [r.state for r in node.scheduler.roster.lives.values() if r.rid == "late"] == ["waiting"]
    assert node.scheduler.load().waiting == 1
    node.scheduler.resume()
    node.settle()
    assert late.tokens == golden(late.prompt, late.sampling, 4096).tokens


@pytest.mark.parametrize("state", ["held", "holding"])
def test_who_is_held_can_be_aborted_and_can_end_by_a_late_stop_string(state: str) -> None:
    """S3.4."""
    node, clients = running(2)
    node.scheduler.pause("retract")
    if state == "held":
        drain_steps(node)
    assert {r.state for r in node.scheduler.roster.lives.values()} == {state}
    node.abort("r0")
    node.stop(clients[1], 2)
    node.flush()
    assert clients[0].reason == "abort"
    assert clients[1].reason == "stop"
    drain_steps(node)
    node.scheduler.resume()
    node.settle()


def test_deadlines_of_waiting_and_running_stand_still_while_paused() -> None:
    node = Node(Shape(running_timeout_s=0.2))
    client = node.ask("r", range(8), 60)
    while len(client.tokens) < 2:
        node.turn()
    node.scheduler.pause("retract")
    drain_steps(node)
    node.now += 5.0
    node.scheduler.tick()
    node.flush()
    assert client.finish is None
    assert node.scheduler.deadlines_of(node.request("r")).keys() == {"running", "held"}
    due = node.scheduler.next_deadline()
    assert due is not None
    assert due > node.now + 3000, "only that of being held comes nearer"
    node.scheduler.resume()
    node.settle()
    assert client.reason == "length"


def test_nobody_is_held_for_ever() -> None:
    node, clients = running(1)
    node.scheduler.pause("retract")
    drain_steps(node)
    node.now += HELD_TIMEOUT_S
    node.scheduler.tick()
    node.flush()
    finish = clients[0].finish
    assert finish is not None
    assert (finish.type, finish.status) == ("abort", 503)
    assert node.scheduler.at_rest


def test_pause_and_resume_are_idempotent() -> None:
    node, clients = running(3)
    for _ in range(2):
        node.scheduler.pause("retract")
        drain_steps(node)
    for _ in range(2):
        node.scheduler.resume()
    node.settle()
    assert all(c.tokens == golden(c.prompt, c.sampling, 4096).tokens for c in clients)
    assert isinstance(clients[0].sampling, SamplingParams)
