"""What happened on a node, kept from its trace and from nothing else.

Expectations and checks read this book, not the scheduler's own indexes, so that a scheduler which
deceives itself does not deceive them.
"""

from dataclasses import dataclass, field
from typing import Final

from engine.frontend import MEMBER_SUFFIX
from fsm.chart import Chart
from fsm.trace import AnswerLine, LeaseLine, Line, MoveLine, SubmitLine


@dataclass(slots=True)
class Life:
    """One life on the node, by its trace lines."""

    life: str
    rid: str
    name: str
    """How the scenario calls it: the submission's name, with ``#i`` for a member of a group."""
    submit: SubmitLine
    where: str
    holds: set[str]
    began: int
    """Where its first line stands among those of all nodes."""
    moves: list[MoveLine] = field(default_factory=list)
    answer: AnswerLine | None = None


class Book:
    """All lines of one node, and the lives they tell of."""

    def __init__(
        self, chart: Chart, node: str = "", log: list[tuple["Book", Line]] | None = None
    ) -> None:
        """``log`` is shared by the nodes of a cluster: their lines in the order of writing."""
        self.chart: Final = chart
        self.node: Final = node
        self._log = log
        self.lines: list[Line] = []
        self.lives: dict[str, Life] = {}
        self.faults: list[str] = []
        """What the trace itself has wrong; a fault is reported once."""
        self.submission = ""
        """The submission being handed to the scheduler: the lives that begin now are its."""
        self._seq = 0

    def write(self, line: Line) -> None:
        """The sink of the node's tracer."""
        self.lines.append(line)
        if self._log is not None:
            self._log.append((self, line))
        if isinstance(line, SubmitLine):
            member = MEMBER_SUFFIX.search(line.rid)
            name = (self.submission or line.rid) + (member[0] if member else "")
            began = len(self.lines if self._log is None else self._log)
            self.lives[line.life] = Life(
                line.life, line.rid, name, line, self.chart.initial, set(line.taken), began
            )
        elif isinstance(line, MoveLine):
            self._move(line)
        elif isinstance(line, AnswerLine):
            self._answer(line)
        if isinstance(line, SubmitLine | MoveLine | LeaseLine | AnswerLine):
            self._seq += 1
            if line.seq != self._seq:
                self.faults.append(f"trace: seq {line.seq} where {self._seq} was due")

    def of(self, name: str) -> list[Life]:
        """The lives of a submission, or the one of a member, in order of arrival."""
        return [
            life
            for life in self.lives.values()
            if name in (life.name, life.name.partition("#")[0], life.name.partition("@")[0])
        ]

    @property
    def open(self) -> list[Life]:
        """Lives that are not done."""
        done = {state.name for state in self.chart.states if state.kind == "done"}
        return [life for life in self.lives.values() if life.where not in done]

    def _move(self, line: MoveLine) -> None:
        life = self.lives[line.life]
        edge = self.chart.table.get((line.source, line.event))
        if life.where != line.source or edge is None or edge.target != line.target:
            self.faults.append(
                f"trace: {life.name} is {life.where}; {line.source} -{line.event}-> {line.target} "
                "is no move from there"
            )
        if life.holds & set(line.taken) or set(line.dropped) - life.holds:
            self.faults.append(
                f"trace: {life.name} holds {sorted(life.holds)}, takes {list(line.taken)} and "
                f"drops {list(line.dropped)}"
            )
        life.holds = (life.holds - set(line.dropped)) | set(line.taken)
        life.where = line.target
        life.moves.append(line)

    def _answer(self, line: AnswerLine) -> None:
        life = self.lives[line.life]
        if life.answer is not None:
            self.faults.append(f"trace: {life.name} is answered twice")
        life.answer = line
