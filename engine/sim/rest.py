"""Whether a node is back at its start (invariant 8), and since when that is due."""

from typing import TYPE_CHECKING, Final

from fsm.ledger import PoolCounts

if TYPE_CHECKING:
    from engine.sim.node import SimNode

EXHAUST: Final = "scenario:exhaust"
"""Owner of pages that a scenario takes away."""


def unrest(node: "SimNode") -> list[str]:
    """Why it is not back at its start; empty when it is. Pages that the scenario itself has taken
    away are not missed."""
    faults = []
    exhausted = len(node.scheduler.kv.pool.pages_of(EXHAUST))
    for name, now in node.ledger().items():
        taken = exhausted if name == "pages" else 0
        total = node.at_start[name].total - taken
        if (now.held, now.quarantined) != (taken, 0) or now.free + now.cached != total:
            faults.append(f"{name}: {_counts(now)}, owners {_owners(node, name)}")
    faults += [f"{life.name} is {life.where}" for life in node.book.open]
    if node.runner.queue or node.results:
        faults.append(f"{len(node.runner.queue) + len(node.results)} launched works are open")
    if not node.scheduler.at_rest and not exhausted:
        faults.append("the scheduler does not say that it is at rest")
    if len(node.clients.table):
        faults.append(f"frontend_records: {[record.rid for record in node.clients.table]}")
    faults += [f"{each.name} has no answer" for each in node.clients.open]
    return faults + node.ranks.behind


def due_from_us(node: "SimNode") -> int:
    """The last terminal answer or fence: from here on rest may take one second."""
    ends = [node.clients.last_answer_us, node.runner.last_end_us, node.last_touch_us]
    ends.append(node.ranks.last_end_us)
    if node.store is not None:
        ends.append(node.store.last_end_us)
    return max(ends)


def _owners(node: "SimNode", pool: str) -> dict[str, int]:
    owners = node.scheduler.ledger[pool].owners()
    lives = node.book.lives
    return {lives[who].name if who in lives else who: units for who, units in owners.items()}


def _counts(counts: PoolCounts) -> str:
    return " ".join(f"{key}={value}" for key, value in counts.as_dict().items())
