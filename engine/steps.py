"""Launched steps: what is on the device, in launch order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from engine.basics import LifecycleBug, Runner
from engine.batch import Batch, BatchItem, RowInit, Sampled, StepResult
from engine.batching import Span, build_batch
from engine.request import Request
from fsm.ledger import PagePool, SlotLease


class Steps:
    """Builds steps, hands them to the runner, and takes them back in the same order."""

    def __init__(self, runner: Runner, page_size: int, depth: int) -> None:
        """``depth`` steps are in flight at most."""
        self._runner = runner
        self._page_size: Final = page_size
        self._depth: Final = depth
        self._in_flight: deque[tuple[Batch, tuple[Request, ...]]] = deque()
        self._rows_taken: list[RowInit] = []
        self._launched = 0

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._in_flight)

    @property
    def full(self) -> bool:
        return len(self._in_flight) >= self._depth

    @property
    def requests(self) -> Iterator[Request]:
        """Whom the steps in flight compute, once for each step."""
        return (request for _, requests in self._in_flight for request in requests)

    @property
    def oldest(self) -> Sequence[Request]:
        """Whom the step that comes back next computes."""
        return self._in_flight[0][1] if self._in_flight else ()

    def init_row(self, request: Request, row: SlotLease) -> None:
        """The runner is to know the request's history, before the next step."""
        self._rows_taken.append(
            RowInit(
                row.slot,
                list(request.tokens),
                request.prompt_len,
                request.sampling,
                tuple(sorted(request.stop_ids)),
            )
        )

    def launch(self, spans: Sequence[Span]) -> Batch:
        """Compute ``spans`` in one step."""
        self._launched += 1
        batch = build_batch(self._launched, self._page_size, spans, tuple(self._rows_taken))
        self._rows_taken.clear()
        for span in spans:
            span.request.launched = span.start + span.length
            span.request.in_steps += 1
        self._in_flight.append((batch, tuple(span.request for span in spans)))
        self._runner.launch(batch)
        return batch

    def take(self, result: StepResult) -> Iterator[tuple[BatchItem, Request, Sampled]]:
        """A step has come back: its items with what was sampled, or the error that failed it. Each
        request is in the step until its item is reached.

        Raises:
            LifecycleBug: It is not the oldest one.
        """
        if not self._in_flight or self._in_flight[0][0].step != result.step:
            raise LifecycleBug(f"step {result.step} came back out of order")
        batch, requests = self._in_flight.popleft()
        for index, (item, request) in enumerate(zip(batch.items, requests, strict=True)):
            request.in_steps -= 1
            failed = result.error is not None
            sampled = Sampled(None, error=result.error) if failed else result.sampled[index]
            yield item, request, sampled

    def audit(self, pool: PagePool) -> list[str]:
        """Faults: a step that touches a page which its request has given up."""
        faults = []
        for batch, requests in self._in_flight:
            for index, request in enumerate(requests):
                loose = [
                    page
                    for page in batch.pages_of(index)
                    if request.life not in pool.owners_of(page)
                ]
                if loose:
                    faults.append(
                        f"step {batch.step} touches released pages {loose} of {request.rid}"
                    )
        return faults
