"""``fsm-replay`` on traces: exit codes, what is printed, filters, pictures, and the help."""

import csv
import io
import json
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fsm.trace import AnswerLine, Footer, Header, Line, MoveLine
from server.replay import main
from server.replay_files import FAULTS, FITS, UNUSABLE
from tests.support.stories import eventful, write

Run = Callable[..., tuple[int, str, str]]
SUBCOMMANDS = (
    *("check", "show", "timeline", "stats", "chart", "diff"),
    *("run", "explore", "simulate"),
)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def lines() -> list[Line]:
    return eventful()


@pytest.fixture
def trace(tmp_path: Path, lines: list[Line]) -> Path:
    return write(tmp_path / "trace.jsonl", lines)


# --- check ----------------------------------------------------------------------------------------


def test_a_trace_that_fits(run: Run, trace: Path, lines: list[Line]) -> None:
    code, out, err = run(trace)
    assert (code, err) == (FITS, "")
    assert "14 requests · 5 abort, 1 error, 7 length, 1 stop" in out
    assert f"fits: {len(lines)} lines in" in out
    assert run("check", trace)[0] == FITS
    assert run("-q", trace) == (FITS, "", "")


def test_faults_have_file_line_and_request(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    index = next(i for i, line in enumerate(lines) if isinstance(line, AnswerLine))
    answer = lines[index]
    assert isinstance(answer, AnswerLine)
    path = write(tmp_path / "bad", [*lines[:index], replace(answer, tokens=9), *lines[index + 1 :]])
    code, out, _ = run(path)
    assert code == FAULTS
    assert f"fault {path}:{index + 1}: refused (boot:1): answers 9 tokens; its move says 0" in out
    assert "1 fault in" in out


def test_many_faults_are_counted(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    bad = [replace(x, by="nobody") if isinstance(x, MoveLine) else x for x in lines]
    moves = sum(isinstance(line, MoveLine) for line in lines)
    path = write(tmp_path / "bad", bad)
    code, out, _ = run("--limit", 3, path)
    assert code == FAULTS
    assert out.count("fault ") == 3
    assert "the faults after the first 3 are counted" in out
    assert int(re.findall(r"(\d+) faults in", out)[0]) >= moves
    assert run("--limit", 0, path)[1].count("fault ") >= moves


def test_a_trace_that_was_cut(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    path = write(tmp_path / "cut", lines[:50])
    path.write_bytes(path.read_bytes()[:-9])
    code, out, _ = run(path)
    assert code == FITS
    assert "truncated: it breaks off in the middle of a line" in out
    assert "requests are open at the end" in out
    assert run("--complete", path)[0] == FAULTS


def test_what_cannot_be_used(run: Run, tmp_path: Path, trace: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for command in ((), ("show",), ("stats",), ("timeline",), ("chart",)):
        code, out, err = run(*command, empty)
        assert (code, out) == (UNUSABLE, "")
        assert "the file is empty" in err
    assert run("diff", trace, empty)[0] == UNUSABLE
    code, _, err = run(trace, trace)
    assert code == UNUSABLE
    assert "two traces are of the same process" in err


def test_nodes_are_joined_by_cause(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    """A line waits for what caused it, whatever the clocks say; a cause that never comes is a
    fault."""
    other = [replace(line, node="unified-1") for line in lines]
    other = [
        replace(line, cause=("unified-1", line.cause[1]))
        if isinstance(line, MoveLine) and line.cause is not None
        else line
        for line in other
    ]
    index = next(
        i for i, line in enumerate(other) if isinstance(line, MoveLine) and line.event == "abort"
    )
    cause = lines[-2]
    assert not isinstance(cause, Header | Footer)
    line = other[index]
    assert isinstance(line, MoveLine)
    other[index] = replace(line, cause=("unified-0", cause.seq), boot="boot")
    left, right = write(tmp_path / "left", lines), write(tmp_path / "right", other)
    code, out, _ = run(left, right)
    assert code == FITS, out
    shown = run("show", left, right, "--kind", "move")[1].splitlines()
    place = next(i for i, row in enumerate(shown) if f"cause=unified-0:{cause.seq}" in row)
    assert not any(" unified-0 " in row for row in shown[place:])

    other[index] = replace(line, cause=("unified-0", 9999), boot="boot")
    code, out, _ = run(left, write(right, other))
    assert code == FAULTS
    assert "its cause unified-0:9999 is not in that trace, which ends with seq" in out


# --- show -----------------------------------------------------------------------------------------


def test_show_prints_every_line(run: Run, trace: Path, lines: list[Line]) -> None:
    code, out, _ = run("show", trace)
    rows = out.splitlines()
    assert (code, len(rows)) == (FITS, len(lines))
    assert "boot boot, charts unified=" in rows[0]
    assert rows[-1].endswith("the end, at rest")
    assert "waiting -admit-> prefilling by=scheduler +prefix_locks +pages=3 +rows" in out
    assert re.search("given-up +prefetches quarantine 1\n", out)
    assert re.search("quarantine:boot:4 +prefetches release 1\n", out)


def test_show_filters(run: Run, trace: Path) -> None:
    def rows(*options: object) -> list[str]:
        return run("show", trace, *options)[1].splitlines()

    assert {row.split()[1] for row in rows("--rid", "group*")} == {"group#0", "group#1"}
    assert all("answer " in row for row in rows("--kind", "answer"))
    assert len(rows("--kind", "answer")) == 14
    assert len(rows("--kind", "answer", "--kind", "submit")) == 28
    assert all("boot:2" in row or "grows" in row for row in rows("--life", "boot:2"))
    retracted = rows("--state", "retracted")
    assert len(retracted) == 2
    assert "-quiesce-> retracted" in retracted[0]
    assert "retracted -readmit->" in retracted[1]
    assert rows("--tail", 2) == rows()[-2:]
    early = rows("--until", 0.002)
    assert early
    assert [*early, *rows("--since", 0.0020001)] == rows()
    assert rows("--rid", "nobody") == []


# --- stats ----------------------------------------------------------------------------------------


def test_stats_as_table_json_and_csv(run: Run, trace: Path, tmp_path: Path) -> None:
    code, out, _ = run("stats", trace)
    assert code == FITS
    assert "unified-0: 14 requests, 0 open at the end" in out
    assert re.search(r"retracted +1 ", out)
    _, out, _ = run("stats", trace, "--json")
    figures = json.loads(out)["unified-0"]
    assert figures["states"]["decoding"]["entries"] == 11
    assert figures["resources"]["pages"]["total"] == 20
    assert figures["resources"]["rows"]["peak"] <= 4
    assert figures["endings"]["abort 503"]["count"] == 2
    assert figures["requests"]["retractions"] == 1
    _, out, _ = run("stats", trace, "--csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert {row["node"] for row in table} == {"unified-0"}
    entries = {row["name"]: row["value"] for row in table if row["measure"] == "entries"}
    assert entries["decoding"] == "11"
    path = tmp_path / "stats.csv"
    assert run("stats", trace, "--csv", "-o", path) == (FITS, "", "")
    assert path.read_text() == out


# --- pictures -------------------------------------------------------------------------------------


def test_a_timeline(run: Run, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "t.svg"
    code, out, _ = run("timeline", trace, "-o", picture)
    assert (code, out) == (FITS, f"{picture}: 14 of 14 requests\n")
    root = ET.fromstring(picture.read_text())
    words = list(root.itertext())
    for word in ("grows", "group#1", "prefilling", "retraction", "answer: abort, error"):
        assert word in words
    assert any("retracted: forced" in word for word in words)
    assert "KV pages, unified-0" in words


def test_a_timeline_of_some(run: Run, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "t.svg"
    out = run("timeline", trace, "-o", picture, "--limit", 5, "--page", 3)[1]
    assert out == f"{picture}: 4 of 14 requests, page 3 of 3\n"
    assert "requests 11 to 14 of 14" in picture.read_text()
    assert run("timeline", trace, "-o", picture, "--rid", "g*")[1].endswith(": 4 of 4 requests\n")
    assert run("timeline", trace, "-o", picture, "--rid", "no")[1].endswith(": 0 of 0 requests\n")
    ET.fromstring(picture.read_text())
    out = run("timeline", trace, "-o", picture, "--until", 0.001)[1]
    assert out.endswith(": 4 of 4 requests\n")


def test_a_timeline_escapes_names(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    named = [
        replace(line, rid='<&"grows">') if "rid" in line.__struct_fields__ else line
        for line in lines
    ]
    picture = tmp_path / "t.svg"
    assert run("timeline", write(tmp_path / "t", named), "-o", picture)[0] == FITS
    words = list(ET.fromstring(picture.read_text()).itertext())
    assert '<&"grows">' in words


def test_a_chart_with_counts(run: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.dot"
    assert run("chart", "--dot", trace, "-o", path)[0] == FITS
    text = path.read_text()
    assert "<b>11</b>&#160;prefilled" in text
    assert "unified-0: 14 requests in" in text
    assert "11 ×" in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="drawing needs the program `dot`")
def test_a_chart_as_a_picture(run: Run, trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "c.svg"
    assert run("chart", trace, "-o", path) == (FITS, f"{path}: 14 requests\n", "")
    assert "svg" in ET.fromstring(path.read_text()).tag


# --- diff -----------------------------------------------------------------------------------------


def test_a_trace_is_like_itself_whatever_the_times(
    run: Run, trace: Path, tmp_path: Path, lines: list[Line]
) -> None:
    later = [replace(line, time=line.time * 3 + 1) for line in lines]
    code, out, _ = run("diff", trace, write(tmp_path / "later", later))
    assert (code, out) == (FITS, "alike: 14 and 14 requests, paired by rid\n")


def test_the_first_difference_of_each_request(
    run: Run, trace: Path, tmp_path: Path, lines: list[Line]
) -> None:
    changed: list[Line] = []
    for line in lines:
        new = line
        if isinstance(line, MoveLine) and (line.rid, line.event) == ("grows", "retract"):
            new = replace(line, event="abort", target="stopping")
        if isinstance(line, AnswerLine) and line.rid == "turn":
            new = replace(line, reason="stop")
        changed.append(new)
    code, out, _ = run("diff", trace, write(tmp_path / "other", changed))
    assert code == FAULTS
    first, second, third = out.splitlines()
    assert first == (
        "grows after prefilling -prefilled-> decoding: "
        "decoding -retract-> retracting | decoding -abort-> stopping"
    )
    assert second.endswith(": answer length of 3 tokens | answer stop of 3 tokens")
    assert third == "2 differ: 14 and 14 requests, paired by rid"


def test_requests_of_one_side_only(run: Run, tmp_path: Path, lines: list[Line]) -> None:
    fewer = [
        line
        for line in lines
        if "rid" not in line.__struct_fields__ or line.rid != "turn"  # type: ignore[union-attr]
    ]
    left, right = write(tmp_path / "left", lines), write(tmp_path / "right", fewer)
    assert run("diff", left, right)[1].startswith("turn: submit of 5 tokens for 3 with ")
    assert " | nothing" in run("diff", left, right)[1]
    assert "nothing | submit" in run("diff", right, left)[1]
    assert "paired by order" in run("diff", "--by", "order", left, right)[1]


# --- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "least"),
    [("check", "--limit", 0), ("show", "--tail", 0), ("timeline", "--limit", 1)],
)
def test_a_number_that_cannot_be_is_refused(
    name: str, option: str, least: int, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for wrong in ("-1", "many"):
        with pytest.raises(SystemExit) as exit_:
            main([name, f"{option}={wrong}", str(trace)])
        assert exit_.value.code == UNUSABLE
        assert f"{wrong!r} is no whole number from {least} on" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_named(run: Run, trace: Path, tmp_path: Path) -> None:
    code, _, err = run("timeline", trace, "-o", tmp_path)
    assert (code, err) == (UNUSABLE, f"unusable {tmp_path}: Is a directory\n")


def test_a_scenario_that_cannot_be_read_is_named(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.scenario"
    assert run("run", path)[:2] == (UNUSABLE, f"unusable {path}: No such file or directory\n")
    path.write_bytes(b"\xff")
    assert run("run", path)[:2] == (UNUSABLE, f"unusable {path}: the file is not text\n")


# --- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_explains_itself_with_an_example(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as exit_:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "examples:\n  fsm-replay " in out
    assert "exit codes: 0 " in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_the_command_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in SUBCOMMANDS:
        assert re.search(rf"^    {name} +\w", out, re.MULTILINE)
