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
from collections.abc import Callable
from typing import Final

from fsm.chart import ordered
from fsm.replay_answers import check_ending, check_tokens
from fsm.replay_base import Replay
from fsm.replay_causes import CauseBook, misled
from fsm.replay_faults import Fault, diagnose, ended, names, unknown_life
from fsm.replay_lives import KNOWN, Life
from fsm.trace import PAGES, AnswerLine, Header, LeaseLine, MoveLine, Numbered, SubmitLine
from fsm.trace_read import Read

STRANGERS: Final = 256
"""Unknown lives that are remembered, so that each is reported once."""


class NodeReplay(Replay):
    """Replays one node's trace.

    Raises:
        Unusable: Its header names no chart that this build has.
    """

    def __init__(self, file: str, header: Header, report: Callable[[Fault], None]) -> None:
        super().__init__(file, header, report)
        self.answers: Final[Counter[str]] = Counter()
        """Terminal answers by reason."""
        self._minted = 0
        self._rids: dict[str, Life] = {}
        self._strangers: dict[str, None] = {}
        self._page_size: Final = max(1, header.page_size)
        self._causes: Final = CauseBook(header, self.fault)
        self.handlers |= {
            MoveLine: self._move,
            LeaseLine: self._lease,
            AnswerLine: self._answer,
            SubmitLine: self._submit,
        }

    @property
    def requests(self) -> int:
        """Lives that began."""
        return self._minted

    def _submit(self, line: SubmitLine) -> None:
        self._order(line)
        self._causes.submitted(line)
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
        holds = ordered(self._tables.holds(initial, line.kit))
        if line.taken != holds:
            has = names(line.taken) or "nothing"
            self.fault(f"begins with {has}; {initial} holds {names(holds) or 'nothing'}")
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
        self.units.count((resource, 1) for resource in holds)

    def _move(self, line: MoveLine) -> None:
        if (
            line.seq != self.seq + 1
            or line.time < self._time
            or line.node != self.node
            or self._owed is not None
            or self._gave is not None
            or self.footer is not None
        ):
            self._order(line)
        self.seq, self._time = line.seq, line.time
        life = self.lives.get(line.life)
        if life is None:
            self._stranger(line.life)
            if line.pool is not None:
                self.pages.move_takes(line, line.units)
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
            if line.source != life.stage:
                life.tokens = line.tokens  # it was computing, unseen
        if line.attempt != life.attempt or line.rid != life.rid:
            self._not_itself(line, life)
        if step.first or line.cause is not None or line.boot or line.by == "peer":
            self._causes.moved(line, life, step)
            if step.first and not step.retires:
                self._begins(life)
        if step.computing or line.tokens != life.tokens:
            wrong = check_tokens(line, step, life, self._page_size)
            if wrong:
                self.fault(wrong)
            life.tokens = line.tokens
        if step.takes_pages:
            life.account = self.pages.move_takes(line, self._needs(life))
        elif line.units or line.pool is not None:
            self.fault(f"takes no pages, and says {line.units} units of them and a balance")
        if step.drops_pages:
            self._dropped(life)
        elif self._gave is not None:
            self._keeps()
        if step.counts:
            self.units.count(step.counts)
        if "prefetches" in line.dropped:
            self._loaded(line)
        if step.new_attempt:
            life.attempt += 1
            life.peer = None  # who computes it again may be another one
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
            self.fault(f"an answer while it is {life.stage}, and no move that ends it")
            life.answered = True

    def _lease(self, line: LeaseLine) -> None:
        if (
            line.seq != self.seq + 1
            or line.time < self._time
            or line.node != self.node
            or self._owed is not None
            or self._gave is not None
            or self.footer is not None
        ):
            self._order(line)
        self.seq, self._time = line.seq, line.time
        life = self.lives.get(line.owner)
        if line.resource == PAGES:
            if life is not None:
                if line.what == "cache":
                    self._caches(life)
                elif line.what == "release":
                    self._gave = life
            self.pages.lease(line)
            return
        holds = life is not None and line.resource in self._tables.holds(life.stage, life.kit)
        self.units.lease(line, holds)

    # --- what is rare ---

    def _begins(self, life: Life) -> None:
        """Its first move: from here on its rid is taken."""
        other = self._rids.setdefault(life.rid, life)
        if other is not life:
            self.fault(f"its rid is live already, as {other.life}")
            self._rids[life.rid] = life

    def linked(self, line: Read, cause: Numbered) -> None:
        """The line that was just judged names ``cause``, which is in another trace."""
        if isinstance(line, SubmitLine | MoveLine):
            why = misled(line, self._tables.chart.name, cause)
            if why:
                self.fault(why)

    def _needs(self, life: Life) -> int:
        """The pages of what is to be computed; where a peer does that, of the output, too."""
        output = life.tokens if self._tables.prefills else life.max_new_tokens
        return -(-(life.prompt_tokens + output) // self._page_size)

    def _dropped(self, life: Life) -> None:
        """Its pages were released just before."""
        gave, self._gave, life.account = self._gave, None, None
        if gave is not life:
            self.fault("drops its pages, which no release gave back")
        self.pages.forget(life.life)

    def _caches(self, life: Life) -> None:
        """A request's pages go to the prefix cache when its prompt is done, and on its way out."""
        if not any(step.prefilling or step.drops_pages for step in life.here.values()):
            self.fault(f"caches pages while it is {life.stage}")

    def _loaded(self, line: MoveLine) -> None:
        """Whether stored pages came is told twice: by the copy that ended just before, and here."""
        seq, kept = self.pages.copied_in
        just_now = seq == line.seq - 1
        if line.event == "loaded" and not just_now:
            self.fault("loaded, and no copy has ended just before")
        elif line.event == "missed" and just_now and kept:
            self.fault("missed, and the prefix cache has just got pages of a copy")

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
        self.units.count((resource, -1) for resource in before - after)
        self.units.count((resource, 1) for resource in after - before)
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
