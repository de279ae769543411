"""A server in the test's event loop, on a free loopback port, in front of a fake engine."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from server.app import create_app
from server.chat_template import ChatTemplate
from server.engine_client import EngineClient
from server.service import SERVICE, Service, TextModel
from server.settings import ServerSettings
from server.tokenizer import ByteTokenizer
from tests.support.fake_engine import FakeEngine
from transport.channel import AsyncChannel, private_endpoint
from transport.messages import FromEngine, ToEngine

MODEL = "toy"


def byte_text() -> TextModel:
    """The hash model's tokenizer and template."""
    tokenizer = ByteTokenizer()
    return TextModel(tokenizer=tokenizer, chat_template=ChatTemplate(tokenizer))


def bound_socket() -> socket.socket:
    """A socket on a free loopback port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    return listener


@dataclass
class Served:
    """A running server, seen from a test."""

    url: str
    port: int
    http: aiohttp.ClientSession
    engine: FakeEngine
    service: Service

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and JSON (or text) of a POST."""
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await read(response)

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON (or text) of a GET."""
        async with self.http.get(self.url + path) as response:
            return response.status, await read(response)

    async def events(self, path: str, body: object) -> list[Any]:
        """All events of a stream, checked for their form; the last must be ``[DONE]``."""
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            assert "Content-Length" not in response.headers
            raw = await response.read()
        return parse_events(raw)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 2.0) -> float:
        """Wait for a condition; the seconds it took."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < timeout_s, "the condition did not come true"
            await asyncio.sleep(0.002)
        return time.monotonic() - started

    async def at_rest(self) -> None:
        """Everything must be back at its start within a second, without new requests."""
        front = self.service.front
        await self.until(
            lambda: not front.table and not front.calls and not self.engine.members, 1.0
        )
        assert front._choices == {}
        assert self.service.engine._owed == type(self.service.engine._owed)()
        status, ledger = await self.get("/ledger")
        assert status == 200
        assert ledger["at_rest"] is True, ledger
        assert ledger["counts"]["frontend_records"] == 0
        assert ledger["counts"]["open_calls"] == 0


async def read(response: aiohttp.ClientResponse) -> Any:
    """JSON where it is JSON, else text."""
    if response.content_type == "application/json":
        return await response.json()
    return await response.text()


def parse_events(raw: bytes) -> list[Any]:
    """The JSON values of a stream: one ``data:`` line an event, LF, no comments, ``[DONE]``
    last."""
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")
    blocks = raw.decode().removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    assert blocks[-1] == "data: [DONE]"
    return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks[:-1]]


@contextlib.asynccontextmanager
async def serving(
    settings: ServerSettings | None = None,
    *,
    wait: bool = True,
    send_buffer: int = 0,
    **engine_options: Any,
) -> AsyncIterator[Served]:
    """Start and stop everything. Other keyword arguments are the fake engine's.

    Args:
        settings: The server's.
        wait: Whether the engine starts, and is waited for.
        send_buffer: Bytes that the kernel takes from the server for a client that does not read.
    """
    settings = settings or ServerSettings()
    endpoint, folder = private_endpoint("engine")
    with folder:
        channel: AsyncChannel[ToEngine, FromEngine] = AsyncChannel(
            endpoint, receives=FromEngine, bind=True
        )
        client = EngineClient(channel, settings.query_timeout_s)
        client.start()
        engine = FakeEngine(endpoint, **engine_options)
        app = create_app(client, byte_text(), settings, model_name=MODEL)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.2
        )
        await runner.setup()
        listener = bound_socket()
        if send_buffer:  # accepted sockets inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = listener.getsockname()[1]
        await web.SockSite(runner, listener, backlog=1024).start()
        try:
            async with aiohttp.ClientSession() as http:
                if wait:
                    engine.start()
                    await client.ready(5)
                yield Served(f"http://127.0.0.1:{port}", port, http, engine, app[SERVICE])
        finally:
            await runner.cleanup()
            engine.frozen.clear()
            if engine._thread.is_alive():
                await asyncio.to_thread(engine.stop)
            await client.close()


async def raw_request(port: int, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A bare connection that has sent ``data``: for clients that misbehave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def http_post(path: str, body: object) -> bytes:
    """A POST as bytes."""
    payload = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload
