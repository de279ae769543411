"""The hash model: a toy whose next token is a hash of the KV content that it reads.

A real small model hides a stale page: its output hardly changes. This one does not. Every
position's KV entry is a hash of the weights, the token, the position and the entry before it,
read back from the page it lies in; the next token is a hash of every entry that the page table
names, each bound to the position it is read at. A stale, foreign, zeroed, swapped or late-written
page therefore changes the output, and *golden* (the same request alone on a fresh engine) detects
it. Sums of per-entry hashes are kept for each page, so that long contexts stay cheap.

The tokens do not depend on page size, chunking, batch or depth, because only positions and
contents enter.

Sampling: ``temperature`` 0 takes the context's hash; otherwise the hash is mixed with (seed,
position). A token is a byte; penalties, bias and truncation are ignored. End of sequence is
sampled at output index ``eos_at`` and nowhere else. Log-probabilities are a function of the
context alone. This module does not import torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from engine.batch import FEED, Batch, RowInit, Sampled, StepResult
from engine.config import DType

BYTES: Final = 256
BOS: Final = 256
EOS: Final = 257
VOCAB_SIZE: Final = 258

_MASK: Final = (1 << 64) - 1


def mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers with good avalanche."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True)
class _Page:
    entries: list[int]
    base: int = -1
    filled: int = 0
    total: int = 0
    """Sum of ``mix(entry ^ position)`` over the first ``filled`` entries, read at position
    ``base``."""


@dataclass(slots=True)
class _Row:
    init: RowInit
    last: int = 0
    last_position: int = -1
    """Where :attr:`last`, the token that was sampled last, goes; -1 before the first."""


class HashModel:
    """An :class:`engine.batch.Executor` over integers. ``weights`` is a name: W1, W2, …"""

    def __init__(
        self, kv_pages: int, page_size: int, weights: str = "W1", context_length: int = 8192
    ) -> None:
        self.vocab_size: Final = VOCAB_SIZE
        self.context_length: Final = context_length
        self.eos_token_ids: Final = (EOS,)
        self.dtype: Final[DType] = "auto"
        self.kv_layout: Final = f"u64 x {page_size}"
        self._page_size: Final = page_size
        self._pages = [_Page([0] * page_size) for _ in range(kv_pages)]
        self._rows: dict[int, _Row] = {}
        self.load_weights(weights)

    def load_weights(self, weights: str) -> None:
        """Compute under other weights from now on. What lies in the pages stays as it is."""
        self.weights = weights
        self._seed = mix(int.from_bytes(weights.encode().ljust(8, b"\0")[:8], "little"))

    @property
    def weights_digest(self) -> str:
        return f"hash:{self.weights}"

    def execute(self, batch: Batch) -> StepResult:
        for init in batch.rows:
            self._rows[init.row] = _Row(init)
        sampled = []
        offset = 0
        for index, item in enumerate(batch.items):
            row = self._rows.get(item.row)
            pages = batch.pages_of(index)
            tokens = batch.tokens[offset : offset + item.count]
            offset += item.count
            if row is None or (FEED in tokens and row.last_position != item.start):
                # The step that should have left this row behind has failed.
                sampled.append(Sampled(None, error=f"row {item.row} has not come so far"))
                continue
            for position, token in enumerate(tokens, item.start):
                self._write(pages, position, row.last if token == FEED else token)
            if not item.sample:
                sampled.append(Sampled(None))
                continue
            result = self._sample(row, pages, item.start + item.count)
            row.last = result.token if result.token is not None else 0
            row.last_position = item.start + item.count
            sampled.append(result)
        return StepResult(batch.step, tuple(sampled))

    def export_pages(self, pages: array[int]) -> list[bytes]:
        return [array("Q", self._pages[page].entries).tobytes() for page in pages]

    def import_pages(self, pages: array[int], blobs: list[bytes]) -> None:
        for page, blob in zip(pages, blobs, strict=True):
            entries = array("Q")
            entries.frombytes(blob)
            if len(entries) != self._page_size:
                raise ValueError(f"a page of {len(entries)} entries, not {self._page_size}")
            self._pages[page] = _Page(list(entries))

    def _write(self, pages: array[int], position: int, token: int) -> None:
        before = self._read(pages, position - 1) if position else 0
        page = self._pages[pages[position // self._page_size]]
        entry = mix(before ^ mix(self._seed ^ mix(token ^ (position << 20))))
        slot = position % self._page_size
        if page.filled > slot:
            page.base = -1
        page.entries[slot] = entry

    def _read(self, pages: array[int], position: int) -> int:
        return self._pages[pages[position // self._page_size]].entries[position % self._page_size]

    def _context(self, pages: array[int], length: int) -> int:
        """Hash of everything that attention over positions 0 … length-1 reads."""
        size = self._page_size
        total = 0
        for index in range(-(-length // size)):
            base = index * size
            total += self._page_sum(self._pages[pages[index]], base, min(size, length - base))
        return mix((total & _MASK) ^ self._seed)

    @staticmethod
    def _page_sum(page: _Page, base: int, count: int) -> int:
        if page.base != base or page.filled > count:
            page.base, page.filled, page.total = base, 0, 0
        for slot in range(page.filled, count):
            page.total += mix(page.entries[slot] ^ mix(base + slot))
        page.filled = count
        return page.total

    def _sample(self, row: _Row, pages: array[int], length: int) -> Sampled:
        sampling = row.init.sampling
        context = self._context(pages, length)
        choice = context
        if sampling.temperature >= 1e-6:
            choice = mix(context ^ mix((sampling.seed & _MASK) ^ (length << 1)))
        token = choice % BYTES
        if sampling.eos_at >= 0 and length - row.init.prompt_len == sampling.eos_at:
            token = EOS
        if not sampling.logprobs:
            return Sampled(token)
        return Sampled(
            token,
            self._logprob(context, token),
            [
                (other % VOCAB_SIZE, self._logprob(context, other % VOCAB_SIZE))
                for other in range(token, token + sampling.top_logprobs)
            ],
            [(other, self._logprob(context, other)) for other in sampling.token_ids_logprob],
        )

    @staticmethod
    def _logprob(context: int, token: int) -> float:
        return -(mix(context ^ token) % 10_000 + 1) / 1000.0
