"""Whether a line can follow from the line that it names as its cause.

:class:`CauseBook` judges what one trace says about its causes, and :func:`misled` what a cause says
that was found in another trace."""

from collections.abc import Callable, Mapping
from typing import Final

from fsm.replay_lives import Life, Step
from fsm.trace import Header, MoveLine, Numbered, SubmitLine

SAID: Final = frozenset({"granted", "met", "landed", "outdated"})
"""Moves by a peer that only a frame of the other half's life can lead to. An ``abort`` by the peer
needs a frame, too, perhaps that of a door; what is ``lost``, or silent, may have said nothing."""

LOCAL: Final = frozenset({"scheduler", "runner", "clock", "store"})
"""Whoever moves a request without being told to. What another node led to they may complete at
once, with the same cause."""

FOLLOWS: Final[Mapping[tuple[str, str], frozenset[str]]] = {
    ("decode", "met"): frozenset({"enqueue"}),
    ("prefill", "granted"): frozenset({"grant"}),
    ("decode", "landed"): frozenset({"prefilled"}),
    ("decode", "outdated"): frozenset({"prefilled"}),
    ("prefill", "landed"): frozenset({"landed", "outdated"}),
}
"""(role, event) → the events of the other half that it can follow from."""


class CauseBook:
    """Judges the causes of the lines of one node; ``report`` is about the newest line."""

    def __init__(self, header: Header, report: Callable[[str], None]) -> None:
        self._node: Final = header.node
        self._boot: Final = header.boot_id
        self._report = report
        self._foreign: tuple[str, int, str] | None = None
        """What the newest line with a cause on another node named."""

    def submitted(self, line: SubmitLine) -> None:
        """A life that begins with a cause was asked for by another node."""
        if line.cause is None:
            self._unnamed(line)
        elif self._ours(line):
            self._report(f"its cause is {_name(line)}; a submission follows from no line here")
        else:
            self._elsewhere(line)

    def moved(self, line: MoveLine, life: Life, step: Step) -> None:
        """Call it for first moves, for moves by a peer, and for whatever names a cause."""
        if step.first and line.by == "intake":
            if line.cause != (self._node, life.seq) or not self._ours(line):
                self._report(f"its cause is {_name(line)}; it was submitted by seq {life.seq}")
        elif line.cause is None:
            self._unnamed(line)
            if life.peer is not None and line.by == "peer" and line.event in (*SAID, "abort"):
                node, _, seq = life.peer
                self._report(f"its cause is missing; its peer spoke by {node}:{seq} before")
        elif not self._ours(line):
            self._heard(line, life)
        elif line.cause[1] >= line.seq:
            self._report(f"its cause, seq {line.cause[1]}, is not before it")
        elif not step.first:
            self._report(f"its cause is {_name(line)}; only a first move follows from a line here")

    def _heard(self, line: MoveLine, life: Life) -> None:
        """A move that follows from another node: a peer's word, or at once from what it did."""
        before = self._foreign
        named = self._elsewhere(line)
        if line.by in LOCAL and named != before:
            self._report(f"its cause is {_name(line)}; what is done by {line.by} begins here")
        if line.by != "peer" or line.event not in SAID:
            return
        spoke, life.peer = life.peer, (named[0], named[2], named[1])
        if spoke is None:
            return
        if spoke[:2] != life.peer[:2]:
            self._report(f"its cause is {_name(line)}; its peer is {spoke[0]} ({spoke[1]})")
        elif spoke[2] > life.peer[2]:
            self._report(f"its cause is {_name(line)}; its peer spoke by seq {spoke[2]} before")

    def _elsewhere(self, line: SubmitLine | MoveLine) -> tuple[str, int, str]:
        """What a cause on another node names: node, ``seq``, boot id."""
        assert line.cause is not None, "it was asked for"
        if not line.boot:
            self._report(f"its cause is {_name(line)}, and the boot id of that node is missing")
        if line.cause[1] < 1:
            self._report(f"its cause is {_name(line)}; lines count from 1")
        self._foreign = (*line.cause, line.boot)
        return self._foreign

    def _unnamed(self, line: SubmitLine | MoveLine) -> None:
        if line.boot:
            self._report(f"its cause is missing, and of process {line.boot}")

    def _ours(self, line: SubmitLine | MoveLine) -> bool:
        named = line.cause[0] if line.cause is not None else ""
        return named == self._node and line.boot in ("", self._boot)


def misled(effect: SubmitLine | MoveLine, role: str, cause: Numbered) -> str:
    """Why ``effect``, on a node of ``role``, cannot follow from the line ``cause`` of another node;
    empty if it can."""
    if isinstance(effect, SubmitLine):
        events = None
    elif (role, effect.event) in FOLLOWS:
        events = FOLLOWS[role, effect.event]
    else:
        return ""
    if not isinstance(cause, MoveLine):
        return f"its cause {_name(effect)} is no move"
    if not _one_request(effect.rid, cause.rid):
        return f"its cause {_name(effect)} is about {cause.rid}"
    if events is not None and cause.event not in events:
        return f"its cause {_name(effect)} is {cause.event!r}, not {' or '.join(sorted(events))}"
    return ""


def _one_request(one: str, other: str) -> bool:
    """Two halves have one rid; a prompt that is computed again has a number behind it."""
    return one == other or one.rpartition("@")[0] == other or other.rpartition("@")[0] == one


def _name(line: SubmitLine | MoveLine) -> str:
    if line.cause is None:
        return "missing"
    return f"{line.cause[0]}:{line.cause[1]}" + (f" ({line.boot})" if line.boot else "")
