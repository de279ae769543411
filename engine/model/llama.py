"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A step is one flat list of tokens, of any requests, decodes and prompt chunks alike; only attention
knows which token belongs to whom. Shapes below: ``T`` tokens, ``S`` of which are sampled, ``H``
hidden size, ``V`` vocabulary size.

**float32 is batch-invariant**: a token's logits are the same to the last bit in any batch and any
chunking. GEMMs (and vectorised element-wise loops) round differently in different shapes, so every
part but attention runs in blocks of a fixed number of rows, the last one padded;
``engine.attention`` describes its part. This costs most of the speed at one stream and buys that
tokens can be compared across batches, chunkings and machines of the same kind. It rests on a
property that the tests check: within one shape, a row's result does not depend on its place.

**bfloat16 is for products only.** The residual stream and the norms are float32 in every compute
type: that costs nothing, as norms are computed in float32 anyway. Logits in bfloat16 would be
multiples of 1/8 at the usual size of the best ones, and near ties be decided by rounding, so the
most likely ones are scored once more, with float32 arithmetic over the file's own values.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.attention import AttentionBackend
from engine.kv import KVPool
from engine.model.checkpoint import Checkpoint, GroupedInt4, Weight, dense
from engine.model.config import EMBEDDING, FINAL_NORM, LM_HEAD, layer_prefix
from engine.model.head import PackedHead, rescored
from engine.model.layers import (
    Block,
    CompiledLayers,
    EagerLayers,
    Layer,
    Layers,
    Step,
    by_blocks,
    norm_floor,
    norm_weight,
    padded,
    rms_norm,
)
from engine.model.linear import INT4_ROWS, Dense, Product, gate_of, product_of
from engine.model.rope import rope_tables

ATTENTION_NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = ("self_attn.o_proj",)
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.down_proj",)


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
        self._compiled = device.type == "cpu" and not self._exact
        if int4 and not self._compiled:
            raise ValueError(f"int4 needs the CPU, the model is on {device}")
        self._dtype = dtype
        weights = _Weights(checkpoint, torch.empty(0, dtype=dtype, device=device))
        self._floor = norm_floor(self.config.hidden_size, self.config.rms_norm_eps, device)
        self._final_norm = weights.norm(FINAL_NORM)
        # Tables keep the type of the file (float32 for 4-bit and 8-bit ones).
        embedding = _table(checkpoint.weight(EMBEDDING))
        self._embedding = embedding.to(device)
        tied = self.config.tied_embeddings
        head = embedding if tied else _table(checkpoint.weight(LM_HEAD))
        self._head_table = self._embedding if tied else head.to(device)
        indices = range(self.config.num_layers)
        self._layers: Layers
        self._head: Callable[[Tensor], Tensor]
        if self._compiled:
            blocks = [weights.block(layer_prefix(index), int4=int4) for index in indices]
            self._layers = CompiledLayers(blocks, self.config, self._floor)
            self._head = PackedHead(head)
        else:
            layers = [weights.layer(layer_prefix(index)) for index in indices]
            self._layers = EagerLayers(layers, self.config, self._floor, exact=self._exact)
            self._head = Dense([head], None, weights.like)
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
            Logits ``float32[S, V]``, which the next step may overwrite.
        """
        rows, wanted = len(tokens), len(sampled)
        if self._compiled:
            tokens, positions = padded(tokens), padded(positions)
        hidden = functional.embedding(tokens, self._embedding).float()
        few_bits = decodes and rows <= INT4_ROWS
        step = Step(self._cos[positions], self._sin[positions], sampled, rows, few_bits)
        hidden = self._layers.run(hidden, step, kv, slots, attention)
        if not wanted:
            return hidden.new_empty(0, self.config.vocab_size)
        if self._exact:
            return by_blocks(Llama._logits, self, hidden)
        return self._logits(hidden)[:wanted]

    def _logits(self, hidden: Tensor) -> Tensor:
        wide = rms_norm(hidden, self._final_norm, self._floor)
        if self._exact:
            return self._head(wide)
        return rescored(self._head(wide.to(self._dtype)).float(), wide, self._head_table)


class _Weights:
    """A checkpoint's tensors in the forms that layers take; ``like`` has their type and device."""

    def __init__(self, checkpoint: Checkpoint, like: Tensor) -> None:
        self.like = like
        self._checkpoint = checkpoint
        self._config = checkpoint.config

    def norm(self, name: str) -> Tensor:
        return norm_weight(dense(self._checkpoint.weight(name)).to(self.like.device))

    def layer(self, prefix: str) -> Layer:
        def product(names: tuple[str, ...], *, bias: bool = False) -> Dense:
            return Dense(self._matrices(prefix, names), self._bias(prefix, names, bias), self.like)

        return Layer(
            attention_norm=self.norm(prefix + ATTENTION_NORM),
            qkv=product(QKV, bias=self._config.attention_bias),
            output=product(OUTPUT, bias=self._config.output_bias),
            mlp_norm=self.norm(prefix + MLP_NORM),
            gate_up=product(GATE_UP),
            down=product(DOWN),
        )

    def block(self, prefix: str, *, int4: bool) -> Block:
        def product(names: tuple[str, ...], *, bias: bool = False) -> Product:
            matrices = self._matrices(prefix, names)
            return product_of(matrices, self._bias(prefix, names, bias), int4=int4)

        return Block(
            attention_norm=self.norm(prefix + ATTENTION_NORM),
            qkv=product(QKV, bias=self._config.attention_bias),
            output=product(OUTPUT, bias=self._config.output_bias),
            mlp_norm=self.norm(prefix + MLP_NORM),
            gate=gate_of(*self._matrices(prefix, GATE_UP), int4=int4),
            down=product(DOWN),
        )

    def _matrices(self, prefix: str, names: tuple[str, ...]) -> list[Weight]:
        return [self._checkpoint.weight(f"{prefix}{name}.weight") for name in names]

    def _bias(self, prefix: str, names: tuple[str, ...], there: bool) -> Tensor | None:
        if not there:
            return None
        parts = [self._checkpoint.weight(f"{prefix}{name}.bias") for name in names]
        return torch.cat([dense(part).to(self.like) for part in parts])


def _table(weight: Weight) -> Tensor:
    return weight.dequantize() if isinstance(weight, GroupedInt4) else weight
