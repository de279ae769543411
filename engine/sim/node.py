"""A node in virtual time: the production scheduler on a simulated device.

A *turn* of the node is the production loop's: messages, deadlines, what the store and the device
have finished, commits in launch order, launches while there is room, and what clients are told. A
turn runs whenever something arrived, at the virtual time at which it arrived.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import ClassVar, Final

from engine.basics import Parts
from engine.batch import Batch, PageExport, PageImport, StepResult
from engine.config import EngineConfig
from engine.core import SchedulerCore
from engine.hash_model import HashModel
from engine.scheduler import ModelFacts, Scheduler
from engine.sim.book import Book
from engine.sim.client import Clients
from engine.sim.fast_forward import make_up, uneventful
from engine.sim.gates import GATES, Gate, GateName
from engine.sim.ranks import Ranks, RankSettings
from engine.sim.rest import EXHAUST, due_from_us, unrest
from engine.sim.runner import DEFAULT_COSTS, Costs, Done, SimRunner
from engine.sim.store import VirtualStore
from engine.sim.world import US_PER_S, World
from fsm.chart import Chart
from fsm.ledger import PoolCounts
from fsm.trace import Line
from fsm.unified import UNIFIED
from transport.messages import (
    Abort,
    CloseSession,
    Drain,
    OpenSession,
    StopMatched,
    Submit,
    ToEngine,
)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Everything that a unified node is built from; times are in microseconds."""

    config: EngineConfig
    kv_pages: int
    costs: Costs = DEFAULT_COSTS
    weights: str = "W1"
    store_latency_us: int | None = None
    """None is a node without a store."""
    detok_us: int = 0
    held_timeout_us: int | None = None
    """How long a request may be held; None leaves the production default."""
    ranks: RankSettings = field(default_factory=RankSettings)


class SimNode:
    """``unified-0``: scheduler, ranks with a device each, store, and the clients that talk to it.

    It is one process: a restart is another one, with another ``boot_id``. ``clients`` are those of
    the process before it, whose answers are remembered.
    """

    chart: ClassVar[Chart] = UNIFIED

    def __init__(
        self,
        world: World,
        settings: NodeSettings,
        name: str = "unified-0",
        boot_id: str = "boot",
        clients: Clients | None = None,
        log: list[tuple[Book, Line]] | None = None,
    ) -> None:
        self.name: Final = name
        self.boot_id: Final = boot_id
        self.settings: Final = settings
        self.world: Final = world
        self.book: Final = Book(self.chart, name, log)
        self.dead = False
        """Killed: nothing happens here any more."""
        self.frozen = False
        """Stopped by a signal: what arrives piles up. Its device and its wire go on."""
        self.touched = True
        """Something has happened here since the last check."""
        self.skew_us = 0
        """How far its clock is ahead."""
        self.turn_due = False
        """A turn is among the events of the world."""
        self.behind_us = 0
        """How far the turn that is being made up for lies in the past."""
        self.forwards: Final[Counter[str]] = Counter()
        """How many launched steps contained each life."""
        config = settings.config
        context = config.context_length or 8192
        self.ranks: Final = Ranks(
            world,
            boot_id,
            settings.ranks,
            lambda: HashModel(settings.kv_pages, config.page_size, settings.weights, context),
        )
        self.ranks.end = self.kill
        self.model: Final = self.ranks.leader
        """The leader's device."""
        self.runner: Final = SimRunner(world, self.model, settings.costs, self._done, self.catch_up)
        self.store: VirtualStore | None = None
        if settings.store_latency_us is not None:
            self.store = VirtualStore(world, settings.store_latency_us, self.wake)
        self.scheduler: Final = self._build(
            ModelFacts(
                self.model.vocab_size,
                self.model.context_length,
                self.model.eos_token_ids,
                self.model.weights_digest,
            )
        )
        self.clients: Final = clients or Clients(world, settings.detok_us)
        self.clients.attach(self.post)
        self.gates: Final[dict[GateName, Gate]] = {name: Gate() for name in GATES}
        self.gates["step"] = self.runner.gate
        if self.store is not None:
            self.gates["store"] = self.store.gate
        self.steps_committed = 0
        self.faults: list[str] = []
        """What this node's own watching has found; a fault is reported once."""
        self.at_start: Final = self.ledger()
        self.last_touch_us = 0
        """When a scenario last interfered: a release or a restore, from which rest is due."""
        self._inbox: deque[tuple[ToEngine, str]] = deque()
        self.results: Final[deque[Done]] = deque()
        """What the device has finished, and is not committed."""
        self._alarm: float | None = None
        self._alarm_us: int | None = None
        self.fast_forward = False
        """Whether uneventful steps may be computed late (:mod:`engine.sim.fast_forward`)."""

    def _build(self, facts: ModelFacts) -> SchedulerCore:
        """The production scheduler of this role."""
        scheduler = Scheduler(
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
        )
        if self.settings.held_timeout_us is not None:
            scheduler.held_timeout_s = self.settings.held_timeout_us / US_PER_S
        return scheduler

    def clock(self) -> float:
        """Seconds, as this node's own clock shows them."""
        return (self.world.now_us - self.behind_us + self.skew_us) / US_PER_S

    # --- what the scheduler sees ---

    def launch(self, work: Batch | PageExport | PageImport) -> None:
        """The scheduler's runner. No step may contain a request that has its answer."""
        if isinstance(work, Batch):
            for item in work.items:
                self.forwards[item.life] += 1
                life = self.book.lives[item.life]
                if life.answer is not None:
                    self.faults.append(f"step {work.step} computes {life.name} after its answer")
        self.ranks.launched(work)
        self.runner.launch(work)

    # --- what a scenario does ---

    def post(self, message: ToEngine, submission: str = "") -> None:
        self._inbox.append((message, submission))
        self.wake()

    def wake(self) -> None:
        self.catch_up()
        if not self.turn_due:
            self.turn_due = True
            self.world.after(0, self.turn)

    def look(self) -> None:
        """A gate has changed."""
        self.runner.look()
        if self.store is not None:
            self.store.look()
        self.wake()

    def kill(self) -> None:
        """The process ends at once, and with it every rank, and every connection that its clients
        had."""
        self.dead = True
        self.ranks.stop()
        self.clients.connection_lost()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.last_touch_us = self.world.now_us
        self.wake()

    def ledger(self) -> dict[str, PoolCounts]:
        return {pool.name: pool.counts() for pool in self.scheduler.ledger}

    def exhaust(self, leave: int) -> None:
        """Take pages away until no more than ``leave`` are available."""
        kv = self.scheduler.kv
        kv.take(EXHAUST, max(0, kv.available - leave))

    def restore(self) -> None:
        """Give the pages of :meth:`exhaust` back."""
        kv = self.scheduler.kv
        kv.drop(EXHAUST, kv.pool.pages_of(EXHAUST))
        self.last_touch_us = self.world.now_us
        self.wake()

    # --- rest ---

    def unrest(self) -> list[str]:
        """Why this node is not back at its start; empty when it is."""
        return unrest(self)

    @property
    def rest_due_from_us(self) -> int:
        """The last terminal answer or fence: from here on rest may take one second."""
        return due_from_us(self)

    @property
    def idle(self) -> bool:
        """Nothing is under way, in the front end or behind it."""
        busy = self._inbox or self.turn_due or self.runner.queue or len(self.clients.table)
        return not busy and not self.unrest()

    # --- the loop ---

    def _done(self, done: Done) -> None:
        if self.dead:
            return
        self.touched = True
        self.ranks.executed(done)
        self.results.append(done)
        self.wake()

    def turn(self) -> None:
        """One turn of the production loop."""
        self.turn_due = False
        if self.dead or self.frozen:
            return
        self.touched = True
        scheduler = self.scheduler
        while self._inbox:
            self._handle(*self._inbox.popleft())
        self._hear()
        scheduler.tick()
        self.commit()
        scheduler.poll_store()
        self._poll()
        launched, before = False, scheduler.tracer.last
        while self._may_launch() and scheduler.launch() is not None:
            launched = True
        settled = scheduler.tracer.last == before and (launched or not scheduler.roster.queue)
        self._speak()
        for frame in scheduler.flush():
            self.clients.receive(frame, self.model.weights)
        self._set_alarm()
        if self.fast_forward and settled and (steps := uneventful(self)):
            self.runner.doze(steps, self._alarm_us)

    def catch_up(self) -> None:
        """Whatever touches this node first lets it do what it has dozed through."""
        if self.fast_forward and (owed := self.runner.wake()):
            make_up(self, owed)

    def _hear(self) -> None:
        """Take what peers have said."""

    def _poll(self) -> None:
        """Take what the wire has finished."""

    def _speak(self) -> None:
        """Send what there is to say to peers."""

    def commit(self) -> None:
        """Hand the results of the device to the scheduler, as the gate lets them through."""
        while self.results:
            done = self.results[0]
            if isinstance(done, StepResult):
                if not self.gates["commit"].passes():
                    return
                self.results.popleft()
                self.scheduler.commit(done)
                self.steps_committed += 1
            else:
                self.results.popleft()
                self.scheduler.pages_done(done)

    def _may_launch(self) -> bool:
        gate = self.gates["schedule"]
        return not gate.closed or (self.scheduler.can_launch and gate.passes())

    def _handle(self, message: ToEngine, submission: str) -> None:
        scheduler = self.scheduler
        match message:
            case Submit():
                self.book.submission = submission
                scheduler.submit(message)
                self.book.submission = ""
            case Abort():
                scheduler.abort(message)
            case StopMatched():
                scheduler.stop_matched(message)
            case OpenSession():
                scheduler.open_session(message)
            case CloseSession():
                scheduler.close_session(message)
            case Drain():
                scheduler.drain(message)
            case _:
                raise TypeError(f"a simulated node does not take {type(message).__name__}")

    def _set_alarm(self) -> None:
        due = self.scheduler.next_deadline()
        if due is not None and due != self._alarm:
            self._alarm = due
            self._alarm_us = self.world.at_seconds(due - self.skew_us / US_PER_S, self._ring)

    def _ring(self) -> None:
        self._alarm = self._alarm_us = None
        self.wake()
