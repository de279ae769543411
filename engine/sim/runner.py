"""A simulated device: one queue, strictly in launch order, each piece of work taking its time.

Results are computed when a step *ends*, not when it is launched. A page that was freed, reused or
overwritten meanwhile therefore shows in the tokens.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.batch import Batch, Executor, PageExport, PageImport, PagesDone, StepResult
from engine.sim.gates import Gate
from engine.sim.world import US_PER_MS, World

Work = Batch | PageExport | PageImport
Done = StepResult | PagesDone


@dataclass(frozen=True, slots=True)
class Costs:
    """What work costs in virtual time, in microseconds.

    A step takes ``step_us`` and ``token_us`` for each new token in it; copying pages takes
    ``copy_us`` for each page.
    """

    step_us: int = US_PER_MS
    token_us: int = 10
    copy_us: int = 100

    def of(self, work: Work) -> int:
        if isinstance(work, Batch):
            return self.step_us + self.token_us * len(work.tokens)
        return self.copy_us * len(work.pages)


DEFAULT_COSTS: Final = Costs()


class SimRunner:
    """An :class:`engine.scheduler.Runner` in virtual time."""

    def __init__(
        self,
        world: World,
        model: Executor,
        costs: Costs,
        deliver: Callable[[Done], None],
        woken: Callable[[], None] = lambda: None,
    ) -> None:
        """``woken`` is called when a step ends that is to be computed, and others are owed."""
        self.gate: Final = Gate()
        self.queue: deque[Work] = deque()
        """Launched and not ended, in order."""
        self.fail_copies: deque[str] = deque()
        """Errors of the next copies of pages to or from host memory and the store."""
        self.fail_steps: deque[str] = deque()
        """Errors that the next steps raise, one each."""
        self.steps_ended = 0
        self.last_end_us = 0
        self._world = world
        self._model = model
        self._costs = costs
        self._deliver = deliver
        self._woken = woken
        self.owed: list[tuple[int, int]] = []
        """Steps that have ended and are not computed: when, and the place of what they cause."""
        self._running = False
        self._waiting = False
        self._dozing = 0
        """So many steps end before anything is computed again."""
        self._pace_us = 0
        """What each of them takes."""
        self._due_us = 0
        """When the running step ends."""
        self._known: dict[int, int] = {}
        self._chunks: dict[tuple[str, int], int] = {}

    def launch(self, work: Work) -> None:
        self.queue.append(work)
        self._start()

    def doze(self, steps: int, before_us: int | None) -> None:
        """Compute up to ``steps`` steps, all like the last one in the queue, only when asked to
        (:mod:`engine.sim.fast_forward`); none that does not end before ``before_us``."""
        self._pace_us = self._costs.of(self.queue[-1])
        if before_us is not None:
            steps = min(steps, (before_us - 1 - self._due_us) // self._pace_us + 1)
        self._dozing = max(0, steps)

    def wake(self) -> list[tuple[int, int]]:
        """Compute steps when they end, from now on; returns what is owed, each of which has to be
        computed now with :meth:`repay`."""
        owed, self.owed, self._dozing = self.owed, [], 0
        return owed

    def repay(self, when_us: int) -> None:
        """Compute the step that ended at ``when_us``, the first in the queue."""
        work = self.queue.popleft()
        self.last_end_us = when_us
        self._deliver(self._compute(work))
        self._take_up()

    def look(self) -> None:
        """The gate has changed: a step that waits at it may end now."""
        if self._waiting and self.gate.passes():
            self._waiting = False
            self._end()

    def _start(self) -> None:
        if self.queue and not self._running:
            self._running = True
            self._take_up()
            cost = self._costs.of(self.queue[0])
            self._due_us = self._world.now_us + cost
            self._world.after(cost, self._arrive)

    def _take_up(self) -> None:
        """The first in the queue begins."""
        work = self.queue[0]
        if isinstance(work, Batch):
            self.gate.arrive(self._chunk_numbers(work))

    def _arrive(self) -> None:
        if self._dozing:
            self._dozing -= 1
            self.owed.append((self._world.now_us, self._world.reserve()))
            self._due_us = self._world.now_us + self._pace_us
            self._world.at(self._due_us, self._arrive)
            return
        if self.owed:
            self._woken()
        if isinstance(self.queue[0], Batch) and not self.gate.passes():
            self._waiting = True
            return
        self._end()

    def _end(self) -> None:
        work = self.queue.popleft()
        self._running = False
        self.last_end_us = self._world.now_us
        self._deliver(self._compute(work))
        self._start()

    def _compute(self, work: Work) -> Done:
        if not isinstance(work, Batch):
            return self._copied(work)
        self.steps_ended += 1
        result = self._model.execute(work)
        if self.fail_steps:
            return StepResult(work.step, error=self.fail_steps.popleft())
        return result

    def _copied(self, work: PageExport | PageImport) -> PagesDone:
        """A copy that fails has copied, as on every other rank; nobody relies on it."""
        blobs: list[bytes] = []
        if isinstance(work, PageExport):
            blobs = self._model.export_pages(work.pages)
        else:
            self._model.import_pages(work.pages, work.blobs)
        error = self.fail_copies.popleft() if self.fail_copies else None
        return PagesDone(work.ticket, blobs, error)

    def _chunk_numbers(self, batch: Batch) -> frozenset[int]:
        """Which chunk (1 is the first) of their texts the items of a step are."""
        for init in batch.rows:
            self._known[init.row] = len(init.token_ids)
        numbers = []
        for item in batch.items:
            if item.start < self._known[item.row] and not (item.sample and item.count == 1):
                key = (item.life, item.attempt)
                self._chunks[key] = self._chunks.get(key, 0) + 1
                numbers.append(self._chunks[key])
        return frozenset(numbers)
