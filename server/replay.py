"""``fsm-replay``: what requests did, from a trace, and what they do, from a scenario.

Exit codes: 0 everything fits, 1 faults were found, 2 something could not be used.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape

from engine.sim.campaign import traces_of
from engine.sim.scenario import Outcome, Run, ScenarioError, play
from engine.sim.traces import difference, rewrite, trace_path
from fsm.replay_links import labels
from server import (
    replay_chart,
    replay_check,
    replay_diff,
    replay_explore,
    replay_show,
    replay_simulate,
    replay_stats,
    replay_timeline,
)
from server.replay_files import FAULTS, FITS, UNUSABLE

HELP: Final = """\
Replay what requests did, and say what does not fit.
`interlock serve --trace FILE` writes traces; docs/trace-format.md describes
them."""

EPILOG: Final = """\
examples:
  fsm-replay trace.jsonl                           does it fit?
  fsm-replay show --tail 20 trace.jsonl            the last lines, readable
  fsm-replay timeline trace.jsonl -o trace.svg     a picture of it
  fsm-replay run tests/scenarios                   scenario files, replayed
  fsm-replay COMMAND --help                        more about one command

exit codes: 0 it fits · 1 faults were found · 2 a file that cannot be used"""

RUN_HELP: Final = """\
Run scenario files on a simulated cluster: the production scheduler in virtual
time, with the hash model. A run has to meet every 'expect' of its file, keep
every invariant after every event, and leave exactly the golden trace
FILE.trace that lies beside FILE.scenario, if there is one.

A folder stands for the *.scenario files in it. The language is described in
docs/scenarios.md."""

RUN_EPILOG: Final = """\
examples:
  fsm-replay run tests/scenarios                   all of them
  fsm-replay run tests/scenarios/b1*.scenario      some of them
  fsm-replay run --show tests/scenarios/b24_abort_overlapped.scenario
  fsm-replay run --rewrite tests/scenarios/b24_abort_overlapped.scenario
  fsm-replay run --traces DIR tests/scenarios/clocks_apart.scenario

exit codes: 0 all fit · 1 faults or changed traces
            2 a file that cannot be used"""


@dataclass(slots=True)
class Tally:
    """What the files of one call came to."""

    fit: int = 0
    rewritten: int = 0
    skipped: list[str] = field(default_factory=list)
    faulty: int = 0
    unusable: int = 0

    @property
    def code(self) -> int:
        if self.unusable:
            return UNUSABLE
        return FAULTS if self.faulty else FITS


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="fsm-replay",
        usage="fsm-replay [COMMAND] TRACE …",
        description=HELP,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, prog="fsm-replay"
    )
    for add in (
        replay_check.add,
        replay_show.add,
        replay_stats.add,
        replay_timeline.add,
        replay_chart.add,
        replay_diff.add,
        replay_explore.add,
        replay_simulate.add,
        add_run,
    ):
        add(commands)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] not in {*commands.choices, "-h", "--help"}:
        given.insert(0, "check")
    options = parser.parse_args(given)
    handler: Callable[[argparse.Namespace], int] = options.handler
    try:
        return handler(options)
    except BrokenPipeError:  # whoever reads has seen enough, as `head` does
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the exit
        return FAULTS


def add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The arguments of ``fsm-replay run``."""
    parser = commands.add_parser(
        "run",
        help="run scenario files and compare their golden traces",
        description=RUN_HELP,
        epilog=RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a *.scenario file, or a folder"
    )
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="write the golden traces of runs without faults; review the diff before committing",
    )
    parser.add_argument("--show", action="store_true", help="print the trace of every run")
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="write what every node did into DIR, as `serve --trace` would",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only what does not fit")
    parser.set_defaults(handler=run)


def run(options: argparse.Namespace) -> int:
    """``fsm-replay run``."""
    console = Console(highlight=False, soft_wrap=True, emoji=False)
    tally = Tally()
    began = time.perf_counter()
    try:
        files = scenario_files(options.files)
    except ValueError as error:
        console.print(f"[red]{escape(str(error))}[/]")
        return UNUSABLE
    for path in files:
        try:
            outcome, played = play(path.read_text(encoding="utf-8"), path.name, str(path))
            if played is not None and options.traces is not None:
                write_traces(options.traces, path, played)
        except ScenarioError as error:
            tally.unusable += 1
            console.print(f"[red]unusable[/] {escape(str(error))}")
            continue
        except (OSError, UnicodeDecodeError) as error:
            tally.unusable += 1
            why = error.strerror if isinstance(error, OSError) else "the file is not text"
            console.print(f"[red]unusable[/] {escape(f'{path}: {why}')}")
            continue
        report(console, path, outcome, options, tally)
    if len(files) > 1 or tally.skipped:
        summary(console, tally, time.perf_counter() - began)
    return tally.code


def scenario_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant. Raises ValueError for a folder without any."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob("*.scenario"))
        if not found:
            raise ValueError(f"{path} holds no *.scenario")
        files += found
    return files


def write_traces(folder: Path, scenario: Path, played: Run) -> None:
    """A file for each process of a run: SCENARIO.NODE.jsonl, or NODE@BOOT where a node has started
    again."""
    folder.mkdir(parents=True, exist_ok=True)
    traces, encoder = traces_of(played), msgspec.json.Encoder()
    for name, trace in zip(labels([each.header for each in traces]), traces, strict=True):
        lines = [trace.header, *(line for _, batch in trace for line in batch)]
        path = folder / f"{scenario.stem}.{name}.jsonl"
        path.write_bytes(encoder.encode_lines(lines))


def report(
    console: Console, path: Path, outcome: Outcome, options: argparse.Namespace, tally: Tally
) -> None:
    """Say how one file came out, and count it."""
    name = escape(outcome.file)
    if outcome.skipped:
        tally.skipped.append(f"{outcome.file}: {outcome.skipped}")
        return
    if options.show:
        console.print(escape(outcome.trace), end="")
    if outcome.faults:
        tally.faulty += 1
        console.print(f"[red]fault[/]    {name}")
        for fault in outcome.faults:
            console.print(escape(fault))
        return
    if options.rewrite:
        changed = rewrite(path, outcome)
        tally.rewritten += changed
        tally.fit += 1
        if changed or not options.quiet:
            word = "[yellow]written[/]" if changed else "[green]same[/]   "
            console.print(f"{word}  {name}")
        return
    new = not trace_path(path).exists()
    lines = [] if new else difference(path, outcome)
    if lines:
        tally.faulty += 1
        console.print(f"[red]changed[/]  {name}: the golden trace differs")
        for line in lines:
            colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
            console.print(f"[{colour}]{escape(line)}[/]" if colour else escape(line))
        return
    tally.fit += 1
    if not options.quiet:
        console.print(
            f"[green]fits[/]     {name:<44} "
            f"[dim]{outcome.requests:>4} requests {outcome.time_us / 1e6:>9.3f} s[/]"
            + ("  no golden trace yet; --rewrite writes it" if new else "")
        )


def summary(console: Console, tally: Tally, wall_s: float) -> None:
    """One line for all files, and the skipped ones with their reasons."""
    for reason in tally.skipped:
        console.print(f"[yellow]skipped[/]  {escape(reason)}")
    parts = [f"{tally.fit} fit"]
    parts += [f"{tally.rewritten} written"] if tally.rewritten else []
    parts += [f"{len(tally.skipped)} skipped"] if tally.skipped else []
    parts += [f"{tally.faulty} with faults"] if tally.faulty else []
    parts += [f"{tally.unusable} unusable"] if tally.unusable else []
    console.print(f"{', '.join(parts)} in {wall_s:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
