"""The simulated wire: one-sided writes that take their time and copy when they complete.

Nobody asks the target. What a write reads is what its source pages hold *at completion*, and it
overwrites whatever its target pages belong to by then, as RDMA does; a page that either side gave
back too early shows in the tokens, and :attr:`SimWire.faults` names it besides.

Writes for one request keep their order (its slot is written last); those of different requests
share the bandwidth to a peer and nothing else.

Where nodes have several ranks, a write is one for each: rank i reads its own pages and writes those
of rank i of the target. The write is over when the last rank's is; the slot is the leader's alone.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from engine.frontend import MEMBER_SUFFIX
from engine.request import Request
from engine.sim.follower import Blobs
from engine.sim.gates import Gate
from engine.sim.ranks import Ranks
from engine.sim.world import US_PER_MS, US_PER_S, World
from engine.slots import LocalSlots
from fsm.ledger import QUARANTINE, PagePool
from transport.wire import Process, WireDone

RETRY_US: Final = 50 * US_PER_MS
"""How often a write tries again across a partition."""
GIVE_UP_US: Final = 5 * US_PER_S
"""After so long it fails."""


@dataclass(frozen=True, slots=True)
class WireCosts:
    """A write takes ``latency_us`` and ``page_us`` for each page; writes to one peer follow each
    other on the link."""

    latency_us: int = 20
    page_us: int = 10


DEFAULT_WIRE: Final = WireCosts()


class Target(Protocol):
    """A decode node as a writer sees it: memory, and whether the process still has it."""

    @property
    def boot_id(self) -> str: ...
    @property
    def dead(self) -> bool: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def slots(self) -> LocalSlots: ...
    @property
    def page_pool(self) -> PagePool: ...
    def slot_owner(self, slot: int) -> str | None: ...
    def catch_up(self) -> None:
        """Its memory is about to be written: what its device should have done by now is done."""


@dataclass(slots=True)
class Write:
    """One operation: pages, or a slot with its record."""

    ticket: int
    peer: str
    target: Target | None
    request: Request
    peer_life: str
    source: array[int]
    pages: array[int]
    slot: int
    record: bytes
    posted_us: int
    held_us: int = 0


@dataclass(slots=True)
class WireRule:
    """The next operations of a request fail, or take longer."""

    rid: str
    """Of one member, or of all that a submission has."""
    left: int
    by_us: int | None = None
    """None: they fail."""

    def fits(self, request: Request) -> bool:
        """Whether the next operation for ``request`` is one of them."""
        rid = request.rid.partition("@")[0]
        return self.left > 0 and self.rid in (rid, MEMBER_SUFFIX.sub("", rid))


class SimWire:
    """A :class:`transport.wire.Wire` of one prefill process."""

    def __init__(
        self,
        world: World,
        costs: WireCosts,
        ranks: Ranks,
        pool: Callable[[], PagePool],
        writer: Callable[[int], Request],
        find: Callable[[str], Target | None],
        cut: Callable[[str], bool],
        wake: Callable[[], None],
    ) -> None:
        self.gate: Final = Gate()
        """Closed: no write completes."""
        self.rules: Final[list[WireRule]] = []
        self.faults: list[str] = []
        self.dead = False
        """The process is gone, and its writes with it."""
        self.last_end_us = 0
        self.writes = 0
        """Operations completed."""
        self._world = world
        self._costs = costs
        self._ranks = ranks
        self._pool = pool
        self._writer = writer
        self._find = find
        self._cut = cut
        self._wake = wake
        self._queues: dict[tuple[str, str], deque[Write]] = defaultdict(deque)
        self._busy_until: dict[str, int] = defaultdict(int)
        self._ready: list[Write] = []
        self._done: list[WireDone] = []

    @property
    def open_writes(self) -> list[Write]:
        return [write for queue in self._queues.values() for write in queue]

    # --- what the scheduler calls ---

    def write(self, ticket: int, peer: Process, source: array[int], target: array[int]) -> None:
        self._post(ticket, peer, array("q", source), array("q", target), -1, b"")

    def write_slot(self, ticket: int, peer: Process, slot: int, record: bytes) -> None:
        self._post(ticket, peer, array("q"), array("q"), slot, record)

    def poll(self) -> list[WireDone]:
        done, self._done = self._done, []
        return done

    # --- the link ---

    def look(self) -> None:
        """The gate has changed."""
        ready, self._ready = self._ready, []
        for write in ready:
            self._arrive(write)

    def _post(
        self,
        ticket: int,
        peer: Process,
        source: array[int],
        pages: array[int],
        slot: int,
        record: bytes,
    ) -> None:
        request = self._writer(ticket)
        life = request.pairing.life if request.pairing is not None else None
        target = self._find(peer.node)
        write = Write(
            ticket,
            peer.node,
            target if target is not None and target.boot_id == peer.boot_id else None,
            request,
            life or "",
            source,
            pages,
            slot,
            record,
            self._world.now_us,
        )
        queue = self._queues[peer.node, request.life]
        queue.append(write)
        if len(queue) == 1:
            self._start(write)

    def _start(self, write: Write) -> None:
        begin = max(self._world.now_us, self._busy_until[write.peer])
        end = begin + self._costs.page_us * max(1, len(write.source))
        self._busy_until[write.peer] = end
        write.posted_us = self._world.now_us
        self._world.at(end + self._costs.latency_us, lambda: self._arrive(write))

    def _arrive(self, write: Write) -> None:
        if self.dead:
            return
        if not self.gate.passes():
            self._ready.append(write)
            return
        if self._cut(write.peer) and self._world.now_us - write.posted_us < GIVE_UP_US:
            self._world.after(RETRY_US, lambda: self._arrive(write))
            return
        error = "the peer does not answer" if self._cut(write.peer) else ""
        for rule in self.rules:
            if rule.fits(write.request):
                rule.left -= 1
                if rule.by_us is not None:
                    self._world.after(rule.by_us, lambda: self._arrive(write))
                    return
                error = "injected fault"
        if error or write.slot >= 0:
            self._end(write, error, [])
        else:
            self._ranks.read(write.ticket, write.source, partial(self._end, write, error))

    def _end(self, write: Write, error: str, shards: list[Blobs]) -> None:
        """``shards`` is what each rank has read."""
        target = write.target
        if target is None or target.dead:
            error = error or "the connection is closed"
        elif not error:
            target.catch_up()
            self._check(write, target)
            if write.slot >= 0:
                target.slots.write(write.slot, write.record)
            else:
                target.ranks.land(self._ranks.boot_id, write.ticket, write.pages, shards)
        self.writes += 1
        self.last_end_us = self._world.now_us
        self._done.append(WireDone(write.ticket, error))
        queue = self._queues[write.peer, write.request.life]
        queue.popleft()
        if queue:
            self._start(queue[0])
        else:
            del self._queues[write.peer, write.request.life]
        self._wake()

    def _check(self, write: Write, target: Target) -> None:
        """No wire touches a page, or a slot, whose lease was released (invariant 4)."""
        rid, life = write.request.rid, write.request.life
        loose = [page for page in write.source if life not in self._pool().owners_of(page)]
        if loose:
            self.faults.append(f"the wire reads pages {loose}, released by {rid}")
        owners = {write.peer_life, f"{QUARANTINE}{write.peer_life}"}
        loose = [page for page in write.pages if not owners & target.page_pool.owners_of(page)]
        if loose:
            self.faults.append(
                f"the wire writes pages {loose} of {write.peer}, released by {rid} there"
            )
        if write.slot >= 0 and target.slot_owner(write.slot) != write.peer_life:
            self.faults.append(
                f"the wire writes slot {write.slot} of {write.peer}, released by {rid} there"
            )
