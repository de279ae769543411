"""``fsm-replay simulate``: whole clusters from seeds, with faults of every kind."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.markup import escape

from engine.sim.campaign import minimize, simulate
from engine.sim.draw import COMMANDS, SHAPES, scenario
from server.replay_files import EXIT_CODES, FAULTS, FITS, Commands, console

HELP: Final = """\
Simulate clusters: the production schedulers and routing core in virtual time, with a workload and
faults (aborts, disconnects, pauses, changes of weights, lost messages, failed writes, crashes,
freezes, partitions) drawn from a seed. Every invariant is checked after every event; at the end
everybody has the answer that the same request gets alone, and everything is back at its start.

A seed that fails is shortened and written as a scenario with its trace, for `fsm-replay run`."""

EXAMPLES: Final = f"""\
examples:
  fsm-replay simulate --seeds 1000                 seeds 0 to 999
  fsm-replay simulate --from 417 --seeds 1 --show  what one seed does
  fsm-replay simulate --shape 2+2 --commands 500   long ones, on two pairs

{EXIT_CODES}"""

WORD: Final = "failed seed "
"""What a line of a child that reports a failure begins with."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="simulate clusters from seeds, with faults of every kind",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (100)")
    parser.add_argument("--from", type=int, default=0, metavar="SEED", dest="first", help="(0)")
    parser.add_argument("--every", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=list(SHAPES), default="", help="one cluster for all")
    parser.add_argument(
        "--commands", type=int, default=COMMANDS, metavar="N", help=f"about so many ({COMMANDS})"
    )
    parser.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="processes (one for each core)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("failures"),
        metavar="DIR",
        help="where failing seeds are written (failures/)",
    )
    parser.add_argument("--show", action="store_true", help="print each scenario and its trace")
    parser.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    """``fsm-replay simulate``."""
    jobs = options.jobs or len(os.sched_getaffinity(0))
    began = time.perf_counter()
    if options.show or jobs == 1 or options.seeds < 2 * jobs:
        failed = _here(options)
    else:
        failed = _apart(options, jobs)
    if options.every == 1:
        seconds = time.perf_counter() - began
        verdict = f"{failed} failed" if failed else "all clean"
        console().print(f"{options.seeds} seeds, {verdict}, in {seconds:.1f} s")
    return FAULTS if failed else FITS


def _here(options: argparse.Namespace) -> int:
    """All seeds in this process; returns how many failed."""
    screen, failed = console(), 0
    for index in range(options.seeds):
        seed = options.first + index * options.every
        if options.show:
            screen.print(escape(scenario(seed, options.shape, options.commands)))
        outcome = simulate(seed, options.shape, options.commands)
        if options.show:
            screen.print(escape(outcome.trace))
        if outcome.faults:
            failed += 1
            failure = minimize(seed, options.shape, options.commands)
            path = failure.write(options.out)
            screen.print(f"{WORD}{seed}: {escape(str(path))}")
            screen.print(escape(failure.outcome.faults[0] if failure.outcome.faults else ""))
    return failed


def _apart(options: argparse.Namespace, jobs: int) -> int:
    """Every ``jobs``-th seed in a process of its own."""
    children = []
    for job in range(jobs):
        count = len(range(job, options.seeds, jobs))
        command = [sys.executable, "-m", "server.replay", "simulate", "--jobs", "1"]
        command += ["--seeds", str(count), "--from", str(options.first + job)]
        command += ["--every", str(jobs), "--commands", str(options.commands)]
        command += ["--out", str(options.out)]
        command += ["--shape", options.shape] if options.shape else []
        children.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment())
        )
    return sum(_collect(child) for child in children)


def _environment() -> dict[str, str]:
    """The children's: they find the same packages as this process, wherever it was started."""
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _collect(child: "subprocess.Popen[str]") -> int:
    failed = 0
    with child:
        for line in child.stdout or ():
            failed += line.startswith(WORD)
            sys.stdout.write(line)
    code = child.returncode
    if code not in (FITS, FAULTS):
        raise subprocess.CalledProcessError(code, child.args)
    return failed


__all__: Sequence[str] = ["add", "run"]
