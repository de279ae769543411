"""``fsm-replay show``: the lines of traces, readable."""

import argparse
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from rich.text import Text

from fsm.replay_join import join
from fsm.replay_links import labels
from fsm.trace_read import TraceReader, Unusable
from fsm.trace_show import KINDS, Filter, Shown, Teller
from server.replay_files import (
    FITS,
    Commands,
    Faults,
    at_least,
    command,
    console,
    open_traces,
    unusable,
)

HELP: Final = """\
Print the lines of traces for people: seconds since the start, the request,
and what happened, as 'from -event-> to by=actor +taken -dropped (why)'. Lines
of several nodes are joined by cause."""

EXAMPLES: Final = """\
  fsm-replay show trace.jsonl --rid chatcmpl-17
  fsm-replay show trace.jsonl --rid 'soak-1*' --kind move --kind answer
  fsm-replay show trace.jsonl --state retracted --since 12.5 --until 13
  fsm-replay show trace.jsonl --tail 40"""

COLOURS: Final = {
    "header": "dim",
    "submit": "cyan",
    "move": "",
    "lease": "dim",
    "answer": "green",
    "footer": "dim",
    "malformed": "red",
}


def add(commands: Commands) -> None:
    parser = command(commands, "show", show, "print lines readable, all or some", HELP, EXAMPLES)
    add_filters(parser)
    parser.add_argument(
        "--tail", type=at_least(0), metavar="N", help="only the last N of what is shown"
    )


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Options that choose requests and lines; each but the times may be given several times."""
    group = parser.add_argument_group("which lines (all that are given must fit)")
    for name, what in (
        ("rid", "of this request; * and ? are wild"),
        ("life", "of this life, as in boot:17"),
        ("kind", f"of this kind: {', '.join(KINDS)}"),
        ("state", "into, out of, or in this state"),
    ):
        choices = KINDS if name == "kind" else None
        group.add_argument(
            f"--{name}",
            action="append",
            default=[],
            choices=choices,
            metavar=name.upper(),
            help=what,
        )
    group.add_argument("--since", type=float, metavar="S", help="from S seconds after the start on")
    group.add_argument("--until", type=float, metavar="S", help="up to S seconds after the start")


def filter_of(options: argparse.Namespace) -> Filter:
    return Filter(
        tuple(options.rid),
        tuple(options.life),
        tuple(options.kind),
        tuple(options.state),
        float("-inf") if options.since is None else options.since,
        float("inf") if options.until is None else options.until,
    )


def show(options: argparse.Namespace) -> int:
    """``fsm-replay show``."""
    out = console()
    try:
        readers = open_traces(options.traces)
        shown: Iterable[Shown] = _tell(readers, filter_of(options))
        if options.tail is not None:
            shown = deque(shown, maxlen=max(0, options.tail))
        for line in shown:
            out.print(_text(line, len(readers) > 1))
    except Unusable as error:
        return unusable(error)
    for reader in readers:
        if reader.cut:
            out.print(f"[yellow]{reader.name} is truncated: {reader.cut}[/]")
    return FITS


def _tell(readers: list[TraceReader], wanted: Filter) -> Iterator[Shown]:
    headers = [reader.header for reader in readers]
    names = labels(headers)
    tellers = [Teller(head, wanted, name) for head, name in zip(headers, names, strict=True)]
    for teller in tellers:
        head = teller.tell(teller.header)
        if head is not None:
            yield head
    for index, _, line in join(readers, Faults(0)):
        told = tellers[index].tell(line)
        if told is not None:
            yield told


def _text(line: Shown, several: bool) -> Text:
    text = Text(f"{line.time:12.6f}  ", style="dim")
    if several:
        text.append(f"{line.node:<11} ", style="magenta")
    text.append(f"{line.who:<16} ", style="bold")
    return text.append(line.text, style=COLOURS[line.kind])
