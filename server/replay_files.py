"""What the subcommands of ``fsm-replay`` that read traces share: files, progress, exit codes."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from fsm.replay_faults import Fault
from fsm.trace_read import TraceReader, Unusable

FITS: Final = 0
FAULTS: Final = 1
UNUSABLE: Final = 2

DONE: Final = "0 done"
JUDGED: Final = "0 it fits · 1 faults were found"
"""What the exit codes mean of subcommands that look for no faults, and of those that do."""
UNUSABLE_MEANS: Final = "2 a file that cannot be used"
EXIT_CODES: Final = f"exit codes: {JUDGED} · {UNUSABLE_MEANS}"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001
"""What ``add_subparsers`` returns; argparse has no public name for it."""

BIG: Final = 8 << 20
"""Bytes of traces from which on a terminal is shown progress."""


def command(
    commands: Commands,
    name: str,
    handler: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    examples: str,
    traces: tuple[str, ...] = (),
    codes: str = DONE,
) -> argparse.ArgumentParser:
    """The parser of a subcommand that reads traces: any number, or one for each name. ``codes``
    says what the exit codes 0 and, where there is one, 1 mean."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"examples:\n{examples}\n\nexit codes: {codes} · {UNUSABLE_MEANS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name in traces:
        parser.add_argument(name, type=Path, help="a trace, plain or .gz")
    if not traces:
        parser.add_argument(
            "traces", nargs="+", type=Path, metavar="TRACE", help="a trace, plain or .gz"
        )
    parser.set_defaults(handler=handler)
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number from ``least`` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return number


def output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help=f"write {what} here, not to the terminal"
    )


def console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


def open_traces(paths: Sequence[Path]) -> list[TraceReader]:
    """Readers of all traces. Raises :class:`Unusable` for the first that cannot be used."""
    readers: list[TraceReader] = []
    try:
        for path in paths:
            readers.append(TraceReader(path))  # noqa: PERF401 - those before a bad one are closed
    except Unusable:
        for reader in readers:
            reader.close()
        raise
    processes = {(reader.header.node, reader.header.boot_id) for reader in readers}
    if len(processes) < len(readers):
        for reader in readers:
            reader.close()
        raise Unusable("two traces are of the same process: read them one at a time")
    return readers


@contextlib.contextmanager
def progress(readers: Sequence[TraceReader]) -> Iterator[Callable[[], None]]:
    """Call what this yields now and then: on a terminal, big traces have a progress bar."""
    screen = console(stderr=True)
    size = sum(reader.size for reader in readers)
    if not screen.is_terminal or size < BIG:
        yield lambda: None
        return
    columns = (
        TextColumn("reading"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=size)
        yield lambda: bar.update(task, completed=sum(reader.position for reader in readers))


def unusable(error: Unusable | OSError) -> int:
    """Say why something cannot be used; returns the exit code."""
    why = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        why = f"{error.filename}: {error.strerror}"
    console(stderr=True).print(f"[red]unusable[/] {escape(why)}")
    return UNUSABLE


class Faults:
    """Prints the first ``limit`` faults, and counts all."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit
        self._console = console()

    def __call__(self, fault: Fault) -> None:
        self.count += 1
        if not self._limit or self.count <= self._limit:
            self._console.print(f"[red]fault[/] {escape(str(fault))}")
        elif self.count == self._limit + 1:
            self._console.print(f"[dim]… the faults after the first {self._limit} are counted[/]")
