"""GGUF files of the ``llama`` architecture, in the types F32, F16, BF16, Q8_0, Q4_0 and Q4_1.

Layout of the quantised types (ggml-quants.c; blocks of 32 columns, ``f16`` scales):

====  ==========================  ====================================================
Q8_0  ``d, int8 q[32]``           ``d * q``
Q4_0  ``d, nibbles[16]``          ``d * (q - 8)``
Q4_1  ``d, m, nibbles[16]``       ``d * q + m``
====  ==========================  ====================================================

Nibble byte ``i`` of a block holds column ``i`` in its low half, column ``i + 16`` in its high one.

llama.cpp rotates neighbouring columns of a head where Hugging Face rotates the two halves of it, so
its converter interleaves the rows of q and k. This loader puts them back: the model knows one
convention only.
"""

import hashlib
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from torch import Tensor

from engine.model.checkpoint import GROUP_SIZE, Checkpoint, GroupedInt4, Weight, dense
from engine.model.config import EMBEDDING, LM_HEAD, ModelConfig, ModelLoadError, tensor_shapes

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """The name of a tensor in GGUF, from its Hugging Face name."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file.

    Raises:
        ModelLoadError: the file is broken or truncated, a tensor is missing, misshapen or of
            another type than this loader reads, or the architecture is not ``llama``.
    """
    try:
        reader = _Reader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = _config(path, reader, tensors)
    except _BROKEN as error:
        raise ModelLoadError(f"{path}: broken or truncated GGUF file: {error}") from None
    weights: dict[str, Callable[[], Weight]] = {}
    for name, expected in tensor_shapes(config).items():
        tensor = _checked(path, tensors, gguf_name(name), expected)
        weights[name] = partial(_read, tensor, _interleaved_heads(config, name))
    factors = None
    if "rope_freqs.weight" in tensors:
        tensor = _checked(path, tensors, "rope_freqs.weight", (config.head_dim // 2,))
        factors = dense(_read(tensor, 0))
    matrices = [
        tensors[gguf_name(name)].tensor_type
        for name, shape in tensor_shapes(config).items()
        if len(shape) == 2 and name not in (EMBEDDING, LM_HEAD)
    ]
    return Checkpoint(
        config,
        _digest(reader.tensors),
        weights,
        four_bit=all(kind in (GgmlType.Q4_0, GgmlType.Q4_1) for kind in matrices),
        rope_factors=factors,
    )


_BROKEN = (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError, struct.error)
"""What reading lengths and offsets out of damaged bytes can raise."""


class _Reader(GGUFReader):
    """Skips arrays, all of which are the tokenizer's: the base class takes seconds to index their
    items singly."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "c")  # copy on write: torch warns about arrays it could not write to

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Any, Any, Any]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.data
        item_type, length = struct.unpack_from("<IQ", data, orig_offs)
        offset = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            size_at = struct.Struct("<Q").unpack_from
            for _ in range(length):
                offset += 8 + size_at(data, offset)[0]
        else:
            offset += length * np.dtype(self.gguf_scalar_to_np[GGUFValueType(item_type)]).itemsize
        return offset - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(item_type)]


def _config(path: Path, reader: GGUFReader, tensors: dict[str, ReaderTensor]) -> ModelConfig:
    def setting(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise ModelLoadError(f"{path}: setting {key} is missing")
        return default

    architecture = setting("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"{path}: architecture {architecture!r} is not supported, expected 'llama'"
        )
    if setting("llama.expert_count", 0):
        raise ModelLoadError(f"{path}: mixture of experts is not supported")
    heads, hidden = (
        int(setting("llama.attention.head_count")),
        int(setting("llama.embedding_length")),
    )
    head_dim = int(setting("llama.attention.key_length", hidden // max(heads, 1)))
    rotated = int(setting("llama.rope.dimension_count", head_dim))
    if rotated != head_dim:
        raise ModelLoadError(
            f"{path}: rotates {rotated} of {head_dim} dimensions, expected all of them"
        )
    scaling = setting("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelLoadError(
            f"{path}: rope scaling {scaling!r} is not supported, expected 'linear'"
        )
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(f"{path}: tensor token_embd.weight is missing")
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    config = ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[-1]),
        hidden_size=hidden,
        intermediate_size=int(setting("llama.feed_forward_length")),
        num_layers=int(setting("llama.block_count")),
        num_heads=heads,
        num_kv_heads=int(setting("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        rms_norm_eps=float(setting("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=float(setting("llama.rope.freq_base", 10000.0)),
        context_length=int(setting("llama.context_length")),
        rope_scaling=float(setting("llama.rope.scaling.factor", 1.0))
        if scaling == "linear"
        else 1.0,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        tied_embeddings=gguf_name(LM_HEAD) not in tensors,
        eos_token_ids=tuple(
            dict.fromkeys(
                int(setting(key)) for key in eos_keys if reader.get_field(key) is not None
            )
        ),
    )
    config.check(str(path))
    return config


def _checked(
    path: Path, tensors: dict[str, ReaderTensor], name: str, expected: tuple[int, ...]
) -> ReaderTensor:
    if name not in tensors:
        raise ModelLoadError(f"{path}: tensor {name} is missing, expected shape {expected}")
    tensor = tensors[name]
    shape = tuple(
        int(size) for size in reversed(tensor.shape)
    )  # GGUF writes the fastest dimension first
    if shape != expected:
        raise ModelLoadError(f"{path}: tensor {name} has shape {shape}, expected {expected}")
    if tensor.tensor_type not in _DECODERS:
        known = ", ".join(kind.name for kind in _DECODERS)
        raise ModelLoadError(
            f"{path}: tensor {name} has type {tensor.tensor_type.name}, expected one of {known}"
        )
    return tensor


def _interleaved_heads(config: ModelConfig, name: str) -> int:
    """How many heads' rows the converter interleaved in this tensor; 0 where it left them alone."""
    if ".self_attn.q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".self_attn.k_proj." in name else 0


def _read(tensor: ReaderTensor, interleaved_heads: int) -> Weight:
    shape = [int(size) for size in reversed(tensor.shape)]
    weight = _DECODERS[tensor.tensor_type](torch.from_numpy(np.asarray(tensor.data)), shape)
    if not interleaved_heads:
        return weight
    rows = torch.arange(shape[0]).view(interleaved_heads, -1, 2).transpose(1, 2).reshape(-1)
    return weight.select(rows) if isinstance(weight, GroupedInt4) else weight[rows]


def _plain(data: Tensor, shape: list[int]) -> Tensor:
    return data.reshape(shape)


def _bfloat16(data: Tensor, shape: list[int]) -> Tensor:
    return data.view(torch.bfloat16).reshape(shape)


def _blocks(data: Tensor, shape: list[int], *sizes: int) -> tuple[Tensor, ...]:
    """Split the bytes of every block: ``uint8[rows, blocks, size]`` for each of ``sizes``."""
    blocks = data.view(shape[0], shape[1] // GROUP_SIZE, sum(sizes))
    return torch.split(blocks, list(sizes), dim=2)


def _scale(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16).squeeze(2).float()


def _nibbles(raw: Tensor) -> Tensor:
    codes = torch.empty(*raw.shape[:2], 2, raw.shape[2], dtype=torch.uint8)
    torch.bitwise_and(raw, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(raw, 4, out=codes[:, :, 1])
    return codes.flatten(1)


def _q8_0(data: Tensor, shape: list[int]) -> Tensor:
    scale, codes = _blocks(data, shape, 2, 32)
    return codes.view(torch.int8).float().mul_(_scale(scale).unsqueeze(2)).view(shape)


def _q4_0(data: Tensor, shape: list[int]) -> GroupedInt4:
    raw_scale, codes = _blocks(data, shape, 2, 16)
    scale = _scale(raw_scale)
    return GroupedInt4(_nibbles(codes), scale, scale * -8)


def _q4_1(data: Tensor, shape: list[int]) -> GroupedInt4:
    scale, minimum, codes = _blocks(data, shape, 2, 2, 16)
    return GroupedInt4(_nibbles(codes), _scale(scale), _scale(minimum))


_DECODERS: dict[gguf.GGMLQuantizationType, Callable[[Tensor, list[int]], Weight]] = {
    GgmlType.F32: _plain,
    GgmlType.F16: _plain,
    GgmlType.BF16: _bfloat16,
    GgmlType.Q8_0: _q8_0,
    GgmlType.Q4_0: _q4_0,
    GgmlType.Q4_1: _q4_1,
}


def _digest(tensors: list[ReaderTensor]) -> str:
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: str(tensor.name)):
        shape = tuple(int(size) for size in tensor.shape)
        digest.update(f"{tensor.name} {tensor.tensor_type.name} {shape}\n".encode())
        digest.update(tensor.data.data)
    return digest.hexdigest()
