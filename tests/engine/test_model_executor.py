"""The executor's own duties: rows, fed tokens, pages that come and go, results in their places."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.batch import FEED
from engine.config import EngineConfig
from engine.kv import KVLayout
from engine.torch_executor import TorchExecutor, load_torch_executor
from tests.support.tiny_models import VOCAB_SIZE, Driver, load, random_model, random_prompt
from transport.messages import SamplingParams

SAMPLED = SamplingParams(
    temperature=1.0,
    top_p=0.95,
    seed=11,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    logprobs=True,
    top_logprobs=3,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model(tie_word_embeddings=False).save_pretrained(folder)
    return folder


@pytest.fixture
def executor(path: Path) -> TorchExecutor:
    return load(path)


def test_what_the_engine_asks_of_it(path: Path) -> None:
    executor = load(path, page_size=16, kv_pages=0)
    assert executor.vocab_size == VOCAB_SIZE
    assert executor.context_length == 512
    assert executor.eos_token_ids == (2,)
    assert executor.num_pages == 32768 // 16
    assert len(executor.weights_digest) == 64


def test_sampled_tokens_do_not_depend_on_the_batch(executor: TorchExecutor) -> None:
    prompt = random_prompt(20, seed=1)
    driver = Driver(executor)
    alone = driver.add(prompt, SAMPLED)
    driver.generate([alone], 30)
    driver = Driver(executor, seed=1)
    others = [driver.add(random_prompt(n, seed=n), seeded(n)) for n in (4, 33, 50)]
    driver.generate(others, 3, chunk=9)
    again = driver.add(prompt, SAMPLED)
    driver.generate([*others, again], 30, chunk=6)
    assert again.output == alone.output
    assert again.results == alone.results
    assert len({tuple(request.output) for request in others}) == 3


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed)


def test_a_request_that_comes_back_goes_on_as_if_it_had_never_left(
    executor: TorchExecutor,
) -> None:
    """Retracted after 9 tokens and computed again from its token ids: the same tokens follow."""
    prompt = random_prompt(15, seed=2)
    driver = Driver(executor)
    whole = driver.add(prompt, SAMPLED)
    driver.generate([whole], 25)
    back = driver.add(prompt, SAMPLED, output=whole.output[:9])
    driver.generate([back], 25, chunk=10)
    assert back.output == whole.output
    assert back.results == whole.results[9:]


def test_the_minimum_length_counts_tokens_from_an_earlier_life(executor: TorchExecutor) -> None:
    prompt = random_prompt(15, seed=2)
    every_token = tuple(range(VOCAB_SIZE - 1))  # all but one are stop tokens
    params = SamplingParams(temperature=0.0, min_new_tokens=6)
    driver = Driver(executor)
    request = driver.add(prompt, params, stop_ids=every_token, output=[5, 5, 5])
    driver.generate([request], 8)
    assert request.output[3:6] == [VOCAB_SIZE - 1] * 3
    assert VOCAB_SIZE - 1 not in request.output[6:]


def test_rows_are_used_again(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    first = driver.add(random_prompt(10, seed=3), SAMPLED)
    driver.generate([first], 5)
    fresh = Driver(executor, seed=5)
    second = fresh.add(random_prompt(12, seed=4), SAMPLED)
    assert second.row == first.row
    fresh.generate([second], 10)
    other = Driver(executor, seed=6)
    other.add(random_prompt(3, seed=5))  # takes row 0, so that the next one is elsewhere
    elsewhere = other.add(random_prompt(12, seed=4), SAMPLED)
    other.generate([elsewhere], 10)
    assert second.output == elsewhere.output


def test_results_stand_beside_their_items(executor: TorchExecutor) -> None:
    """Chunks that do not end a prompt give no token, wherever they are in the batch."""
    driver = Driver(executor)
    decoding, chunked, ending = (driver.add(random_prompt(n, seed=n)) for n in (3, 30, 8))
    driver.step((decoding, 3))
    result = driver.step((decoding, 1), (chunked, 12), (ending, 8))
    assert [each.token is not None for each in result.sampled] == [True, False, True]
    assert result.error is None
    assert result.compute_s > 0
    none_samples = driver.step((chunked, 5))
    assert [each.token for each in none_samples.sampled] == [None]


def test_fed_tokens_are_those_of_the_step_before(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    request = driver.add(random_prompt(7, seed=1))
    driver.step((request, 7))
    batch = driver.batch((request, 1))
    assert list(batch.tokens) == [FEED]
    fed = executor.logits(batch)
    spelled_out = executor.logits(replace(batch, tokens=array("q", request.output)))
    assert torch.equal(fed, spelled_out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_carry_a_request_to_another_executor(path: Path, dtype: str) -> None:
    """Prefill here, decode there: the exported pages and the first token are all it takes."""
    here, there = load(path, dtype=dtype), load(path, dtype=dtype, kv_pages=60)
    prompt = random_prompt(33, seed=6)
    driver = Driver(here)
    request = driver.add(prompt)
    driver.generate([request], 20)
    blobs = here.export_pages(array("q", request.pages[:8]))
    assert {len(blob) for blob in blobs} == {here.kv.layout.page_bytes}

    receiver = Driver(there, seed=9)
    pages = [7, 3, 50, 21, 8, 30, 2, 44]
    receiver._free = [page for page in receiver._free if page not in pages]
    there.import_pages(array("q", pages), blobs)
    moved = receiver.add(prompt, output=request.output[:1], shared_pages=pages)
    receiver.generate([moved], 20)
    if dtype == "float32":
        assert moved.output == request.output
    assert there.export_pages(array("q", pages)) == blobs


def test_the_pool_may_lie_in_memory_that_is_handed_in(path: Path) -> None:
    config = EngineConfig(model_path=str(path), kv_pages=10, page_size=4, dtype="bfloat16")
    layout = KVLayout(3, 4, 2, 16, torch.bfloat16)
    memory = bytearray(10 * layout.page_bytes)
    executor = load_torch_executor(config, memory)
    assert executor.kv.layout == layout
    driver = Driver(executor)
    driver.generate([driver.add(random_prompt(9, seed=1))], 3)
    assert any(memory)
    with pytest.raises(ValueError, match="KV pool: memory of"):
        load_torch_executor(config, memory[1:])


def test_a_batch_that_does_not_fit_is_refused(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    request = driver.add(random_prompt(7, seed=1))
    batch = driver.batch((request, 7))
    with pytest.raises(ValueError, match="pages of 16 tokens, the pool 4"):
        executor.execute(replace(batch, page_size=16))


def test_a_row_that_is_elsewhere_fails_alone(executor: TorchExecutor) -> None:
    """A step that was launched behind one that failed: who was fed by that one gets an error, who
    is new in it gets its token."""
    alone = Driver(executor)
    prompt = random_prompt(9, seed=2)
    expected = alone.add(prompt)
    alone.generate([expected], 1)

    driver = Driver(executor, seed=3)
    fed, new = driver.add(random_prompt(7, seed=1)), driver.add(prompt)
    driver.step((fed, 7))
    fed.computed, fed.tokens = 8, [*fed.tokens, 5]  # a step that never ran
    result = executor.execute(driver.batch((fed, 1), (new, 9)))
    assert result.error is None
    assert result.sampled[0].error == "row 0 has 8 tokens, the batch computes 9"
    assert result.sampled[0].token is None
    assert (result.sampled[1].token, result.sampled[1].error) == (expected.output[0], None)


def test_a_row_that_nobody_took_fails_alone(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    request = driver.add(random_prompt(7, seed=1))
    batch = replace(driver.batch((request, 7)), rows=())
    assert executor.execute(batch).sampled[0].error == "row 0 has 0 tokens, the batch computes 7"


def test_an_id_outside_the_vocabulary_fails_its_item_alone(executor: TorchExecutor) -> None:
    driver = Driver(executor)
    good, bad = driver.add(random_prompt(7, seed=1)), driver.add([3, VOCAB_SIZE, 4])
    result = driver.step((good, 7), (bad, 3))
    assert [each.token is None for each in result.sampled] == [False, True]
    assert result.sampled[1].error == f"token id {VOCAB_SIZE} is outside the vocabulary"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_page_held_before_is_never_read(path: Path, dtype: str) -> None:
    """NaN that an earlier owner left behind would pass any mask: zero times NaN is NaN."""
    outputs = []
    for left_behind in (0.0, torch.nan, torch.inf):
        executor = load(path, dtype=dtype)
        with torch.inference_mode():
            executor.kv.pages.fill_(left_behind)
        driver = Driver(executor)
        requests = [driver.add(random_prompt(n, seed=n), seeded(n)) for n in (5, 8, 26)]
        driver.generate(requests, 12, chunk=7)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_whose_keys_are_no_numbers_hurts_no_other(path: Path, dtype: str) -> None:
    executor = load(path, dtype=dtype)

    def outputs(spoil: float) -> list[list[int]]:
        driver = Driver(executor, seed=4)
        good = [driver.add(random_prompt(n, seed=n), seeded(n)) for n in (6, 19)]
        bad = driver.add(random_prompt(17, seed=9), seeded(3))
        driver.step((good[0], 6), (bad, 17), (good[1], 19))
        with torch.inference_mode():
            executor.kv.pages[bad.pages[0]] = spoil
        driver.generate([good[0], bad, good[1]], 8)
        assert all(0 <= token < VOCAB_SIZE for token in bad.output)
        return [request.output for request in good]

    assert outputs(torch.nan) == outputs(0.0)
