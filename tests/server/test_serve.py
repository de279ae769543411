"""The server as a process: it drains, and neither it nor its engine outlives the other."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.config import EngineConfig
from server.app import serve
from server.settings import ServerSettings
from tests.support.harness import bound_socket, byte_text

ROOT = Path(__file__).parents[2]
LONG: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 4000}}


@dataclass
class Process:
    """A server process under test."""

    process: asyncio.subprocess.Process
    url: str
    engine_pid: int

    async def exit_code(self, within_s: float) -> int:
        """Its exit code; it must end in time."""
        async with asyncio.timeout(within_s):
            return await self.process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def gone(pid: int, within_s: float = 1.0) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:  # noqa: ASYNC110 - nobody tells us
        await asyncio.sleep(0.01)
    return not alive(pid)


@contextlib.asynccontextmanager
async def process(*arguments: str, tmpdir: Path | None = None) -> AsyncIterator[Process]:
    started = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-W", "error", "-m", "tests.support.serve_fake", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | ({} if tmpdir is None else {"TMPDIR": str(tmpdir)}),
    )
    assert started.stdout is not None
    try:
        line = (await asyncio.wait_for(started.stdout.readline(), 10)).split()
        yield Process(started, f"http://127.0.0.1:{int(line[1])}", int(line[2]))
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()
        await started.stdout.read()


async def first_event(response: aiohttp.ClientResponse) -> bytes:
    assert response.status == 200
    return await response.content.readuntil(b"\n\n")


async def test_an_engine_that_is_killed_ends_every_call_and_the_server() -> None:
    async with process() as server, aiohttp.ClientSession() as http:
        stream = await http.post(server.url + "/generate", json=LONG | {"stream": True})
        await first_event(stream)
        whole = asyncio.create_task(http.post(server.url + "/generate", json=LONG))
        chat = await http.post(
            server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 4000, "stream": True}
        )
        await first_event(chat)
        killed = time.monotonic()
        os.kill(server.engine_pid, signal.SIGKILL)
        answer = await whole
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert "engine process is gone" in await answer.text()
        for response in (stream, chat):
            events = (await response.read()).split(b"\n\n")
            assert b'data: {"error":{"message":"the engine process is gone"' in events[-3]
            assert events[-2] == b"data: [DONE]"
        assert await server.exit_code(2) == 1
        assert time.monotonic() - killed < 2


async def test_a_signal_drains_and_the_engine_goes_with_the_server() -> None:
    async with process("hash", "0.5") as server, aiohttp.ClientSession() as http:
        stream = await http.post(server.url + "/generate", json=LONG | {"stream": True})
        await first_event(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        refused = await http.post(server.url + "/generate", json=LONG)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        events = (await stream.read()).split(b"\n\n")
        assert b'"type":"abort"' in events[-3]
        assert await server.exit_code(3) == 0
        assert 0.4 < time.monotonic() - started < 1.5
        assert await gone(server.engine_pid)


async def test_an_idle_server_stops_at_once() -> None:
    async with process() as server:
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        assert await server.exit_code(2) == 0
        assert time.monotonic() - started < 1.0
        assert await gone(server.engine_pid)


async def test_a_second_signal_exits_at_once() -> None:
    async with process("hash", "30") as server, aiohttp.ClientSession() as http:
        stream = await http.post(server.url + "/generate", json=LONG | {"stream": True})
        await first_event(stream)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_code(1) == 128 + signal.SIGTERM
        assert await gone(server.engine_pid)


async def test_an_engine_that_does_not_drain_does_not_keep_the_server() -> None:
    async with process("hash:deaf", "0.2") as server, aiohttp.ClientSession() as http:
        stream = await http.post(server.url + "/generate", json=LONG | {"stream": True})
        await first_event(stream)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert b'"type":"abort"' in (await stream.read()).split(b"\n\n")[-3]
        assert await server.exit_code(3) == 0
        assert time.monotonic() - started < 0.2 + 1.0
        assert await gone(server.engine_pid)


async def test_a_server_that_is_killed_takes_its_engine_with_it_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    async with process(tmpdir=tmp_path) as server, aiohttp.ClientSession() as http:
        answer = await http.post(server.url + "/v1/completions", json={"prompt": "x"})
        assert answer.status == 200
        server.process.kill()
        await server.process.wait()
        assert await gone(server.engine_pid)
        assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_an_engine_that_cannot_start_is_an_exit_code(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = (sys.executable, "-m", "tests.support.fake_engine")
    config, settings = EngineConfig(model="hash:broken"), ServerSettings()
    code = await serve(bound_socket(), config, settings, byte_text, engine_command=fake)
    assert code == 3
    assert "exit code 3" in caplog.text


@pytest.mark.parametrize("field", ["trace", "kv_store"])
async def test_a_place_that_turns_out_to_be_of_no_use_is_a_setting_to_change(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The command looks before it starts; by the time that the engine is there it can be gone."""
    (tmp_path / "file").touch()
    config = EngineConfig.model_validate({"model": "hash", field: str(tmp_path / "file" / "x")})
    code = await serve(bound_socket(), config, ServerSettings(), byte_text)
    assert code == 2
    assert f"--{field.replace('_', '-')} {tmp_path}/file/x: Not a directory" in caplog.text


async def test_an_engine_that_takes_too_long_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    settings = ServerSettings(engine_start_timeout_s=0.2)
    started = time.monotonic()
    code = await serve(
        bound_socket(), EngineConfig(model="hash"), settings, byte_text, engine_command=sleeper
    )
    assert code == 1
    assert "not ready after 0.2 s" in caplog.text
    assert time.monotonic() - started < 2


async def test_a_tokenizer_that_cannot_be_loaded_stops_the_engine() -> None:
    def broken() -> Any:
        raise ValueError("no such tokenizer")

    fake = (sys.executable, "-m", "tests.support.fake_engine")
    listener = bound_socket()
    with pytest.raises(ValueError, match="no such tokenizer"):
        await serve(listener, EngineConfig(), ServerSettings(), broken, engine_command=fake)
    assert listener.fileno() == -1, "closed"


async def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await serve(
            bound_socket(), EngineConfig(), ServerSettings(), byte_text, engine_command=("no-such",)
        )


def test_a_busy_port_is_known_before_anything_starts() -> None:
    with bound_socket() as taken:
        taken.listen()
        with socket.socket() as second, pytest.raises(OSError, match="in use"):
            second.bind(taken.getsockname())
