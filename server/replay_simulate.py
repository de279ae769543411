"""``fsm-replay simulate``: whole clusters, from seeds with faults of every kind, or with a
workload (:mod:`server.replay_workload`)."""

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rich.markup import escape

from engine.sim.campaign import minimize, simulate
from engine.sim.draw import COMMANDS, SHAPES, scenario
from engine.sim.feeding import DEFAULT_SIZES
from server import replay_workload
from server.replay_files import EXIT_CODES, FAULTS, FITS, UNUSABLE, Commands, at_least, console

Group: TypeAlias = "argparse._ArgumentGroup"  # noqa: SLF001 - argparse has no public name for it

HELP: Final = """\
Simulate clusters: the production schedulers and routing core in virtual time,
with the hash model on simulated devices, a simulated network and a simulated
wire. There are two ways.

From seeds: requests and faults (aborts, disconnects, pauses, changes of
weights, lost messages, failed writes, crashes, freezes, partitions) are drawn
from each seed. Every invariant is checked after every event; at the end
everybody has the answer that the same request gets alone, and everything is
back at its start. A seed that fails is shortened and written as a scenario
with its trace, for `fsm-replay run`.

With --workload: requests come as a file says, on a cluster of any size. At the
end every request has one answer and the cluster is at rest; then latencies,
prefix-cache hits and page use are printed, in virtual time. A file is JSON
lines of the Mooncake form, whose hash_ids make prompts share their prefixes,
or CSV of the Azure form (TIMESTAMP,ContextTokens,GeneratedTokens); or it is
made up: synthetic:prompt=256,output=16-64,every=2ms."""

EXAMPLES: Final = f"""\
examples:
  fsm-replay simulate --seeds 1000                 seeds 0 to 999
  fsm-replay simulate --from 417 --seeds 1 --show  what one seed does
  fsm-replay simulate --shape 2+2 --commands 500   long ones, on two pairs
  fsm-replay simulate --workload conversation.jsonl --cluster 8+8 --requests 200
  fsm-replay simulate --workload synthetic:prompt=256,output=32,every=2ms --json
  fsm-replay simulate --workload azure.csv --disconnects 0.05 --trace traces
  fsm-replay check --complete traces/*.jsonl       what it wrote fits

{EXIT_CODES}"""

SEEDS: Final[dict[str, object]] = {
    "seeds": 100,
    "first": 0,
    "every": 1,
    "shape": "",
    "commands": COMMANDS,
    "jobs": 0,
    "out": Path("failures"),
    "show": False,
}
"""What goes with seeds, and what each is unless it is given."""

WORKLOAD: Final[dict[str, object]] = {
    "cluster": "1+1",
    "requests": None,
    "speed": 1.0,
    "seed": 0,
    "aborts": 0.0,
    "disconnects": 0.0,
    "page_size": DEFAULT_SIZES.page_size,
    "pages": DEFAULT_SIZES.pages,
    "rows": DEFAULT_SIZES.rows,
    "chunk": DEFAULT_SIZES.chunk,
    "step_us": DEFAULT_SIZES.costs.step_us,
    "token_us": DEFAULT_SIZES.costs.token_us,
    "check": False,
    "trace": None,
    "json": False,
}
"""What goes with a workload."""

WORD: Final = "failed seed "
"""What a line of a child that reports a failure begins with."""


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "simulate",
        help="simulate clusters: from seeds, with faults of every kind, or with a workload",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_seeds(parser.add_argument_group("from seeds"))
    _add_workload(parser.add_argument_group("with a workload"))
    _add_sizes(parser.add_argument_group("each node of a workload's cluster"))
    parser.set_defaults(handler=run)


def _add_seeds(group: Group) -> None:
    group.add_argument("--seeds", type=at_least(1), metavar="N", help="how many (100)")
    group.add_argument(
        "--from", type=at_least(0), metavar="SEED", dest="first", help="the first one (0)"
    )
    group.add_argument("--every", type=int, help=argparse.SUPPRESS)
    group.add_argument("--shape", choices=list(SHAPES), help="one cluster for all")
    group.add_argument(
        "--commands", type=at_least(1), metavar="N", help=f"about so many commands ({COMMANDS})"
    )
    group.add_argument(
        "--jobs", type=at_least(1), metavar="N", help="processes (one for each core)"
    )
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="where failing seeds are written (failures/)"
    )
    group.add_argument(
        "--show", action="store_true", default=None, help="print each scenario and its trace"
    )


def _add_workload(group: Group) -> None:
    group.add_argument("--workload", metavar="FILE", help="a trace file, or synthetic:…")
    group.add_argument(
        "--cluster", metavar="SHAPE", help="P+D prefill and decode nodes, or N unified ones (1+1)"
    )
    group.add_argument(
        "--requests",
        type=at_least(1),
        metavar="N",
        help="the first N (all of a file, 1000 made up)",
    )
    group.add_argument(
        "--speed", type=_speed, metavar="X", help="send them X times as fast as they came (1)"
    )
    group.add_argument(
        "--aborts", type=_share, metavar="P", help="share that is aborted on the way (0)"
    )
    group.add_argument(
        "--disconnects", type=_share, metavar="P", help="share whose clients leave on the way (0)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of tokens, and of who leaves (0)")
    group.add_argument(
        "--check",
        action="store_true",
        default=None,
        help="check every invariant after every event (slow)",
    )
    group.add_argument("--trace", type=Path, metavar="DIR", help="write a trace for each node")
    group.add_argument("--json", action="store_true", default=None, help="figures as JSON")


def _add_sizes(group: Group) -> None:
    sizes = DEFAULT_SIZES
    for flag, default, what in (
        ("--page-size", sizes.page_size, "tokens in a page"),
        ("--pages", sizes.pages, "pages"),
        ("--rows", sizes.rows, "requests that run at a time"),
        ("--chunk", sizes.chunk, "prompt tokens in a step"),
        ("--step-us", sizes.costs.step_us, "virtual µs that a step takes"),
        ("--token-us", sizes.costs.token_us, "and those of each token in it"),
    ):
        group.add_argument(flag, type=at_least(1), metavar="N", help=f"{what} ({default:,})")


def _speed(text: str) -> float:
    if not 0 < (value := _float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no factor above 0")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := _float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to 1")
    return value


def _float(text: str) -> float:
    """A number, or one that is in no range."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def run(options: argparse.Namespace) -> int:
    """``fsm-replay simulate``."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    workload = options.workload is not None
    own, other = (WORKLOAD, SEEDS) if workload else (SEEDS, WORKLOAD)
    for name in other:
        if name in given:
            flag = "--from" if name == "first" else f"--{name.replace('_', '-')}"
            why = "does not go with --workload" if workload else "needs --workload"
            console(stderr=True).print(f"[red]unusable[/] {flag} {why}")
            return UNUSABLE
    options = argparse.Namespace(**{**own, **given})
    return replay_workload.simulate(options) if workload else _seeds(options)


def _seeds(options: argparse.Namespace) -> int:
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
