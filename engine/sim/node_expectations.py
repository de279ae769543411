"""Expectations of the node: rest, the ledger, its load, and what it replied."""

import operator
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.sim.drive import Fault
from engine.sim.language import Command
from engine.sim.world import US_PER_S

if TYPE_CHECKING:
    from engine.sim.scenario import Run

RESERVED: Final = frozenset(
    {"all", "idle", "until", "no", "never", "order", "base", "held", "ledger", "load", "reply"}
    | {"logprobs", "retractions", "cached", "same", "differ"}
)
"""Words that begin or end a command, so that no request can be called so."""

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
    node = run.check_node(command, words[0] if words else run.node.name)
    unanswered = [each.name for each in node.clients.open]
    if unanswered:
        raise Fault(f"still without an answer: {', '.join(unanswered)}")
    limit = max(node.rest_due_from_us + US_PER_S, run.world.now_us)
    run.drive.until(lambda: not node.unrest(), limit)
    faults = node.unrest()
    if faults:
        raise Fault("not at rest:\n  " + "\n  ".join(faults))


def held(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect held RID POOL=N…``: units that the ledger counts for this request."""
    if len(words) != 1 or not command.options:
        raise command.error("write 'expect held RID pages=N rows=N …'")
    lives = run.lives(command, words[0])
    pools = {str(pool.name): pool for pool in run.node.scheduler.ledger}
    for name in command.options:
        if name not in pools:
            raise command.unknown("pool", name, pools)
        owners = pools[name].owners()
        for life in lives:
            actual, wanted = owners.get(life.life, 0), command.integer(name, 0)
            if actual != wanted:
                raise Fault(f"{life.name}: expected {name}={wanted}, holds {actual}")


def ledger(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect ledger NODE pool.class OP N``."""
    node = run.check_node(command, words[0] if words else "")
    left, test, right = comparison(command, words[1:])
    pool_name, _, kind = left.partition(".")
    ledger = node.ledger()
    if pool_name not in ledger:
        raise command.unknown("pool", pool_name, ledger)
    counts = ledger[pool_name].as_dict()
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


def reply(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect reply aborted=r1,r2 finished=r3 unknown=r4``, ``… flushed=no``, ``… closed=yes``,
    ``… error="TEXT"``: the newest answer to an abort, a flush or a session call."""
    if words or not command.options:
        raise command.error("write 'expect reply KEY=VALUE…'")
    if not run.node.clients.replies:
        raise Fault("nothing was asked, or nothing answered yet")
    data = run.node.clients.replies[-1]
    assert isinstance(data, dict)
    for key, value in command.options.items():
        actual = data.get(key)
        if key in ("aborted", "finished", "unknown"):
            names = (
                value if isinstance(value, tuple) else tuple(filter(None, str(value).split(",")))
            )
            fits = actual is not None and sorted(actual) == sorted(names)
        elif key in ("flushed", "closed"):
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
