"""Paged attention behind one protocol. Every back end consumes flashinfer's index arrays,
unchanged.

A step is planned once (:meth:`AttentionBackend.plan`) and run for each layer. Back ends are
registered by name and imported when they are asked for, so a package that is not installed costs
nothing until somebody wants it.

The torch back end
==================

``scaled_dot_product_attention`` knows nothing of pages, so keys and values are gathered first, into
a buffer that every layer uses again. Queries that share a call form a *group* of rows, each a page
table with a *tile* of consecutive queries. Keys and values are never repeated: query heads that
share a key/value head are folded into the query dimension, except in single queries on a CPU,
whose kernel lets heads share them, works through vectors faster than through matrices of three
rows, and has more heads to divide among threads.

- Decodes (tile 1) are grouped by context length, so that one long context does not pad all others
  to its length, and so few at a time that what is gathered stays in cache until it is used
  (32 contexts of 1,000 tokens, one layer and thread: 7.9 ms at once, 6.1 ms by eights).
- A prompt chunk is cut into tiles of up to 256 queries, which skips the keys that causality hides
  from each.

**Exact mode** (float32) makes a query's result independent of what it shares the step with, to
the last bit. A GEMM's summation order depends on its shape, so all shapes are fixed: tiles of 4
queries, and contexts padded to multiples of 512, the block of keys in which torch's CPU kernel
works through any context. What lies behind a query's own context is masked, and adds exact zeros.
"""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv import KVPool
from engine.model.attend import Group, attend

CHUNK_TILE = 256
EXACT_TILE = 4
EXACT_KEYS = 512
GROUP_COST = 2048
GROUP_BYTES = 1_500_000


class AttentionUnavailable(Exception):  # noqa: N818  # names a state of this machine, not a fault
    """The requested back end cannot run here. The message says what it needs."""


@dataclass(frozen=True, slots=True)
class PagedIndex:
    """The ragged indexing of one step, as in :class:`engine.batch.Batch`."""

    page_size: int
    qo_indptr: array[int]
    kv_indptr: array[int]
    kv_indices: array[int]
    kv_last_page_len: array[int]

    def new_tokens(self, item: int) -> int:
        return self.qo_indptr[item + 1] - self.qo_indptr[item]

    def context(self, item: int) -> int:
        """Tokens of ``item`` in the pool, its new ones included."""
        pages = self.kv_indptr[item + 1] - self.kv_indptr[item]
        return (pages - 1) * self.page_size + self.kv_last_page_len[item]


class AttentionBackend(Protocol):
    """Causal attention of a step's new tokens over the pages of their requests."""

    def plan(self, index: PagedIndex) -> None:
        """Prepare one step; :meth:`run` refers to it until the next plan."""
        ...

    def run(self, layer: int, query: Tensor) -> Tensor:
        """Attend. The step's own keys and values must already be in the pool.

        Args:
            layer: the layer of the pool to read.
            query: ``[tokens, heads, head_dim]``, rotated.

        Returns:
            ``[tokens, heads * head_dim]``.
        """
        ...


class _Row(NamedTuple):
    """Consecutive queries of one item that share a call: ``first`` counts from the item's first
    new token."""

    item: int
    first: int
    queries: int


class TorchAttention:
    """The back end for every device that torch has."""

    def __init__(self, kv: KVPool, num_heads: int, *, exact: bool) -> None:
        self._kv = kv
        self._num_heads = num_heads
        self._heads_per_kv = num_heads // kv.layout.num_kv_heads
        self._exact = exact
        self._kernel_shares_heads = kv.pages.device.type == "cpu"
        layout = kv.layout
        key_bytes = 2 * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
        self._group_keys = GROUP_BYTES // key_bytes
        self.groups: list[Group] = []
        """What :func:`attend` takes for the planned step."""
        self.order: Tensor | None = None
        """Likewise."""
        self._buffer = kv.new_gathered(0)

    def plan(self, index: PagedIndex) -> None:
        items = range(len(index.kv_last_page_len))
        decodes = [item for item in items if index.new_tokens(item) == 1]
        contexts = [index.context(item) for item in decodes]
        tile = EXACT_TILE if self._exact else 1
        shares = [
            ([_Row(item, 0, 1) for item in part], tile)
            for part in group_by_context(decodes, contexts, self._group_keys)
        ]
        for item in items:
            count = index.new_tokens(item)
            if count == 1:
                continue
            tile = EXACT_TILE if self._exact else min(CHUNK_TILE, count)
            rows = [_Row(item, first, min(tile, count - first)) for first in range(0, count, tile)]
            if self._exact:
                shares.append((rows, tile))
            else:
                shares.extend(([row], row.queries) for row in rows)
        self.groups = [self._group(index, rows, tile) for rows, tile in shares]
        order = array("q")
        for rows, _ in shares:
            for row in rows:
                first = index.qo_indptr[row.item] + row.first
                order.extend(range(first, first + row.queries))
        in_order = order == array("q", range(len(order)))
        self.order = None if in_order else _tensor(order).argsort().to(self._kv.pages.device)

    def run(self, layer: int, query: Tensor) -> Tensor:
        return attend(query, self._kv.caches[layer], self.groups, self.order)

    def _group(self, index: PagedIndex, rows: Sequence[_Row], tile: int) -> Group:
        device, page_size = self._kv.pages.device, index.page_size
        queries, visible, kept = array("q"), array("q"), array("q")
        for row in rows:
            start = index.context(row.item) - index.new_tokens(row.item) + row.first
            place = index.qo_indptr[row.item] + row.first
            fillers = tile - row.queries
            kept.extend(range(len(queries), len(queries) + row.queries))
            queries.extend(range(place, place + row.queries))
            queries.extend([place + row.queries - 1] * fillers)
            visible.extend(range(start + 1, start + row.queries + 1))
            visible.extend([start + row.queries] * fillers)
        keys = max(visible)
        if self._exact:
            keys += -keys % EXACT_KEYS

        # A table that is too short repeats its own last page: masked, and no other request's
        # contents.
        pages, width = array("q"), -(-keys // page_size)
        tables = list(dict.fromkeys(row.item for row in rows))
        if len(tables) > 1:
            tables = [row.item for row in rows]
        for item in tables:
            begin = index.kv_indptr[item]
            end = min(index.kv_indptr[item + 1], begin + width)
            pages.extend(index.kv_indices[begin:end])
            pages.extend([index.kv_indices[end - 1]] * (width - (end - begin)))
        if len(pages) > len(self._buffer):
            self._buffer = self._kv.new_gathered(len(pages))
        gathered = self._buffer[: len(pages)]
        key, value = self._kv.keys_and_values(gathered, len(tables), keys)

        mask = None
        if keys > min(visible):
            hidden = torch.arange(keys) >= _tensor(visible).view(len(rows), tile, 1)
            mask = torch.zeros(hidden.shape, dtype=self._kv.layout.dtype)
            mask.masked_fill_(hidden, -torch.inf)
            if tile > 1 or not self._kernel_shares_heads:
                mask = mask.repeat_interleave(self._heads_per_kv, dim=1)
            mask = mask.unsqueeze(1).to(device)
        start, stop = queries[0], queries[0] + len(queries)
        consecutive = queries == array("q", range(start, stop))
        return Group(
            tile=tile,
            start=start,
            stop=stop,
            queries=None if consecutive else _tensor(queries).to(device),
            kept=None if len(kept) == len(queries) else _tensor(kept).to(device),
            pages=_tensor(pages).to(device),
            gathered=gathered,
            key=key.expand(len(rows), -1, -1, -1),
            value=value.expand(len(rows), -1, -1, -1),
            mask=mask,
        )


class FlashInferAttention:
    """The back end for NVIDIA GPUs: flashinfer's batch-prefill wrapper serves decodes and chunks
    in one call."""

    WORKSPACE_BYTES = 128 * 2**20  # what flashinfer's documentation recommends

    def __init__(self, kv: KVPool, num_heads: int) -> None:
        import flashinfer

        self._kv = kv
        self._num_heads = num_heads
        workspace = torch.empty(self.WORKSPACE_BYTES, dtype=torch.uint8, device=kv.pages.device)
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, index: PagedIndex) -> None:
        layout = self._kv.layout
        arrays = (index.qo_indptr, index.kv_indptr, index.kv_indices, index.kv_last_page_len)
        self._wrapper.plan(
            *(_tensor(values).int().to(self._kv.pages.device) for values in arrays),
            num_qo_heads=self._num_heads,
            num_kv_heads=layout.num_kv_heads,
            head_dim_qk=layout.head_dim,
            page_size=layout.page_size,
            causal=True,
            q_data_type=layout.dtype,
        )

    def run(self, layer: int, query: Tensor) -> Tensor:
        keys, values = self._kv.layer(layer).unbind(2)
        out: Tensor = self._wrapper.run(query.contiguous(), (keys, values))
        return out.flatten(1)


def group_by_context(
    items: Sequence[int], contexts: Sequence[int], most_keys: int
) -> list[list[int]]:
    """Partition decodes into groups that are padded to their longest context.

    From the shortest context up, a new group starts where padding the rows of this one any further
    would cost more than the calls of another group (as much as :data:`GROUP_COST` keys), or where
    it would have more than ``most_keys`` keys, which then no longer stay in cache between the
    gathering and the attention. Items keep their order within a group.
    """
    groups: list[list[int]] = []
    group: list[int] = []
    previous = 0
    for context, item in sorted(zip(contexts, items, strict=True)):
        padding = (context - previous) * len(group)
        if group and (padding > GROUP_COST or context * (len(group) + 1) > most_keys):
            groups.append(sorted(group))
            group = []
        group.append(item)
        previous = context
    return [*groups, sorted(group)] if group else groups


def _tensor(values: array[int]) -> Tensor:
    return torch.frombuffer(values, dtype=torch.int64)


def _torch_backend(kv: KVPool, num_heads: int) -> AttentionBackend:
    return TorchAttention(kv, num_heads, exact=kv.layout.dtype == torch.float32)


def _flashinfer_backend(kv: KVPool, num_heads: int) -> AttentionBackend:
    if kv.pages.device.type != "cuda":
        raise AttentionUnavailable(
            f"attention back end flashinfer needs a CUDA device, the model is on {kv.pages.device}"
        )
    if importlib.util.find_spec("flashinfer") is None:
        raise AttentionUnavailable(
            "attention back end flashinfer needs the package flashinfer-python: "
            "pip install 'interlock[flashinfer]'"
        )
    return FlashInferAttention(kv, num_heads)


BACKENDS: dict[str, Callable[[KVPool, int], AttentionBackend]] = {
    "torch": _torch_backend,
    "flashinfer": _flashinfer_backend,
}


def attention_backend(name: str, kv: KVPool, num_heads: int) -> AttentionBackend:
    """The back end ``name`` over the pool ``kv``.

    Raises:
        AttentionUnavailable: there is no back end of that name, or it cannot run on this machine.
    """
    if name not in BACKENDS:
        raise AttentionUnavailable(f"no attention back end {name!r}, there are {sorted(BACKENDS)}")
    return BACKENDS[name](kv, num_heads)
