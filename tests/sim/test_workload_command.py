"""Goal: `fsm-replay simulate --workload` says how a workload was served, the same way every time,
tells good, faulty and unusable by its exit code, and writes traces that replay clean.

Method: the command's own entry point on small workloads; bugs planted in the engine.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from server.replay import main
from server.replay_files import FAULTS, FITS, UNUSABLE
from tests.support.planted_cluster import PLANTS

SMALL = ["simulate", "--workload", "synthetic:prompt=40-90,output=3-20,every=700us"]
LINES = "".join(
    f'{{"timestamp": {40 * n}, "input_length": 1100, "output_length": 9, "hash_ids": [1, 2, {n}]}}'
    "\n"
    for n in range(3, 13)
)
WALL = ("wall_s", "core_s", "requests_per_minute_and_core")


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (FAULTS if found["faults"] else FITS)
    assert all(found.pop(name) > 0 for name in WALL)
    return found


def test_figures_are_printed_and_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    outs = []
    for _ in range(2):
        assert main([*SMALL, "--requests", "30", "--cluster", "2+2"]) == FITS
        outs.append([line for line in capsys.readouterr().out.splitlines() if "wall" not in line])
    assert outs[0] == outs[1]
    text = "\n".join(outs[0])
    assert text.startswith("30 requests on 2+2: 30 length")
    for part in ("p50", "p99", "first token (TTFT)", "mean of a request (TPOT)", "decode-1"):
        assert part in text
    assert "every request has one answer, and the cluster is at rest" in text
    assert "\x1b" not in text, "colours are for terminals"


def test_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES, encoding="utf-8")
    found = figures(capsys, "simulate", "--workload", str(path), "--cluster", "1+1")
    assert (found["requests"], found["ends"], found["faults"]) == (10, {"length": 10}, [])
    assert found["prompt_tokens"] == 10 * 1100
    assert found["hit_rate"] == pytest.approx(9 * 1024 / 11_000, abs=1e-6)
    times = found["first_token"]["quantiles"]
    assert 1 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
    assert found["token_gap"]["count"] == 10 * 8
    assert found["token_gap"]["quantiles"]["p50"] == 1.01
    assert found["nodes"]["decode-0"]["peak_pages"] >= 18
    assert 0.3 < found["seconds"] < 0.5
    slower = figures(
        capsys, "simulate", "--workload", str(path), "--step-us", "2000", "--requests", "4"
    )
    assert slower["requests"] == 4
    assert slower["token_gap"]["quantiles"]["p50"] == 2.01


def test_checking_every_event_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    leave = ["--aborts", "0.2", "--disconnects", "0.2", "--seed", "3", "--requests", "25"]
    fast = figures(capsys, *SMALL, *leave)
    assert fast["ends"]["abort"] > 2
    assert figures(capsys, *SMALL, *leave, "--check") == fast
    assert figures(capsys, *SMALL, *leave, "--seed", "4") != fast


def test_traces_replay_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "traces"
    leave = ["--aborts", "0.2", "--disconnects", "0.2"]
    arguments = [*SMALL, *leave, "--requests", "30", "--cluster", "2+1", "--trace", str(folder)]
    assert main(arguments) == FITS
    names = ["decode-0.jsonl", "prefill-0.jsonl", "prefill-1.jsonl"]
    paths = sorted(folder.iterdir())
    assert [path.name for path in paths] == names
    assert main(["check", "--complete", *map(str, paths)]) == FITS
    assert "fits:" in capsys.readouterr().out
    before = [path.read_bytes() for path in paths]
    main(arguments)
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("check", [[], ["--check"]], ids=["at the end", "at every event"])
def test_a_bug_is_a_fault(
    check: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    next(plant for plant in PLANTS if plant.name == "decode_room_is_kept").apply(monkeypatch)
    assert main([*SMALL, "--requests", "10", *check]) == FAULTS
    out = capsys.readouterr().out
    assert "fault " in out
    assert "rooms" in out
    assert "every request has one answer" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl: "),
        (["--workload", "synthetic:prompt=x"], "prompt=x is no length"),
        ([*SMALL[1:], "--cluster", "many"], "unknown cluster 'many': P+D"),
        ([*SMALL[1:], "--pages", "1"], "never fit: a node's pages hold 64"),
        ([*SMALL[1:], "--seeds", "3"], "--seeds does not go with --workload"),
        ([*SMALL[1:], "--from", "3"], "--from does not go with --workload"),
        (["--seeds", "3", "--page-size", "8"], "--page-size needs --workload"),
        (["--json"], "--json needs --workload"),
        ([*SMALL[1:], "--trace", "/dev/null/traces"], "/dev/null/traces: Not a directory"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == UNUSABLE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "0"],
        ["--speed", "0"],
        ["--aborts", "1.5"],
        ["--chunk", "x"],
        ["--speed", "x"],
    ],
)
def test_values_out_of_range_are_errors_of_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main([*SMALL, *arguments])
    assert done.value.code == UNUSABLE
    assert arguments[0] in capsys.readouterr().err


def test_the_help_shows_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["simulate", "--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    for part in ("from seeds:", "with a workload:", "hash_ids", "exit codes: 0", "examples:"):
        assert part in out
