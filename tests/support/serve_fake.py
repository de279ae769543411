"""A whole server process in front of a fake engine process, for tests that kill one or the other.

``python -m tests.support.serve_fake [MODEL [GRACE]]`` prints ``ready PORT ENGINE-PID`` when it
serves.
"""

import asyncio
import logging
import sys

from engine.config import EngineConfig
from server.app import serve
from server.settings import ServerSettings
from tests.support.harness import bound_socket, byte_text
from transport.messages import Hello


async def main(model: str = "hash", grace: str = "5") -> int:
    """Serve until told to stop; the exit code."""
    listener = bound_socket()
    port = listener.getsockname()[1]

    async def ready(limits: Hello) -> None:
        print("ready", port, limits.info["pid"], flush=True)

    return await serve(
        listener,
        EngineConfig(model=model, hash_step_ms=2),
        ServerSettings(drain_grace_s=float(grace), engine_exit_s=0.5),
        byte_text,
        engine_command=(sys.executable, "-m", "tests.support.fake_engine"),
        on_ready=ready,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    sys.exit(asyncio.run(main(*sys.argv[1:])))
