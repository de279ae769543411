"""Golden traces: the file beside each scenario that says, line by line, what happens in it.

A changed trace is a changed behaviour. It is rewritten on demand, and then reviewed as a diff.
"""

import difflib
from pathlib import Path
from typing import Final

from engine.sim.scenario import Outcome

DIFF_LIMIT: Final = 80
"""Lines of a difference that are shown."""


def trace_path(scenario: Path) -> Path:
    return scenario.with_suffix(".trace")


def golden_text(outcome: Outcome) -> str:
    """The contents of the golden trace of a run."""
    return f"# {outcome.file}: time in ms, request, what happened\n{outcome.trace}"


def difference(scenario: Path, outcome: Outcome) -> list[str]:
    """How the run differs from its golden trace, as a unified diff; empty when it does not."""
    path = trace_path(scenario)
    if not path.exists():
        return [f"there is no {path.name} yet; --rewrite writes it"]
    lines = list(
        difflib.unified_diff(
            path.read_text(encoding="utf-8").splitlines(),
            golden_text(outcome).splitlines(),
            path.name,
            "this run",
            lineterm="",
        )
    )
    if len(lines) > DIFF_LIMIT:
        lines = [*lines[:DIFF_LIMIT], f"… {len(lines) - DIFF_LIMIT} more lines differ"]
    return lines


def rewrite(scenario: Path, outcome: Outcome) -> bool:
    """Write the golden trace; returns whether it changed."""
    path, text = trace_path(scenario), golden_text(outcome)
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True
