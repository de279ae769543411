"""The model computes what ``transformers`` computes, alone and in any company.

In float32, logits agree within 1e-4 and greedy tokens are equal; between our own
batches they agree to the last bit.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from engine.torch_executor import TorchExecutor
from tests.support.tiny_models import (
    Driver,
    is_greedy,
    load,
    random_model,
    random_prompt,
    reference_logits,
    write_gguf,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "one key head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "head dimension": {"head_dim": 32},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear scaling": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    "llama3 scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "biases": {"attention_bias": True},
    "mistral": {"family": "mistral", "sliding_window": None},
    "qwen2": {"family": "qwen2"},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, TorchExecutor]:
    model = random_model(**VARIANTS[request.param])
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, load(folder)


def check_logits(model: PreTrainedModel, executor: TorchExecutor) -> None:
    """Logits after chunks of uneven sizes, each of which sees the earlier ones only in the pool."""
    prompt = random_prompt(100, seed=1)
    expected = reference_logits(model, prompt)
    driver = Driver(executor)
    request = driver.add(prompt)
    for count in (1, 2, 17, 40, 1, 39):
        logits = driver.logits((request, count))
        torch.testing.assert_close(logits[0], expected[request.computed - 1], atol=1e-4, rtol=0)


def test_logits(pair: tuple[PreTrainedModel, TorchExecutor]) -> None:
    check_logits(*pair)


def test_greedy_tokens_alone_and_in_a_mixed_batch(
    pair: tuple[PreTrainedModel, TorchExecutor],
) -> None:
    model, executor = pair
    prompts = [random_prompt(length, seed=length) for length in (23, 5, 41)]
    driver = Driver(executor)
    alone = driver.add(prompts[0])
    driver.generate([alone], 64)
    assert is_greedy(model, prompts[0], alone.output)

    driver = Driver(executor, seed=1)
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests[:1], 10, chunk=8)  # decodes while the prompts of the others arrive
    driver.generate(requests, 64, chunk=7)
    assert requests[0].output == alone.output
    for request, prompt in zip(requests, prompts, strict=True):
        assert len(request.output) == 64
        assert is_greedy(model, prompt, request.output)


def test_a_shared_prefix_serves_two_requests(pair: tuple[PreTrainedModel, TorchExecutor]) -> None:
    model, executor = pair
    prefix = random_prompt(24, seed=3)
    prompts = [prefix + random_prompt(5, seed=4), prefix + random_prompt(9, seed=5)]
    driver = Driver(executor)
    first = driver.add(prompts[0])
    driver.step((first, len(prompts[0])))
    second = driver.add(prompts[1], shared_pages=first.pages[: len(prefix) // driver.page_size])
    assert second.computed == len(prefix)
    driver.generate([first, second], 64)
    assert is_greedy(model, prompts[0], first.output)
    assert is_greedy(model, prompts[1], second.output)


@pytest.mark.parametrize("threads", [1, 2])
def test_float32_logits_do_not_depend_on_the_batch(tmp_path: Path, threads: int) -> None:
    """To the last bit: any chunking, any company, any pages, any page size."""
    model = random_model(
        head_dim=64, hidden_size=320, intermediate_size=1056, max_position_embeddings=1024
    )
    model.save_pretrained(tmp_path)
    short, middle, long = (random_prompt(length, seed=length) for length in (9, 120, 700))
    before = torch.get_num_threads()
    try:
        seen = [
            _last_logits(load(tmp_path, threads=threads, page_size=page_size, kv_pages=2000), *work)
            for page_size, *work in (
                (4, (530, 1, 1), []),
                (4, (530, 1, 1), [short, middle, long]),
                (16, (128, 100, 1, 71, 230, 1, 1), [middle, long, long]),
                (1, (7, 522, 1, 1, 1), [short]),
                (24, (529, 1, 1, 1), [long]),
            )
        ]
    finally:
        torch.set_num_threads(before)
    for logits in seen[1:]:
        assert torch.equal(logits, seen[0])


def _last_logits(
    executor: TorchExecutor, chunks: tuple[int, ...], companions: list[list[int]]
) -> torch.Tensor:
    """The logits after the last three of 532 tokens, computed in ``chunks`` beside ``companions``,
    each of which computes a fifth of its prompt in every step."""
    driver = Driver(executor, seed=len(companions))
    request = driver.add(random_prompt(532, seed=7))
    others = [driver.add(companion) for companion in companions]
    rows = []
    for count in chunks:
        work = [(request, count)]
        for other in others:
            left = len(other.tokens) - other.computed
            work += [(other, min(left, 1 + len(other.tokens) // 5))] if left else []
        work.sort(key=lambda item: item[1] > 1)
        place = next(index for index, item in enumerate(work) if item[0] is request)
        rows.append(driver.logits(*work)[place])
    return torch.stack(rows[-3:])


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_lower_precisions_stay_close(tmp_path: Path, dtype: str) -> None:
    """Their logits differ from float32's by rounding only, at one row and at many."""
    model = random_model(num_key_value_heads=1)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q4_1)
    prompt = random_prompt(60, seed=1)
    expected = reference_logits(model, prompt)
    driver = Driver(load(tmp_path / "model.gguf", dtype=dtype))
    request = driver.add(prompt)
    spread = expected.std()
    for count in (40, 1, 2, 17):
        logits = driver.logits((request, count))[0].float()
        error = (logits - expected[request.computed - 1]).abs().max()
        assert error < 0.15 * spread, f"after {request.computed} tokens"


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_lower_precisions_stay_close_in_company(tmp_path: Path, dtype: str) -> None:
    """Steps of every mixture: only decodes, decodes beside chunks, none and some that sample."""
    model = random_model(num_key_value_heads=1)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q4_1)
    driver = Driver(load(tmp_path / "model.gguf", dtype=dtype))
    prompts = [random_prompt(length, seed=length) for length in (60, 61, 62, 63, 64, 65)]
    references = [reference_logits(model, prompt) for prompt in prompts]
    a, b, c, d, e, f = (driver.add(prompt) for prompt in prompts)
    mixtures = (
        ((a, 30), (b, 5)),
        ((a, 1), (b, 1)),
        ((a, 1), (c, 17), (b, 6)),
        ((d, 1), (a, 1), (c, 1), (e, 40), (f, 7)),
        ((d, 1), (a, 1), (c, 1), (e, 1), (f, 1)),
    )
    for work in mixtures:
        for sampled in ([], [len(work) - 1], list(range(len(work)))):
            if any(request.computed + count > 60 for request, count in work):
                break
            batch = driver.batch(*work)
            items = tuple(
                replace(item, sample=index in sampled) for index, item in enumerate(batch.items)
            )
            logits = driver.executor.logits(replace(batch, items=items))
            for request, count in work:
                request.computed += count
            for place, index in enumerate(sampled):
                request = work[index][0]
                expected = references[request.row]
                error = (logits[place].float() - expected[request.computed - 1]).abs().max()
                assert error < 0.15 * expected.std(), f"{request.row} at {request.computed}"


class TestFolders:
    def test_shards(self, tmp_path: Path) -> None:
        model = random_model(tie_word_embeddings=False)
        model.save_pretrained(tmp_path, max_shard_size="60KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        check_logits(model, load(tmp_path))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_stored_precision(self, tmp_path: Path, dtype: torch.dtype) -> None:
        model = random_model()
        for weight in model.parameters():
            weight.data = weight.to(dtype).float()
        copy.deepcopy(model).to(dtype).save_pretrained(tmp_path)
        check_logits(model, load(tmp_path))

    def test_settings_as_older_versions_wrote_them(self, tmp_path: Path) -> None:
        settings = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
        model = random_model(rope_parameters=settings)
        model.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        del config["rope_parameters"]
        config |= {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0}
        path.write_text(json.dumps(config))
        check_logits(model, load(tmp_path))

    def test_end_of_sequence_ids_come_from_both_files(self, tmp_path: Path) -> None:
        random_model().save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
        assert load(tmp_path).eos_token_ids == (2, 7)

    def test_the_digest_is_that_of_the_tensors(self, tmp_path: Path) -> None:
        model = random_model(tie_word_embeddings=False)
        model.save_pretrained(tmp_path / "one")
        model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
        digest = load(tmp_path / "one").weights_digest
        assert load(tmp_path / "shards", dtype="bfloat16").weights_digest == digest
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[3, 5] += 0.001
        model.save_pretrained(tmp_path / "other")
        assert load(tmp_path / "other").weights_digest != digest
