"""The model alone, at the executor: decode and prefill speed of each compute type.

    python -m benchmarks.model [--model smollm2-135m] [--rounds 5] [--dtypes int4,bfloat16,float32]

The measurements of all types are interleaved, and each figure is the best of the rounds: on a
machine that other work shares, the best round is the one that was disturbed least. ``transformers``
runs beside them in bfloat16 if it is installed. Figures are tokens per second, except where they
say ms. The process starts again with the environment of a served engine, which its allocator and
its threads are tuned by.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import torch

from engine.batch import FEED, Batch, BatchItem, RowInit
from engine.config import EngineConfig
from engine.torch_executor import TorchExecutor, load_torch_executor
from server.engine_client import SETTINGS
from server.model_store import default_cache_dir, resolve
from transport.messages import SamplingParams

PAGE_SIZE = 16
PROMPT, OUTPUT, STREAMS, LONG = 128, 64, 32, 1024

Measurement = Callable[[], float]


def step(requests: list[tuple[int, int, int]], *, fresh: bool) -> Batch:
    """One step of requests (row, start, count); ``fresh`` ones take their rows with it."""
    items, rows, tokens = [], [], array("q")
    qo_indptr, kv_indptr = array("q", [0]), array("q", [0])
    kv_indices, last_page_len = array("q"), array("q")
    for row, start, count in requests:
        end = start + count
        used = -(-end // PAGE_SIZE)
        # Pages of different requests interleave, as they do after a while of serving.
        kv_indices.extend(range(row, row + used * STREAMS, STREAMS))
        kv_indptr.append(len(kv_indices))
        last_page_len.append(end - (used - 1) * PAGE_SIZE)
        tokens.extend(
            [FEED] if count == 1 else [17 + (start + i) * 31 % 4000 for i in range(count)]
        )
        qo_indptr.append(len(tokens))
        items.append(BatchItem("bench:0", 0, row, start, count, sample=True))
        if fresh:
            params = SamplingParams(temperature=0.0)
            rows.append(RowInit(row, [1] * end, end, params, ()))
    return Batch(
        step=0,
        page_size=PAGE_SIZE,
        items=tuple(items),
        tokens=tokens,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=last_page_len,
        rows=tuple(rows),
    )


def decode_seconds(executor: TorchExecutor, streams: int, steps: int) -> float:
    """Seconds of one decode step, over contexts from ``PROMPT`` to ``PROMPT + steps``."""
    for row in range(streams):
        executor.execute(step([(row, 0, PROMPT)], fresh=True))
    started = time.perf_counter()
    for offset in range(steps):
        requests = [(row, PROMPT + offset, 1) for row in range(streams)]
        executor.execute(step(requests, fresh=False))
    return (time.perf_counter() - started) / steps


def prefill_seconds(executor: TorchExecutor, chunk: int) -> float:
    """Seconds for one prompt of ``LONG`` tokens, in chunks."""
    started = time.perf_counter()
    for start in range(0, LONG, chunk):
        executor.execute(step([(0, start, chunk)], fresh=True))
    return time.perf_counter() - started


def serve_seconds(executor: TorchExecutor) -> float:
    """Seconds for ``STREAMS`` requests of ``PROMPT`` in and ``OUTPUT`` out: prompts two to a
    step."""
    started = time.perf_counter()
    for row in range(0, STREAMS, 2):
        prompts = [(row, 0, PROMPT), (row + 1, 0, PROMPT)]
        executor.execute(step(prompts, fresh=True))
    for offset in range(OUTPUT - 1):
        requests = [(row, PROMPT + offset, 1) for row in range(STREAMS)]
        executor.execute(step(requests, fresh=False))
    return time.perf_counter() - started


def executor_measurements(path: Path, dtype: str) -> dict[str, Measurement]:
    config = EngineConfig.model_validate(
        {"model_path": str(path), "dtype": dtype, "page_size": PAGE_SIZE, "kv_pages": 4096}
    )
    executor = load_torch_executor(config)
    return {
        "1 stream": lambda: 1 / decode_seconds(executor, 1, 32),
        "32 streams": lambda: STREAMS / decode_seconds(executor, STREAMS, 8),
        "32 streams, 128 in / 64 out": lambda: STREAMS * OUTPUT / serve_seconds(executor),
        "prefill 1024, chunks of 256": lambda: LONG / prefill_seconds(executor, 256),
        "prefill 1024, chunks of 512": lambda: LONG / prefill_seconds(executor, 512),
    }


def transformers_measurements() -> dict[str, Measurement]:
    """The same shapes through ``transformers``, with random weights: speed does not depend on
    them."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)

    @torch.inference_mode()
    def decode(streams: int, steps: int) -> float:
        cache = DynamicCache(config=config)
        model(torch.full((streams, PROMPT), 7), cache=cache, logits_to_keep=1)
        token = torch.full((streams, 1), 7)
        started = time.perf_counter()
        for _ in range(steps):
            out = model(token, cache=cache)
            token = out.logits[:, -1].argmax(dim=1, keepdim=True)
        return streams * steps / (time.perf_counter() - started)

    @torch.inference_mode()
    def prefill() -> float:
        started = time.perf_counter()
        model(torch.full((1, LONG), 7), logits_to_keep=1)
        return LONG / (time.perf_counter() - started)

    return {
        "1 stream": lambda: decode(1, 16),
        "32 streams": lambda: decode(STREAMS, 4),
        "prefill 1024, chunks of 256": prefill,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", default="int4,bfloat16,float32")
    options = parser.parse_args()
    missing = {name: value for name, value in SETTINGS.items() if name not in os.environ}
    if missing:
        command = [sys.executable, "-m", "benchmarks.model", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **missing})
    path = resolve(options.model, default_cache_dir()).path

    contestants = {dtype: executor_measurements(path, dtype) for dtype in options.dtypes.split(",")}
    if importlib.util.find_spec("transformers"):
        contestants["transformers bfloat16"] = transformers_measurements()
    best: dict[str, dict[str, float]] = {name: {} for name in contestants}
    for _ in range(options.rounds):
        for name, measurements in contestants.items():
            for what, measure in measurements.items():
                best[name][what] = max(best[name].get(what, 0.0), measure())

    labels = list(dict.fromkeys(what for results in best.values() for what in results))
    print(f"tokens per second, {torch.get_num_threads()} threads, best of {options.rounds} rounds")
    print(f"{'':30}" + "".join(f"{name:>24}" for name in best))
    for label in labels:
        cells = [f"{results[label]:.1f}" if label in results else "" for results in best.values()]
        print(f"{label:30}" + "".join(f"{cell:>24}" for cell in cells))
    for name, results in best.items():
        print(f"{name}: {1000 * STREAMS / results['32 streams']:.1f} ms a step at 32 streams")


if __name__ == "__main__":
    main()
