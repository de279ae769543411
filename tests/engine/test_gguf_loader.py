"""GGUF files: every type that is read, every fault that is named."""

import contextlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType

from engine.config import EngineConfig
from engine.model.checkpoint import GroupedInt4, dense
from engine.model.config import ModelLoadError
from engine.model.gguf_loader import open_gguf
from tests.support.tiny_models import (
    VOCAB_SIZE,
    Driver,
    is_greedy,
    load,
    random_model,
    random_prompt,
    reference_logits,
    write_gguf,
)

TYPES = (GgmlType.F32, GgmlType.F16, GgmlType.BF16, GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q4_1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_parity_for_each_type(path: Path, kind: GgmlType, tied: bool) -> None:
    model = random_model(tie_word_embeddings=tied)
    write_gguf(path, model, kind)
    executor = load(path)
    prompt = random_prompt(40, seed=1)
    driver = Driver(executor)
    request = driver.add(prompt)
    for count in (9, 31):
        logits = driver.logits((request, count))[0]
        expected = reference_logits(model, prompt[: request.computed])[-1]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    request = driver.add(prompt)
    driver.generate([request], 64)
    assert is_greedy(model, prompt, request.output)
    assert executor.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(path: Path, kind: GgmlType) -> None:
    """Also for the extremes of every code, in blocks with large and zero scales."""
    model = random_model(tie_word_embeddings=False)
    weight = model.state_dict()["lm_head.weight"]
    weight[:2] = torch.linspace(-7, 7, 128).view(2, 64)
    weight[2:4] = 0.0
    weight[4] *= 1000
    write_gguf(path, model, kind)
    read = open_gguf(path).weight("lm_head.weight")
    assert isinstance(read, GroupedInt4) == (kind in (GgmlType.Q4_0, GgmlType.Q4_1))
    torch.testing.assert_close(dense(read), weight, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(GgmlType.Q4_1, "int4"), (GgmlType.Q4_0, "int4"), (GgmlType.Q8_0, "bfloat16")],
)
def test_the_default_compute_type_is_4_bit_where_the_file_is(
    path: Path, kind: GgmlType, dtype: str
) -> None:
    write_gguf(path, random_model(), kind)
    assert EngineConfig().dtype == "auto"
    assert load(path, dtype="auto").dtype == dtype
    assert load(path, dtype="float32").dtype == "float32"


def test_rope_factors(path: Path) -> None:
    """``rope_freqs`` is how llama.cpp's converter writes the scaling of Llama 3.1."""
    model = random_model()
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    write_gguf(path, model, extra={"rope_freqs.weight": factors})
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    _check_last_logits(model, path)


def test_linear_rope_scaling(path: Path) -> None:
    model = random_model(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    )
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(path, model, extra=extra)
    _check_last_logits(model, path)


def test_biases_are_permuted_like_their_matrices(path: Path) -> None:
    model = random_model(attention_bias=True)
    write_gguf(path, model)
    _check_last_logits(model, path)


def _check_last_logits(model: Any, path: Path) -> None:
    prompt = random_prompt(40, seed=2)
    driver = Driver(load(path))
    logits = driver.logits((driver.add(prompt), len(prompt)))[0]
    torch.testing.assert_close(logits, reference_logits(model, prompt)[-1], atol=1e-4, rtol=0)


def test_the_digest_covers_every_byte_of_every_tensor(path: Path) -> None:
    model = random_model()
    digests = set()
    for kind in TYPES:
        write_gguf(path, model, kind)
        digests.add(open_gguf(path).digest)
    assert len(digests) == len(TYPES)
    content = bytearray(path.read_bytes())
    before = open_gguf(path).digest
    content[-40] ^= 1  # within the last tensor, which has 64 floats
    path.write_bytes(content)
    assert open_gguf(path).digest != before


class TestFaults:
    def test_truncated_anywhere(self, path: Path) -> None:
        write_gguf(path, random_model(), GgmlType.Q4_1)
        content = path.read_bytes()
        points = {*range(0, 3000, 7), *range(3000, len(content), 9973), len(content) - 300}
        for size in sorted(points):
            path.write_bytes(content[:size])
            with pytest.raises(ModelLoadError, match="broken or truncated"):
                open_gguf(path)

    def test_damaged_header(self, path: Path) -> None:
        """Any byte of the header may be wrong: the model opens or the error is ours."""
        write_gguf(path, random_model())
        content = path.read_bytes()
        generator = torch.Generator().manual_seed(0)
        for _ in range(300):
            place, value = (
                int(torch.randint(0, limit, (1,), generator=generator)) for limit in (3000, 256)
            )
            damaged = bytearray(content)
            damaged[place] = value
            path.write_bytes(damaged)
            with contextlib.suppress(ModelLoadError):
                open_gguf(path)

    def test_not_a_gguf_file(self, path: Path) -> None:
        path.write_bytes(b"PK\x03\x04" + bytes(500))
        with pytest.raises(ModelLoadError, match="magic"):
            open_gguf(path)

    def test_missing_tensor(self, path: Path) -> None:
        write_gguf(path, random_model(), drop="blk.1.ffn_up.weight")
        expected = (
            r"model\.gguf: tensor blk\.1\.ffn_up\.weight is missing, expected shape \(96, 64\)"
        )
        with pytest.raises(ModelLoadError, match=expected):
            open_gguf(path)

    def test_wrong_shape(self, path: Path) -> None:
        extra = {"blk.2.attn_norm.weight": np.ones(63, dtype=np.float32)}
        write_gguf(path, random_model(), drop="blk.2.attn_norm.weight", extra=extra)
        expected = r"blk\.2\.attn_norm\.weight has shape \(63,\), expected \(64,\)"
        with pytest.raises(ModelLoadError, match=expected):
            open_gguf(path)

    def test_unsupported_type(self, path: Path) -> None:
        write_gguf(path, random_model(), GgmlType.Q5_0)
        expected = (
            r"token_embd\.weight has type Q5_0, expected one of F32, F16, BF16, Q8_0, Q4_0, Q4_1"
        )
        with pytest.raises(ModelLoadError, match=expected):
            open_gguf(path)

    def test_unsupported_architecture(self, path: Path) -> None:
        write_gguf(path, random_model(), architecture="gemma3")
        with pytest.raises(ModelLoadError, match="architecture 'gemma3' is not supported"):
            open_gguf(path)

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
            ({"llama.expert_count": 8.0}, "mixture of experts"),
            ({"llama.attention.key_length": 15.0}, "odd|attn_q.weight has shape"),
            ({"llama.rope.dimension_count": 8.0}, "rotates 8 of 16 dimensions"),
        ],
    )
    def test_unsupported_setting(self, path: Path, extra: dict[str, Any], message: str) -> None:
        write_gguf(path, random_model(), extra=extra)
        with pytest.raises(ModelLoadError, match=message):
            open_gguf(path)

    def test_missing_setting(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor("token_embd.weight", np.zeros((VOCAB_SIZE, 64), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(
            ModelLoadError, match=r"setting llama\.attention\.head_count is missing"
        ):
            open_gguf(path)
