"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A step is one flat list of tokens, of any requests, decodes and prompt chunks alike; only attention
knows which token belongs to whom. Shapes below: ``T`` tokens, ``S`` of which are sampled, ``H``
hidden size, ``V`` vocabulary size.

**float32 is batch-invariant**: a token's logits are the same to the last bit in any batch and any
chunking. GEMMs (and vectorised element-wise loops) round differently in different shapes, so every
part but attention runs in blocks of exactly :data:`EXACT_ROWS` rows, the last one padded;
``engine.attention`` describes its part. This costs most of the speed at one stream and buys that
tokens can be compared across batches, chunkings and machines of the same kind. It rests on a
property that the tests check: within one shape, a row's result does not depend on its place.

**bfloat16 is for products only.** The residual stream and the norms are float32 in every compute
type: that costs nothing, as norms are computed in float32 anyway. Logits in bfloat16 would be
multiples of 1/8 at the usual size of the best ones, and near ties be decided by rounding, so the
most likely ones are scored once more, with float32 arithmetic over the file's own values.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend
from engine.kv import KVPool
from engine.model.checkpoint import Checkpoint, GroupedInt4, Weight, dense
from engine.model.config import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Llama3Scaling,
    ModelConfig,
    layer_prefix,
)
from engine.model.linear import GatedUnit, Linear, Step, kernels_for

EXACT_ROWS = 16
SCORED_BLOCK = 256
SCORED_BLOCKS = 16
SCORED_TOKENS = 32
"""The most likely tokens are looked for in the best blocks of consecutive ids: a search through the
whole vocabulary takes ten times as long, and the best 16 are found in any case."""


class RMSNorm:
    """Root-mean-square normalisation (arXiv:1910.07467)."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        """``weight`` is ``float32[H]``; results are of type ``dtype``."""
        self._dtype = dtype
        size = weight.shape[0]
        self._weight = weight * math.sqrt(size)
        self._floor = torch.full((1, 1), math.sqrt(size * eps), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.wide(x).to(self._dtype)

    def wide(self, x: Tensor) -> Tensor:
        """In float32: ``float32[T, H]`` of ``float32[T, H]``."""
        # sqrt(mean(x^2) + eps) * sqrt(size) = hypot(norm(x), sqrt(size * eps)): half the calls of
        # torch's own. In float32 throughout: rounding the scale of a row to bfloat16 errs in all
        # its elements alike, which quadruples the divergence from float32's distribution.
        scale = torch.linalg.vector_norm(x, dim=1, keepdim=True).hypot_(self._floor)
        return torch.div(x, scale).mul_(self._weight)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block, in the two parts between which attention runs."""

    attention_norm: RMSNorm
    qkv: Linear
    output: Linear
    mlp_norm: RMSNorm
    gated_unit: GatedUnit
    down: Linear

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor, config: ModelConfig) -> Tensor:
        """``[T, heads + 2 * kv_heads, head_dim]``: rotated queries, rotated keys, values."""
        qkv = self.qkv(self.attention_norm(hidden)).view(-1, config.qkv_heads, config.head_dim)
        rotate(qkv[:, : config.num_heads + config.num_kv_heads], cos, sin)
        return qkv

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """The rest of the block: output projection and MLP, each added to the residual stream
        ``float32[T, H]`` in place."""
        hidden.add_(self.output(attended))
        return hidden.add_(self.down(self.gated_unit(self.mlp_norm(hidden))))


class Llama:
    """The weights in one compute type on one device, and the forward pass over them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        int4: bool = False,
    ) -> None:
        self.config = checkpoint.config
        self._exact = dtype == torch.float32
        self._step = Step()
        kernels = kernels_for(dtype, device, self._step if int4 else None)

        def vector(name: str) -> Tensor:
            return dense(checkpoint.weight(name)).to(device, dtype)

        def norm(name: str) -> RMSNorm:
            weight = dense(checkpoint.weight(name)).to(device)
            return RMSNorm(weight, self.config.rms_norm_eps, dtype)

        def linear(prefix: str, *names: str, bias: bool) -> Linear:
            return kernels.linear(
                [checkpoint.weight(f"{prefix}{name}.weight") for name in names],
                torch.cat([vector(f"{prefix}{name}.bias") for name in names]) if bias else None,
            )

        def layer(prefix: str) -> Layer:
            qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            return Layer(
                attention_norm=norm(prefix + "input_layernorm.weight"),
                qkv=linear(prefix, *qkv, bias=self.config.attention_bias),
                output=linear(prefix, "self_attn.o_proj", bias=self.config.output_bias),
                mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
                gated_unit=kernels.gated_unit(
                    checkpoint.weight(prefix + "mlp.gate_proj.weight"),
                    checkpoint.weight(prefix + "mlp.up_proj.weight"),
                ),
                down=linear(prefix, "mlp.down_proj", bias=False),
            )

        # Tables keep the type of the file (float32 for 4-bit and 8-bit ones).
        embedding = _table(checkpoint.weight(EMBEDDING))
        self._embedding = embedding.to(device)
        self._layers = [layer(layer_prefix(index)) for index in range(self.config.num_layers)]
        self._final_norm = norm(FINAL_NORM)
        tied = self.config.tied_embeddings
        head = embedding if tied else _table(checkpoint.weight(LM_HEAD))
        self._head = kernels.linear([head])
        self._head_table = self._embedding if tied else head.to(device)
        cos, sin = rope_tables(self.config, checkpoint.rope_factors)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        sampled: Tensor,
        kv: KVPool,
        slots: Sequence[Tensor],
        attention: AttentionBackend,
        *,
        decodes: bool,
    ) -> Tensor:
        """Compute one step: write its keys and values, and return logits where they are wanted.

        Args:
            tokens: ``int64[T]``.
            positions: ``int64[T]``, absolute.
            sampled: ``int64[S]``, which of the tokens need logits.
            kv: the pool.
            slots: where each layer's keys and values go (:meth:`KVPool.slots`).
            attention: planned for this step.
            decodes: every token is a request's output, none belongs to a prompt.

        Returns:
            Logits ``float32[S, V]``.
        """
        config, last = self.config, len(self._layers) - 1
        self._step.decodes(decodes)
        rows, wanted = len(tokens), len(sampled)
        if not self._exact:
            tokens, positions = _padded(tokens), _padded(positions)
        hidden = functional.embedding(tokens, self._embedding).float()
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            project = partial(layer.project, config=config)
            qkv = self._by_rows(project, hidden, cos, sin)
            kv.write(slots[index], qkv[:rows, config.num_heads :])
            if index == last and not wanted:
                break
            attended = attention.run(index, qkv[:rows, : config.num_heads])
            if index == last and wanted < rows:
                attended, hidden = attended[sampled], hidden[sampled]
                hidden = hidden if self._exact else _padded(hidden)
            attended = attended if self._exact else _padded(attended)
            hidden = self._by_rows(layer.finish, attended, hidden)
        else:
            return self._by_rows(self._logits, hidden)[:wanted]
        return hidden.new_empty(0, config.vocab_size)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self._exact:
            return self._head(self._final_norm(hidden))
        wide = self._final_norm.wide(hidden)
        logits = self._head(wide.to(self._cos.dtype)).float()
        ids = likely(logits)
        rows = self._head_table[ids].float()
        return logits.scatter_(1, ids, torch.bmm(rows, wide.unsqueeze(2)).squeeze(2))

    def _by_rows(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Apply a function that treats tokens alike: at once, or for float32 in blocks of a fixed
        size."""
        if not self._exact:
            return function(*inputs)
        rows = inputs[0].shape[0]
        filler = -rows % EXACT_ROWS
        padded = [functional.pad(x, (0, 0) * (x.dim() - 1) + (0, filler)) for x in inputs]
        blocks = zip(*(torch.split(x, EXACT_ROWS) for x in padded), strict=True)
        return torch.cat([function(*block) for block in blocks])[:rows]


def padded_rows(rows: int) -> int:
    """How many rows a step of ``rows`` tokens is computed with.

    oneDNN builds and keeps a kernel for every shape it meets. Ragged steps come in every size; that
    cost milliseconds at each new one, and memory that went on growing. So there are few sizes.
    """
    if rows <= 4:
        return rows
    unit = 8 if rows <= 64 else 32 if rows <= 512 else 128
    return -(-rows // unit) * unit


def _padded(x: Tensor) -> Tensor:
    filler = padded_rows(x.shape[0]) - x.shape[0]
    return x if not filler else functional.pad(x, (0, 0) * (x.dim() - 1) + (0, filler))


def likely(logits: Tensor) -> Tensor:
    """``int64[S, n]``: ids of the most likely tokens of ``float32[S, V]``, :data:`SCORED_TOKENS` if
    there are so many. What is left of the vocabulary behind its last full block is not searched.
    """
    rows, vocab_size = logits.shape
    if vocab_size < SCORED_BLOCK * SCORED_BLOCKS:
        return logits.topk(min(SCORED_TOKENS, vocab_size), dim=1, sorted=False).indices
    usable = vocab_size - vocab_size % SCORED_BLOCK
    blocks = logits[:, :usable].view(rows, -1, SCORED_BLOCK)
    best = blocks.amax(dim=2).topk(SCORED_BLOCKS, dim=1, sorted=False).indices
    inside = blocks.gather(1, best.unsqueeze(2).expand(-1, -1, SCORED_BLOCK)).flatten(1)
    found = inside.topk(SCORED_TOKENS, dim=1, sorted=False).indices
    block = best.gather(1, found // SCORED_BLOCK)
    return block * SCORED_BLOCK + found % SCORED_BLOCK


def _table(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, GroupedInt4) else weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary position embedding in place (arXiv:2104.09864, in the half-split convention).

    Args:
        x: ``[T, heads, head_dim]``.
        cos: ``[T, 1, head_dim]``.
        sin: the same shape, its first half negated (:func:`rope_tables`).
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, sin)


def rope_tables(config: ModelConfig, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, ``float32[context_length, 1, head_dim]`` each.

    The first half of the sines is negated, which makes a rotation ``x * cos + swap_halves(x) *
    sin``.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if isinstance(config.rope_scaling, Llama3Scaling):
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    else:
        frequencies = frequencies / config.rope_scaling
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend linearly between the
    two."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_context_length / wavelengths
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)
