"""``fsm-replay explore``: what it prints, and its exit codes.

Method: the command is called as a function, with small budgets; the violation is one of the
planted bugs, in place of production's design."""

from pathlib import Path

import pytest

from fsm.explore_pd_model import PairModel
from server import replay_explore
from server.replay import main
from tests.fsm.planted import PLANTED
from tests.fsm.planted_shared import PLANTED_SHARED

BUG = next(bug for bug in PLANTED if bug.name == "decode releases on abort while prefill writes")


def test_a_clean_run_prints_a_table_and_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore"]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == [
        "nodes",
        "requests",
        "budget",
        "depth",
        "states",
        "steps",
        "longest",
        "seconds",
        "a",
        "second",
    ]
    assert [line[0] for line in lines[1:4]] == ["unified", "shared,", "pd"]
    assert all(line[-1] == "fits" for line in lines[1:4])
    assert "F1 A1 D1 R0" in out
    assert "MiB of memory at most" in out
    assert "nothing found" in out


@pytest.mark.parametrize(("what", "rows"), [("unified", 1), ("shared", 1), ("pd", 1), ("all", 3)])
def test_what_to_explore(what: str, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", what, "--faults", "0", "--aborts", "0", "--deadlines", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("F0 A0 D0 R0") == rows


def test_options_reach_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "2", "--depth", "2", "--ample", "--deadlines", "0", "--aborts", "0"]
    assert main(["explore", "pd", "--faults", "0", *options]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith("pd, ample")
    assert row.split()[2] == "2"


def test_a_violation_is_printed_step_by_step_and_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_explore.Run, "model", lambda self: PairModel(BUG.design))
    assert main(["explore", "pd"]) == 1
    out = capsys.readouterr().out
    assert "violation in pd" in out
    assert BUG.says in out
    steps = [line for line in out.splitlines() if ": " in line and line.lstrip()[:1].isdigit()]
    assert len(steps) == BUG.length
    assert "client aborts" in steps[-1]


def test_an_unfinished_run_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "pd", "--limit", "200"]) == 2
    assert "not finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--faults", "4"],
        ["--requests", "3"],
        ["--depth", "0"],
        ["--limit", "0"],
        ["--limit", "-5"],
        ["router"],
    ],
)
def test_arguments_that_cannot_be_used_are_2_and_are_named(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["explore", *arguments])
    assert error.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


def test_help_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["explore", "--help"])
    assert error.value.code == 0
    out = capsys.readouterr().out
    assert "exit codes" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_the_long_runs_name_what_ci_runs_and_more() -> None:
    runs = {(run.what, run.requests, run.budget, run.depth) for run in replay_explore.LONG}
    assert len(runs) >= 6
    assert any(run.requests == 2 and run.budget.rebuilds for run in replay_explore.LONG)


def test_a_violation_is_written_as_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = next(bug for bug in PLANTED if bug.name == "decode's abort is not forwarded")
    monkeypatch.setattr(replay_explore.Run, "model", lambda self: PairModel(rules.design))
    assert main(["explore", "pd", "--traces", str(tmp_path / "out")]) == 1
    written = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in written] == ["decode-0.jsonl", "prefill-0.jsonl"]
    assert main([str(path) for path in written]) == 0, capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_explore.Run, "model", lambda self: PairModel(BUG.design))
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    assert main(["explore", "pd", "--traces", str(blocked)]) == 2
    assert "file" in capsys.readouterr().out


@pytest.mark.parametrize("together", ["group", "session"])
def test_what_two_requests_share_is_explored(
    together: str, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = ["--faults", "0", "--deadlines", "0"]
    assert main(["explore", "shared", "--together", together, *budget]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith(f"shared, {together}, 3 pages")


def test_pauses_of_either_node_are_explored(capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--faults", "0", "--aborts", "0", "--deadlines", "0", "--rebuilds", "1"]
    assert main(["explore", "pd", "--pauses", *budget]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("pd, pauses")


def test_a_violation_of_what_is_shared_is_written_as_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = next(bug for bug in PLANTED_SHARED if bug.replay == "evict")
    monkeypatch.setattr(replay_explore.Run, "model", lambda self: bug.model)
    folder = tmp_path / "out"
    assert main(["explore", "shared", "--aborts", "0", "--traces", str(folder)]) == 1
    assert [path.name for path in folder.iterdir()] == ["unified-0.jsonl"]
    assert main([str(folder / "unified-0.jsonl")]) == 1
    assert "evict" in capsys.readouterr().out
