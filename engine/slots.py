"""Metadata slots: where prefill writes the first token, last of all.

A slot is zeroed when its lease is given back, before anybody else can have it: what a late writer
of the last owner left there must never be read as the next one's."""

from __future__ import annotations

from typing import Final, Protocol

from engine.request import Request
from fsm.ledger import LeaseError, PoolCounts, SlotLease, SlotPool
from fsm.resources import Disposition


class SlotMemory(Protocol):
    """The memory that peers write into."""

    @property
    def total(self) -> int: ...

    def read(self, slot: int) -> bytes:
        """What was written; empty if nothing was."""
        ...

    def clear(self, slot: int) -> None: ...


class RecordLease(SlotLease):
    """A slot that is zeroed when it is given back."""

    __slots__ = ("_memory",)

    def __init__(self, pool: SlotPool, memory: SlotMemory, owner: str, slot: int) -> None:
        super().__init__(pool, owner, slot)
        self._memory = memory

    def _give_back(self, disposition: Disposition | None) -> None:
        self._memory.clear(self.slot)
        super()._give_back(disposition)


class SlotPoolOfRecords(SlotPool):
    """The pool ``metadata_slots``."""

    def __init__(self, memory: SlotMemory) -> None:
        super().__init__("metadata_slots", memory.total)
        self._memory: Final = memory

    def reserve(self, owner: str) -> SlotLease:
        taken = super().reserve(owner)
        return RecordLease(self, self._memory, owner, taken.slot)

    def owner_of(self, slot: int) -> str | None:
        """The life that has a slot; None if nobody has."""
        return self._owner.get(slot)

    def slot_of(self, request: Request) -> int:
        lease = request.leases["metadata_slots"]
        if not isinstance(lease, SlotLease):
            raise LeaseError(f"{request.rid} has no metadata slot")
        return lease.slot


class LocalSlots:
    """Slots in this process's memory: for tests, simulation and the loopback wire."""

    def __init__(self, total: int) -> None:
        self._records = [b""] * total

    @property
    def total(self) -> int:
        return len(self._records)

    def read(self, slot: int) -> bytes:
        return self._records[slot]

    def write(self, slot: int, record: bytes) -> None:
        """A peer's write; it asks nobody."""
        self._records[slot] = record

    def clear(self, slot: int) -> None:
        self._records[slot] = b""


__all__ = ["LocalSlots", "PoolCounts", "RecordLease", "SlotMemory", "SlotPoolOfRecords"]
