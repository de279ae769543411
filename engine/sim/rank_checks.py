"""Checks that the ranks of a node are one (invariant 10), written from the outside.

Every report of a follower is compared with the leader's of the same plan: that it follows the same
plans in the same order, computes the same requests, and finds the same tokens and the same KV.
"""

from array import array
from typing import Final

from engine.sim.follower import ItemReport, Report
from engine.sim.node import SimNode

_RESULTS: Final = frozenset({"token", "logprob", "top_logprobs", "chosen_logprobs", "error"})
"""What does not count where the leader's step has failed."""


def rank_faults(node: SimNode) -> list[str]:
    """Where a follower's newest work differs from the leader's, by step, request and field."""
    ranks = node.ranks
    faults = []
    while ranks.reports:
        rank, made = ranks.reports.popleft()
        ours = ranks.decided.get(made.number)
        if ours is None:
            faults.append(f"{made.what}: rank {rank} applies plan {made.number} once more")
        else:
            difference = _difference(node, ours, made)
            if difference:
                faults.append(f"{made.what}: rank {rank} {difference}")
    for number in list(ranks.decided):
        if number > ranks.slowest:
            break
        del ranks.decided[number]
    return faults + _cached(node)


def _difference(node: SimNode, ours: Report, theirs: Report) -> str:
    """The first thing that is not the same; empty if everything is."""
    if theirs.what != ours.what:
        return f"does this where the leader does {ours.what}"
    if theirs.chain != ours.chain:
        return f"has come to plan {ours.number} by other plans than the leader"
    if theirs.kv != ours.kv:
        return "finds other KV than the leader"
    lives = [item.life for item in ours.items]
    if [item.life for item in theirs.items] != lives:
        named = " and ".join(
            ", ".join(node.book.lives[item.life].name for item in items) or "nothing"
            for items in (theirs.items, ours.items)
        )
        return f"does not compute what the leader does: {named}"
    for our, their in zip(ours.items, theirs.items, strict=True):
        field = _field(our, their, ours.failed)
        if field:
            name = node.book.lives[our.life].name
            return f"has for {name} {field}"
    return ""


def _field(ours: ItemReport, theirs: ItemReport, failed: bool) -> str:
    for name, our, their in zip(ours._fields, ours, theirs, strict=True):
        if our != their and not (failed and name in _RESULTS):
            return f"{name}={their}, the leader {name}={our}"
    return ""


def _cached(node: SimNode) -> list[str]:
    """At rest every rank holds the same KV in every page that the prefix cache may give away."""
    ranks = node.ranks
    if ranks.dead or ranks.behind or not node.scheduler.at_rest:
        return []
    pool = node.scheduler.kv.pool
    pages = array("q", (page for page in range(pool.total) if pool.class_of(page) == "cached"))
    ours = ranks.leader.export_pages(pages)
    faults = []
    for rank, follower in ranks.followers.items():
        theirs = follower.model.export_pages(pages)
        loose = [page for page, a, b in zip(pages, ours, theirs, strict=True) if a != b]
        if loose:
            faults.append(f"rank {rank} holds other KV than the leader in cached pages {loose}")
    return faults
