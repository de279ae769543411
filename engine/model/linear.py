"""Matrix products in the three compute types, each with what it can fuse.

:class:`Dense`
    ``torch.nn.functional.linear``: any device, any type; the only one that float32 uses.
:class:`Packed`
    bfloat16 on a CPU that oneDNN has bfloat16 kernels for. Weights are reordered once into oneDNN's
    blocked layout instead of in every call, and SwiGLU's two element-wise steps run inside the
    products while their results are still in registers.
:class:`Grouped`
    4-bit codes in groups of 32 columns for the decodes of few rows, where reading the weights is
    what a product costs; a :class:`Packed` copy of the same matrix for everything else.

The operators behind the last two are not public API of torch, hence its version is pinned exactly.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.checkpoint import GROUP_SIZE, GroupedInt4, Weight, dense

_has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
_reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001
_linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001
_int4_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default  # noqa: SLF001
_int4_matmul = torch.ops.aten._weight_int4pack_mm_for_cpu.default  # noqa: SLF001


Linear = Callable[[Tensor], Tensor]
"""``x @ weight.T + bias`` for ``x[tokens, in_features]``."""

GatedUnit = Callable[[Tensor], Tensor]
"""SwiGLU's inner part: ``silu(x @ gate.T) * (x @ up.T)``."""


INT4_ROWS = 3
"""Up to so many rows the 4-bit product is the faster one. One layer of SmolLM2-135M, two threads,
microseconds, 4-bit against packed bfloat16: 167 / 250 for one row, 211 / 255 for two, 270 / 260 for
four, 535 / 265 for six."""


class Step:
    """What the products of a model must know of the step that they are part of."""

    def __init__(self) -> None:
        self.int4_rows = INT4_ROWS
        """Up to so many rows are multiplied with the 4-bit copy. None are where a prompt is
        computed: the kernel rounds the scales to bfloat16, and everything that follows reads a
        prompt's keys and values."""

    def decodes(self, only: bool) -> None:
        self.int4_rows = INT4_ROWS if only else 0


class Kernels(Protocol):
    """Builds the products of a model in one compute type."""

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        """One product for matrices that share their input, stacked along the output."""
        ...

    def gated_unit(self, gate: Weight, up: Weight) -> GatedUnit: ...


def kernels_for(dtype: torch.dtype, device: torch.device, step: Step | None = None) -> Kernels:
    """The fastest kernels that this machine has for ``dtype``; with ``step``, 4-bit ones as well.

    Raises:
        ValueError: 4-bit kernels on a device other than the CPU.
    """
    if step is not None and device.type != "cpu":
        raise ValueError(f"int4 needs the CPU, the model is on {device}")
    packs = dtype == torch.bfloat16 and device.type == "cpu" and _has_bfloat16()
    many_rows: Kernels = PackedKernels() if packs else DenseKernels(dtype, device)
    return many_rows if step is None else GroupedKernels(many_rows, step)


class Dense:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class DenseKernels:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        weight = stacked([dense(part).to(self._device, self._dtype) for part in weights])
        return Dense(weight, None if bias is None else bias.to(self._device, self._dtype))

    def gated_unit(self, gate: Weight, up: Weight) -> GatedUnit:
        return SplitGate(self.linear([gate, up]))


class SplitGate:
    """SwiGLU's inner part over one product that yields the gate and then the up projection."""

    def __init__(self, gate_up: Linear) -> None:
        self._gate_up = gate_up

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=1)
        return functional.silu(gate).mul_(up)


class Packed:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = _reorder(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _linear(x, self._weight, self._bias, "none", [], "")
        return out

    def silu(self, x: Tensor) -> Tensor:
        out: Tensor = _linear(x, self._weight, self._bias, "swish", [], "")
        return out

    def multiply(self, x: Tensor, other: Tensor) -> Tensor:
        out: Tensor = _linear_binary(x, other, self._weight, self._bias, "mul")
        return out


_ROWS_HINT = 256
"""The row count that oneDNN chooses the blocked layout for. Measured with 1, 32 and 256: none is
better at few rows, and 256 is best from 32 up (the output matrix at 32 rows: 1.6 ms, 3.4 with 32).
"""


class FusedGate:
    """SwiGLU's inner part as two products: the second multiplies into the first one's activated
    result.

    Two matrices rather than one of twice the rows: at 32 rows that halves the time, because the
    element-wise passes disappear and the result stays in cache.
    """

    def __init__(self, gate: Packed, up: Packed) -> None:
        self._gate = gate
        self._up = up

    def __call__(self, x: Tensor) -> Tensor:
        return self._up.multiply(x, self._gate.silu(x))


class PackedKernels:
    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        weight = stacked([dense(part).bfloat16() for part in weights])
        return Packed(weight, None if bias is None else bias.bfloat16())

    def gated_unit(self, gate: Weight, up: Weight) -> GatedUnit:
        return FusedGate(Packed(dense(gate).bfloat16(), None), Packed(dense(up).bfloat16(), None))


class Int4:
    """A matrix of 4-bit codes; the kernel computes ``(code - 8) * scale + zero`` with both in
    bfloat16."""

    def __init__(self, weight: GroupedInt4, bias: Tensor | None) -> None:
        self._codes: Tensor = _int4_pack(weight.codes.int(), 1)
        zero = weight.minimum + 8 * weight.scale
        scale_and_zero = torch.stack((weight.scale, zero), dim=2).transpose(0, 1)
        self._scale_and_zero = scale_and_zero.contiguous().bfloat16()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _int4_matmul(x, self._codes, GROUP_SIZE, self._scale_and_zero)
        return out if self._bias is None else out.add_(self._bias)


class Grouped:
    """Chooses between two copies of a matrix (or of SwiGLU's two) by step and number of rows."""

    def __init__(self, step: Step, few_rows: Linear, many_rows: Linear) -> None:
        self._step = step
        self._few_rows = few_rows
        self._many_rows = many_rows

    def __call__(self, x: Tensor) -> Tensor:
        few = x.shape[0] <= self._step.int4_rows
        return (self._few_rows if few else self._many_rows)(x)


class GroupedKernels:
    """4-bit for matrices that are 4-bit in the file; what the file holds in more bits stays in
    bfloat16."""

    def __init__(self, many_rows: Kernels, step: Step) -> None:
        self._many_rows = many_rows
        self._step = step

    def linear(self, weights: Sequence[Weight], bias: Tensor | None = None) -> Linear:
        many_rows = self._many_rows.linear(weights, bias)
        codes = _all_int4(weights)
        if codes is None:
            return many_rows
        int4 = Int4(codes, None if bias is None else bias.bfloat16())
        return Grouped(self._step, int4, many_rows)

    def gated_unit(self, gate: Weight, up: Weight) -> GatedUnit:
        many_rows = self._many_rows.gated_unit(gate, up)
        codes = _all_int4([gate, up])
        if codes is None:
            return many_rows
        return Grouped(self._step, SplitGate(Int4(codes, None)), many_rows)


def _all_int4(weights: Sequence[Weight]) -> GroupedInt4 | None:
    """The stacked matrix if every part has 4-bit codes, in a shape that the kernel takes."""
    parts = [weight for weight in weights if isinstance(weight, GroupedInt4)]
    if len(parts) < len(weights):
        return None
    rows = sum(part.shape[0] for part in parts)
    if rows % 16:  # the kernel's blocks of output columns
        return None
    return GroupedInt4(
        stacked([part.codes for part in parts]),
        stacked([part.scale for part in parts]),
        stacked([part.minimum for part in parts]),
    )


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all ``parts``; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
