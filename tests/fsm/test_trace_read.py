"""Reading traces: plain and gzip, whole and cut at any byte, garbage, and lines of any length."""

import gzip
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fsm import trace_read
from fsm.trace import Header, Line
from fsm.trace_read import Malformed, Read, TraceReader, Unusable
from tests.support.stories import eventful, judge, write


def read(path: Path) -> tuple[list[Read], str]:
    """All lines, and how the file breaks off."""
    reader = TraceReader(path)
    lines: list[Read] = [reader.header]
    for first, batch in reader:
        assert first == len(lines) + 1
        lines += batch
    return lines, reader.cut


@pytest.fixture
def lines() -> list[Line]:
    return eventful()


def raw(lines: Sequence[Line]) -> bytes:
    return msgspec.json.Encoder().encode_lines(lines)


@pytest.mark.parametrize("chunk", [7, 100, 1 << 18])
def test_a_whole_file(
    tmp_path: Path, lines: list[Line], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_read, "CHUNK", chunk)
    assert read(write(tmp_path / "t", lines)) == (lines, "")


def test_a_gzip_file_by_its_contents_not_its_name(tmp_path: Path, lines: list[Line]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(raw(lines)))
    assert read(path) == (lines, "")


def test_a_file_cut_anywhere(tmp_path: Path, lines: list[Line]) -> None:
    """What was written whole is read; the rest of a line is not taken for one."""
    data = raw(lines[:12])
    path = tmp_path / "t"
    head = data.index(b"\n")
    for cut in range(head, len(data)):
        path.write_bytes(data[:cut])
        got, how = read(path)
        whole = data[:cut].count(b"\n")
        ended = data[cut : cut + 1] == b"\n"  # only the line break is missing
        assert got == lines[: whole + ended]
        assert bool(how) == (data[cut - 1 : cut] != b"\n" and not ended)


def test_a_gzip_file_cut_anywhere(tmp_path: Path, lines: list[Line]) -> None:
    data = gzip.compress(raw(lines))
    path = tmp_path / "t.gz"
    rng = random.Random(0)
    for cut in rng.sample(range(200, len(data) - 1), 40):
        path.write_bytes(data[:cut])
        try:
            got, how = read(path)
        except Unusable as error:  # not even the header
            got, how = [], str(error)
        assert got == lines[: len(got)]
        assert "breaks off" in how
    path.write_bytes(data[:500] + b"\0\1\2" * 50 + data[650:])
    try:
        _, how = read(path)
    except Unusable as error:  # where it is noticed depends on every byte of the trace
        how = str(error)
    assert how


def test_malformed_lines_come_in_their_place(tmp_path: Path, lines: list[Line]) -> None:
    rows = raw(lines).splitlines()
    rows[5:5] = [b"{", b"", b'{"kind":"move"}', b'{"kind":"nothing"}', b"\xff\xfe", b"[1]"]
    path = tmp_path / "t"
    path.write_bytes(b"\n".join(rows) + b"\n")
    got, how = read(path)
    assert how == ""
    assert [line for line in got if not isinstance(line, Malformed)] == lines
    assert [type(line) for line in got[5:11]] == [Malformed] * 6
    reasons = [line.reason for line in got[5:11] if isinstance(line, Malformed)]
    assert reasons[1] == "an empty line"
    assert "missing required field" in reasons[2]


def test_random_bytes_in_the_middle(tmp_path: Path, lines: list[Line]) -> None:
    rng = random.Random(1)
    path = tmp_path / "t"
    for _ in range(50):
        rows = raw(lines).splitlines()
        garbage = rng.randbytes(rng.randrange(1, 400))
        place = rng.randrange(1, len(rows))
        path.write_bytes(b"\n".join([*rows[:place], garbage, *rows[place:]]) + b"\n")
        got, _ = read(path)
        assert [line for line in got if not isinstance(line, Malformed)] == lines
        assert any("no line of a trace" in fault.text for fault in judge(got))


def test_a_line_that_never_ends_costs_no_memory(
    tmp_path: Path, lines: list[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_read, "MAX_LINE", 2000)
    monkeypatch.setattr(trace_read, "CHUNK", 500)
    rows = raw(lines).splitlines()
    path = tmp_path / "t"
    path.write_bytes(b"\n".join([*rows[:4], b"x" * 100_000, *rows[4:]]) + b"\n")
    got, how = read(path)
    assert (how, got[4]) == ("", Malformed("longer than 2000 bytes"))
    assert [*got[:4], *got[5:]] == lines


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (random.Random(2).randbytes(3000), "line 1 is no trace header"),
        (b"\x1f\x8b" + random.Random(2).randbytes(3000), "cannot be read on|breaks off"),
        (b'{"kind":"move"}\n', "line 1 is no trace header"),
        (b'{"kind":"header","version":1}\n', "trace format version 1; this program reads"),
        (b'{"kind":"header","version":99}\n', "trace format version 99; this program reads"),
        (b"# a golden trace\n", "line 1 is no trace header"),
    ],
)
def test_what_is_no_trace_is_unusable(tmp_path: Path, contents: bytes, why: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(contents)
    with pytest.raises(Unusable, match=why):
        TraceReader(path)


def test_a_trace_without_its_header_is_unusable(tmp_path: Path, lines: list[Line]) -> None:
    with pytest.raises(Unusable, match="line 1 is no trace header but a submit line"):
        TraceReader(write(tmp_path / "t", lines[1:]))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="No such file"):
        TraceReader(tmp_path / "nothing")
    with pytest.raises(Unusable, match="directory"):
        TraceReader(tmp_path)


def test_progress_ends_at_the_size(tmp_path: Path, lines: list[Line]) -> None:
    reader = TraceReader(write(tmp_path / "t", lines))
    for _ in reader:
        pass
    assert reader.position == reader.size
    assert isinstance(reader.header, Header)
