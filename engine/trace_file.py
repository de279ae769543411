"""A trace on disk, written by a thread of its own: it never blocks the scheduler.

The thread wakes a few times a second and writes what has gathered, so a line costs the scheduler
one append. When the disk is full, or :data:`MAX_PENDING` lines wait, tracing stops with a warning
and serving goes on; the file then has no footer, which readers report as truncated."""

from __future__ import annotations

import gzip
import logging
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from fsm.trace import Line

logger = logging.getLogger(__name__)

MAX_PENDING: Final = 262_144
"""Lines in memory, about 100 MB of them."""

INTERVAL_S: Final = 0.05
"""The file lags behind by at most this much, and by what the disk takes."""

BATCH: Final = 512
"""Lines encoded at a time: the scheduler gets its turn in between."""


class TraceFile:
    """Writes lines to ``path``, replacing what is there, compressed where its name ends in
    ``.gz``. :meth:`write` is the sink for a Tracer.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw: BinaryIO = path.open("wb", buffering=0)
        self._file: BinaryIO | gzip.GzipFile = self._raw
        if path.suffix == ".gz":
            try:
                self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=1)
            except OSError:
                self._raw.close()
                raise
        self._lines: deque[Line] = deque()
        self._closing = threading.Event()
        self.stopped = ""
        """Why tracing stopped early; empty while it goes on."""
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Queue a line; never blocks."""
        if self.stopped:
            return
        self._lines.append(line)
        if len(self._lines) > MAX_PENDING:
            self._stop(f"the disk does not keep up: {MAX_PENDING} lines wait")

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        encoder = msgspec.json.Encoder()
        closing = False
        while not closing:
            closing = self._closing.wait(INTERVAL_S)
            self._drain(encoder)
        for file in (self._file, self._raw):  # closing twice does nothing
            try:
                file.close()
            except (OSError, ValueError) as error:
                self._stop(str(error))

    def _drain(self, encoder: msgspec.json.Encoder) -> None:
        """Write everything that is queued now; once tracing has stopped, forget it."""
        if self.stopped:
            self._lines.clear()
        wrote = False
        while self._lines and not self.stopped:
            batch = [self._lines.popleft() for _ in range(min(BATCH, len(self._lines)))]
            try:
                self._put(encoder.encode_lines(batch))
                wrote = True
            except (OSError, ValueError) as error:
                self._stop(str(error))
        if wrote and isinstance(self._file, gzip.GzipFile) and not self.stopped:
            try:
                self._file.flush()  # what is compressed can be read, whatever happens next
            except OSError as error:
                self._stop(str(error))

    def _put(self, data: bytes) -> None:
        """All of ``data``: a file without a buffer may take less at a time."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _stop(self, why: str) -> None:
        if not self.stopped:
            self.stopped = why
            logger.warning("tracing to %s stops: %s", self._path, why)
