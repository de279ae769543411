"""A real server in processes of its own, for end-to-end tests, the soak run and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 60.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """A running ``interlock serve``. ``url`` has no trailing slash."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and decoded JSON (or text) of a POST, error statuses included."""
        request = urllib.request.Request(
            self.url + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def wait_at_rest(self, timeout_s: float) -> float:
        """Seconds until ``/ledger`` says that everything is back; fails after ``timeout_s``."""
        started = time.monotonic()
        while True:
            ledger = self.get("/ledger")
            waited = time.monotonic() - started
            if ledger["at_rest"]:
                return waited
            if waited > timeout_s:
                raise AssertionError(f"not at rest after {waited:.2f} s: {json.dumps(ledger)}")
            time.sleep(0.02)

    def resident_bytes(self) -> int:
        """Resident memory of the server and its engine."""
        server = psutil.Process(self.process.pid)
        return sum(p.memory_info().rss for p in [server, *server.children(recursive=True)])

    def engine_pid(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Server]:
    """Start ``interlock serve`` with ``arguments`` on a free port, and stop it by its process
    id."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "server.main", "serve", "--port", "0", *arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, **environment},
            )
        try:
            url = _wait_ready(process, log)
            yield Server(url, process, log, time.monotonic() - started)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            raise AssertionError(f"the server exited with {process.returncode}:\n{text}")
        found = re.search(r"http://127\.0\.0\.1:\d+", text)
        if found is not None:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(found[0] + "/health", timeout=5) as reply,
            ):
                if reply.status == 200:
                    return found[0]
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready in {START_TIMEOUT_S} s:\n{log.read_text()}")
