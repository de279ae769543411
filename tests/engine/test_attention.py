"""The torch back end against dense attention, over random page tables and mixtures of requests."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import (
    BACKENDS,
    AttentionUnavailable,
    PagedIndex,
    TorchAttention,
    attention_backend,
    group_by_context,
)
from engine.kv import KVLayout, KVPool

CPU = torch.device("cpu")
POOL_TOKENS = 4096


def filled_pool(page_size: int, kv_heads: int, dtype: torch.dtype, seed: int) -> KVPool:
    torch.manual_seed(seed)
    pool = KVPool(KVLayout(2, page_size, kv_heads, 16, dtype), POOL_TOKENS // page_size, CPU)
    pool.pages.normal_()
    return pool


def paged_index(pool: KVPool, items: list[tuple[int, int]], shared: bool) -> PagedIndex:
    """Items of (history, new tokens) on random pages; ``shared`` lets them start on common ones."""
    page_size = pool.layout.page_size
    free = torch.randperm(pool.num_pages).tolist()
    common = [free.pop() for _ in range(4)] if shared else []
    index = PagedIndex(page_size, array("q", [0]), array("q", [0]), array("q"), array("q"))
    for history, count in items:
        total = history + count
        used = -(-total // page_size)
        prefix = common[: history // page_size]
        index.kv_indices.extend(prefix + [free.pop() for _ in range(used - len(prefix))])
        index.kv_indptr.append(len(index.kv_indices))
        index.qo_indptr.append(index.qo_indptr[-1] + count)
        index.kv_last_page_len.append(total - (used - 1) * page_size)
    return index


def dense_attention(
    pool: KVPool, layer: int, index: PagedIndex, items: list[tuple[int, int]], query: Tensor
) -> Tensor:
    """One query and one head at a time, in float64."""
    group = query.shape[1] // pool.layout.num_kv_heads
    out = torch.empty(query.shape, dtype=torch.float64)
    for number, (history, count) in enumerate(items):
        pages = index.kv_indices[index.kv_indptr[number] : index.kv_indptr[number + 1]]
        tokens = torch.cat([pool.layer(layer)[page] for page in pages]).double()
        for place in range(count):
            token = index.qo_indptr[number] + place
            for head in range(query.shape[1]):
                keys, values = tokens[: history + place + 1, :, head // group].unbind(1)
                scores = keys @ query[token, head].double() / math.sqrt(query.shape[2])
                out[token, head] = scores.softmax(0) @ values
    return out.flatten(1)


@settings(max_examples=40)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    items=st.lists(
        st.tuples(st.integers(0, 90), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=7,
    ),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    exact=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_dense_attention(
    page_size: int,
    items: list[tuple[int, int]],
    heads: tuple[int, int],
    exact: bool,
    shared: bool,
    seed: int,
) -> None:
    pool = filled_pool(page_size, heads[1], torch.float32, seed)
    index = paged_index(pool, items, shared)
    query = torch.randn(index.qo_indptr[-1], heads[0], 16)
    backend = TorchAttention(pool, heads[0], exact=exact)
    backend.plan(index)
    for layer in (0, 1):
        expected = dense_attention(pool, layer, index, items, query)
        torch.testing.assert_close(
            backend.run(layer, query).double(), expected, atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("exact", [False, True])
def test_long_chunks_and_contexts_of_every_size(exact: bool) -> None:
    """Chunks of several tiles, contexts beyond one block of keys, and decodes in several groups."""
    items = [(0, 1), (700, 1), (5, 1), (699, 1), (3, 1), (0, 530), (300, 270), (1, 2)]
    pool = filled_pool(4, 2, torch.float32, seed=1)
    index = paged_index(pool, items, shared=False)
    query = torch.randn(index.qo_indptr[-1], 2, 16)
    backend = TorchAttention(pool, 2, exact=exact)
    backend.plan(index)
    expected = dense_attention(pool, 1, index, items, query)
    torch.testing.assert_close(backend.run(1, query).double(), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_as_good_as_its_inputs() -> None:
    items = [(64, 1), (200, 1), (100, 30)]
    pool = filled_pool(16, 2, torch.bfloat16, seed=2)
    index = paged_index(pool, items, shared=False)
    query = torch.randn(index.qo_indptr[-1], 6, 16).bfloat16()
    backend = TorchAttention(pool, 6, exact=False)
    backend.plan(index)
    expected = dense_attention(pool, 0, index, items, query)
    torch.testing.assert_close(backend.run(0, query).double(), expected, atol=2e-2, rtol=2e-2)


def test_other_requests_pages_are_not_read() -> None:
    """Short requests are padded to longer ones, but with nothing that could carry a NaN over."""
    items = [(40, 1), (3, 1), (300, 1), (8, 9)]
    pool = filled_pool(4, 2, torch.float32, seed=3)
    index = paged_index(pool, items, shared=False)
    query = torch.randn(index.qo_indptr[-1], 2, 16)
    backend = TorchAttention(pool, 2, exact=False)
    backend.plan(index)
    clean = backend.run(0, query)
    pool.pages[index.kv_indices[0]] = torch.nan  # the first request's
    used = set(index.kv_indices)
    for page in range(pool.num_pages):
        if page not in used:
            pool.pages[page] = torch.nan
    spoilt = backend.run(0, query)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:], clean[1:])


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 4000))
def test_groups_partition_the_decodes(contexts: list[int], most_keys: int) -> None:
    items = list(range(100, 100 + len(contexts)))
    groups = group_by_context(items, contexts, most_keys)
    assert sorted(item for group in groups for item in group) == items
    for group in groups:
        assert group == sorted(group)
        longest = max(contexts[item - 100] for item in group)
        assert len(group) == 1 or longest * len(group) <= most_keys


def test_groups_do_not_pad_short_contexts_to_long_ones() -> None:
    contexts = [100, 4000, 101, 99, 4001, 102]
    assert group_by_context(range(6), contexts, 10**9) == [[0, 2, 3, 5], [1, 4]]


def test_an_unknown_back_end_is_refused() -> None:
    pool = filled_pool(16, 2, torch.float32, seed=0)
    with pytest.raises(AttentionUnavailable, match="no attention back end 'triton'"):
        attention_backend("triton", pool, 4)


def test_flashinfer_needs_a_gpu() -> None:
    assert "flashinfer" in BACKENDS
    pool = filled_pool(16, 2, torch.float32, seed=0)
    with pytest.raises(AttentionUnavailable, match="needs a CUDA device, the model is on cpu"):
        attention_backend("flashinfer", pool, 4)


class TestPool:
    LAYOUT = KVLayout(num_layers=3, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)

    def test_a_page_is_contiguous_with_all_its_layers(self) -> None:
        memory = bytearray(5 * self.LAYOUT.page_bytes)
        pool = KVPool(self.LAYOUT, 5, CPU, memory)
        pool.pages.normal_()
        (blob,) = pool.read_pages(array("q", [3]))
        assert len(blob) == self.LAYOUT.page_bytes
        assert blob == memory[3 * self.LAYOUT.page_bytes : 4 * self.LAYOUT.page_bytes]

    def test_what_is_written_is_gathered(self) -> None:
        pool = KVPool(self.LAYOUT, 5, CPU)
        kv = torch.randn(3, 4, 8).bfloat16()
        pages, offsets = torch.tensor([4, 4, 1]), torch.tensor([2, 3, 0])
        slots = pool.slots(pages, offsets)
        pool.write(slots[2], kv)
        gathered = pool.new_gathered(2)
        torch.index_select(pool.caches[2], 0, torch.tensor([1, 4]), out=gathered)
        gathered = gathered.view(2, 4, 2, 2, 8)
        assert torch.equal(gathered[1, 2], kv[0].view(2, 2, 8))
        assert torch.equal(gathered[1, 3], kv[1].view(2, 2, 8))
        assert torch.equal(gathered[0, 0], kv[2].view(2, 2, 8))
        assert torch.equal(pool.layer(2)[4, 2], kv[0].view(2, 2, 8))
        assert pool.pages.count_nonzero() == kv.numel()

    def test_pages_move_between_pools(self) -> None:
        source, target = KVPool(self.LAYOUT, 5, CPU), KVPool(self.LAYOUT, 7, CPU)
        source.pages.normal_()
        target.write_pages(array("q", [6, 0]), source.read_pages(array("q", [1, 4])))
        assert torch.equal(target.pages[6], source.pages[1])
        assert torch.equal(target.pages[0], source.pages[4])
        assert not target.pages[1:6].any()

    def test_a_wrong_blob_changes_nothing(self) -> None:
        pool = KVPool(self.LAYOUT, 5, CPU)
        good = bytes([1]) * self.LAYOUT.page_bytes
        for blobs in ([good, good[:-1]], [good], [good, good + b"x"]):
            with pytest.raises(ValueError, match="blob"):
                pool.write_pages(array("q", [0, 1]), blobs)
        assert not pool.pages.any()

    def test_memory_of_another_size_is_refused(self) -> None:
        with pytest.raises(ValueError, match="expected"):
            KVPool(self.LAYOUT, 5, CPU, bytearray(4 * self.LAYOUT.page_bytes))
