"""The engine process: ``python -m engine.worker ENDPOINT``, its configuration as one JSON line on
standard input.

It connects to the server's channel, loads the model, says :class:`~transport.messages.Hello` and
serves. Standard input stays open for as long as the server lives: its end means that the server
is gone, and the engine exits.

Exit codes: 0 drained or the server is gone, 1 a fault of ours, 2 a place on the disk that a setting
names cannot be used, 3 the model cannot be loaded.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from engine.basics import Parts
from engine.batch import Executor
from engine.config import EngineConfig
from engine.hash_model import HashModel
from engine.loop import EngineLoop
from engine.runner import RunnerThread
from engine.scheduler import ModelFacts, Scheduler
from engine.store import DirectoryStore
from engine.trace_file import TraceFile
from fsm.unified import UNIFIED
from transport.channel import Channel
from transport.messages import PROTOCOL_VERSION, FromEngine, Hello, Stopped, ToEngine

logger = logging.getLogger(__name__)

DEFAULT_POOL_TOKENS: Final = 32_768
HASH_ARCHITECTURE: Final = "HashModel"
MODEL_TYPES: Final = {
    HASH_ARCHITECTURE: "hash",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
}
"""Hugging Face's ``model_type`` of each architecture that is served."""
EXIT_FAULT: Final = 1
EXIT_SETTINGS: Final = 2
EXIT_MODEL: Final = 3


class CannotServe(Exception):  # noqa: N818 - an answer, not a fault
    """The model cannot be loaded, or what it needs is not there; the message says why."""


class UnusablePlace(Exception):  # noqa: N818 - an answer, not a fault
    """The file or folder of a setting cannot be used; the message says which, and why."""


def load_executor(config: EngineConfig) -> tuple[Executor, int, str]:
    """The model with its KV pool, the pool's size in pages, and the model's architecture. Torch is
    imported for real models only.

    Raises:
        CannotServe: with a message for the person who started the server.
    """
    if config.model.partition(":")[0] == "hash":
        context = config.context_length or 8192
        pages = config.kv_pages or -(-max(DEFAULT_POOL_TOKENS, context) // config.page_size)
        weights = config.model.partition(":")[2] or "W1"
        return HashModel(pages, config.page_size, weights, context), pages, HASH_ARCHITECTURE
    from engine.attention import AttentionUnavailable
    from engine.model.config import ModelLoadError
    from engine.torch_executor import load_torch_executor

    try:
        executor = load_torch_executor(config)
    except (ModelLoadError, AttentionUnavailable) as error:
        raise CannotServe(str(error)) from error
    except (RuntimeError, AssertionError) as error:  # torch's way to say that a device is not there
        raise CannotServe(f"--device {config.device}: {error}") from error
    return executor, executor.num_pages, executor.architecture


def serve(
    config: EngineConfig, channel: Channel[FromEngine, ToEngine], gone: threading.Event
) -> str:
    """Load, say hello, and run the loop until it ends; returns why it ended."""
    executor, pages, architecture = load_executor(config)
    config = config.model_copy(update={"dtype": executor.dtype})  # what "auto" has become
    step_s = config.hash_step_ms / 1000 if config.model.partition(":")[0] == "hash" else 0.0
    runner = RunnerThread(executor, channel.wake, step_s)
    try:
        store = DirectoryStore(Path(config.kv_store), channel.wake) if config.kv_store else None
    except OSError as error:
        raise UnusablePlace(f"--kv-store {config.kv_store}: {error.strerror}") from error
    try:
        trace = TraceFile(Path(config.trace)) if config.trace else None
    except OSError as error:
        raise UnusablePlace(f"--trace {config.trace}: {error.strerror}") from error
    clock = time.monotonic
    facts = ModelFacts(
        executor.vocab_size,
        executor.context_length,
        tuple(executor.eos_token_ids),
        executor.weights_digest,
        executor.kv_layout,
    )
    boot_id = secrets.token_hex(4)
    scheduler = Scheduler(
        Parts(
            config,
            facts,
            pages,
            clock,
            runner,
            store=store,
            boot_id=boot_id,
            trace=trace.write if trace is not None else None,
        ),
    )
    info: dict[str, object] = {
        **config.model_dump(),
        "kv_pages": pages,
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "context_length": scheduler.limits.context_length,
        "max_total_num_tokens": scheduler.limits.pool_tokens,
        "max_req_input_len": scheduler.limits.max_prompt_tokens,
        "weights_digest": facts.weights_digest,
        "vocab_size": facts.vocab_size,
        "boot_id": boot_id,
        "charts": {UNIFIED.name: UNIFIED.fingerprint},
        "pid": os.getpid(),
    }
    channel.send(
        Hello(
            PROTOCOL_VERSION,
            boot_id,
            config.model,
            facts.vocab_size,
            scheduler.limits.context_length,
            facts.eos_token_ids,
            scheduler.limits.max_prompt_tokens,
            info,
        )
    )
    loop = EngineLoop(channel, scheduler, runner, clock, info, gone)
    try:
        reason = loop.run()
        loop.stop(reason)
        runner.close()
        if store is not None:
            store.close()
        scheduler.tracer.footer(scheduler.at_rest)
    finally:
        if trace is not None:
            trace.close()
    return reason


def main(arguments: list[str]) -> int:
    """Entry point of the process; returns its exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s engine %(message)s", stream=sys.stderr
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server drains us
    sys.setswitchinterval(0.001)  # the loop must get its turn while the runner dispatches
    if len(arguments) != 1:
        logger.error("usage: python -m engine.worker ENDPOINT, configuration on standard input")
        return EXIT_FAULT
    channel: Channel[FromEngine, ToEngine] = Channel(arguments[0], receives=ToEngine)
    try:
        # Unbuffered: a thread that waits in a buffered read holds a lock that a clean exit needs.
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            config = EngineConfig.model_validate_json(stdin.readline())
        gone = threading.Event()
        threading.Thread(target=_watch_server, args=(gone, channel), daemon=True).start()
        serve(config, channel, gone)
    except (CannotServe, ValidationError) as error:
        logger.error("%s", error)
        channel.send(Stopped("model", str(error)))
        return EXIT_MODEL
    except UnusablePlace as error:
        logger.error("%s", error)
        channel.send(Stopped("settings", str(error)))
        return EXIT_SETTINGS
    except Exception as error:
        logger.exception("the engine fails")
        channel.send(Stopped("fault", f"{type(error).__name__}: {error}"))
        return EXIT_FAULT
    finally:
        channel.close()
    return 0


def _watch_server(gone: threading.Event, channel: Channel[FromEngine, ToEngine]) -> None:
    """Standard input ends when the server does, whatever killed it."""
    while os.read(0, 4096):
        pass
    gone.set()
    channel.wake()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    os._exit(code)  # everything is closed; taking torch apart would only take time
