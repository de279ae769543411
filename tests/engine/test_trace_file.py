"""The trace on disk: whole after a close, readable before, compressed on demand, and no trouble
for the server when the disk is full."""

import gzip
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import trace_file
from engine.trace_file import TraceFile
from fsm.trace import Line
from fsm.trace_read import Read, TraceReader
from tests.support.stories import eventful

FULL = Path("/dev/full")


def read(path: Path) -> list[Read]:
    reader = TraceReader(path)
    return [reader.header, *(line for _, batch in reader for line in batch)]


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def lines() -> list[Line]:
    return eventful()


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_written_is_read(tmp_path: Path, lines: list[Line], name: str) -> None:
    path = tmp_path / name
    file = TraceFile(path)
    for line in lines:
        file.write(line)
    file.close()
    assert read(path) == lines
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert file.stopped == ""


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_it_can_be_read_while_it_is_written(tmp_path: Path, lines: list[Line], name: str) -> None:
    """And after a kill, which closes nothing."""
    path = tmp_path / name
    file = TraceFile(path)
    for line in lines[:20]:
        file.write(line)
    eventually(lambda: path.stat().st_size > 200 and len(read(path)) == 20)
    file.close()


def test_it_replaces_what_is_there(tmp_path: Path, lines: list[Line]) -> None:
    path = tmp_path / "t"
    path.write_text("old")
    file = TraceFile(path)
    file.write(lines[0])
    file.close()
    assert read(path) == lines[:1]


def test_a_compressed_file_is_whole(tmp_path: Path, lines: list[Line]) -> None:
    path = tmp_path / "t.gz"
    file = TraceFile(path)
    for line in lines:
        file.write(line)
    file.close()
    assert gzip.decompress(path.read_bytes()).count(b"\n") == len(lines)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_stops_tracing_and_nothing_else(
    lines: list[Line], caplog: pytest.LogCaptureFixture
) -> None:
    file = TraceFile(FULL)
    file.write(lines[0])
    eventually(lambda: file.stopped != "")
    for line in lines:
        file.write(line)
    file.close()
    assert "No space left" in file.stopped
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "tracing to /dev/full stops" in warnings[0].getMessage()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_compressed_file_on_a_full_disk_cannot_be_created(tmp_path: Path) -> None:
    """It begins with a header of its own: whoever starts the server learns it at once."""
    path = tmp_path / "t.gz"
    path.symlink_to(FULL)
    with pytest.raises(OSError, match="No space left"):
        TraceFile(path)


def test_a_disk_that_fails_at_the_end(tmp_path: Path, lines: list[Line]) -> None:
    """A compressed file writes its last bytes when it is closed."""
    file = TraceFile(tmp_path / "t.gz")
    file._raw.close()
    file.write(lines[0])
    file.close()
    assert file.stopped


class Slow:
    """A file that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.go = False
        self.taken = 0
        self.asked = False

    def write(self, data: memoryview) -> int:
        self.asked = True
        while not self.go:
            time.sleep(0.001)
        taken = min(100, len(data))
        self.taken += taken
        return taken

    def close(self) -> None: ...


def test_a_disk_that_does_not_keep_up(
    tmp_path: Path, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing never waits, and what waits is bounded."""
    monkeypatch.setattr(trace_file, "MAX_PENDING", 1000)
    slow = Slow()
    file = TraceFile(tmp_path / "t")
    file._raw.close()
    file._raw = file._file = slow  # type: ignore[assignment]
    file.write(lines[0])
    eventually(lambda: slow.asked)
    began = time.monotonic()
    for _ in range(20):
        for line in lines:
            file.write(line)
    assert time.monotonic() - began < 5
    assert file.stopped == "the disk does not keep up: 1000 lines wait"
    slow.go = True
    file.close()
    assert slow.taken > 0
    assert not file._lines


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TraceFile(tmp_path / "no" / "t")
