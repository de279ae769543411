"""A trace on disk, written by a thread of its own: it never blocks the scheduler.

When the disk is full, or cannot keep up with :data:`MAX_PENDING` lines, tracing stops with a
warning and serving goes on; the file then has no footer, which readers report as truncated."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import Final

import msgspec

from fsm.trace import Line

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 65_536


class TraceFile:
    """Writes lines to ``path``, replacing what is there. :meth:`write` is the sink for a Tracer.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._path = path
        self._lines: queue.Queue[Line | None] = queue.Queue(MAX_PENDING)
        self.stopped = ""
        """Why tracing stopped early; empty while it goes on."""
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Queue a line; never blocks."""
        if self.stopped:
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._stop(f"the disk does not keep up with {MAX_PENDING} lines")

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        buffer = bytearray()
        running = True
        with contextlib.closing(self._file):
            while running:
                batch = [self._lines.get()]
                with contextlib.suppress(queue.Empty):
                    while len(batch) < 1024:
                        batch.append(self._lines.get_nowait())
                running = None not in batch
                buffer.clear()
                for line in batch:
                    if line is not None:
                        buffer += encoder.encode(line) + b"\n"
                self._flush(buffer)

    def _flush(self, buffer: bytearray) -> None:
        if self.stopped:
            return
        try:
            self._file.write(buffer)
            self._file.flush()
        except OSError as error:
            self._stop(str(error))

    def _stop(self, why: str) -> None:
        self.stopped = why
        logger.warning("tracing to %s stops: %s", self._path, why)
