"""Goal: the lifecycle does what every scenario file says, exactly as its golden trace says.

Method: run each file on the simulated cluster and compare. `fsm-replay run --rewrite` writes the
traces; a changed trace is reviewed like code.
"""

from pathlib import Path

import pytest

from engine.sim.scenario import run_file
from engine.sim.traces import difference, golden_text, trace_path

FOLDER = Path(__file__).parent / "scenarios"
FILES = sorted(FOLDER.glob("*.scenario"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    outcome = run_file(path)
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert not outcome.faults, "\n".join(outcome.faults)
    differs = difference(path, outcome)
    assert not differs, "\n".join(differs)


def test_there_are_scenarios_and_each_says_what_it_is_for() -> None:
    assert len(FILES) > 4
    for path in FILES:
        head = path.read_text(encoding="utf-8").splitlines()[:6]
        text = "\n".join(head)
        assert head[0].startswith("# Goal:"), f"{path.name} begins with its goal"
        assert "# Source:" in text, f"{path.name} names its source"
        assert "# Method:" in text, f"{path.name} says its method"


def test_no_trace_is_left_of_a_scenario_that_is_gone() -> None:
    assert {trace_path(path) for path in FILES} == set(FOLDER.glob("*.trace"))


def test_a_run_is_the_same_every_time() -> None:
    path = FILES[0]
    assert golden_text(run_file(path)) == golden_text(run_file(path))
