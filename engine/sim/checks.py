"""Checks after every simulated event, written from the outside.

They read pools, the device's queue, the trace book and what clients were shown. The scheduler's own
``audit`` runs after every transition as well; these do not share its code.
"""

from engine.batch import Batch, PageExport
from engine.sim.node import SimNode
from fsm.ledger import CACHE


def faults_of(node: SimNode) -> list[str]:
    """Everything that is wrong on ``node`` at this instant; empty when nothing is."""
    faults = [*node.faults, *node.book.faults, *node.clients.check()]
    node.faults.clear()
    node.book.faults.clear()
    faults += [
        f"{name}: {counts.as_dict()} do not add up (conservation)"
        for name, counts in node.ledger().items()
        if not counts.conserved
    ]
    return faults + _page_owners(node) + _launched_pages(node)


def _page_owners(node: SimNode) -> list[str]:
    """A page of two requests is one that the prefix cache gave to both."""
    pool = node.scheduler.kv.pool
    lives = node.book.lives
    faults = []
    for page in range(pool.total):
        owners = pool.owners_of(page)
        requests = sorted(lives[owner].name for owner in owners if owner in lives)
        if len(requests) > 1 and CACHE not in owners:
            faults.append(f"page {page} has two owners: {', '.join(requests)}")
    return faults


def _launched_pages(node: SimNode) -> list[str]:
    """What the device may still touch is still owned by the request it computes for (B24)."""
    pool = node.scheduler.kv.pool
    faults = []
    for work in node.runner.queue:
        if isinstance(work, Batch):
            for index, item in enumerate(work.items):
                loose = [
                    page for page in work.pages_of(index) if item.life not in pool.owners_of(page)
                ]
                if loose:
                    name = node.book.lives[item.life].name
                    faults.append(f"step {work.step} touches pages {loose}, released by {name}")
        elif isinstance(work, PageExport):
            loose = [page for page in work.pages if pool.class_of(page) == "free"]
            if loose:
                faults.append(f"export {work.ticket} reads free pages {loose}")
    return faults
