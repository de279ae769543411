"""The default model against ``transformers`` over the values that llama.cpp's types hold."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.torch_executor import TorchExecutor
from server.model_store import default_cache_dir, resolve
from server.tokenizer_loader import load_tokenizer
from tests.support.tiny_models import (
    GGUF_NAMES,
    Driver,
    converter_rows,
    load,
    reference_logits,
)

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about autumn.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.array([",
    "SELECT name, age FROM users WHERE",
    "1, 2, 3, 4, 5, 6, 7,",
    "Q: What is 12 + 30?\nA:",
    "Once upon a time, in a small village by the sea, there lived",
    "The quick brown fox",
    "Water boils at 100 degrees Celsius because",
    "In 1969, Neil Armstrong",
    "<html>\n<head>\n<title>",
    '{"name": "Ada", "born": 1815, "works": [',
    "Liebe Kolleginnen und Kollegen,",
    "La photosynthèse est",
    "!!!! ???? ....",
    "A",
    "Photosynthesis is the process by which green plants use sunlight to make food. " * 8,
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n",
)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve("smollm2-135m", default_cache_dir()).path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(resolve("smollm2-135m", default_cache_dir()))
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def reference(path: Path) -> LlamaForCausalLM:
    """``transformers`` over the file's values as the ``gguf`` package decodes them."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for name, weight in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            tensor = tensors[f"blk.{layer}.{GGUF_NAMES[stem]}.{kind}"]
        else:
            tensor = tensors[
                "token_embd.weight" if stem == "lm_head" else f"{GGUF_NAMES[stem]}.{kind}"
            ]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = 9 if stem == "self_attn.q_proj" else 3
            values = values[np.argsort(converter_rows(len(values), heads))]
        weight.copy_(torch.from_numpy(values.copy()))
    return model


def generate(executor: TorchExecutor, prompts: list[list[int]], count: int) -> list[list[int]]:
    """All prompts together, in chunks, so that decodes of some meet the prompts of others."""
    driver = Driver(executor)
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, count, chunk=48)
    return [request.output for request in requests]


def test_float32_tokens_are_those_of_transformers(
    path: Path, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    """Greedy tokens, each of which is the reference's choice after the ones before it: 64 of a few
    prompts, 12 of the others."""
    executor = load(path, page_size=16, kv_pages=400)
    outputs = generate(executor, prompts[:5], 64) + generate(executor, prompts[5:], 12)
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == output


@pytest.mark.parametrize(("dtype", "agreeing"), [("bfloat16", 0.9), ("int4", 0.9)])
def test_lower_precisions_agree_with_transformers(
    path: Path,
    prompts: list[list[int]],
    reference: LlamaForCausalLM,
    dtype: str,
    agreeing: float,
) -> None:
    """Teacher-forced: each token is among the reference's best, and nearly always the best."""
    executor = load(path, dtype=dtype, page_size=16, kv_pages=400)
    same = total = 0
    for start in range(0, len(prompts), 3):  # few rows: int4 computes with its 4-bit weights
        some = prompts[start : start + 3]
        for prompt, output in zip(some, generate(executor, some, 24), strict=True):
            logits = reference_logits(reference, prompt + output)[len(prompt) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
            assert (logits.max(dim=1).values - chosen).max() < 2.0
            same += int((logits.argmax(dim=1) == torch.tensor(output)).sum())
            total += len(output)
    assert same / total > agreeing


FRANCE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
"""What the chat template makes of the question."""


@pytest.fixture(scope="module", params=["auto", "bfloat16"])
def lower(request: pytest.FixtureRequest, path: Path) -> TorchExecutor:
    executor = load(path, dtype=request.param, page_size=16, kv_pages=400)
    assert executor.dtype == {"auto": "int4"}.get(request.param, request.param)
    return executor


@pytest.mark.parametrize("others", [0, 2, 11])
@pytest.mark.parametrize("chunk", [1, 8, 256])
def test_a_near_tie_is_decided_alike_in_every_chunking_and_company(
    lower: TorchExecutor, prompts: list[list[int]], chunk: int, others: int
) -> None:
    """In float32 the first token wins by 0.08 of 25; logits in bfloat16 are multiples of 1/8."""
    tokenizer = load_tokenizer(resolve("smollm2-135m", default_cache_dir()))
    driver = Driver(lower)
    company = [driver.add(prompt) for prompt in prompts[2 : 2 + others]]
    driver.generate(company, 1)
    asked = driver.add(tokenizer.encode(FRANCE))
    while not asked.output:
        count = min(chunk, len(asked.tokens) - asked.computed)
        driver.step(*sorted([*((r, 1) for r in company), (asked, count)], key=lambda w: w[1] > 1))
    driver.generate([asked], 7)
    assert "Paris" in tokenizer.decode(asked.output)


@pytest.mark.parametrize("rest", [1, 3, 20])
def test_a_near_tie_is_decided_alike_after_a_prefix_hit(lower: TorchExecutor, rest: int) -> None:
    tokenizer = load_tokenizer(resolve("smollm2-135m", default_cache_dir()))
    prompt = tokenizer.encode(FRANCE)
    driver = Driver(lower)
    first = driver.add(prompt)
    driver.step((first, len(prompt) - rest))
    hit = driver.add(prompt)
    hit.pages, hit.computed = first.pages, first.computed
    driver.generate([hit], 7)
    assert "Paris" in tokenizer.decode(hit.output)
