"""What cannot be loaded is refused: the message names the file, the tensor and the expectation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention import AttentionUnavailable
from engine.model.config import ModelLoadError
from engine.model.loader import open_checkpoint
from tests.support.tiny_models import load, random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    return tmp_path


def change_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, path)


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such model, expected a GGUF file or a Hugging Face folder")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, r"config\.json: file is missing")


@pytest.mark.parametrize("content", ["{", "[1]", "\udc80"])
def test_broken_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content, errors="surrogateescape")
    refused(folder, r"config\.json: (broken JSON|expected a JSON object)")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"expected model\.safetensors or model\.safetensors\.index\.json")


def test_pickled_weights_are_not_even_looked_at(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"expected model\.safetensors")


@pytest.mark.parametrize("size", [0, 4, 1000, -1000])
def test_truncated(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(folder, r"model\.safetensors: broken safetensors file")


def test_missing_tensor(folder: Path) -> None:
    change_tensor(folder, "model.layers.1.mlp.up_proj.weight", None)
    refused(folder, r"model\.layers\.1\.mlp\.up_proj\.weight is missing, expected shape \(96, 64\)")


def test_wrong_shape(folder: Path) -> None:
    change_tensor(folder, "model.norm.weight", torch.ones(63))
    refused(folder, r"model\.norm\.weight has shape \(63,\), expected \(64,\)")


def test_wrong_type(folder: Path) -> None:
    change_tensor(folder, "model.norm.weight", torch.ones(64, dtype=torch.int8))
    refused(folder, r"model\.norm\.weight has type I8, expected F32, F16 or BF16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.* is not supported"),
        ({"architectures": None}, "is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "setting 'factor' is missing"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3"),
        ({"head_dim": 15}, "head dimension 15 is odd"),
        ({"num_attention_heads": 0}, "at least 1"),
        ({"num_hidden_layers": 4}, r"model\.layers\.3\.\S+ is missing"),
        ({"vocab_size": "many"}, "wrong type"),
    ],
)
def test_unsupported_config(folder: Path, settings: dict[str, Any], message: str) -> None:
    change_config(folder, **settings)
    refused(folder, message)


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        random_model().save_pretrained(tmp_path, max_shard_size="60KB")
        return tmp_path

    def test_missing_shard(self, folder: Path) -> None:
        next(folder.glob("model-00002*")).unlink()
        refused(folder, r"shard model-00002\S+ is missing")

    def test_index_that_lies(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        files = sorted(set(content["weight_map"].values()))
        content["weight_map"]["model.norm.weight"] = files[0]
        index.write_text(json.dumps(content))
        refused(folder, rf"{files[0]}: tensor model\.norm\.weight is missing")

    @pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", 3])
    def test_index_that_reaches_outside(self, folder: Path, shard: object) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["model.norm.weight"] = shard
        index.write_text(json.dumps(content))
        refused(folder, "is not a file name")

    def test_index_without_a_map(self, folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text("{}")
        refused(folder, "weight_map is missing")


def test_context_length_beyond_the_model(folder: Path) -> None:
    assert load(folder, context_length=512).context_length == 512
    assert load(folder, context_length=100).context_length == 100
    with pytest.raises(ModelLoadError, match="513 was asked for, the model has 512"):
        load(folder, context_length=513)


def test_flashinfer_without_a_gpu(folder: Path) -> None:
    with pytest.raises(AttentionUnavailable, match="flashinfer needs a CUDA device"):
        load(folder, attention="flashinfer")
