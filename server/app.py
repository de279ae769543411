"""The HTTP process put together: application, start, drain, end."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from aiohttp import web

from engine.config import EngineConfig
from server.engine_client import (
    ENGINE_COMMAND,
    EngineClient,
    EngineProcess,
    EngineStartError,
)
from server.front_end import FrontEnd
from server.metrics import ServerMetrics
from server.probe import HealthProbe
from server.routes import add_routes, surround
from server.service import SERVICE, Service, TextModel
from server.settings import ServerSettings
from transport.channel import AsyncChannel, private_endpoint
from transport.messages import FromEngine, Hello, ToEngine

logger = logging.getLogger(__name__)

EXIT_DRAINED = 0
EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_MODEL = 3
"""The engine's own exit codes for a place on the disk that it cannot use and for a model that it
cannot load; passed on."""
EXIT_SIGNAL = 128
LAST_WORDS_S = 1.0
"""How long open calls may take to write their 503 when the engine is gone."""
ENGINE_STOP_S = 0.4
"""How long an engine may take to exit once its server is gone, before it is killed. One that was
drained has had ``settings.engine_exit_s`` before."""

OnReady = Callable[[Hello], Awaitable[None]]


def create_app(
    engine: EngineClient,
    text: TextModel,
    settings: ServerSettings,
    *,
    model_name: str,
    model_path: str = "",
    role: str = "unified",
) -> web.Application:
    """The application, without a socket. ``engine`` must be started, and may still be loading.

    Run it with ``web.AppRunner(app, handler_cancellation=True)``: without that a client's leaving
    is never noticed. Clean up the application before closing ``engine``.

    Args:
        engine: The engine, as the server talks to it.
        text: Tokenizer and chat template.
        settings: What the operator chose.
        model_name: The model's name for clients.
        model_path: Where its files are, for ``/model_info``.
        role: ``unified``, ``prefill`` or ``decode``: a label of metrics.
    """
    metrics = ServerMetrics(engine, model_name, role)
    front = FrontEnd(engine, text.tokenizer, settings, metrics)
    probe = HealthProbe(front, settings.probe_timeout_s)
    app = web.Application(middlewares=[surround], client_max_size=settings.max_body_bytes)
    app[SERVICE] = Service(
        settings=settings,
        engine=engine,
        front=front,
        text=text,
        metrics=metrics,
        probe=probe,
        model_name=model_name,
        model_path=model_path,
    )
    add_routes(app.router, debug=settings.debug)

    async def clean_up(_: web.Application) -> AsyncIterator[None]:
        yield
        await probe.close()
        front.close()

    app.cleanup_ctx.append(clean_up)
    return app


async def serve(
    listener: socket.socket,
    config: EngineConfig,
    settings: ServerSettings,
    load_text: Callable[[], TextModel],
    *,
    model_name: str = "",
    model_path: str = "",
    engine_command: Sequence[str] = ENGINE_COMMAND,
    on_ready: OnReady | None = None,
) -> int:
    """Serve until a signal or the engine's end; the exit code of the process.

    The engine process starts first and loads while ``load_text`` (in a thread) makes the tokenizer.
    Then the server listens: ``/health`` says 503 until the engine is ready.

    The first SIGTERM or SIGINT drains: new calls get 503, open ones ``settings.drain_grace_s`` to
    end. A second one kills the engine and exits at once with 128 + its number.

    Args:
        listener: A bound socket; closed on return. Bind it before anything expensive, so that a
            busy port is known at once.
        config: For the engine process.
        settings: For this process.
        load_text: Makes tokenizer and chat template; its errors are raised here.
        model_name: The model's name for clients; empty takes the settings' or ``config.model``.
        model_path: Where its files are.
        engine_command: What to run; the channel's endpoint is added as the last argument.
        on_ready: Called once requests are answered, while serving goes on.

    Returns:
        0 after a drain, 2 when the engine could not use the folder or file of a setting, 3 when it
        could not load its model, 1 when it died otherwise or could not start.
    """
    endpoint, folder = private_endpoint("engine")
    with folder, contextlib.closing(listener):
        async with contextlib.AsyncExitStack() as stack:
            channel: AsyncChannel[ToEngine, FromEngine] = AsyncChannel(
                endpoint, receives=FromEngine, bind=True
            )
            engine = EngineClient(channel, settings.query_timeout_s)
            stack.push_async_callback(engine.close)
            engine.start()
            process = await EngineProcess.start(endpoint, config, engine_command)
            stack.push_async_callback(process.stop, ENGINE_STOP_S)
            watcher = asyncio.create_task(_watch(process, engine), name="engine-watcher")
            stack.push_async_callback(_cancel, watcher)
            stop = stack.enter_context(_signals(process, folder))

            host, port = listener.getsockname()[:2]
            settings = settings.model_copy(update={"host": host, "port": port})
            text = await asyncio.to_thread(load_text)
            app = create_app(
                engine,
                text,
                settings,
                model_name=model_name or settings.served_model_name or config.model,
                model_path=model_path or config.model_path,
            )
            runner = web.AppRunner(
                app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_WORDS_S
            )
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener, backlog=1024).start()
            starting = asyncio.create_task(_start(app[SERVICE], folder, on_ready), name="start")
            code = await _run(app[SERVICE], starting, watcher, stop)
            if code == EXIT_FAILED and process.exit_code in (EXIT_SETTINGS, EXIT_MODEL):
                return process.exit_code
            return code
    raise AssertionError("unreachable: nothing above suppresses exceptions")


async def _run(
    service: Service,
    starting: asyncio.Task[None],
    watcher: asyncio.Task[None],
    stop: asyncio.Event,
) -> int:
    """From listening to the last answer; the exit code."""
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        done, _ = await asyncio.wait(
            (starting, stopping, watcher), return_when=asyncio.FIRST_COMPLETED
        )
        if starting in done:
            try:
                starting.result()
            except EngineStartError as error:
                logger.error("%s", error)
                return EXIT_FAILED
            await asyncio.wait((stopping, watcher), return_when=asyncio.FIRST_COMPLETED)
        if watcher.done():
            logger.error("the engine process is gone: %s", service.engine.gone)
            await service.front.answered(LAST_WORDS_S)
            return EXIT_FAILED
        await _drain(service, watcher)
        return EXIT_DRAINED
    finally:
        for task in (starting, stopping):
            await _cancel(task)


async def _drain(service: Service, watcher: asyncio.Task[None]) -> None:
    """Answer every open call, and let the engine come to rest and exit by itself.

    It may still compute a step whose requests are all answered, and then has pages to store and a
    trace to finish. An engine that has not said hello yet has nothing of the kind.
    """
    settings = service.settings
    logger.info("draining for %g s", settings.drain_grace_s)
    most = settings.drain_grace_s + settings.engine_exit_s
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most):
            await service.front.drain(settings.drain_grace_s)
            if service.engine.hello is not None:
                await asyncio.wait((watcher,))


async def _start(
    service: Service, folder: tempfile.TemporaryDirectory[str], on_ready: OnReady | None
) -> None:
    limits = await service.engine.ready(service.settings.engine_start_timeout_s)
    # The two are connected, and nobody else ever may be: nothing stays on the disk, however we end.
    folder.cleanup()
    # What exists now stays: no collection that holds the loop needs to walk it again.
    gc.collect()
    gc.freeze()
    if on_ready is not None:
        await on_ready(limits)


async def _watch(process: EngineProcess, engine: EngineClient) -> None:
    why = await process.exited()
    if process.exit_code is not None and process.exit_code >= 0:
        # It ended on purpose, and may have answered requests with its last breath.
        await engine.last_words(LAST_WORDS_S / 2)
    engine.lost(why)


async def _cancel(task: asyncio.Task[object] | asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@contextlib.contextmanager
def _signals(
    process: EngineProcess, folder: tempfile.TemporaryDirectory[str]
) -> Iterator[asyncio.Event]:
    """An event that the first SIGTERM or SIGINT sets; a second one ends everything at once."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            process.kill()
            folder.cleanup()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_SIGNAL + number)
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
