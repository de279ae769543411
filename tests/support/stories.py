"""Small traces in which much happens, for tests of what reads traces."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fsm.replay import NodeReplay
from fsm.replay_faults import Fault
from fsm.trace import Header, Line
from fsm.trace_read import Read
from tests.support.node import Node, Shape
from tests.support.stores import MemoryStore


def eventful() -> list[Line]:
    """Every kind of line and ending: refusals, a group, a session, prefetches that hit, fail and
    are given up, growth, eviction, retraction, abort, deadline, stop string, a failed step."""
    store = MemoryStore()
    text = list(range(100, 120))
    store.fill(4, text)
    node = Node(Shape(pages=20, page_size=4, rows=4, running_timeout_s=0.5), store)
    node.ask("refused", [])
    grows = node.ask("grows", range(9), 14)
    hit = node.ask("hit", [*text, 1, 2, 3], 3)
    node.ask("given-up", [*text, 4], 3)
    node.abort("given-up")
    node.turn()
    store.finish()
    node.until_tokens(grows, 4)
    node.scheduler.retract("grows")
    node.until_tokens(hit, 1)
    node.ask("group", range(40, 46), 3, n=2)
    node.open_session("s")
    node.ask("turn", range(50, 55), 3, session="s")
    _rest(node, store)
    node.scheduler.flush_cache()
    node.ask("fails-to-load", [*text, 5], 2)
    node.turn()
    store.finish(error="planted")
    stops = node.ask("stops", range(60, 70), 9)
    aborted = node.ask("aborted", range(70, 79), 30)
    node.until_tokens(stops, 3)
    node.stop(stops, 2)
    node.until_tokens(aborted, 4)
    node.abort("aborted")
    waits = node.ask("waits", range(80, 84), 2, deadline_s=0.0005)
    _rest(node, store)
    assert waits.refused
    node.ask("late-load", range(5), 2)
    node.turn()
    node.now += 0.6
    _rest(node, store)
    node.ask("slow", range(90, 95), 8)
    node.turn()
    node.turn()
    node.now += 1.0
    _rest(node, store)
    node.ask("fails", range(6), 8)
    node.turn()
    node.commit(error="planted")
    _rest(node, store)
    node.scheduler.tracer.footer(at_rest=True)
    return node.trace


def _rest(node: Node, store: MemoryStore) -> None:
    node.until("steps", lambda: not node.runner.work and not node.scheduler.roster.lives)
    while not node.scheduler.at_rest or node.runner.work:
        store.finish()
        node.turn()
    node.flush()


def judge(lines: Sequence[Read], complete: bool = True) -> list[Fault]:
    """The faults of a whole trace."""
    faults: list[Fault] = []
    header = lines[0]
    assert isinstance(header, Header)
    replay = NodeReplay("trace", header, faults.append)
    replay.run(2, lines[1:])
    replay.finish("", complete)
    return faults


def write(path: Path, lines: Sequence[Line]) -> Path:
    """One JSON object a line."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
    return path
