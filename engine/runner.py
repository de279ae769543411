"""The runner: a thread of its own that computes steps in launch order.

The scheduler must never wait for a forward pass: a long chunk may not delay a refusal, an abort
or a deadline. So work goes in through a queue and results come out through another one, and
``wake`` tells the loop to look.

Work is executed strictly in the order in which it was launched. That order is what makes several
things correct: a
*feed* takes the token of the step before it, a copy into a page is done before the step that
reads it, and a page that was given back and taken again is written by its new owner only after
every step that still read the old contents."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from engine.batch import Batch, Executor, PageExport, PageImport, PagesDone, StepResult

logger = logging.getLogger(__name__)


class RunnerThread:
    """Runs an :class:`~engine.batch.Executor`. ``launch`` and ``poll`` never block.

    Args:
        executor: Called from this thread only.
        wake: Called after every piece of work that is done.
        step_s: The least time a step takes, in seconds; the hash model's steps would be instant.
    """

    def __init__(self, executor: Executor, wake: Callable[[], None], step_s: float = 0.0) -> None:
        self._executor = executor
        self._wake = wake
        self._step_s: Final = step_s
        self._work: queue.SimpleQueue[Batch | PageExport | PageImport | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[StepResult | PagesDone] = queue.SimpleQueue()
        self._gate = threading.Event()
        self._gate.set()
        self.busy_s = 0.0
        """Seconds spent computing, for utilization."""
        self._thread = threading.Thread(target=self._run, name="runner", daemon=True)
        self._thread.start()

    def launch(self, work: Batch | PageExport | PageImport) -> None:
        self._work.put(work)

    def poll(self) -> list[StepResult | PagesDone]:
        """What is done since the last call, in launch order."""
        done = []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._done.get_nowait())
        return done

    def hold(self) -> None:
        """Fault hook: results stay inside until :meth:`release`."""
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def close(self) -> None:
        """Finish what was launched, and end the thread."""
        self._gate.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            started = time.perf_counter()
            done = self._execute(work)
            elapsed = time.perf_counter() - started
            if isinstance(work, Batch) and elapsed < self._step_s:
                time.sleep(self._step_s - elapsed)
            self.busy_s += max(elapsed, self._step_s)
            self._gate.wait()
            self._done.put(done)
            self._wake()

    def _execute(self, work: Batch | PageExport | PageImport) -> StepResult | PagesDone:
        """Whatever the model or the device raises fails this step's requests, not the process."""
        try:
            if isinstance(work, Batch):
                return self._executor.execute(work)
            if isinstance(work, PageExport):
                return PagesDone(work.ticket, self._executor.export_pages(work.pages))
            self._executor.import_pages(work.pages, work.blobs)
            return PagesDone(work.ticket)
        except Exception as error:
            logger.exception("work on the device failed")
            message = f"{type(error).__name__}: {error}"
            if isinstance(work, Batch):
                return StepResult(work.step, error=message)
            return PagesDone(work.ticket, error=message)
