"""The KV pool: one tensor that holds every page of every layer.

Layout: ``[pages, layers, page_size, 2, kv_heads, head_dim]``, keys before values. All layers of a
page are contiguous, so a page moves to a peer, a store or a host backup in one copy. One token's
keys and values of one layer are contiguous as well, so a step writes both with one indexed copy,
straight out of the fused projection. flashinfer reads ``layer(i)[:, :, 0]`` and ``[:, :, 1]`` as
its NHD pair of caches; it takes strides.

Page-major costs attention nothing. Gathering one layer's pages (SmolLM2-135M, bfloat16, two
threads, microseconds, page-major against layer-major): one request of 2,000 tokens 31 / 32, 32
requests of 160 tokens 215 / 206, 32 of 1,000 tokens 1,101 / 1,105. One page of one layer is 12 kB
there, so either way the copy runs at the memory's speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WritableBuffer = bytearray | memoryview


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a page looks like. Two nodes may exchange pages only if their layouts are equal."""

    num_layers: int
    page_size: int
    """Tokens in one page."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.page_size, 2, self.num_kv_heads, self.head_dim)

    def __str__(self) -> str:
        """In words, for peers and stores."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} layers, tokens, kv, heads, dim = {'x'.join(map(str, self.page_shape))}"

    @property
    def page_bytes(self) -> int:
        """Size of one page over all layers, in bytes."""
        elements = self.num_layers * self.page_size * 2 * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class KVPool:
    """Pages by number. Which of them are in use, and by whom, is the scheduler's business."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        memory: WritableBuffer | None = None,
    ) -> None:
        """Allocate the pool, or lay it over ``memory`` (shared or registered memory, CPU only).

        Raises:
            ValueError: ``memory`` has another size than ``num_pages * layout.page_bytes``.
        """
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, *layout.page_shape)
        if memory is None:
            # Zeroed: a masked slot is still multiplied (by zero), and old memory may read as NaN.
            # Touched, too: what is resident from the start cannot grow in the middle of a night.
            self.pages = torch.empty(shape, dtype=layout.dtype, device=device).zero_()
        else:
            expected = num_pages * layout.page_bytes
            if memoryview(memory).nbytes != expected:
                raise ValueError(
                    f"KV pool: memory of {memoryview(memory).nbytes} bytes, expected {expected}"
                )
            self.pages = torch.frombuffer(memory, dtype=layout.dtype).view(shape)
        self.tokens = self.pages.view(num_pages * layout.num_layers * layout.page_size, -1)
        """Every place for one layer of a token: a view ``[places, 2 * kv_heads * head_dim]``."""
        self.caches = list(self.pages.flatten(2).unbind(1))
        """For each layer, that layer of every page: strided views ``[pages, page_size * 2 *
        kv_heads * head_dim]``."""
        self._layer_starts = torch.arange(layout.num_layers, device=device).unsqueeze(1)
        self._layer_starts *= layout.page_size

    def layer(self, layer: int) -> Tensor:
        """One layer of every page: a strided view ``[pages, page_size, 2, kv_heads, head_dim]``."""
        return self.pages[:, layer]

    def slots(self, pages: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        """Where tokens go, for each layer: ``int64[tokens]`` for :meth:`write`.

        Args:
            pages: ``int64[tokens]``, each token's page.
            offsets: ``int64[tokens]``, its place within the page.
        """
        first_layer = pages * (self.layout.num_layers * self.layout.page_size) + offsets
        return (self._layer_starts + first_layer).unbind(0)

    def write(self, slots: Tensor, kv: Tensor) -> None:
        """Store keys and values.

        Args:
            slots: one layer's entry of :meth:`slots`.
            kv: ``[tokens, 2 * kv_heads, head_dim]``, keys first.
        """
        self.tokens.index_copy_(0, slots, kv.flatten(1))

    def clear(self, pages: Sequence[int]) -> None:
        """Zero ``pages``. Attention multiplies what is masked by zero, which hides everything but
        NaN and infinities: a page that its owner has not filled yet must not hold what the one
        before left in it."""
        for page in pages:
            self.pages[page].zero_()

    def new_gathered(self, pages: int) -> Tensor:
        """Room for a copy of one layer of ``pages`` pages: ``[pages, page_size * 2 * kv_heads *
        head_dim]``, not initialised."""
        return self.pages.new_empty(pages, self.caches[0].shape[1])

    def keys_and_values(self, gathered: Tensor, tables: int, keys: int) -> tuple[Tensor, Tensor]:
        """The first ``keys`` tokens of each of ``tables`` page tables that were gathered one after
        another: two views ``[tables, kv_heads, keys, head_dim]``."""
        layout = self.layout
        tokens = gathered.view(tables, -1, 2, layout.num_kv_heads, layout.head_dim)
        key, value = tokens[:, :keys].permute(2, 0, 3, 1, 4).unbind(0)
        return key, value

    def read_pages(self, pages: array[int]) -> list[bytes]:
        """The contents of ``pages``, one blob of :attr:`KVLayout.page_bytes` each."""
        return [
            self.pages[page].reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for page in pages
        ]

    def write_pages(self, pages: array[int], blobs: list[bytes]) -> None:
        """Overwrite ``pages``, one blob each.

        Raises:
            ValueError: a blob is not exactly one page, or there are more or fewer blobs than
            pages. Nothing is
                written then.
        """
        expected = self.layout.page_bytes
        if len(pages) != len(blobs):
            raise ValueError(f"KV pool: {len(blobs)} blobs for {len(pages)} pages")
        for blob in blobs:
            if len(blob) != expected:
                raise ValueError(f"KV pool: blob of {len(blob)} bytes, expected {expected}")
        for page, blob in zip(pages, blobs, strict=True):
            source = torch.frombuffer(bytearray(blob), dtype=self.layout.dtype)
            self.pages[page].view(-1).copy_(source)
