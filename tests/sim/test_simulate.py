"""Goal: clusters of every shape, with faults of every kind, answer everybody rightly and come to
rest; the same seed is the same run; and a bug anywhere is found, shortened and kept.

Method: seeds. The planted bugs are in `tests/support/planted_cluster.py`.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from engine.sim.campaign import judge, minimize, simulate
from engine.sim.draw import SHAPES, scenario
from engine.sim.language import parse
from engine.sim.scenario import run_text
from engine.sim.shrink import kind_of, shrink
from server.replay import main
from server.replay_files import FAULTS, FITS, UNUSABLE
from tests.support.planted_cluster import PLANTS, Plant

SEEDS = 50
HUNT = 60
"""Seeds within which each planted bug is found."""


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_seeds_are_clean(first: int) -> None:
    for seed in range(first, first + 10):
        outcome = simulate(seed)
        assert not outcome.faults, f"seed {seed}: {outcome.faults[0]}\n{scenario(seed)}"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_serves(shape: str) -> None:
    outcome = simulate(1, shape, 40)
    assert not outcome.faults, outcome.faults[0]
    assert outcome.requests > 0


def test_a_seed_is_one_run_whatever_the_hash_seed() -> None:
    root = Path(__file__).parents[2]
    script = (
        "import hashlib; from engine.sim.campaign import simulate\n"
        "print(hashlib.sha256(''.join(simulate(s).trace for s in (3, 8)).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    here = "".join(simulate(seed).trace for seed in (3, 8)).encode()
    assert digests == {hashlib.sha256(here).hexdigest()}


def test_what_is_drawn_is_a_scenario_that_can_be_read() -> None:
    for seed in range(200):
        assert parse(scenario(seed), "drawn")[0].verb == "cluster"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant.apply(monkeypatch)
    for seed in range(HUNT):
        found = simulate(seed, plant.shape).faults
        if found:
            assert "AttributeError" not in found[0], "the plant itself is broken"
            return
    pytest.fail(f"{plant.name}: not found in {HUNT} seeds")


def test_a_failing_seed_is_shortened_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = next(plant for plant in PLANTS if plant.name == "done_is_said_too_early")
    plant.apply(monkeypatch)
    seed = next(seed for seed in range(HUNT) if simulate(seed, "1+1").faults)
    failure = minimize(seed, "1+1")
    assert len(failure.text.splitlines()) < len(scenario(seed, "1+1").splitlines()) / 2
    path = failure.write(tmp_path)
    assert judge(path.read_text(encoding="utf-8"), path.name).faults
    assert "\n! " in path.with_suffix(".trace").read_text(encoding="utf-8")


def test_shrinking_keeps_what_it_needs() -> None:
    text = (
        "cluster unified=1\nsubmit r1 prompt=4 max_tokens=3\nsubmit r2\nrun 1ms\nrun until idle\n"
        "expect r1 tokens=4\nexpect base\n"
    )
    small = shrink(text)
    assert "expect r1 tokens=4" in small
    assert "r2" not in small
    assert "expected tokens" in kind_of(run_text(small, "small"))
    assert shrink("cluster unified=1\n") == "cluster unified=1\n"


def test_the_command_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--seeds", "4", "--commands", "20", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--jobs", "2"]) == FITS
    assert "4 seeds, all clean, in" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--seeds", "-1"), ("--seeds", "0"), ("--commands", "0"), ("--from", "-1"), ("--jobs", "0")],
)
def test_numbers_that_name_no_seeds_are_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["simulate", option, value])
    assert done.value.code == UNUSABLE
    assert f"argument {option}: {value!r}" in capsys.readouterr().err


def test_the_command_writes_what_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    next(plant for plant in PLANTS if plant.name == "decode_room_is_kept").apply(monkeypatch)
    arguments = ["simulate", "--seeds", "2", "--shape", "1+1", "--commands", "15", "--jobs", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == FAULTS
    assert "failed seed" in capsys.readouterr().out
    assert list(tmp_path.glob("seed_*.scenario"))
