"""What two requests share on a unified node, as a state: see :mod:`fsm.explore_shared`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from fsm.chart import Chart, Edge
from fsm.explore_shared_pages import BOOKS, Books, Key, Owners, Tree, evictable
from fsm.explore_unified_draft import ABSENT, UnifiedDesign
from fsm.ledger import QUARANTINE
from fsm.resources import Resource
from fsm.unified import BASE_KIT

Together: TypeAlias = Literal["alone", "group", "session"]
"""What the two requests are to each other: nothing, samples of one submission, or turns of one
session."""

KITS: Final[dict[Together, frozenset[Resource]]] = {
    "alone": BASE_KIT,
    "group": BASE_KIT | {"group_members"},
    "session": BASE_KIT | {"session_turns"},
}
SHORT, LONG = 2, 3
"""Pages of a request's tokens: a full one and a part of a second, and with it full, of a third."""
GUEST: Final = "guest"
FENCE: Final = f"{QUARANTINE}{GUEST}"


class Life(NamedTuple):
    state: str = ABSENT
    launched: int = 0
    answers: int = 0
    weights: int = 0
    """Those that its KV was computed under; ``MIXED`` where they were changed in place."""
    long: bool = False
    """Its tokens reach into a third page."""
    ready: int = 0
    """Full pages of which the KV is committed."""
    pages: tuple[int, ...] = ()
    """Its block table."""
    lock: Key | None = None
    """The node of the prefix cache that it locks; None is the root."""

    @property
    def size(self) -> int:
        """Pages that its tokens need."""
        return LONG if self.long else SHORT


class Node(NamedTuple):
    """Both requests, the pages, and what belongs to neither."""

    lives: tuple[Life, Life]
    owners: Owners
    tree: Tree = ()
    guest: str = ""
    """Somebody else has a page: a *load* from the store, or a *peer* that may still write."""
    members: tuple[int, ...] = ()
    """Who is in the group now."""
    retired: int = 0
    """How often the group has ended."""
    turn: int = -1
    """Whose turn of the session it is."""


@dataclass(frozen=True)
class SharedDesign(UnifiedDesign):
    """What is explored besides chart and table. Tests plant bugs by replacing parts."""

    books: Books = BOOKS
    evictable: Callable[[Tree, tuple[Key | None, ...]], list[Key]] = evictable
    matches: Callable[[Key, int], bool] = lambda key, weights: key[0] == weights
    """Whether a node computing under ``weights`` finds what ``key`` holds."""
    relocks: Callable[[Key | None, Key | None], bool] = lambda old, new: old != new
    """Whether a request whose prompt went to the prefix cache locks the new node instead."""
    gives_way: Callable[[bool], bool] = lambda stuck: stuck
    """Whether somebody is retracted for sure where nobody can go on."""
    aborts: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda members: members
    """Whom an abort of a group reaches."""


def name(who: int) -> str:
    """As whom a request owns pages."""
    return f"r{who + 1}"


Edges: TypeAlias = Mapping[tuple[str, str], tuple[Edge, frozenset[Resource], frozenset[Resource]]]
"""(state, event) → the edge, what it takes and what it drops."""


def edges_of(chart: Chart, kit: frozenset[Resource]) -> Edges:
    holds = {state: resources & kit for state, resources in chart.holds.items()}
    return {
        (edge.source, edge.event): (
            edge,
            holds[edge.target] - holds[edge.source],
            holds[edge.source] - holds[edge.target],
        )
        for edge in chart.edges
    }
