"""Real processes ended in every way: each open call gets its terminal, nothing outlives its
parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.support.serving import Server, serving


async def _chunks(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, object]]:
    async for raw in reply.content:
        line = raw.decode().strip()
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _body(tokens: int, rid: str, stream: bool = True) -> dict[str, object]:
    return {
        "rid": rid,
        "text": f"request {rid}",
        "stream": stream,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
    }


async def _drain(server: Server, tokens: int, second: bool) -> tuple[list[object], int, float]:
    """Open five streams, ask the server to stop, and collect how each ended."""
    ends: list[object] = []
    async with aiohttp.ClientSession() as session:

        async def stream(rid: str, started: asyncio.Event) -> None:
            finish: object = None
            async with session.post(server.url + "/generate", json=_body(tokens, rid)) as reply:
                async for chunk in _chunks(reply):
                    started.set()
                    finish = chunk["meta_info"]["finish_reason"]  # type: ignore[index]
            ends.append(finish)

        events = [asyncio.Event() for _ in range(5)]
        tasks = [asyncio.create_task(stream(f"s{i}", event)) for i, event in enumerate(events)]
        for event in events:
            await asyncio.wait_for(event.wait(), 10)
        stopped = time.monotonic()
        server.signal()
        await asyncio.sleep(0.15)
        status = 0
        try:
            async with session.post(server.url + "/generate", json=_body(4, "late")) as reply:
                status = reply.status
        except aiohttp.ClientConnectionError:
            status = -1  # it no longer listens
        if second:
            server.signal()
        await asyncio.gather(*tasks, return_exceptions=True)
        return ends, status, stopped


@pytest.mark.parametrize(("grace", "tokens"), [(0.0, 4000), (3.0, 4000), (3.0, 400)])
def test_drain_answers_everybody(grace: float, tokens: int) -> None:
    """B126. Goal: SIGTERM ends every stream with a terminal, a new request gets 503, and the
    process exits with 0 within the grace and a second; requests that fit into the grace finish by
    length."""
    with serving("--model", "hash", "--drain-grace", str(grace)) as server:
        ends, status, stopped = asyncio.run(_drain(server, tokens, second=False))
        assert server.wait() == 0
        assert time.monotonic() - stopped <= grace + 1.0
        assert status in (503, -1)
        if grace:
            assert status == 503
        kinds = {end["type"] if isinstance(end, dict) else end for end in ends}
        assert kinds == ({"length"} if tokens == 400 else {"abort"})
        assert len(ends) == 5


def test_second_signal_exits_at_once() -> None:
    """B126. Goal: a second SIGTERM during the drain does not wait for anybody."""
    with serving("--model", "hash", "--drain-grace", "30") as server:
        _, _, stopped = asyncio.run(_drain(server, 4000, second=True))
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - stopped < 3.0


def test_engine_killed_answers_every_call() -> None:
    """Goal: kill -9 of the engine ends every open call with 503 or an error event, and the server
    exits with a status that is not zero."""
    with serving("--model", "hash") as server:

        async def run() -> tuple[int, str]:
            async with aiohttp.ClientSession() as session:
                plain = asyncio.create_task(
                    session.post(server.url + "/generate", json=_body(5000, "plain", stream=False))
                )
                async with session.post(
                    server.url + "/generate", json=_body(5000, "stream")
                ) as reply:
                    await anext(_chunks(reply))
                    os.kill(server.engine_pid(), signal.SIGKILL)
                    rest = (await reply.content.read()).decode()
                return (await plain).status, rest

        status, rest = asyncio.run(run())
        assert status == 503
        assert "error" in rest or "abort" in rest
        assert server.wait() == 1


def test_server_killed_ends_the_engine() -> None:
    """Goal: an engine never outlives its server, even one that was killed."""
    with serving("--model", "hash") as server:
        engine = psutil.Process(server.engine_pid())
        server.process.kill()
        server.process.wait()
        engine.wait(5)


@pytest.mark.parametrize("grace", ["0", "5"])
def test_a_drain_waits_for_the_step_that_still_runs(tmp_path: Path, grace: str) -> None:
    """Goal: the clients are answered at once and the engine computes for a second more; it is not
    killed in it, so the trace has its end and the engine says that it drained."""
    trace = tmp_path / "trace.jsonl"
    options = ("--hash-step-ms", "1500", "--trace", str(trace), "--drain-grace", grace)
    with serving("--model", "hash", *options) as server:

        async def leave() -> None:
            async with aiohttp.ClientSession() as session:
                body = _body(50, "long")
                async with session.post(server.url + "/generate", json=body) as reply:
                    await anext(_chunks(reply))  # and the next step runs
                    if grace != "0":
                        await session.post(server.url + "/abort_request", json={"rid": "long"})
                    server.signal()
                    await reply.content.read()

        asyncio.run(leave())
        stopped = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - stopped < 5.0
        log = server.log.read_text()
    assert "the engine stops: drained" in log
    assert "is killed" not in log
    last = json.loads(trace.read_text().splitlines()[-1])
    assert last["at_rest"] is True, last


def test_second_signal_does_not_wait_for_a_step() -> None:
    """Goal: while the drain waits for the engine's last step, a second signal still ends all."""
    with serving("--model", "hash", "--hash-step-ms", "4000", "--drain-grace", "0") as server:

        async def leave() -> None:
            async with aiohttp.ClientSession() as session:
                waiting = asyncio.create_task(
                    session.post(server.url + "/generate", json=_body(50, "x", stream=False))
                )
                await asyncio.sleep(0.3)
                server.signal()
                await waiting

        asyncio.run(leave())
        time.sleep(0.5)
        assert server.process.poll() is None, "it waits for the step"
        server.signal()
        stopped = time.monotonic()
        assert server.wait() == 128 + signal.SIGTERM
        assert time.monotonic() - stopped < 1.0
