"""What must hold in every state of two requests that share a unified node."""

from collections.abc import Iterator
from typing import Final

from fsm.explore_shared_base import (
    FENCE,
    GUEST,
    KITS,
    Life,
    Node,
    SharedDesign,
    Together,
    name,
)
from fsm.explore_shared_pages import parent_of, tree_faults
from fsm.explore_unified import broken as broken_life
from fsm.explore_unified_draft import ABSENT
from fsm.ledger import CACHE
from fsm.pauses import PauseMode

WHO: Final = {name(0): 0, name(1): 1}


def broken(design: SharedDesign, together: Together, pause: PauseMode | None, node: Node) -> str:
    """The first property that does not hold; empty if all do."""
    return next(_faults(design, together, pause, node), "")


def _faults(
    design: SharedDesign, together: Together, pause: PauseMode | None, node: Node
) -> Iterator[str]:
    locks = tuple(life.lock for life in node.lives)
    for who, life in enumerate(node.lives):
        if life.state == ABSENT:
            continue
        fault = broken_life(design, pause, life.state, life.launched, life.answers)
        if fault:
            yield f"r{who + 1}: {fault}"
        yield from _pages(design, node, who, life)
    yield from _owners(node)
    said = design.books.counts(node.owners)
    yield from said.faults
    yield from tree_faults(node.owners, node.tree, locks)
    holds = [
        design.chart.holds.get(life.state, frozenset()) & KITS[together] for life in node.lives
    ]
    members = {who for who in range(2) if "group_members" in holds[who]}
    if members != set(node.members):
        yield f"the group has {sorted(node.members)}, and its leases are with {sorted(members)}"
    if together == "group" and node.retired != all(life.answers for life in node.lives):
        yield "the group has not ended with its last member, and only then"
    for who, life in enumerate(node.lives):
        if life.answers and who in node.members:
            yield f"r{who + 1} has answered, and is still in its group"
        if life.answers and who == node.turn:
            yield f"r{who + 1} has answered, and still has its session's turn"
    turns = [who for who in range(2) if "session_turns" in holds[who]]
    if turns != [who for who in range(2) if who == node.turn]:
        yield f"the turn is with r{node.turn + 1}, and its lease is not"


def _pages(design: SharedDesign, node: Node, who: int, life: Life) -> Iterator[str]:
    """A life owns what is in its table, all of it, and nothing else."""
    holds = design.chart.holds[life.state]
    if bool(life.pages) != ("pages" in holds):
        yield f"r{who + 1} in {life.state} has the pages {life.pages}"
    for page in life.pages:
        if name(who) not in node.owners[page]:
            touches = "a launched step touches" if life.launched else "its table has"
            yield f"r{who + 1}: {touches} page {page}, which it does not own"
    if life.lock is not None:
        nodes, at = dict(node.tree), life.lock
        while at is not None:
            if nodes.get(at) not in life.pages:
                yield f"r{who + 1} locks {at[1]} in the prefix cache and does not use its page"
            above = parent_of(at)
            if above is None:
                break
            at = above


def _owners(node: Node) -> Iterator[str]:
    for page, owners in enumerate(node.owners):
        for owner in owners:
            if owner in (GUEST, FENCE):
                leaks = not node.guest
            else:
                leaks = owner != CACHE and page not in node.lives[WHO[owner]].pages
            if owner in (name(0), name(1)) and FENCE in owners:
                yield f"{owner} has page {page}, into which a peer may still write"
            if leaks:
                yield f"page {page} is owned by {owner}, which does not have it: a leak"


def writes(node: Node, who: int) -> str:
    """What is wrong with a step of request ``who``: it writes all of its pages that are not
    committed, and nobody else may use those."""
    life = node.lives[who]
    for page in life.pages[life.ready :]:
        others = set(node.owners[page]) - {name(who)}
        if others:
            return f"r{who + 1} writes into page {page}, which {', '.join(sorted(others))} owns"
    return ""
