"""The server's side of the engine: its process, its channel, and answers matched to questions.

:class:`EngineProcess` starts ``python -m engine.worker ENDPOINT``, gives it the configuration as
one JSON line on standard input and keeps that pipe open: when the server is gone the engine reads
end-of-file and exits, whatever killed the server. It runs in a session of its own, so that a
Ctrl-C in the terminal reaches the server alone, which then drains.

:class:`EngineClient` speaks ``transport.messages`` with it. Control messages (an abort, a stop)
are never refused: when the channel is full they wait their turn in a queue, whose length is
bounded by the open requests. Submissions and questions are refused instead (503), because their
callers can try again.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

from engine.config import EngineConfig
from server.errors import ApiError, overloaded
from server.throughput import Throughput
from transport.channel import AsyncChannel, ChannelFull
from transport.messages import (
    PROTOCOL_VERSION,
    FromEngine,
    Hello,
    Load,
    Outputs,
    Reply,
    Stopped,
    Submit,
    ToEngine,
)

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "engine.worker")
AT_A_TIME = 32
"""Messages of the engine handled before others get their turn on the event loop."""
SETTINGS = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "GOMP_SPINCOUNT": "20000",
}
"""Environment of the engine, unless the operator chose otherwise.

For glibc: tensors of ever new sizes left holes behind in its arenas, and resident memory grew by
250 MB in a minute of ragged batches; with large ones mapped, and given back, it does not. What
counts as large is a compromise: mapping anew what every step needs costs page faults (a single
stream and a prefill are about a tenth faster with 4 MiB than with 1, and with huge pages, where
the kernel offers them). For OpenMP: threads that wait spin for some ten microseconds and then
sleep, because a thread that spins takes the core that the server, or the other compute thread,
needs (a 1,024-token prefill on two cores: 1.4 times as fast)."""
ENGINE_GONE = "the engine process is gone"


class EngineStartError(Exception):
    """The engine did not become ready. The message says what is known."""


class EngineProcess:
    """A child process that computes. Made by :meth:`start`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, endpoint: str, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND
    ) -> "EngineProcess":
        """Start it. Its output goes where ours goes.

        Raises:
            OSError: The command cannot be run.
        """
        process = await asyncio.create_subprocess_exec(
            *command,
            endpoint,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**SETTINGS, **os.environ},
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # a child that died at once is seen by exited()
            process.stdin.write(config.model_dump_json().encode() + b"\n")
            await process.stdin.drain()
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def exited(self) -> str:
        """Wait for its end and describe it: ``exit code 1``, ``signal SIGKILL``."""
        code = await self._process.wait()
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    async def stop(self, patience_s: float) -> None:
        """Close its input, which asks it to exit; kill it when it has not after ``patience_s``."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                await self._process.wait()
        except TimeoutError:
            logger.warning("the engine (pid %d) does not exit and is killed", self.pid)
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class EngineClient:
    """One engine, as the server talks to it. Belongs to one event loop.

    Args:
        channel: A bound channel; the engine connects to it.
        query_timeout_s: How long :meth:`ask` waits.
    """

    def __init__(
        self, channel: AsyncChannel[ToEngine, FromEngine], query_timeout_s: float = 10.0
    ) -> None:
        self._channel = channel
        self._query_timeout_s = query_timeout_s
        self._owed: deque[ToEngine] = deque()
        self._flusher: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._queries: dict[int, asyncio.Future[object]] = {}
        self._numbers = itertools.count(1)
        self._ready = asyncio.Event()
        self._said_goodbye = asyncio.Event()
        self._last_heard = time.monotonic()
        self.hello: Hello | None = None
        """What the engine said when it became ready; None before."""
        self.load: Load | None = None
        """Its last periodic summary."""
        self.generated: Throughput = Throughput()
        """Output tokens per second."""
        self.stopped: Stopped | None = None
        """Its last message, when it exits on purpose."""
        self.gone: str | None = None
        """Why it is gone; None while it may still be there."""
        self.on_outputs: Callable[[Outputs], None] = _ignore_outputs
        """Called for every frame of outputs, on the event loop."""
        self.on_gone: Callable[[], None] = _ignore_gone
        """Called once when the engine is gone."""

    @property
    def available(self) -> Hello:
        """What the engine said when it became ready.

        Raises:
            ApiError: 503, when it is not ready yet, or gone.
        """
        if self.gone is not None:
            raise overloaded(ENGINE_GONE)
        if self.hello is None:
            raise overloaded("the engine is starting")
        return self.hello

    @property
    def silence_s(self) -> float:
        """Seconds since the engine's last message."""
        return time.monotonic() - self._last_heard

    def start(self) -> None:
        """Begin to read the channel."""
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    async def ready(self, timeout_s: float) -> Hello:
        """Wait until the engine serves.

        Raises:
            EngineStartError: It is gone, speaks another protocol, or takes too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            raise EngineStartError(f"the engine was not ready after {timeout_s:g} s") from None
        if self.gone is not None or self.hello is None:
            reason = (
                "" if self.stopped is None else f": {self.stopped.error or self.stopped.reason}"
            )
            raise EngineStartError(f"the engine did not start: {self.gone}{reason}")
        return self.hello

    def submit(self, message: Submit) -> None:
        """Hand over a request.

        Raises:
            ApiError: 503, when the engine is starting, gone, or does not keep up. It was not sent.
        """
        self._send_or_refuse(message)

    def post(self, message: ToEngine) -> None:
        """Send a control message; it is never refused. Without effect when the engine is gone."""
        if self.gone is not None:
            return
        if not self._owed:
            try:
                self._channel.send_nowait(message)
            except ChannelFull:
                pass
            else:
                return
        self._owed.append(message)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush(), name="engine-flusher")

    async def ask(self, build: Callable[[int], ToEngine], timeout_s: float | None = None) -> object:
        """Ask a question: ``build`` makes the message from the number that its reply will carry.

        Raises:
            ApiError: 503, when the engine is starting, gone, does not keep up, or does not answer
                in time.
        """
        number = next(self._numbers)
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._send_or_refuse(build(number))
        self._queries[number] = future
        try:
            async with asyncio.timeout(timeout_s or self._query_timeout_s):
                return await future
        except TimeoutError:
            raise overloaded("the engine did not answer in time") from None
        finally:
            del self._queries[number]

    def lost(self, why: str) -> None:
        """The engine is gone: fail every question, tell the front end. Only the first call
        counts."""
        if self.gone is not None:
            return
        self.gone = why
        self._owed.clear()
        for future in self._queries.values():
            if not future.done():
                future.set_exception(overloaded(ENGINE_GONE))
        self._ready.set()
        self.on_gone()

    async def last_words(self, timeout_s: float) -> None:
        """Wait until everything that an engine sent before it stopped is handled. One that died
        without saying so is waited for in vain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._said_goodbye.wait()

    async def close(self, linger_s: float = 0.0) -> None:
        """Stop reading and close the channel."""
        tasks = [task for task in (self._reader, self._flusher) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._channel.close(linger_s)

    def _send_or_refuse(self, message: ToEngine) -> None:
        _ = self.available  # before it is connected, its channel looks full
        try:
            if self._owed:  # overtaking control messages would break their order
                raise ChannelFull
            self._channel.send_nowait(message)
        except ChannelFull:
            raise overloaded("the engine does not keep up with its messages") from None

    async def _flush(self) -> None:
        while self._owed:
            try:
                self._channel.send_nowait(self._owed[0])
            except ChannelFull:
                await self._channel.wait_writable()
            else:
                self._owed.popleft()

    async def _read(self) -> None:
        for count in itertools.count(1):
            message = await self._channel.receive()
            if count % AT_A_TIME == 0:
                await asyncio.sleep(0)  # receiving what is there already does not wait
            self._last_heard = time.monotonic()
            try:
                self._dispatch(message)
            except Exception:
                # A fault in handling one message must not stop the answers of all other requests.
                logger.exception("handling a %s failed", type(message).__name__)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self.on_outputs(message)
            case Load():
                self.load = message
                self.generated.add(self._last_heard, message.generated_tokens)
            case Reply():
                future = self._queries.get(message.query)
                if future is not None and not future.done():
                    future.set_result(message.data)
            case Hello() if message.version != PROTOCOL_VERSION:
                self.lost(f"it speaks protocol {message.version}, this server {PROTOCOL_VERSION}")
            case Hello():
                self.hello = message
                self._ready.set()
            case Stopped():
                self.stopped = message
                self._said_goodbye.set()
                logger.info("the engine stops: %s %s", message.reason, message.error)


def _ignore_outputs(outputs: Outputs) -> None:
    """Nobody listens yet."""


def _ignore_gone() -> None:
    """Nobody listens yet."""


def reply_error(data: object) -> ApiError | None:
    """The error in a reply of the form ``{"error": message, "status": 400}``, if it is one."""
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        status = data.get("status")
        return ApiError(status if isinstance(status, int) else 400, data["error"])
    return None
