"""Figures of a served model, over HTTP: ``make bench``.

One stream, 32 streams (128 in, 64 out), a 1,024-token prefill, start to first token, and what a
client sees while a long prefill runs (a bad request, an abort). ``--peer`` adds the same three
loads on ``transformers`` in this process, with the same weights, for a ratio from one run.
Nothing here is a test: a busy machine moves every figure."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator

import aiohttp

from tests.support.serving import Server, serving

VOCABULARY = range(1000, 40000)


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(tokens)]


def body(tokens: list[int], new: int, stream: bool = True) -> dict[str, object]:
    return {
        "input_ids": tokens,
        "stream": stream,
        "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
    }


async def chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, object]]:
    async for raw in reply.content:
        line = raw.decode().strip()
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def stream(
    session: aiohttp.ClientSession, url: str, tokens: list[int], new: int
) -> list[float]:
    """Arrival times of the chunks of one request, the first one relative to its start."""
    times = [time.perf_counter()]
    async with session.post(url + "/generate", json=body(tokens, new)) as reply:
        reply.raise_for_status()
        times.extend([time.perf_counter() async for _ in chunks(reply)])
    return times


async def one_stream(session: aiohttp.ClientSession, url: str) -> float:
    """Output tokens per second of a single stream, after its first token."""
    times = await stream(session, url, prompt(32, 1), 128)
    return 127 / (times[-1] - times[1])


async def many_streams(session: aiohttp.ClientSession, url: str, streams: int = 32) -> float:
    """Output tokens per second over the wall time of ``streams`` requests, 128 in and 64 out."""
    started = time.perf_counter()
    loads = [stream(session, url, prompt(128, 100 + i), 64) for i in range(streams)]
    await asyncio.gather(*loads)
    return streams * 64 / (time.perf_counter() - started)


async def long_prefill(session: aiohttp.ClientSession, url: str, seed: int) -> float:
    """Seconds from the request to the first token of a 1,024-token prompt."""
    times = await stream(session, url, prompt(1024, seed), 1)
    return times[1] - times[0]


async def beside_a_prefill(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Milliseconds until a bad request is refused, and an abort answered, while prefills run."""
    refused, aborted = [], []
    for round_ in range(8):
        rid = f"prefill-{round_}"
        request = body(prompt(1024, 200 + round_), 1, stream=False) | {"rid": rid}
        running = asyncio.create_task(session.post(url + "/generate", json=request))
        await asyncio.sleep(0.02)
        for _ in range(6):
            started = time.perf_counter()
            bad = body([1, 2], 4) | {"sampling_params": {"temperature": -1}}
            async with session.post(url + "/generate", json=bad) as reply:
                assert reply.status == 400
            refused.append((time.perf_counter() - started) * 1000)
        started = time.perf_counter()
        async with session.post(url + "/abort_request", json={"rid": rid}):
            pass
        reply = await running
        await reply.read()
        aborted.append((time.perf_counter() - started) * 1000)
    return {
        "bad_request_p50_ms": statistics.median(refused),
        "bad_request_p99_ms": sorted(refused)[int(len(refused) * 0.99)],
        "abort_p50_ms": statistics.median(aborted),
        "abort_max_ms": max(aborted),
    }


async def measure(server: Server) -> dict[str, float]:
    async with aiohttp.ClientSession() as session:
        await stream(session, server.url, prompt(64, 0), 16)  # warm
        figures = {
            "one_stream_tok_s": max([await one_stream(session, server.url) for _ in range(3)]),
            "streams_32_tok_s": max([await many_streams(session, server.url) for _ in range(2)]),
            "prefill_1024_tok_s": 1024
            / min([await long_prefill(session, server.url, seed) for seed in (5, 6, 7)]),
        }
        return figures | await beside_a_prefill(session, server.url)


def peer_figures() -> dict[str, float]:
    """The same three loads on ``transformers`` in bfloat16, a model of the same shape with random
    weights: speed does not depend on them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def generate(rows: int, tokens: int, new: int) -> float:
        ids = torch.tensor([prompt(tokens, 300 + i) for i in range(rows)])
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    generate(1, 32, 4)
    first = generate(1, 32, 1)
    return {
        "one_stream_tok_s": 127 / (generate(1, 32, 128) - first),
        "streams_32_tok_s": 32 * 64 / generate(32, 128, 64),
        "prefill_1024_tok_s": 1024 / min(generate(1, 1024, 1) for _ in range(2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dtype", action="append", help="repeat for several; default auto and bfloat16"
    )
    parser.add_argument("--peer", action="store_true", help="also measure transformers")
    options = parser.parse_args()
    rows: dict[str, dict[str, float]] = {}
    for dtype in options.dtype or ["auto", "bfloat16"]:
        with serving("--dtype", dtype) as server:
            started = time.perf_counter()
            asyncio.run(_first_token(server))
            first = server.started_s + time.perf_counter() - started
            rows[f"interlock {dtype}"] = asyncio.run(measure(server)) | {"start_s": first}
    if options.peer:
        rows["transformers bfloat16"] = peer_figures()
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    print("| | " + " | ".join(rows) + " |")
    print("|---" * (len(rows) + 1) + "|")
    for name in names:
        cells = [f"{row[name]:.1f}" if name in row else "" for row in rows.values()]
        print(f"| {name} | " + " | ".join(cells) + " |")


async def _first_token(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        await stream(session, server.url, prompt(16, 9), 1)


if __name__ == "__main__":
    main()
