"""Goal: the lifecycle does what every scenario file says, exactly as its golden trace says.

Method: run each file on the simulated cluster and compare. `fsm-replay run --rewrite` writes the
traces; a changed trace is reviewed like code.
"""

import re
from pathlib import Path

import pytest

from engine.sim.expectations import FORMS
from engine.sim.scenario import FEATURES, run_file
from engine.sim.traces import difference, golden_text, trace_path
from engine.sim.vocabulary import VERBS
from fsm.resources import RESOURCES

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


def test_the_reference_knows_every_word_of_the_language_and_every_file() -> None:
    text = (FOLDER.parents[1] / "docs" / "scenarios.md").read_text(encoding="utf-8")
    words = set(re.findall(r"[a-z]\w*", text))
    language = {verb.name for verb in VERBS.values()} | set(FORMS) | set(FEATURES)
    for verb in VERBS.values():
        language |= set(verb.options) | verb.flags
    resources = set(RESOURCES)  # named by the ledger, not by the language
    assert language - words - resources == set()
    assert {path.stem for path in FILES} - words == set(), "in no table of what is covered"


def test_a_run_is_the_same_every_time() -> None:
    path = FILES[0]
    assert golden_text(run_file(path)) == golden_text(run_file(path))
