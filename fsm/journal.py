"""A bounded record of the moves of one request: what ``/requests/{rid}`` shows and tests assert
on."""

from collections import deque
from typing import Final, NamedTuple

JOURNAL_LIMIT: Final = 64
"""Moves kept for each request. A request that is retracted again and again keeps its newest
ones."""


class Entry(NamedTuple):
    """One move: when (seconds, the node's clock), what, and who caused it."""

    time: float
    event: str
    source: str
    target: str
    by: str
    why: str


class Journal:
    """The newest :data:`JOURNAL_LIMIT` moves, and how many there were in all."""

    __slots__ = ("_entries", "count")

    def __init__(self, limit: int = JOURNAL_LIMIT) -> None:
        self._entries: deque[Entry] = deque(maxlen=limit)
        self.count = 0

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.count += 1

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries)

    def path(self) -> list[str]:
        """The states visited, oldest kept first."""
        if not self._entries:
            return []
        return [self._entries[0].source, *(entry.target for entry in self._entries)]
