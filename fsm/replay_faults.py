"""What does not fit, in words."""

from collections.abc import Iterable
from dataclasses import dataclass

from fsm.replay_lives import Life, Step, Tables
from fsm.trace import MoveLine, Numbered


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that does not fit: ``line`` of ``file``, about ``who`` (a request, an owner)."""

    file: str
    line: int
    who: str
    text: str

    def __str__(self) -> str:
        who = f"{self.who}: " if self.who else ""
        return f"{self.file}:{self.line}: {who}{self.text}"


def names(words: Iterable[str]) -> str:
    return ", ".join(words)


def ended(reason: str, status: int | None, message: str) -> str:
    """An answer in a few words."""
    return f"{reason!r}" + (f" {status}" if status else "") + (f" ({message})" if message else "")


def unknown_life(life: str, boot_id: str, minted: int) -> str:
    """Why nobody is known by the name of ``life``, after ``minted`` lives of ``boot_id``."""
    boot, _, number = life.rpartition(":")
    if boot != boot_id or not number.isdecimal():
        return f"the life is not of this boot ({boot_id})"
    if int(number) <= minted:
        return "a stale life: it has ended"
    return "a life that never began"


def order_faults(line: Numbered, seq: int, time: float, node: str) -> list[str]:
    """What is wrong with the place of ``line`` after one with ``seq`` at ``time`` on ``node``."""
    faults = []
    due = seq + 1
    if line.seq > due:
        missing = "1 line is" if line.seq == due + 1 else f"{line.seq - due} lines are"
        faults.append(f"seq {line.seq} where {due} was due: {missing} missing")
    elif line.seq < due:
        faults.append(f"seq {line.seq} again, where {due} was due")
    if line.time < time:
        faults.append(f"time goes back from {time:.6f} to {line.time:.6f} s")
    if line.node != node:
        faults.append(f"a line of node {line.node!r} in the trace of {node!r}")
    return faults


def diagnose(line: MoveLine, life: Life, tables: Tables) -> tuple[list[str], Step | None]:
    """The faults of ``line``, and the move that was probably meant; None where nothing fits."""
    table = tables.steps(life.kit)
    here = table[life.stage]
    faults = []
    if line.source != life.stage:
        faults.append(f"moves from {line.source}; it is in {life.stage}")
        meant = here.get(line.event)
        if (meant is None or meant.target != line.target) and line.source in table:
            here = table[line.source]  # it is not the name that is wrong: a move is missing
    step = here.get(line.event)
    if step is None:
        source = line.source if here is table.get(line.source) else life.stage
        faults.append(
            f"no edge {line.event!r} leaves {source}; its edges are {names(here) or 'none'}"
        )
        step = next((other for other in here.values() if other.target == line.target), None)
        if step is None:
            return faults, None
    if line.target != step.target:
        faults.append(
            f"{step.event} leads from {step.source} to {step.target}, not to {line.target}"
        )
    if line.by not in step.by:
        faults.append(
            f"{step.event} of {step.source} is caused by {names(step.by)}, not by {line.by}"
        )
    for word, has, wanted in (
        ("takes", line.taken, step.taken),
        ("drops", line.dropped, step.dropped),
    ):
        if has != wanted:
            faults.append(
                f"{word} {names(has) or 'nothing'}; from {step.source} to {step.target} it"
                f" {word} {names(wanted) or 'nothing'}"
            )
    return faults, step
