"""Goal: `fsm-replay run` tells fitting, faulty and unusable files apart by its exit code, shows
what differs, and writes a golden trace only when asked and only for a run without faults.

Method: the command's own entry point on small files.
"""

from pathlib import Path

import pytest

from server.replay import FAULTS, FITS, UNUSABLE, main

GOOD = "cluster unified=1\nsubmit r1 prompt=20 max_tokens=3\nrun until idle\nexpect base\n"
BAD = GOOD + "expect r1 tokens=4\n"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "one.scenario"
    path.write_text(GOOD, encoding="utf-8")
    return path


def test_a_trace_is_written_once_and_then_fits(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = scenario.with_suffix(".trace")
    assert main(["run", str(scenario)]) == FITS
    assert "no golden trace yet; --rewrite writes it" in capsys.readouterr().out
    assert not trace.exists()
    assert main(["run", "--rewrite", str(scenario)]) == FITS
    assert capsys.readouterr().out == "written  one.scenario\n"
    text = trace.read_text(encoding="utf-8")
    assert "waiting -admit-> prefilling by=scheduler +prefix_locks +pages +rows" in text
    assert main(["run", "--rewrite", str(scenario)]) == FITS
    assert capsys.readouterr().out == "same     one.scenario\n"
    assert main(["run", str(scenario)]) == FITS
    assert trace.read_text(encoding="utf-8") == text


def test_a_changed_trace_is_a_fault_with_a_diff(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--rewrite", str(scenario)])
    trace = scenario.with_suffix(".trace")
    text = trace.read_text(encoding="utf-8")
    trace.write_text(text.replace("answer length", "answer stop"), encoding="utf-8")
    capsys.readouterr()
    assert main(["run", str(scenario)]) == FAULTS
    out = capsys.readouterr().out
    assert "changed  one.scenario: the golden trace differs" in out
    assert "\n-" in out
    assert "answer stop tokens=3\n+" in out
    assert "\x1b" not in out, "colours are for terminals"


def test_a_fault_is_not_written_into_a_trace(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.write_text(BAD, encoding="utf-8")
    assert main(["run", "--rewrite", str(scenario)]) == FAULTS
    out = capsys.readouterr().out
    assert f"{scenario}:5: expect r1 tokens=4" in out
    assert "r1: expected tokens=4, got 3" in out
    assert not scenario.with_suffix(".trace").exists()


def test_what_cannot_be_used_is_named_and_the_rest_still_runs(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["run", "--rewrite", str(scenario)])
    broken = scenario.with_name("broken.scenario")
    broken.write_text("cluster unified=1\nsubmitt r1\n", encoding="utf-8")
    capsys.readouterr()
    missing = scenario.with_name("missing.scenario")
    assert main(["run", str(broken), str(missing), str(scenario)]) == UNUSABLE
    out = capsys.readouterr().out
    assert f"unusable {broken}:2: unknown command 'submitt' (did you mean 'submit'?)" in out
    assert "missing.scenario" in out
    assert "fits     one.scenario" in out
    assert "1 fit, 2 unusable in" in out


def test_a_folder_is_its_files_and_skipped_ones_are_listed(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = scenario.with_name("late.scenario")
    late.write_text("requires grammar\ncluster\n", encoding="utf-8")
    assert main(["run", "--rewrite", "--quiet", str(scenario.parent)]) == FITS
    out = capsys.readouterr().out
    assert "skipped  late.scenario: requires grammar: " in out
    assert "1 fit, 1 written, 1 skipped in" in out
    assert not late.with_suffix(".trace").exists()


def test_an_empty_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path)]) == UNUSABLE
    assert "holds no *.scenario" in capsys.readouterr().out


def test_show_prints_the_trace(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--rewrite", "--show", str(scenario)])
    assert "> submit r1 prompt=20 max_tokens=3\n" in capsys.readouterr().out


def test_traces_are_written_for_what_reads_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tmp_path / "pair.scenario"
    pair.write_text(
        "cluster prefill=1 decode=1 router=1 pages=64\n"
        "skew decode-0 by=1h\n"
        "submit r1 prompt=20 max_tokens=3\n"
        "run until idle\n"
        "kill decode-0\n"
        "restart decode-0\n"
        "run 1s\n",
        encoding="utf-8",
    )
    out = tmp_path / "out"
    main(["run", "--rewrite", "--traces", str(out), str(pair)])
    files = sorted(out.iterdir())
    assert [path.name for path in files] == [
        "pair.decode-0@decode-0.1.jsonl",
        "pair.decode-0@decode-0.2.jsonl",
        "pair.prefill-0.jsonl",
    ]
    assert main([*map(str, files)]) == FITS, capsys.readouterr().out
    assert main(["show", *map(str, files), "--kind", "move"]) == FITS
    assert "cause=prefill-0:" in capsys.readouterr().out


def test_traces_of_a_run_are_whole_but_those_of_processes_that_were_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = tmp_path / "pair.scenario"
    out = tmp_path / "out"

    def check(text: str) -> tuple[int, str]:
        """The exit code of `check --complete` for the traces of this run, and what it says."""
        for path in out.iterdir() if out.exists() else ():
            path.unlink()
        cluster = "cluster prefill=1 decode=1 router=1 pages=64\n"
        pair.write_text(cluster + "submit r1 prompt=20 max_tokens=9\n" + text, encoding="utf-8")
        main(["run", "--traces", str(out), str(pair)])
        capsys.readouterr()
        code = main(["check", "--complete", *map(str, sorted(out.iterdir()))])
        return code, capsys.readouterr().out

    assert check("run until idle")[0] == FITS
    code, said = check("run until r1 tokens=3")
    assert code == FAULTS
    assert "the node stopped before it was at rest" in said, "it did not leak: the file ended"
    assert "it has no footer" not in said
    code, said = check("run until idle\nkill prefill-0\nrestart prefill-0\nrun 1s")
    assert code == FAULTS
    assert "pair.prefill-0@prefill-0.1.jsonl:10: truncated: it has no footer" in said
    assert "\n1 fault in " in said
    code, said = check("run until idle\nexpect r1 tokens=3")
    assert said.count(": truncated: it has no footer") == 2, "a fault is no orderly end"


def test_help_tells_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["run", "--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for part in ("--rewrite", "docs/scenarios.md", "exit codes: 0", "examples:"):
        assert part in out


def test_no_command_is_an_error_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == UNUSABLE
    assert "COMMAND" in capsys.readouterr().err
