"""Host memory for the KV of retracted requests."""

from __future__ import annotations

from fsm.ledger import CountPool, Exhausted, Lease
from fsm.resources import Disposition


class HostPages(Lease):
    """A copy of one request's pages in host memory; ``blobs`` is filled when it is made."""

    __slots__ = ("_pool", "blobs")

    def __init__(self, pool: HostPool, owner: str, units: int) -> None:
        super().__init__("host_pages", owner, units)
        self._pool = pool
        self.blobs: list[bytes] = []

    def _give_back(self, disposition: Disposition | None) -> None:
        self.blobs = []
        self._pool.give_back(self.owner, self.units)


class HostPool(CountPool):
    """The pool ``host_pages``."""

    def __init__(self, total: int) -> None:
        super().__init__("host_pages", total)

    def reserve(self, owner: str, units: int = 1) -> HostPages:  # type: ignore[override]
        """Raises :class:`Exhausted` when fewer than ``units`` pages are free."""
        self.take(owner, units)
        return HostPages(self, owner, units)


__all__ = ["Exhausted", "HostPages", "HostPool"]
