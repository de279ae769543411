"""A follower: one rank of a node but the first, and what ranks report of the plans they apply.

A follower is a device and the bytes that it was given. It knows nothing else: no clock, no
scheduler, no request, no page pool. So it cannot decide anything (invariant 10).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from engine.batch import Batch, PageExport, PageImport, PagesDone, Sampled, StepResult
from engine.hash_model import HashModel
from engine.plan import Plan, PlanError, WeightLoad, WireLand, WireSend, decode, unseal

Blobs: TypeAlias = list[bytes]
"""Contents of pages, one blob each."""
Outcome: TypeAlias = StepResult | PagesDone | Blobs
"""What comes out of a plan; of one that only writes, nothing."""


class ItemReport(NamedTuple):
    """What a rank computed for one request of a step."""

    life: str
    attempt: int
    row: int
    start: int
    length: int
    """How many new tokens."""
    kv: int
    """Checksum of the pages that were written."""
    token: int | None
    logprob: float | None
    top_logprobs: object
    chosen_logprobs: object
    error: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank made of the plan of this number."""

    number: int
    chain: int
    """Checksum of all plans so far, this one included: equal where they were the same ones, in the
    same order."""
    what: str
    kv: int
    """Checksum of the pages that were read or written; 0 for a step, whose items have their own."""
    items: tuple[ItemReport, ...] = ()
    failed: bool = False
    """The step failed on this rank after it was computed: its results do not count."""


def _checksum(blobs: Sequence[bytes]) -> int:
    return zlib.crc32(b"".join(blobs))


def report(number: int, chain: int, work: Plan, done: Outcome, model: HashModel) -> Report:
    """What ``model`` holds of ``work`` right after it; ``done`` is what came out."""
    match work:
        case Batch():
            assert isinstance(done, StepResult)
            items = _items(work, done.sampled or (Sampled(None),) * len(work.items), model)
            return Report(number, chain, f"step {work.step}", 0, items, done.error is not None)
        case PageExport():
            blobs = done.blobs if isinstance(done, PagesDone) else done
            assert isinstance(blobs, list)
            return Report(number, chain, f"export {work.ticket}", _checksum(blobs))
        case PageImport():
            what, pages = f"import {work.ticket}", work.pages
        case WireSend():
            what, pages = f"write {work.ticket}", work.pages
        case WireLand():
            what, pages = f"write {work.ticket} of {work.writer}", work.pages
        case WeightLoad():
            return Report(number, chain, f"weights {model.weights}", 0)
    return Report(number, chain, what, _checksum(model.export_pages(pages)))


def _items(batch: Batch, sampled: Sequence[Sampled], model: HashModel) -> tuple[ItemReport, ...]:
    out = []
    for index, (item, result) in enumerate(zip(batch.items, sampled, strict=True)):
        first = item.start // batch.page_size
        last = (item.start + item.count - 1) // batch.page_size
        written = batch.pages_of(index)[first : last + 1]
        out.append(
            ItemReport(
                item.life,
                item.attempt,
                item.row,
                item.start,
                item.count,
                _checksum(model.export_pages(written)),
                result.token,
                result.logprob,
                result.top_logprobs,
                result.chosen_logprobs,
                result.error,
            )
        )
    return tuple(out)


class Follower:
    """One rank but the first: a device, and the plans that it was given."""

    def __init__(self, model: HashModel) -> None:
        self.model: Final = model
        self.applied = 0
        """Number of the newest plan."""
        self.chain = 0
        self.landing: Final[dict[tuple[str, int], Blobs]] = {}
        """What this rank's partner has written and no plan has named yet, by writer and ticket."""

    def apply(self, sealed: bytes) -> tuple[Report, Blobs]:
        """Do what a plan says; returns what became of it, and the pages that it read.

        Raises :class:`PlanError` where it is damaged, or is not the one that is due.
        """
        number, raw = unseal(sealed)
        self._in_order(number)
        work = decode(raw)
        self.applied = number
        self.chain = zlib.crc32(raw, self.chain)
        done: Outcome = []
        match work:
            case Batch():
                done = self.model.execute(work)
            case PageExport() | WireSend():
                done = self.model.export_pages(work.pages)
            case PageImport():
                self.model.import_pages(work.pages, work.blobs)
            case WireLand():
                self.model.import_pages(work.pages, self.landing.pop((work.writer, work.ticket)))
            case WeightLoad():
                self.model.load_weights(work.weights)
        made = report(number, self.chain, work, done, self.model)
        return made, done if isinstance(done, list) else []

    def _in_order(self, number: int) -> None:
        if number != self.applied + 1:
            raise PlanError(f"plan {number} has come where {self.applied + 1} is due")
