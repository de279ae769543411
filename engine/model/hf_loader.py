"""Hugging Face folders: ``config.json`` beside ``model.safetensors`` or its shards. Never a
pickle."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.config import (
    Llama3Scaling,
    ModelConfig,
    ModelLoadError,
    tensor_shapes,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def open_hf_folder(folder: Path) -> Checkpoint:
    """Open a folder as ``save_pretrained`` writes it.

    Raises:
        ModelLoadError: a file is missing or broken, a tensor is missing or misshapen, or the
            architecture is none of :data:`ARCHITECTURES`.
    """
    config = read_config(folder)
    files = _files_by_tensor(folder)
    weights: dict[str, Callable[[], Tensor]] = {}
    handles = {path: _open_safetensors(path) for path in sorted(set(files.values()))}
    for name, expected in tensor_shapes(config).items():
        if name not in files:
            raise ModelLoadError(f"{folder}: tensor {name} is missing, expected shape {expected}")
        path = files[name]
        weights[name] = _reader(handles[path], path, name, expected)
    return Checkpoint(config=config, digest=_digest(handles), weights=dict(weights))


def read_config(folder: Path) -> ModelConfig:
    """``config.json`` (and the end-of-sequence ids of ``generation_config.json``) as a
    :class:`ModelConfig`."""
    path = folder / "config.json"
    raw = _read_json(path)
    architectures = raw.get("architectures") or []
    if not any(name in ARCHITECTURES for name in architectures):
        raise ModelLoadError(
            f"{path}: architecture {architectures} is not supported, "
            f"expected one of {ARCHITECTURES}"
        )
    _refuse_variants(path, raw)
    try:
        heads, hidden = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        qwen2 = raw.get("model_type") == "qwen2"
        config = ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // max(heads, 1)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(raw),
            context_length=int(raw.get("max_position_embeddings", 2048)),
            rope_scaling=_rope_scaling(path, raw),
            attention_bias=qwen2 or bool(raw.get("attention_bias", False)),
            output_bias=not qwen2 and bool(raw.get("attention_bias", False)),
            tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(folder, raw),
            architecture=next(name for name in architectures if name in ARCHITECTURES),
        )
    except KeyError as error:
        raise ModelLoadError(f"{path}: setting {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: a setting has the wrong type: {error}") from None
    config.check(str(path))
    return config


def _refuse_variants(path: Path, raw: dict[str, Any]) -> None:
    """Settings that change the arithmetic in ways this model does not compute are errors, not
    surprises."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(
            f"{path}: hidden_act {raw['hidden_act']!r} is not supported, expected 'silu'"
        )
    if raw.get("mlp_bias"):
        raise ModelLoadError(f"{path}: mlp_bias is not supported")
    sliding = raw.get("sliding_window") and raw.get("use_sliding_window", True)
    if sliding:
        raise ModelLoadError(f"{path}: sliding_window {raw['sliding_window']} is not supported")
    if float(raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError(f"{path}: partial_rotary_factor is not supported")
    if raw.get("quantization_config"):
        raise ModelLoadError(
            f"{path}: quantization_config is not supported, expected plain weights"
        )


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings: ``rope_parameters`` since transformers 5, ``rope_scaling`` before."""
    return dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})


def _rope_theta(raw: dict[str, Any]) -> float:
    return float(_rope_parameters(raw).get("rope_theta") or raw.get("rope_theta") or 10000.0)


def _rope_scaling(path: Path, raw: dict[str, Any]) -> float | Llama3Scaling:
    settings = _rope_parameters(raw)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind == "linear":
        return float(settings["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            factor=float(settings["factor"]),
            low_freq_factor=float(settings["low_freq_factor"]),
            high_freq_factor=float(settings["high_freq_factor"]),
            original_context_length=int(settings["original_max_position_embeddings"]),
        )
    raise ModelLoadError(
        f"{path}: rope scaling {kind!r} is not supported, expected default, linear or llama3"
    )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The ids of both files: chat models often add their end of turn in ``generation_config.json``
    only."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (raw, _read_json(generation) if generation.is_file() else {}):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(int(token) for token in found))


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index of a sharded model or by the one file's own
    header."""
    index = folder / INDEX_FILE
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelLoadError(f"{index}: weight_map is missing")
        return {name: _shard_path(folder, index, shard) for name, shard in shards.items()}
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise ModelLoadError(f"{folder}: no weights, expected {SINGLE_FILE} or {INDEX_FILE}")
    return dict.fromkeys(_open_safetensors(single).keys(), single)


def _shard_path(folder: Path, index: Path, shard: object) -> Path:
    """A shard must be a plain file name: an index may not reach outside its folder."""
    if not isinstance(shard, str) or Path(shard).name != shard:
        raise ModelLoadError(f"{index}: shard {shard!r} is not a file name")
    if not (folder / shard).is_file():
        raise ModelLoadError(f"{index}: shard {shard} is missing")
    return folder / shard


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: broken safetensors file: {error}") from None


def _reader(handle: Any, path: Path, name: str, expected: tuple[int, ...]) -> Callable[[], Tensor]:
    try:
        view = handle.get_slice(name)
    except SafetensorError:
        raise ModelLoadError(
            f"{path}: tensor {name} is missing, expected shape {expected}"
        ) from None
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != expected:
        raise ModelLoadError(f"{path}: tensor {name} has shape {shape}, expected {expected}")
    if dtype not in ("F32", "F16", "BF16"):
        raise ModelLoadError(f"{path}: tensor {name} has type {dtype}, expected F32, F16 or BF16")

    def read() -> Tensor:
        tensor: Tensor = handle.get_tensor(name)
        return tensor

    return read


def _digest(handles: dict[Path, Any]) -> str:
    """Over contents only: the same tensors in other shards, or under other file names, are the same
    weights."""
    digest = hashlib.sha256()
    located = sorted(
        (name, path)
        for path, handle in handles.items()
        for name in handle.keys()  # noqa: SIM118  # no dictionary, it has no iterator
    )
    for name, path in located:
        tensor: Tensor = handles[path].get_tensor(name)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: broken JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return content
