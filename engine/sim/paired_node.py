"""Prefill and decode nodes in virtual time: the production schedulers on a simulated device,
network and wire."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from engine.basics import Parts
from engine.core import ModelFacts, SchedulerCore
from engine.decode_scheduler import DecodeScheduler
from engine.paired import PairedScheduler
from engine.prefill_scheduler import PrefillScheduler
from engine.request import Request
from engine.sim.book import Book
from engine.sim.client import Clients
from engine.sim.network import Network
from engine.sim.node import NodeSettings, SimNode
from engine.sim.wire import DEFAULT_WIRE, SimWire, Target, WireCosts
from engine.sim.world import US_PER_S, World
from engine.slots import LocalSlots
from fsm.chart import Chart
from fsm.decode import DECODE
from fsm.ledger import PagePool
from fsm.prefill import PREFILL
from fsm.trace import Line
from transport.control import ControlFrame, Heartbeat


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What prefill and decode nodes have besides a node's settings; sizes in slots and pages,
    times in microseconds. ``None`` leaves the production default."""

    metadata: int = 8
    host_pages: int = 64
    wire: WireCosts = DEFAULT_WIRE
    meeting_timeout_us: int | None = None
    transfer_timeout_us: int | None = None
    held_timeout_us: int | None = None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node of a pair finds in its cluster."""

    network: Network
    find: Callable[[str], Target | None]
    """A decode node's memory as it is now."""
    mint_room: Callable[[], str]
    prefills: Callable[[], list[str]]
    """Names of all prefill nodes, dead or alive."""


class PairedNode(SimNode):
    """What both roles share: frames come in, and go out."""

    def __init__(
        self,
        world: World,
        settings: NodeSettings,
        pair: PairSettings,
        around: Surroundings,
        name: str,
        boot_id: str,
        clients: Clients | None = None,
        log: list[tuple[Book, Line]] | None = None,
    ) -> None:
        self.pair: Final = pair
        self.around: Final = around
        self.incoming: Final[deque[tuple[str, ControlFrame | None]]] = deque()
        """Frames that have arrived and are not read; None is the end of a connection."""
        super().__init__(world, settings, name, boot_id, clients, log)

    @property
    def paired(self) -> PairedScheduler:
        assert isinstance(self.scheduler, PairedScheduler)
        return self.scheduler

    def arrive(self, source: str, frame: ControlFrame | None) -> None:
        """A frame, or the end of a connection, has reached this process."""
        self.incoming.append((source, frame))
        self.wake()

    @property
    def idle(self) -> bool:
        return not any(self._matters(frame) for _, frame in self.incoming) and super().idle

    @staticmethod
    def _matters(frame: ControlFrame | None) -> bool:
        return frame is not None and not isinstance(frame, Heartbeat)

    def _hear(self) -> None:
        while self.incoming:
            source, frame = self.incoming.popleft()
            if frame is None:
                self.paired.peer_closed(source)
            else:
                self.paired.receive(source, frame)

    def _speak(self) -> None:
        for node, frame in self.paired.mail():
            self.around.network.send(self.name, node, frame)

    def _limits(self, scheduler: PairedScheduler) -> None:
        """Deadlines that a cluster sets for itself."""
        if self.pair.meeting_timeout_us is not None:
            scheduler.meeting_timeout_s = self.pair.meeting_timeout_us / US_PER_S
        if self.pair.transfer_timeout_us is not None:
            scheduler.transfer_timeout_s = self.pair.transfer_timeout_us / US_PER_S


class PrefillNode(PairedNode):
    """``prefill-0``."""

    chart: ClassVar[Chart] = PREFILL
    wire: SimWire

    @property
    def _prefill(self) -> PrefillScheduler:
        assert isinstance(self.scheduler, PrefillScheduler)
        return self.scheduler

    def _writer(self, ticket: int) -> Request:
        return self._prefill.writer(ticket)

    def _build(self, facts: ModelFacts) -> SchedulerCore:
        network = self.around.network
        self.wire = SimWire(
            self.world,
            self.pair.wire,
            self.ranks,
            lambda: self.scheduler.kv.pool,
            self._writer,
            self.around.find,
            lambda peer: network.cut(self.name, peer),
            self.wake,
        )
        scheduler = PrefillScheduler(
            Parts(
                self.settings.config,
                facts,
                self.settings.kv_pages,
                self.clock,
                self,
                store=self.store,
                boot_id=self.boot_id,
                node=self.name,
                trace=self.book.write,
            ),
            self.wire,
        )
        self._limits(scheduler)
        return scheduler

    def __init__(
        self,
        world: World,
        settings: NodeSettings,
        pair: PairSettings,
        around: Surroundings,
        name: str,
        boot_id: str,
        clients: Clients | None = None,
        log: list[tuple[Book, Line]] | None = None,
    ) -> None:
        super().__init__(world, settings, pair, around, name, boot_id, clients, log)
        self.gates["wire"] = self.wire.gate

    def _poll(self) -> None:
        self.faults += self.wire.faults
        self.wire.faults.clear()
        self._prefill.poll_wire()

    def look(self) -> None:
        super().look()
        self.wire.look()

    def kill(self) -> None:
        self.wire.dead = True
        super().kill()

    def unrest(self) -> list[str]:
        faults = super().unrest()
        if self.wire.open_writes:
            faults.append(f"{len(self.wire.open_writes)} writes are on the wire")
        return faults

    @property
    def rest_due_from_us(self) -> int:
        return max(super().rest_due_from_us, self.wire.last_end_us)


class DecodeNode(PairedNode):
    """``decode-0``. Its memory is a :class:`engine.sim.wire.Target`."""

    chart: ClassVar[Chart] = DECODE
    slots: LocalSlots

    def _build(self, facts: ModelFacts) -> SchedulerCore:
        self.slots = LocalSlots(self.pair.metadata)
        scheduler = DecodeScheduler(
            Parts(
                self.settings.config,
                facts,
                self.settings.kv_pages,
                self.clock,
                self,
                store=self.store,
                boot_id=self.boot_id,
                node=self.name,
                trace=self.book.write,
            ),
            self.slots,
            self.pair.host_pages,
            mint=self.around.mint_room,
            workers=self.around.prefills,
        )
        self._limits(scheduler)
        if self.pair.held_timeout_us is not None:
            scheduler.held_timeout_s = self.pair.held_timeout_us / US_PER_S
        return scheduler

    @property
    def page_pool(self) -> PagePool:
        return self.scheduler.kv.pool

    def slot_owner(self, slot: int) -> str | None:
        assert isinstance(self.scheduler, DecodeScheduler)
        return self.scheduler.metadata.owner_of(slot)
