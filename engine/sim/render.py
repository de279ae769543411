"""A trace as text that people read and review: one line for each submission, move, lease, answer.

The columns are virtual time in milliseconds, the request by the name that the scenario gave it,
and what happened: ``from -event-> to by=actor +taken -dropped (why)``. Lives, sequence numbers and
chart fingerprints are left out, because a diff of a golden trace should show changes of behaviour
only.
"""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from engine.sim.book import Book
from fsm.ledger import QUARANTINE
from fsm.trace import AnswerLine, LeaseLine, Line, MoveLine, SubmitLine

Detail: TypeAlias = Literal["full", "moves", "answers"]

TIME: Final = 12
"""Width of the column of virtual time."""

_SHOWN: Final[dict[str, tuple[type, ...]]] = {
    "full": (SubmitLine, MoveLine, LeaseLine, AnswerLine),
    "moves": (SubmitLine, MoveLine, AnswerLine),
    "answers": (AnswerLine,),
}


def render(
    lines: Sequence[tuple[Book, Line]], detail: Detail = "full", nodes: bool = False
) -> list[str]:
    """The text of some lines; ``detail`` says which kinds are shown, ``nodes`` whether each says
    where it was written."""
    shown = _SHOWN[detail]
    out = []
    for book, line in lines:
        if isinstance(line, shown):
            text = _line(book, line)
            out.append(f"{text[:TIME]}  {book.node:<10}{text[TIME:]}" if nodes else text)
    return out


def _line(book: Book, line: Line) -> str:
    match line:
        case SubmitLine():
            extra = [name for name in line.kit if name not in _ORDINARY]
            kit = f" kit {' '.join(extra)}" if extra else ""
            text = f"submit prompt={line.prompt_tokens} max={line.max_new_tokens}{kit}"
            return _row(line.time, _name(book, line.life), text + _signed("+", line.taken))
        case MoveLine():
            attempt = f" attempt={line.attempt}" if line.attempt else ""
            why = f" ({line.why})" if line.why else ""
            text = f"{line.source} -{line.event}-> {line.target} by={line.by}{attempt}"
            signs = _signed("+", line.taken) + _signed("-", line.dropped)
            return _row(line.time, _name(book, line.life), text + signs + why)
        case LeaseLine():
            return _row(
                line.time, _name(book, line.owner), f"{line.resource} {line.what} {line.units}"
            )
        case AnswerLine():
            status = f" status={line.status}" if line.status is not None else ""
            why = f" ({line.message})" if line.message else ""
            text = f"answer {line.reason} tokens={line.tokens}{status}{why}"
            return _row(line.time, _name(book, line.life), text)
        case _:
            return ""


_ORDINARY: Final = frozenset({"spans", "frontend_records", "prefix_locks", "pages", "rows"})


def _row(time_s: float, name: str, text: str) -> str:
    return f"{time_s * 1000:12.3f}  {name:<8} {text}"


def _signed(sign: str, names: tuple[str, ...]) -> str:
    return "".join(f" {sign}{name}" for name in names)


def _name(book: Book, owner: str) -> str:
    """A life by its name, and what is quarantined for it by both."""
    kind, life = (
        (QUARANTINE, owner.removeprefix(QUARANTINE)) if QUARANTINE in owner else ("", owner)
    )
    known = book.lives.get(life)
    return owner if known is None else f"{kind}{known.name}"
