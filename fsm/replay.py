"""Replaying a trace: every move and lease again, through a fresh ledger, by the chart's table.

One :class:`NodeReplay` judges the lines of one node. It keeps live requests only, so its memory
does not grow with the trace. Where a line does not fit it says so, believes the line, and goes on.

Three things bind lines together, and a wrong line breaks one of them:

- the **table**: a request moves along edges, taking and dropping what the two states differ in;
- the **double entry** of pages (:mod:`fsm.replay_pages`) and of answers, which the move announces
  and the next line gives (:mod:`fsm.replay_answers`);
- the **numbers**: ``seq`` without gaps, lives in the order they were minted, attempts that rise
  exactly when KV was given up."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from fsm.decide import BOOKS
from fsm.replay_answers import check_ending, check_tokens
from fsm.replay_faults import Fault, diagnose, ended, names, unknown_life
from fsm.replay_lives import KNOWN, Life, Step, Tables
from fsm.replay_pages import PageBook
from fsm.replay_units import UnitBook
from fsm.trace import PAGES, AnswerLine, Footer, Header, LeaseLine, MoveLine, SubmitLine
from fsm.trace_read import Malformed, Read, Unusable

STRANGERS: Final = 256
"""Unknown lives that are remembered, so that each is reported once."""


class NodeReplay:
    """Replays one node's trace.

    Raises:
        Unusable: Its header names no chart that this build has.
    """

    def __init__(self, file: str, header: Header, report: Callable[[Fault], None]) -> None:
        self.file: Final = file
        self.node: Final = header.node
        self.header: Final = header
        self.number = 1
        """Line of the file that is being judged."""
        self.seq = 0
        self.lines: Final[Counter[str]] = Counter()
        self.answers: Final[Counter[str]] = Counter()
        self.lives: Final[dict[str, Life]] = {}
        self.footer: Footer | None = None
        self._report = report
        self._line: Read = header
        self._time = header.time
        self._minted = 0
        self._owed: Life | None = None
        """It left its last live state with the line before; its answer is due."""
        self._announced: tuple[str, int | None, str] = ("", None, "")
        self._rids: dict[str, Life] = {}
        self._strangers: dict[str, None] = {}
        self._page_size: Final = max(1, header.page_size)
        self.pages: Final = PageBook(header.pools.get(PAGES, 0), self.fault)
        self.units: Final = UnitBook(header.pools, self.fault)
        self._tables: Final = self._chart(header)
        self._handlers: Final[dict[type, Callable[[Any], None]]] = {
            MoveLine: self._move,
            LeaseLine: self._lease,
            AnswerLine: self._answer,
            SubmitLine: self._submit,
            Footer: self._end,
            Header: self._second_header,
            Malformed: self._malformed,
        }

    def run(self, first: int, lines: Iterable[Read]) -> None:
        """Judge a batch; ``first`` is the number of its first line in the file."""
        handlers = self._handlers
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
        if self._owed is not None:
            self._no_answer()
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

    # --- what every line has ---

    def _order(self, line: SubmitLine | MoveLine | LeaseLine | AnswerLine | Footer) -> None:
        """``seq``, time, node, and that nothing comes between a last move and its answer."""
        due = self.seq + 1
        if line.seq > due:
            self.fault(f"seq {line.seq} where {due} was due: {line.seq - due} lines are missing")
        elif line.seq < due:
            self.fault(f"seq {line.seq} again, where {due} was due")
        if line.time < self._time:
            self.fault(f"time goes back from {self._time:.6f} to {line.time:.6f} s")
        if line.node != self.node:
            self.fault(f"a line of node {line.node!r} in the trace of {self.node!r}")
        if self.footer is not None:
            self.fault("follows the footer")
        if self._owed is not None:
            self._no_answer()
        self.seq, self._time = line.seq, line.time

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
        self.lines["malformed"] += 1
        self.fault(f"no line of a trace: {line.reason}")

    # --- kinds of lines ---

    def _submit(self, line: SubmitLine) -> None:
        self._order(line)
        self.lines["submit"] += 1
        boot, _, number = line.life.rpartition(":")
        if boot != self.header.boot_id or not number.isdecimal():
            self.fault(f"the life is not of this boot ({self.header.boot_id})")
        elif int(number) != self._minted + 1:
            self.fault(f"life {number} where {self._minted + 1} was due")
        if number.isdecimal():
            self._minted = int(number)
        if line.life in self.lives:
            self.fault("the life is here already")
        unknown = set(line.kit) - KNOWN
        if unknown:
            self.fault(f"its kit has unknown resources {sorted(unknown)}")
        initial = self._tables.chart.initial
        holds = self._tables.holds(initial, line.kit)
        if set(line.taken) != holds or len(set(line.taken)) != len(line.taken):
            has = names(line.taken) or "nothing"
            self.fault(f"begins with {has}; {initial} holds {names(sorted(holds))}")
        life = Life(
            line.life,
            line.rid,
            line.kit,
            initial,
            self._tables.steps(line.kit)[initial],
            line.prompt_tokens,
            line.max_new_tokens,
            self.number,
            line.seq,
        )
        self.lives[line.life] = life
        for resource in holds:
            self.units.count(resource, 1)

    def _move(self, line: MoveLine) -> None:
        if (
            line.seq != self.seq + 1
            or line.time < self._time
            or line.node != self.node
            or self._owed is not None
            or self.footer is not None
        ):
            self._order(line)
        self.seq, self._time = line.seq, line.time
        life = self.lives.get(line.life)
        if life is None:
            self._stranger(line.life)
            return
        step = life.here.get(line.event)
        if (
            step is None
            or line.target != step.target
            or line.source != step.source
            or line.taken != step.taken
            or line.dropped != step.dropped
            or line.by not in step.by
        ):
            faults, meant = diagnose(line, life, self._tables)
            for text in faults:
                self.fault(text)
            if meant is None:
                self._jump(line, life)
                return
            step = meant
        if line.attempt != life.attempt or line.rid != life.rid:
            self._not_itself(line, life)
        if step.first or line.cause is not None:
            self._caused(line, life, step)
        if step.computing or line.tokens != life.tokens:
            wrong = check_tokens(line, step, life, self._page_size)
            if wrong:
                self.fault(wrong)
            life.tokens = line.tokens
        if step.takes_pages:
            expected = -(-life.known_tokens // self._page_size)
            life.account = self.pages.move_takes(line, expected)
        elif line.pool is not None:
            self.fault("takes no pages and says a balance of them")
        if step.drops_pages:
            if life.life in self.pages.accounts:
                units = self.pages.accounts[life.life].units
                self.fault(f"drops {units} pages that no release gave back")
                self.pages.forget(life.life)
            life.account = None
        for resource, change in step.counts:
            self.units.count(resource, change)
        if step.new_attempt:
            life.attempt += 1
        life.stage, life.here, life.line = step.target, step.here, self.number
        if step.retires:
            self._retire(line, life)
        elif line.reason or line.status is not None:
            self.fault(f"announces the answer {line.reason!r} and ends nothing")
        if step.ends:
            del self.lives[life.life]

    def _retire(self, line: MoveLine, life: Life) -> None:
        for wrong in check_ending(line, life):
            self.fault(wrong)
        if life.answered:
            return  # too early, which was reported
        self._owed, life.answered = life, True
        self._announced = (line.reason, line.status, line.why)
        if self._rids.get(life.rid) is life:
            del self._rids[life.rid]

    def _answer(self, line: AnswerLine) -> None:
        owed, self._owed = self._owed, None
        self._order(line)
        self.answers[line.reason] += 1
        if owed is not None and owed.life == line.life:
            if line.rid != owed.rid:
                self.fault(f"its rid is {owed.rid!r}")
            said = (line.reason, line.status, line.message)
            if said != self._announced:
                self.fault(f"answers {ended(*said)}; its move says {ended(*self._announced)}")
            if line.tokens != owed.tokens:
                self.fault(f"answers {line.tokens} tokens; its move says {owed.tokens}")
            return
        self._owed = owed
        if owed is not None:
            self._no_answer()
        life = self.lives.get(line.life)
        if life is None:
            self._stranger(line.life, "a second answer, or one of a stranger: ")
        elif life.answered:
            self.fault("a second answer")
        else:
            self.fault(f"an answer while it is {life.stage}, which is a live state")
            life.answered = True

    def _lease(self, line: LeaseLine) -> None:
        if (
            line.seq != self.seq + 1
            or line.time < self._time
            or line.node != self.node
            or self._owed is not None
            or self.footer is not None
        ):
            self._order(line)
        self.seq, self._time = line.seq, line.time
        if line.resource == PAGES:
            self.pages.lease(line)
            return
        life = self.lives.get(line.owner)
        holds = life is not None and line.resource in self._tables.holds(life.stage, life.kit)
        self.units.lease(line, holds)

    # --- what is rare ---

    def _caused(self, line: MoveLine, life: Life, step: Step) -> None:
        """The first move follows from the submission; nothing follows from what comes later."""
        cause = line.cause
        if step.first and line.by == "intake" and cause != (self.node, life.seq):
            self.fault(f"its cause is {cause}; it was submitted by seq {life.seq}")
        elif cause is not None and cause[0] == self.node and cause[1] >= line.seq:
            self.fault(f"its cause, seq {cause[1]}, is not before it")
        if step.first and not step.retires:
            other = self._rids.setdefault(life.rid, life)
            if other is not life:
                self.fault(f"its rid is live already, as {other.life}")
                self._rids[life.rid] = life

    def _not_itself(self, line: MoveLine, life: Life) -> None:
        if line.rid != life.rid:
            self.fault(f"the rid of this life is {life.rid!r}")
        if line.attempt != life.attempt:
            word = "a stale attempt" if line.attempt < life.attempt else "an attempt to come"
            self.fault(f"{word}: {line.attempt}, where it is at {life.attempt}")
            life.attempt = line.attempt

    def _jump(self, line: MoveLine, life: Life) -> None:
        """No edge fits. Believe the target, if there is such a state."""
        chart = self._tables.chart
        if line.target not in chart.by_name:
            return
        before, after = (self._tables.holds(s, life.kit) for s in (life.stage, line.target))
        for resource in before - after:
            self.units.count(resource, -1)
        for resource in after - before:
            self.units.count(resource, 1)
        if "pages" not in after:
            self.pages.forget(life.life)
            life.account = None
        life.stage, life.here = line.target, self._tables.steps(life.kit)[line.target]
        life.tokens, life.line = line.tokens, self.number
        if chart.state(line.target).kind == "done":
            del self.lives[life.life]

    def _stranger(self, name: str, prefix: str = "") -> None:
        """A line of a life that is not here."""
        if name in self._strangers:
            return
        self._strangers[name] = None
        if len(self._strangers) > STRANGERS:
            del self._strangers[next(iter(self._strangers))]
        self.fault(prefix + unknown_life(name, self.header.boot_id, self._minted))

    def _holdings(self, life: Life) -> str:
        held = [
            f"{life.account.units} pages" if r == PAGES and life.account is not None else r
            for r in self._tables.chart.state(life.stage).holds
            if r in life.kit
        ]
        return names(held) or "nothing"

    def _end(self, line: Footer) -> None:
        self._order(line)
        self.footer = line

    def _chart(self, header: Header) -> Tables:
        for name, fingerprint in header.charts.items():
            if name not in BOOKS:
                self.fault(f"chart {name!r} is not known to this build")
            elif fingerprint != BOOKS[name].chart.fingerprint:
                ours = BOOKS[name].chart.fingerprint
                self.fault(f"chart {name!r} has fingerprint {fingerprint}; this build has {ours}")
        for role in (*header.roles, *header.charts):
            if role in BOOKS:
                return Tables(BOOKS[role].chart)
        raise Unusable(f"{self.file}: no chart of {names(header.roles)} is known to this build")
