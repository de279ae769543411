"""The hash model: a toy whose next token is a hash of the KV content that it reads.

A real small model hides a stale page: its output hardly changes. This one does not. Every
position's KV entry is a hash of the weights, the token, the position and the entry before it,
read back from the page it lies in; the next token is a hash of every entry that the page table
names, each bound to the position it is read at. A stale, foreign, zeroed, swapped or late-written
page therefore changes the output, and *golden* (the same request alone on a fresh engine) detects
it. A sum of per-entry hashes is kept for each page, so that long contexts stay cheap, and what
does not depend on the entry before is computed for a whole chunk at once.

The tokens do not depend on page size, chunking, batch or depth, because only positions and
contents enter.

Sampling: ``temperature`` 0 takes the context's hash; otherwise the hash is mixed with (seed,
position). A token is a byte; penalties, bias and truncation are ignored. End of sequence is
sampled at output index ``eos_at`` and nowhere else. Log-probabilities are a function of the
context alone. This module does not import torch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.batch import FEED, Batch, RowInit, Sampled, StepResult
from engine.config import DType

BYTES: Final = 256
BOS: Final = 256
EOS: Final = 257
VOCAB_SIZE: Final = 258

LONG: Final = 24
"""So many positions are worth the fixed cost of computing them as vectors."""

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB

Vector = NDArray[np.uint64]


def mix(value: int) -> int:
    """The finalizer of splitmix64: a bijection of 64-bit integers with good avalanche."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def mix_all(values: Vector) -> Vector:
    """:func:`mix` of each of ``values``."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))


def chain(before: int, keys: Iterable[int]) -> array[int]:
    """The entries that follow the entry ``before``: each is ``mix(the one before ^ its key)``."""
    entries, value = array("Q"), before
    push = entries.append
    for key in keys:  # mix, written out: this loop is most of what a long prompt costs
        value = ((value ^ key) + _GOLDEN) & _MASK
        value = ((value ^ (value >> 30)) * _FIRST) & _MASK
        value = ((value ^ (value >> 27)) * _SECOND) & _MASK
        value ^= value >> 31
        push(value)
    return entries


def _bound(entries: Vector, position: int) -> Vector:
    """Each of ``entries``, the first one read at ``position``, bound to where it is read."""
    positions = np.arange(position, position + len(entries), dtype=np.uint64)
    return mix_all(entries ^ mix_all(positions))


@dataclass(slots=True)
class _Page:
    entries: array[int]
    base: int = -1
    filled: int = 0
    total: int = 0
    """Sum of ``mix(entry ^ mix(position))`` over the first ``filled`` entries, read from position
    ``base`` on; not reduced to 64 bits. A ``base`` of -1 is no sum at all."""

    def note(self, slot: int, position: int, count: int, total: int) -> None:
        """``count`` entries were written from ``slot`` on, for ``position`` and the following;
        theirs is ``total``."""
        if slot == 0:
            self.base, self.filled, self.total = position, count, total
        elif slot == self.filled and self.base == position - slot:
            self.filled += count
            self.total += total
        else:
            self.base = -1

    def sum(self, base: int, count: int) -> int:
        """The sum over the first ``count`` entries, read from position ``base`` on."""
        if self.base != base or self.filled > count:
            self.base, self.filled, self.total = base, 0, 0
        if count - self.filled >= LONG:
            entries = np.frombuffer(self.entries, np.uint64)[self.filled : count]
            self.total += int(_bound(entries, base + self.filled).sum())
        else:
            for slot in range(self.filled, count):
                self.total += mix(self.entries[slot] ^ mix(base + slot))
        self.filled = count
        return self.total


def _sum_all(pages: list[tuple[_Page, int]], size: int) -> int:
    """:meth:`_Page.sum` of whole pages, each read from its base on: many were imported at once."""
    entries = np.concatenate([np.frombuffer(page.entries, np.uint64) for page, _ in pages])
    bases = np.array([base for _, base in pages], dtype=np.uint64)
    positions: Vector = np.add.outer(bases, np.arange(size, dtype=np.uint64)).ravel()
    sums = mix_all(entries ^ mix_all(positions)).reshape(-1, size).sum(axis=1).tolist()
    for (page, base), total in zip(pages, sums, strict=True):
        page.note(0, base, size, total)
    return sum(sums)


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
        self._pages = [_Page(array("Q", bytes(8 * page_size))) for _ in range(kv_pages)]
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
            fed = FEED in tokens
            if row is None or (fed and row.last_position != item.start):
                # The step that should have left this row behind has failed.
                sampled.append(Sampled(None, error=f"row {item.row} has not come so far"))
                continue
            if fed:
                tokens = array("q", [row.last if token == FEED else token for token in tokens])
            if item.count >= LONG:
                self._write_all(pages, item.start, tokens)
            else:
                for position, token in enumerate(tokens, item.start):
                    self._write(pages, position, token)
            if not item.sample:
                sampled.append(Sampled(None))
                continue
            result = self._sample(row, pages, item.start + item.count)
            row.last = result.token if result.token is not None else 0
            row.last_position = item.start + item.count
            sampled.append(result)
        return StepResult(batch.step, tuple(sampled))

    def export_pages(self, pages: array[int]) -> list[bytes]:
        return [self._pages[page].entries.tobytes() for page in pages]

    def import_pages(self, pages: array[int], blobs: list[bytes]) -> None:
        for page, blob in zip(pages, blobs, strict=True):
            entries = array("Q")
            entries.frombytes(blob)
            if len(entries) != self._page_size:
                raise ValueError(f"a page of {len(entries)} entries, not {self._page_size}")
            self._pages[page] = _Page(entries)

    def _write(self, pages: array[int], position: int, token: int) -> None:
        before = self._read(pages, position - 1) if position else 0
        entry = mix(before ^ mix(self._seed ^ mix(token ^ (position << 20))))
        page = self._pages[pages[position // self._page_size]]
        slot = position % self._page_size
        page.entries[slot] = entry
        page.note(slot, position, 1, mix(entry ^ mix(position)))

    def _write_all(self, pages: array[int], start: int, tokens: array[int]) -> None:
        """:meth:`_write` of ``tokens`` from position ``start`` on."""
        before = self._read(pages, start - 1) if start else 0
        end = start + len(tokens)
        places = np.arange(start, end, dtype=np.uint64) << np.uint64(20)
        named = mix_all(np.frombuffer(tokens, np.int64).astype(np.uint64) ^ places)
        keys = mix_all(named ^ np.uint64(self._seed))
        entries = chain(before, keys.tolist())
        bound = _bound(np.frombuffer(entries, np.uint64), start)
        position = start
        while position < end:
            slot = position % self._page_size
            count = min(self._page_size - slot, end - position)
            done = position - start
            page = self._pages[pages[position // self._page_size]]
            page.entries[slot : slot + count] = entries[done : done + count]
            page.note(slot, position, count, int(bound[done : done + count].sum()))
            position += count

    def _read(self, pages: array[int], position: int) -> int:
        return self._pages[pages[position // self._page_size]].entries[position % self._page_size]

    def _context(self, pages: array[int], length: int) -> int:
        """Hash of everything that attention over positions 0 … length-1 reads."""
        size = self._page_size
        full, rest = divmod(length, size)
        total = base = 0
        unknown = []
        for number in pages[:full]:
            page = self._pages[number]
            if page.base == base and page.filled == size:
                total += page.total
            else:
                unknown.append((page, base))
            base += size
        if len(unknown) * size >= LONG:
            total += _sum_all(unknown, size)
        else:
            total += sum(page.sum(base, size) for page, base in unknown)
        if rest:
            total += self._pages[pages[full]].sum(base, rest)
        return mix((total & _MASK) ^ self._seed)

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
