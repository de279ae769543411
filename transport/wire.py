"""The wire: one-sided writes from a prefill node's KV pages into a decode node's, as RDMA does
them.

The receiving side takes no part in a write and cannot refuse one. Therefore memory that was
granted stays reserved until the *writer* says that it is quiet, until its process is proven dead,
or until a fence makes its writes impossible.

``write`` and ``write_slot`` start an operation and return at once; :meth:`Wire.poll` reports what
is over. A slot is written after every page that was written before it to the same peer: a slot
that carries the room proves that the pages are there.

What was granted are pages of a *process*. Another one may have its node's name by now, and must
never be written to; a write for a process that is gone fails."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class WireDone:
    """An operation is over. With ``error``, what the target holds is undefined."""

    ticket: int
    error: str = ""


class Process(NamedTuple):
    """Whose memory a write goes to."""

    node: str
    boot_id: str


class Wire(Protocol):
    """Back ends: ``loopback`` (one process), shared memory, Transfer Engine. One contract suite
    for all."""

    def write(self, ticket: int, peer: Process, source: array[int], target: array[int]) -> None:
        """Copy pages ``source`` of this node into pages ``target`` of ``peer``."""
        ...

    def write_slot(self, ticket: int, peer: Process, slot: int, record: bytes) -> None:
        """Write a metadata record into ``slot`` of ``peer``, after the pages written before."""
        ...

    def poll(self) -> list[WireDone]:
        """Operations that are over since the last call."""
        ...
