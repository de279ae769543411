"""A unified node in virtual time: the production scheduler on a simulated device.

A *turn* of the node is the production loop's: messages, deadlines, what the store and the device
have finished, commits in launch order, launches while there is room, and what clients are told. A
turn runs whenever something arrived, at the virtual time at which it arrived.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from engine.batch import Batch, PageExport, PageImport, StepResult
from engine.config import EngineConfig
from engine.hash_model import HashModel
from engine.scheduler import ModelFacts, Scheduler
from engine.sim.book import Book
from engine.sim.client import Clients
from engine.sim.gates import GATES, Gate, GateName
from engine.sim.runner import DEFAULT_COSTS, Costs, Done, SimRunner
from engine.sim.store import VirtualStore
from engine.sim.world import World
from fsm.ledger import PoolCounts
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

EXHAUST: Final = "scenario:exhaust"
"""Owner of pages that a scenario takes away."""


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


class SimNode:
    """``unified-0``: scheduler, device, store, and the clients that talk to it."""

    def __init__(self, world: World, settings: NodeSettings, name: str = "unified-0") -> None:
        self.name: Final = name
        self.settings: Final = settings
        self.world: Final = world
        self.book: Final = Book(UNIFIED)
        config = settings.config
        context = config.context_length or 8192
        model = HashModel(settings.kv_pages, config.page_size, settings.weights, context)
        self.runner: Final = SimRunner(world, model, settings.costs, self._done)
        self.store: VirtualStore | None = None
        if settings.store_latency_us is not None:
            self.store = VirtualStore(world, settings.store_latency_us, self.wake)
        self.scheduler: Final = Scheduler(
            config,
            ModelFacts(
                model.vocab_size, model.context_length, model.eos_token_ids, model.weights_digest
            ),
            settings.kv_pages,
            world.clock,
            self,
            self.store,
            node=name,
            trace=self.book.write,
        )
        self.clients: Final = Clients(world, self.post, settings.detok_us)
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
        self._results: deque[Done] = deque()
        self._turn_due = False
        self._alarm: float | None = None

    # --- what the scheduler sees ---

    def launch(self, work: Batch | PageExport | PageImport) -> None:
        """The scheduler's runner. No step may contain a request that has its answer."""
        if isinstance(work, Batch):
            for item in work.items:
                life = self.book.lives[item.life]
                if life.answer is not None:
                    self.faults.append(f"step {work.step} computes {life.name} after its answer")
        self.runner.launch(work)

    # --- what a scenario does ---

    def post(self, message: ToEngine, submission: str = "") -> None:
        self._inbox.append((message, submission))
        self.wake()

    def wake(self) -> None:
        if not self._turn_due:
            self._turn_due = True
            self.world.after(0, self._turn)

    def look(self) -> None:
        """A gate has changed."""
        self.runner.look()
        if self.store is not None:
            self.store.look()
        self.wake()

    def ledger(self) -> dict[str, PoolCounts]:
        return {pool.name: pool.counts() for pool in self.scheduler.ledger}

    def exhaust(self, leave: int) -> bool:
        """Take pages away until ``leave`` are available. False: there are fewer already."""
        kv = self.scheduler.kv
        count = kv.available - leave
        return count >= 0 and kv.take(EXHAUST, count) is not None

    def restore(self) -> None:
        """Give the pages of :meth:`exhaust` back."""
        kv = self.scheduler.kv
        kv.drop(EXHAUST, kv.pool.pages_of(EXHAUST))
        self.last_touch_us = self.world.now_us
        self.wake()

    # --- rest ---

    def unrest(self) -> list[str]:
        """Why this node is not back at its start (invariant 8); empty when it is."""
        faults = []
        for name, now in self.ledger().items():
            start = self.at_start[name]
            if (now.held, now.quarantined) != (0, 0) or now.free + now.cached != start.total:
                faults.append(f"{name}: {_counts(now)}, owners {self._owners(name)}")
        faults += [f"{life.name} is {life.where}" for life in self.book.open]
        if self.runner.queue or self._results:
            faults.append(f"{len(self.runner.queue) + len(self._results)} launched works are open")
        if not self.scheduler.at_rest:
            faults.append("the scheduler does not say that it is at rest")
        if len(self.clients.table):
            faults.append(f"frontend_records: {[record.rid for record in self.clients.table]}")
        faults += [f"{each.name} has no answer" for each in self.clients.open]
        return faults

    @property
    def rest_due_from_us(self) -> int:
        """The last terminal answer or fence: from here on rest may take one second."""
        ends = [self.clients.last_answer_us, self.runner.last_end_us, self.last_touch_us]
        if self.store is not None:
            ends.append(self.store.last_end_us)
        return max(ends)

    @property
    def idle(self) -> bool:
        """Nothing is under way, in the front end or behind it."""
        return not self._inbox and not self._turn_due and not self.unrest()

    # --- the loop ---

    def _done(self, done: Done) -> None:
        self._results.append(done)
        self.wake()

    def _turn(self) -> None:
        self._turn_due = False
        scheduler = self.scheduler
        while self._inbox:
            self._handle(*self._inbox.popleft())
        scheduler.tick()
        self._commit()
        scheduler.poll_store()
        while self._may_launch() and scheduler.launch() is not None:
            pass
        for frame in scheduler.flush():
            self.clients.receive(frame)
        self._set_alarm()

    def _commit(self) -> None:
        while self._results:
            done = self._results[0]
            if isinstance(done, StepResult):
                if not self.gates["commit"].passes():
                    return
                self._results.popleft()
                self.scheduler.commit(done)
                self.steps_committed += 1
            else:
                self._results.popleft()
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
            self.world.at_seconds(due, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake()

    def _owners(self, name: str) -> dict[str, int]:
        owners = self.scheduler.ledger[name].owners()
        lives = self.book.lives
        return {lives[who].name if who in lives else who: units for who, units in owners.items()}


def _counts(counts: PoolCounts) -> str:
    return " ".join(f"{key}={value}" for key, value in counts.as_dict().items())
