"""What a replay does with every line, whatever it says: order, belonging together, and the end."""

from collections.abc import Callable, Iterable
from typing import Any, Final

from fsm.decide import BOOKS
from fsm.replay_faults import Fault, names, order_faults
from fsm.replay_lives import Life, Tables, tables_of
from fsm.replay_pages import PageBook
from fsm.replay_units import UnitBook
from fsm.trace import PAGES, AnswerLine, Footer, Header, LeaseLine, MoveLine, Numbered, SubmitLine
from fsm.trace_read import Malformed, Read, Unusable


class Replay:
    """The story so far of one node: its live requests, its pools, and what is due next."""

    def __init__(self, file: str, header: Header, report: Callable[[Fault], None]) -> None:
        self.file: Final = file
        self.node: Final = header.node
        self.header: Final = header
        self.number = 1
        """Line of the file that is being judged."""
        self.seq = 0
        self.lives: Final[dict[str, Life]] = {}
        self.footer: Footer | None = None
        self.pages: Final = PageBook(header.pools.get(PAGES, 0), self.fault)
        self.units: Final = UnitBook(header.pools, self.fault)
        self.handlers: dict[type, Callable[[Any], None]] = {
            Footer: self._end,
            Header: self._second_header,
            Malformed: self._malformed,
        }
        self._report = report
        self._line: Read = header
        self._time = header.time
        self._owed: Life | None = None
        """It left its last live state with the line before; its answer is due."""
        self._announced: tuple[str, int | None, str] = ("", None, "")
        self._gave: Life | None = None
        """It released its pages with the line before; the move that drops them is due."""
        self._tables: Final = self._chart(header)

    def run(self, first: int, lines: Iterable[Read]) -> None:
        """Judge a batch; ``first`` is the number of its first line in the file."""
        handlers = self.handlers
        self.number = first - 1
        for line in lines:
            self.number += 1
            self._line = line
            handlers[type(line)](line)

    def finish(self, cut: str, complete: bool) -> list[str]:
        """The file is over; ``cut`` says how it broke off, if it did. Returns what is worth
        knowing and no fault; with ``complete``, a trace that is no whole story is at fault."""
        self._line = self.header
        notes = []
        if self.footer is not None or complete:
            self._no_answer()
            self._keeps()
        if self.footer is None:
            notes.append(f"truncated: {cut or 'it has no footer'}")
        elif not self.footer.at_rest:
            notes.append("the node stopped before it was at rest")
        rest = self.footer is not None and self.footer.at_rest
        for life in self.lives.values():
            text = f"is in {life.stage} at the end, holding {self._holdings(life)}"
            if rest or complete:
                self._tell(f"{life.rid} ({life.life})", f"a leak: {text}" if rest else text)
        if rest:
            for owner, account in self.pages.accounts.items():
                if owner not in self.lives:
                    self._tell(owner, f"a leak: holds {account.units} pages at the end")
            for owner, resource, units in self.units:
                self._tell(owner, f"a leak: {units} {resource} in quarantine at the end")
        elif complete:
            self._tell("", notes[0])
        elif self.lives:
            notes.append(f"{len(self.lives)} requests are open at the end")
        return notes

    def fault(self, text: str) -> None:
        """Report a fault of the current line."""
        line = self._line
        match line:
            case MoveLine() | SubmitLine() | AnswerLine():
                who = f"{line.rid} ({line.life})"
            case LeaseLine():
                life = self.lives.get(line.owner)
                who = line.owner if life is None else f"{life.rid} ({life.life})"
            case _:
                who = ""
        self._tell(who, text)

    def _tell(self, who: str, text: str) -> None:
        self._report(Fault(self.file, self.number, who, text))

    def _order(self, line: Numbered) -> None:
        """``seq``, time, node, and that nothing comes between lines that belong together."""
        for text in order_faults(line, self.seq, self._time, self.node):
            self.fault(text)
        if self.footer is not None:
            self.fault("follows the footer")
        if self._owed is not None and not (
            isinstance(line, LeaseLine)
            and (line.what, line.owner) == ("quarantine", self._owed.life)
        ):
            self._no_answer()
        if self._gave is not None and not (
            isinstance(line, MoveLine) and line.life == self._gave.life
        ):
            self._keeps()
        self.seq, self._time = line.seq, line.time

    def _keeps(self) -> None:
        if self._gave is not None:
            life, self._gave = self._gave, None
            self._tell(
                f"{life.rid} ({life.life})",
                f"released its pages in the line before, and stays {life.stage}",
            )

    def _no_answer(self) -> None:
        life, self._owed = self._owed, None
        if life is not None:
            reason = self._announced[0]
            self._tell(
                f"{life.rid} ({life.life})",
                f"no answer: it ended by {reason!r} in line {life.line} and was told nothing",
            )

    def _second_header(self, line: Header) -> None:
        self.fault("a second header")

    def _malformed(self, line: Malformed) -> None:
        self.fault(f"no line of a trace: {line.reason}")

    def _end(self, line: Footer) -> None:
        self._order(line)
        self.footer = line

    def _holdings(self, life: Life) -> str:
        held = [
            f"{life.account.units} pages" if r == PAGES and life.account is not None else r
            for r in self._tables.chart.state(life.stage).holds
            if r in life.kit
        ]
        return names(held) or "nothing"

    def _chart(self, header: Header) -> Tables:
        for name, fingerprint in header.charts.items():
            if name not in BOOKS:
                self.fault(f"chart {name!r} is not known to this build")
            elif fingerprint != BOOKS[name].chart.fingerprint:
                ours = BOOKS[name].chart.fingerprint
                self.fault(f"chart {name!r} has fingerprint {fingerprint}; this build has {ours}")
        for role in (*header.roles, *header.charts):
            if role in BOOKS:
                return tables_of(role)
        raise Unusable(f"{self.file}: no chart of {names(header.roles)} is known to this build")
