"""The layers of a Llama, from embedded tokens to the hidden states that logits are made of.

There are two bodies over the same small functions:

:class:`CompiledLayers`
    bfloat16 on a CPU, 4-bit products included. The loop over all layers is one TorchScript
    function, which needs neither a compiler nor noticeable time to load. torch's own interpreter
    runs it: a layer is about forty small operators, and a quarter of the time of a single row was
    Python between them. And it runs without the interpreter lock, so scheduling, which shares the
    process, goes on meanwhile instead of taking turns with every operator.
:class:`EagerLayers`
    Everything else: float32 in blocks of a fixed size, any type on other devices.

**The residual stream is float32** in every compute type, and so are the norms.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend, TorchAttention
from engine.kv import KVPool
from engine.model.attend import Group, attend
from engine.model.config import ModelConfig
from engine.model.linear import Dense, Gate, Product, gated_unit, multiply, silu_times

EXACT_ROWS = 16


class Step(NamedTuple):
    """What the layers must know of a step of ``T`` tokens, ``S`` of which are sampled."""

    cos: Tensor
    """``[T', 1, head_dim]``: the tokens' rotations, and those of what they are padded with."""
    sin: Tensor
    """Likewise."""
    sampled: Tensor
    """``int64[S]``."""
    tokens: int
    """``T``."""
    few_bits: bool
    """Whether to multiply with 4-bit weights where there are any."""


class Layers(Protocol):
    def run(
        self,
        hidden: Tensor,
        step: Step,
        kv: KVPool,
        slots: Sequence[Tensor],
        attention: AttentionBackend,
    ) -> Tensor:
        """Compute all layers and write their keys and values.

        Args:
            hidden: ``float32[T', H]``, overwritten.
            step: see there.
            kv: the pool.
            slots: where each layer's keys and values go (:meth:`KVPool.slots`).
            attention: planned for this step.

        Returns:
            ``float32[S', H]``: behind the last layer, the sampled tokens only, then fillers.
        """
        ...


def norm_weight(weight: Tensor) -> Tensor:
    """What :func:`rms_norm` takes for the weight ``float32[H]`` of a model."""
    return weight * math.sqrt(weight.shape[0])


def norm_floor(size: int, eps: float, device: torch.device) -> Tensor:
    """What :func:`rms_norm` takes for the epsilon of a model."""
    return torch.full((1, 1), math.sqrt(size * eps), device=device)


def rms_norm(x: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """Root-mean-square normalisation (arXiv:1910.07467) of ``float32[T, H]``, in float32."""
    # sqrt(mean(x^2) + eps) * sqrt(size) = hypot(norm(x), sqrt(size * eps)): half the calls of
    # torch's own. In float32 throughout: rounding the scale of a row to bfloat16 errs in all
    # its elements alike, which quadruples the divergence from float32's distribution.
    scale = torch.linalg.vector_norm(x, 2.0, [1], True).hypot_(floor)
    return torch.div(x, scale).mul_(weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary position embedding in place (arXiv:2104.09864, in the half-split convention).

    Args:
        x: ``[T, heads, head_dim]``.
        cos: ``[T, 1, head_dim]``.
        sin: the same shape, its first half negated (:func:`rope_tables`).
    """
    swapped = x.roll([x.shape[-1] // 2], [-1])
    x.mul_(cos).addcmul_(swapped, sin)


def padded_rows(rows: int) -> int:
    """How many rows a step of ``rows`` tokens is computed with on a CPU.

    oneDNN builds and keeps a kernel for every shape it meets. Ragged steps come in every size; that
    cost milliseconds at each new one, and memory that went on growing. So there are few sizes.
    """
    if rows <= 4:
        return rows
    unit = 8 if rows <= 64 else 32 if rows <= 512 else 128
    return (rows + unit - 1) // unit * unit


def padded(x: Tensor) -> Tensor:
    """``x`` with :func:`padded_rows`, zeros behind its own."""
    filler = padded_rows(x.shape[0]) - x.shape[0]
    if filler == 0:
        return x
    return functional.pad(x, [0, 0] * (x.dim() - 1) + [0, filler])


class Block(NamedTuple):
    """The weights of one layer on a CPU."""

    attention_norm: Tensor
    qkv: Product
    output: Product
    mlp_norm: Tensor
    gate: Gate
    down: Product


class _Loop(torch.nn.Module):
    """All layers, in the subset of Python that TorchScript compiles."""

    def __init__(self, blocks: list[Block], config: ModelConfig, floor: Tensor) -> None:
        super().__init__()
        self.blocks = torch.jit.Attribute(blocks, list[Block])
        self.floor = floor
        self.heads: int = config.num_heads
        self.all_heads: int = config.qkv_heads
        self.rotated_heads: int = config.num_heads + config.num_kv_heads
        self.head_dim: int = config.head_dim

    def forward(
        self,
        hidden: Tensor,
        step: Step,
        pool: Tensor,
        slots: list[Tensor],
        caches: list[Tensor],
        groups: list[Group],
        order: Tensor | None,
    ) -> Tensor:
        rows, wanted, few_bits = step.tokens, step.sampled.shape[0], step.few_bits
        last = len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            normed = rms_norm(hidden, block.attention_norm, self.floor).to(torch.bfloat16)
            qkv = multiply(normed, block.qkv, few_bits).view(-1, self.all_heads, self.head_dim)
            rotate(qkv[:, : self.rotated_heads], step.cos, step.sin)
            pool.index_copy_(0, slots[index], qkv[:rows, self.heads :].flatten(1))
            if index == last and wanted == 0:
                return hidden[:0]
            attended = attend(qkv[:rows, : self.heads], caches[index], groups, order)
            if index == last and wanted < rows:
                attended = attended.index_select(0, step.sampled)
                hidden = padded(hidden.index_select(0, step.sampled))
            hidden.add_(multiply(padded(attended), block.output, few_bits))
            normed = rms_norm(hidden, block.mlp_norm, self.floor).to(torch.bfloat16)
            hidden.add_(multiply(gated_unit(normed, block.gate, few_bits), block.down, few_bits))
        return hidden


class CompiledLayers:
    """See the module's description; attends with :class:`TorchAttention` only."""

    def __init__(self, blocks: list[Block], config: ModelConfig, floor: Tensor) -> None:
        with warnings.catch_warnings():
            # It is deprecated in favour of torch.compile, which needs a compiler.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._loop = torch.jit.script(_Loop(blocks, config, floor))

    def run(
        self,
        hidden: Tensor,
        step: Step,
        kv: KVPool,
        slots: Sequence[Tensor],
        attention: AttentionBackend,
    ) -> Tensor:
        if not isinstance(attention, TorchAttention):
            raise TypeError(f"layers on a CPU attend with TorchAttention, not {type(attention)}")
        groups, order = attention.groups, attention.order
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            # Optimising means to measure shapes for a fuser, which there is not for CPUs.
            out: Tensor = self._loop(hidden, step, kv.tokens, list(slots), kv.caches, groups, order)
        return out


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block, in the two parts between which attention runs."""

    attention_norm: Tensor
    qkv: Dense
    output: Dense
    mlp_norm: Tensor
    gate_up: Dense
    down: Dense


class EagerLayers:
    """See the module's description. ``exact``: in blocks of :data:`EXACT_ROWS` tokens."""

    def __init__(
        self, layers: Iterable[Layer], config: ModelConfig, floor: Tensor, *, exact: bool
    ) -> None:
        self._layers = list(layers)
        self._config = config
        self._floor = floor
        self._exact = exact

    def run(
        self,
        hidden: Tensor,
        step: Step,
        kv: KVPool,
        slots: Sequence[Tensor],
        attention: AttentionBackend,
    ) -> Tensor:
        heads, wanted, last = self._config.num_heads, len(step.sampled), len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            qkv = self._apply(layer, self._project, hidden, step.cos, step.sin)
            kv.write(slots[index], qkv[:, heads:])
            if index == last and not wanted:
                return hidden[:0]
            attended = attention.run(index, qkv[:, :heads])
            if index == last and wanted < step.tokens:
                attended, hidden = attended[step.sampled], hidden[step.sampled]
            hidden = self._apply(layer, self._finish, attended, hidden)
        return hidden

    def _apply(self, layer: Layer, part: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return by_blocks(part, layer, *inputs) if self._exact else part(layer, *inputs)

    def _project(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[T, heads + 2 * kv_heads, head_dim]``: rotated queries, rotated keys, values."""
        config = self._config
        normed = rms_norm(hidden, layer.attention_norm, self._floor).to(cos.dtype)
        qkv = layer.qkv(normed).view(-1, config.qkv_heads, config.head_dim)
        rotate(qkv[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return qkv

    def _finish(self, layer: Layer, attended: Tensor, hidden: Tensor) -> Tensor:
        """The rest of the block: output projection and MLP, each added to the residual stream
        ``float32[T, H]`` in place."""
        hidden.add_(layer.output(attended))
        normed = rms_norm(hidden, layer.mlp_norm, self._floor).to(attended.dtype)
        return hidden.add_(layer.down(silu_times(layer.gate_up(normed))))


def by_blocks(function: Callable[..., Tensor], first: object, *inputs: Tensor) -> Tensor:
    """Apply ``function(first, *inputs)``, which treats tokens alike, in blocks of a fixed size."""
    rows = inputs[0].shape[0]
    filler = -rows % EXACT_ROWS
    filled = [functional.pad(x, (0, 0) * (x.dim() - 1) + (0, filler)) for x in inputs]
    blocks = zip(*(torch.split(x, EXACT_ROWS) for x in filled), strict=True)
    return torch.cat([function(first, *block) for block in blocks])[:rows]
