"""Matrix products, in the forms that the machine has fast kernels for.

:class:`Dense`
    ``torch.nn.functional.linear``: any device, any type; the only one that float32 uses.
:class:`Product`
    bfloat16 on a CPU. Weights are reordered once into oneDNN's blocked layout instead of in every
    call, and SwiGLU's two element-wise steps run inside the products while their results are still
    in registers (:class:`Gate`). A matrix that the file holds in 4 bits may be kept in 4-bit codes
    as well, in groups of 32 columns, for the decodes of few rows, where reading the weights is what
    a product costs.

The functions over products are plain ones of tensors and tuples, as TorchScript asks
(``engine.model.layers``). The operators behind them are not public API of torch, hence its version
is pinned exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.model.checkpoint import GROUP_SIZE, GroupedInt4, Weight, dense

_has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
_reorder = torch.ops.mkldnn._reorder_linear_weight.default  # noqa: SLF001
_int4_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu.default  # noqa: SLF001

INT4_ROWS = 3
"""Up to so many rows the 4-bit product is the faster one. One layer of SmolLM2-135M, two threads,
microseconds, 4-bit against packed bfloat16: 167 / 250 for one row, 211 / 255 for two, 270 / 260 for
four, 535 / 265 for six."""

_ROWS_HINT = 256
"""The row count that oneDNN chooses the blocked layout for. Measured with 1, 32 and 256: none is
better at few rows, and 256 is best from 32 up (the output matrix at 32 rows: 1.6 ms, 3.4 with 32).
"""


class Dense:
    """``x @ weight.T + bias`` for ``x[tokens, in_features]``."""

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None, like: Tensor) -> None:
        """Matrices that share their input, stacked along the output; ``like`` has the type to
        compute in and the device to compute on."""
        self._weight = stacked([dense(weight).to(like) for weight in weights])
        self._bias = None if bias is None else bias.to(like)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class Int4(NamedTuple):
    """A matrix of 4-bit codes; the kernel computes ``(code - 8) * scale + zero`` with both in
    bfloat16."""

    codes: Tensor
    scale_and_zero: Tensor


class Product(NamedTuple):
    """``x @ weight.T + bias`` for ``bfloat16[tokens, in_features]`` on a CPU."""

    weight: Tensor
    """bfloat16, in oneDNN's layout if it has kernels for this CPU."""
    bias: Tensor | None
    int4: Int4 | None
    """The same matrix once more, if the file has it in 4 bits."""


class Gate(NamedTuple):
    """SwiGLU's inner part: ``silu(x @ gate.T) * (x @ up.T)``.

    Two matrices rather than one of twice the rows: at 32 rows that halves the time, because the
    element-wise passes disappear and the result stays in cache.
    """

    gate: Tensor
    up: Tensor
    int4: Int4 | None
    """Both, stacked."""


def product_of(weights: Sequence[Weight], bias: Tensor | None = None, *, int4: bool) -> Product:
    """One product for matrices that share their input, stacked along the output; with ``int4``, in
    4 bits as well if the file has them in 4 bits."""
    weight = _packed(stacked([dense(part).bfloat16() for part in weights]))
    return Product(
        weight, None if bias is None else bias.bfloat16(), _int4(weights) if int4 else None
    )


def gate_of(gate: Weight, up: Weight, *, int4: bool) -> Gate:
    packed = [_packed(dense(part).bfloat16()) for part in (gate, up)]
    return Gate(packed[0], packed[1], _int4([gate, up]) if int4 else None)


def multiply(x: Tensor, product: Product, few_bits: bool) -> Tensor:
    """``bfloat16[tokens, out_features]``; with ``few_bits``, of the 4-bit codes if there are any.

    The 4-bit kernel rounds the scales to bfloat16."""
    weight, bias, int4 = product
    if few_bits and int4 is not None:
        rough = multiply_int4(x, int4)
        return rough if bias is None else rough.add_(bias)
    if weight.is_mkldnn:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, weight, bias, "none", [], ""
        )
        return out
    return functional.linear(x, weight, bias)


def gated_unit(x: Tensor, both: Gate, few_bits: bool) -> Tensor:
    """``bfloat16[tokens, intermediate_size]``; ``few_bits`` as in :func:`multiply`."""
    gate, up, int4 = both
    if few_bits and int4 is not None:
        return silu_times(multiply_int4(x, int4))
    if gate.is_mkldnn:
        activated = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, gate, None, "swish", [], ""
        )
        out: Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            x, activated, up, None, "mul"
        )
        return out
    return functional.silu(functional.linear(x, gate)).mul_(functional.linear(x, up))


def multiply_int4(x: Tensor, int4: Int4, group_size: int = GROUP_SIZE) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(  # noqa: SLF001
        x, int4.codes, group_size, int4.scale_and_zero
    )


def silu_times(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[tokens, 2 * n]``, the gate's half first."""
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = _reorder(weight, _ROWS_HINT) if _has_bfloat16() else weight
    return packed


def _int4(weights: Sequence[Weight]) -> Int4 | None:
    """The stacked matrix if every part has 4-bit codes, in a shape that the kernel takes."""
    parts = [weight for weight in weights if isinstance(weight, GroupedInt4)]
    if len(parts) < len(weights):
        return None
    if sum(part.shape[0] for part in parts) % 16:  # the kernel's blocks of output columns
        return None
    codes = stacked([part.codes for part in parts])
    scale = stacked([part.scale for part in parts])
    zero = stacked([part.minimum for part in parts]) + 8 * scale
    scale_and_zero = torch.stack((scale, zero), dim=2).transpose(0, 1)
    return Int4(_int4_pack(codes.int(), 1), scale_and_zero.contiguous().bfloat16())


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all ``parts``; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
