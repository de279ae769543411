"""Checks after every simulated event, written from the outside.

They read pools, the device's queue, the trace book and what clients were shown. The scheduler's own
``audit`` runs after every transition as well; these do not share its code.
"""

from engine.batch import Batch, PageExport
from engine.sim.deployment import Cluster
from engine.sim.node import SimNode
from engine.sim.paired_node import DecodeNode, PairedNode, PrefillNode
from engine.sim.rank_checks import rank_faults
from fsm.joint import shown
from fsm.ledger import CACHE


def cluster_faults(cluster: Cluster) -> list[str]:
    """Everything that is wrong anywhere, as far as anything has happened there."""
    faults: list[str] = []
    for name, node in cluster.nodes.items():
        found = []
        if node.ranks.followers and (node.touched or node.ranks.reports):
            found += rank_faults(node)
        if node.touched:
            node.touched = False
            found += faults_of(node)
        faults += found if cluster.single else [f"{name}: {each}" for each in found]
    for name, router in cluster.routers.items():
        faults += [f"{name}: {each}" for each in router.faults()]
    return faults + _joint_faults(cluster)


def _joint_faults(cluster: Cluster) -> list[str]:
    """Two lives that share a room are in states that may coexist (:mod:`fsm.joint`)."""
    prefills = [node for node in cluster.nodes.values() if isinstance(node, PrefillNode)]
    decodes = [node for node in cluster.nodes.values() if isinstance(node, DecodeNode)]
    faults = []
    for decode in decodes:
        theirs = _by_room(decode)
        for prefill in prefills:
            for room, (life, state) in _by_room(prefill).items():
                if room not in theirs:
                    continue
                peer, where = theirs[room]
                pair = (state, where)
                if pair not in shown():
                    faults.append(f"{life} is {state} while {peer} is {where} (joint table)")
    return faults


def _by_room(node: PairedNode) -> dict[str, tuple[str, str]]:
    return {
        request.pairing.room: (request.life, request.state)
        for request in node.scheduler.roster.lives.values()
        if request.pairing is not None and not node.dead
    }


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
