"""Making a failing scenario small: leave lines out as long as it fails in the same way."""

import re
from collections.abc import Callable
from typing import Final

from engine.sim.language import ScenarioError
from engine.sim.scenario import Outcome, run_text

ROUNDS: Final = 400
"""Runs that one shrinking may take."""

Runner = Callable[[str], Outcome]


def kind_of(outcome: Outcome) -> str:
    """What went wrong, without names and numbers: two runs fail alike if this is equal."""
    if not outcome.faults:
        return ""
    lines = [line.strip() for line in outcome.faults[0].splitlines()]
    what = lines[1] if not lines[1].endswith(":") else f"{lines[1]} {lines[2]}"
    return re.sub(r"\br?\d+\b|'[^']*'|[\d.,\[\]~#@]+", "", what)


def shrink(text: str, run: Runner | None = None) -> str:
    """The shortest scenario found that fails as ``text`` does; ``text`` itself if it does not."""
    runner = run or (lambda each: run_text(each, "shrunk.scenario"))
    wanted = kind_of(runner(text))
    if not wanted:
        return text
    left = ROUNDS

    def fails(lines: list[str]) -> bool:
        nonlocal left
        left -= 1
        try:
            return kind_of(runner("\n".join(lines) + "\n")) == wanted
        except ScenarioError:
            return False  # something was left out that the rest needs

    lines = text.splitlines()
    size = max(1, len(lines) // 2)
    while left > 0:
        position, shorter = 1, False  # the first line builds the cluster
        while position < len(lines) and left > 0:
            attempt = lines[:position] + lines[position + size :]
            if fails(attempt):
                lines, shorter = attempt, True
            else:
                position += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return "\n".join(lines) + "\n"
