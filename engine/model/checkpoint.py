"""A model file, opened and checked: its configuration, a digest of its contents, and its tensors on
demand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.model.config import ModelConfig

GROUP_SIZE = 32
"""Columns that share one scale, in GGUF's Q4 types and in the int4 kernels."""


@dataclass(frozen=True, slots=True)
class GroupedInt4:
    """A matrix of 4-bit codes in groups of :data:`GROUP_SIZE` columns: ``weight = scale * code +
    minimum``."""

    codes: Tensor
    """``uint8[rows, columns]``, 0 to 15."""
    scale: Tensor
    """``float32[rows, columns / 32]``."""
    minimum: Tensor
    """``float32[rows, columns / 32]``."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantize(self) -> Tensor:
        """``float32[rows, columns]``, the values that llama.cpp computes from the same blocks."""
        groups = self.codes.view(self.shape[0], -1, GROUP_SIZE).float()
        return groups.mul_(self.scale.unsqueeze(2)).add_(self.minimum.unsqueeze(2)).flatten(1)

    def select(self, rows: Tensor) -> "GroupedInt4":
        """The same matrix with its rows in the order ``rows`` (``int64[rows]``)."""
        return GroupedInt4(self.codes[rows], self.scale[rows], self.minimum[rows])


Weight: TypeAlias = Tensor | GroupedInt4


def dense(weight: Weight) -> Tensor:
    """``weight`` as ``float32``."""
    return weight.dequantize() if isinstance(weight, GroupedInt4) else weight.float()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors are read when they are asked for, so that only the converted copies stay in
    memory."""

    config: ModelConfig
    digest: str
    """Hexadecimal digest over every tensor's name, type, shape and bytes."""
    weights: dict[str, Callable[[], Weight]]
    """One reader for each name of :func:`engine.model.config.tensor_shapes`, which it is sure to
    match."""
    four_bit: bool = False
    """Whether the matrices of the layers are 4-bit codes in the file."""
    rope_factors: Tensor | None = None
    """``float32[head_dim / 2]``: each RoPE frequency is divided by its factor (GGUF's
    ``rope_freqs``)."""

    def weight(self, name: str) -> Weight:
        return self.weights[name]()
