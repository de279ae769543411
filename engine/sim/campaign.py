"""Simulations by seed: run them, judge their traces a second time, and keep what fails.

While a simulation runs, every check of :mod:`engine.sim.checks` follows every event. Afterwards the
traces of all processes are joined and replayed through fresh books (:mod:`fsm.replay`), which know
nothing of the engine.
"""

from dataclasses import dataclass
from pathlib import Path

from engine.sim.draw import COMMANDS, scenario
from engine.sim.scenario import Outcome, Run, play
from engine.sim.shrink import shrink
from engine.sim.traces import golden_text, trace_path
from fsm.replay_faults import Fault
from fsm.replay_join import replay
from fsm.trace import Header
from fsm.trace_read import TraceLines


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that failed: what it found, and the shortest scenario that finds it."""

    seed: int
    faults: list[str]
    text: str
    outcome: Outcome

    def write(self, folder: Path) -> Path:
        """Write the scenario and its trace; returns the scenario's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"seed_{self.seed}.scenario"
        head = (
            f"# Goal: what seed {self.seed} found does not happen.\n"
            f"# Source: simulation, seed {self.seed}\n"
            "# Method: drawn at random, then shortened.\n\n"
        )
        path.write_text(head + self.text, encoding="utf-8")
        trace = golden_text(self.outcome) + "".join(f"! {each}\n" for each in self.outcome.faults)
        trace_path(path).write_text(trace, encoding="utf-8")
        return path


def simulate(seed: int, shape: str = "", commands: int = COMMANDS) -> Outcome:
    """One simulation. The same seed gives the same outcome, byte for byte, on every machine."""
    return judge(scenario(seed, shape, commands), f"seed_{seed}")


def judge(text: str, name: str) -> Outcome:
    """Run a scenario, and replay the traces of all its processes."""
    outcome, run = play(text, name)
    if run is not None and not outcome.faults:
        outcome.faults += replay_faults(run)
    return outcome


def replay_faults(run: Run) -> list[str]:
    """What does not fit in the traces of a run, joined by cause, by the same judge as ``fsm-replay
    TRACE …``."""
    found: list[Fault] = []
    for node in replay(traces_of(run), found.append):
        node.finish("", complete=False)
    return [f"replay:\n  {fault}" for fault in found[:20]]


def traces_of(run: Run) -> list[TraceLines]:
    """The trace of every process that there ever was."""
    traces = []
    for process in run.cluster.processes():
        header, *lines = process.book.lines
        assert isinstance(header, Header)
        traces.append(TraceLines(process.name, header, lines))
    return traces


def minimize(seed: int, shape: str = "", commands: int = COMMANDS) -> Failure:
    """Shrink a seed that fails."""
    name = f"seed_{seed}"
    text = scenario(seed, shape, commands)
    faults = judge(text, name).faults
    small = shrink(text, lambda each: judge(each, name))
    return Failure(seed, faults, small, judge(small, name))
