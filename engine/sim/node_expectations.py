"""Expectations of the node: rest, the ledger, its load, and what it replied."""

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.sim.drive import Fault
from engine.sim.language import Command
from engine.sim.node import SimNode
from engine.sim.router_node import RouterNode
from engine.sim.world import US_PER_S
from fsm.ledger import PoolCounts
from fsm.resources import RESOURCES

if TYPE_CHECKING:
    from engine.sim.scenario import Run

RESERVED: Final = frozenset(
    {"all", "idle", "until", "no", "never", "order", "base", "held", "ledger", "load", "reply"}
    | {"forwards", "wire", "message", "lost"}
    | {"logprobs", "retractions", "cached", "same", "differ"}
)
"""Words that begin or end a command, so that no request can be called so."""

REPLIES: Final = frozenset(
    {"aborted", "finished", "unknown", "flushed", "updated", "closed", "error", "session"}
)
"""What a reply may be expected to say."""

OPERATORS: Final[dict[str, Callable[[int, int], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def base(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect base [NODE]``: everything is back at its start, within one second of the last
    terminal answer and the last fence, with no new traffic."""
    cluster = run.cluster
    what = run.check_any(command, words[0]) if words else cluster
    unanswered = [name for name, (_, each) in cluster.submissions().items() if not each.answered]
    if unanswered and not words:
        raise Fault(f"still without an answer: {', '.join(unanswered)}")
    limit = max(cluster.rest_due_from_us + US_PER_S, run.world.now_us)
    run.drive.until(lambda: not what.unrest(), limit)
    faults = what.unrest()
    if faults:
        raise Fault("not at rest:\n  " + "\n  ".join(faults))


def held(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect held RID POOL=N… [on=NODE]``: units that the ledger counts for this request, those
    that are quarantined for it included. Without a node, one of them has to hold N, and none
    anything where N is 0. What a node has no pool of, nobody holds there."""
    wanted = {name: command.integer(name, 0) for name in command.options if name != "on"}
    if len(words) != 1 or not wanted:
        raise command.error("write 'expect held RID pages=N rows=N … [on=NODE]'")
    on = command.string("on")
    nodes = [run.check_any(command, each) for each in ([on] if on else run.cluster.names)]
    for name in _each(run, command, words[0]):
        for pool, units in wanted.items():
            holds = {node.name: _units(node, name, pool) for node in nodes}
            if units not in holds.values() or (not units and any(holds.values())):
                amount = ", ".join(
                    f"{actual} on {where}" if len(nodes) > 1 else str(actual)
                    for where, actual in holds.items()
                )
                raise Fault(f"{name}: expected {pool}={units}, holds {amount}")


def _each(run: "Run", command: Command, pattern: str) -> list[str]:
    """Each submission, or each member, that ``pattern`` names."""
    return [each.name if view is None else view.name for each, view in run.views(command, pattern)]


def _units(node: SimNode | RouterNode, name: str, pool: str) -> int:
    if isinstance(node, RouterNode):
        return node.records_of(name.partition("#")[0]) if pool == "router_records" else 0
    lives = node.book.of(name)
    return sum(
        each.owners().get(life.life, 0)
        for each in node.scheduler.ledger
        if each.name == pool
        for life in lives
    )


def forwards(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect forwards RID NODE OP N``: launched steps of a node that contained a request."""
    match = re.fullmatch(r"(\S+) ([\w-]+)\s*([=!<>].*)", " ".join(words))
    if match is None:
        raise command.error("write 'expect forwards RID NODE = N'")
    name, where, tail = match.groups()
    node = run.check_node(command, where)
    _, test, right = comparison(command, ("forwards", tail))
    for each in run.submissions(command, name):
        lives = run.lives_of(each.name, node.name)
        actual = sum(node.forwards[life.life] for life in lives)
        compare(f"forwards {each.name} {node.name}", actual, test, right)


def ledger(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect ledger NODE pool.class OP N``."""
    node = run.check_any(command, words[0]) if words else run.check_node(command)
    left, test, right = comparison(command, words[1:])
    pool_name, _, kind = left.partition(".")
    ledger = node.ledger()
    if pool_name not in (*ledger, *RESOURCES):
        raise command.unknown("pool", pool_name, RESOURCES)
    counts = (ledger.get(pool_name) or PoolCounts(0, 0, 0, 0, 0)).as_dict()
    if kind not in counts:
        raise command.unknown("class", kind, counts)
    compare(left, counts[kind], test, right)


def load(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect load NODE FIGURE OP N``: running, waiting, retracted, steps, in_flight, …"""
    node = run.check_node(command, words[0] if words else "")
    left, test, right = comparison(command, words[1:])
    load = node.scheduler.load()
    figures = {
        "running": load.running,
        "waiting": load.waiting,
        "steps": load.steps,
        "in_flight": node.scheduler.steps_in_flight,
        "generated_tokens": load.generated_tokens,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "retracted": load.retracted,
        "aborted": load.aborted,
        "store_reads": node.store.reads if node.store is not None else 0,
        "tombstones": len(node.scheduler.roster.recent),
    }
    if left not in figures:
        raise command.unknown("figure", left, figures)
    compare(left, figures[left], test, right)


def lost(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect lost NODE message="PART"``: the node has ended because of one of its ranks."""
    if len(words) != 1:
        raise command.error("write 'expect lost NODE message=\"PART\"'")
    why = run.check_node(command, words[0]).ranks.lost
    if not why or command.string("message") not in why:
        raise Fault(f"expected {words[0]} to lose a rank, got {why or 'nothing'}")


def reply(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect reply aborted=r1,r2 finished=r3 unknown=r4``, ``… flushed=no``, ``… closed=yes``,
    ``… error="TEXT"``: the newest answer to an abort, a flush or a session call, of any node."""
    if words or not command.options:
        raise command.error("write 'expect reply KEY=VALUE…'")
    on = command.string("on")
    nodes = [run.check_any(command, on).name] if on else run.cluster.names
    replies = [each for name in nodes for each in run.cluster.clients_of(name).replies]
    if not replies:
        raise Fault("nothing was asked, or nothing answered yet")
    _, data = max(replies, key=lambda numbered: numbered[0])
    assert isinstance(data, dict)
    for key, value in command.options.items():
        if key == "on":
            continue
        actual = data.get(key)
        if key in ("aborted", "finished", "unknown"):
            names = (
                value if isinstance(value, tuple) else tuple(filter(None, str(value).split(",")))
            )
            fits = actual is not None and sorted(actual) == sorted(names)
        elif key in ("flushed", "closed", "updated"):
            fits = actual is (value == "yes")
        elif key == "error":
            fits = str(value) in str(actual)
        else:
            fits = str(actual) == str(value)
        if not fits:
            raise Fault(f"expected {key}={value}, the reply is {data}")


def comparison(
    command: Command, words: tuple[str, ...]
) -> tuple[str, Callable[[int, int], bool], int]:
    match = re.fullmatch(r"([\w.]+)\s*(=|!=|<=|>=|<|>)\s*(\d+)", " ".join(words))
    if match is None:
        raise command.error(f"a comparison such as 'pages.free = 64' is wanted, not {words}")
    return match[1], OPERATORS[match[2]], int(match[3])


def compare(label: str, actual: int, test: Callable[[int, int], bool], wanted: int) -> None:
    if not test(actual, wanted):
        sign = next(sign for sign, each in OPERATORS.items() if each is test)
        raise Fault(f"expected {label} {sign} {wanted}, got {actual}")
