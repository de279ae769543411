"""Front-end records: one for each open request, and the one arbiter of its end. No IO here.

A request can be ended by several parties that do not know of each other: the engine (an
end-of-sequence token, the length limit, an abort, an error), the detokenizer (a stop string), and
the server itself (its client left, it drains, its engine died). Each *proposes* an end after some
number of output tokens. The record takes the proposal with the fewest tokens, as soon as nobody
can still propose fewer; from then on there is exactly one terminal, and no token after it is
visible.

Why waiting is needed, and when it is over: the engine proposes an end at the last token it
delivered, but the detokenizer may not have looked at that token yet and could find a stop string
before it. So an end after ``t`` tokens is final once the detokenizer has *examined* ``t`` tokens.
Order of arrival does not matter.

A record has two ends, and is kept until both have come. It is *answered* when each member's
terminal is decided: that is what the client sees. It is *settled* when the engine has said its last
word on each member, too; only then may the same rid go to the engine again, or late tokens of the
old life could be taken for the new one's. Between the two a rid neither blocks its client nor is
refused: :meth:`FrontendTable.open` tells the caller what to wait for.

With ``n`` > 1 a record has the members ``rid#0`` … ``rid#n-1``, each with a terminal of its own.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from transport.messages import Finish, Output, TopLogprobs

MEMBER_SUFFIX = re.compile(r"#\d+$")
"""A rid that ends so is reserved: it could be the name of a member of another request."""

Proposer = Literal["engine", "detokenizer", "server"]

# At the same number of tokens the more specific reason wins: a stop string that is complete with
# the last allowed token ends a request with "stop", not "length" (and not with an abort that came
# after it).
_RANK = {"stop": 0, "length": 1, "abort": 2, "error": 3}


class DuplicateRid(ValueError):  # noqa: N818
    """A request with this rid is open, and its client waits for an answer."""


class ReservedRid(ValueError):  # noqa: N818
    """A rid may not look like the name of a group's member."""


class StillSettling(Exception):  # noqa: N818
    """The rid's last request is answered, but the engine is not done with it."""

    def __init__(self, record: "FrontendRecord") -> None:
        super().__init__(f"{record.rid}: the engine is not done with the last request of this rid")
        self.record = record


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of one member: after how many output tokens, why, and who proposed it."""

    tokens: int
    finish: Finish
    by: Proposer

    @property
    def order(self) -> tuple[int, int, bool]:
        """Smallest first: fewest tokens, then the more specific reason, then the engine's word."""
        return (self.tokens, _RANK[self.finish.type], self.by != "engine")


class Member:
    """One completion of a request: its output so far, the ends proposed for it, and its
    terminal."""

    __slots__ = (
        "_best",
        "cached_tokens",
        "chosen_logprobs",
        "examined",
        "logprobs",
        "prompt_tokens",
        "record",
        "retractions",
        "rid",
        "settled",
        "terminal",
        "tokens",
        "top_logprobs",
        "weight_version",
    )

    def __init__(self, rid: str, record: "FrontendRecord") -> None:
        self.rid = rid
        self.record = record
        self.tokens: list[int] = []
        """Output tokens that the engine delivered. What a client may see of them is
        :attr:`visible`."""
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.chosen_logprobs: list[TopLogprobs] = []
        self.examined = 0
        """How many of them the detokenizer has looked at."""
        self.terminal: Terminal | None = None
        self.settled = False
        """Whether the engine said its last word on this member."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.retractions = 0
        self.weight_version = "default"
        self._best: Terminal | None = None

    @property
    def visible(self) -> int:
        """How many output tokens the client may see now; never decreases, never passes the
        terminal."""
        return self.examined if self.terminal is None else self.terminal.tokens

    def deliver(self, output: Output) -> list[int]:
        """Take in what the engine sent; the caller shows the result to the detokenizer.

        Returns:
            The tokens that are new. A repeated token is dropped by its index; after the terminal
            there are none.
        """
        if self.settled:
            return []
        fresh: list[int] = []
        if self.terminal is None:
            self._take_counts(output)
            if output.index > len(self.tokens):
                lost = f"output tokens {len(self.tokens)} to {output.index - 1} were lost"
                self.propose(Finish("error", message=lost, status=500), self.examined, "server")
            else:
                fresh = self._take_tokens(output)
        if output.finish is not None:
            self.settled = True
            self.propose(output.finish, len(self.tokens), "engine")
        return fresh

    def _take_counts(self, output: Output) -> None:
        # An Output without a count (an early refusal, a bare finish) must not erase what is known.
        self.prompt_tokens = output.prompt_tokens or self.prompt_tokens
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.retractions = max(self.retractions, output.retractions)
        self.weight_version = output.weight_version

    def _take_tokens(self, output: Output) -> list[int]:
        known = len(self.tokens) - output.index
        fresh = output.tokens[known:]
        self.tokens += fresh
        if output.logprobs is not None:
            self.logprobs += output.logprobs[known:]
        if output.top_logprobs is not None:
            self.top_logprobs += output.top_logprobs[known:]
        if output.chosen_logprobs is not None:
            self.chosen_logprobs += output.chosen_logprobs[known:]
        return fresh

    def examine(self, tokens: int, stop: tuple[int, str] | None = None) -> None:
        """The detokenizer has looked at the first ``tokens`` tokens.

        Args:
            tokens: Number of tokens; may only grow, and not past what was delivered.
            stop: The stop string found among them, with the number of tokens that complete it.
        """
        assert self.examined <= tokens <= len(self.tokens), (self.rid, self.examined, tokens)
        if self.terminal is not None:
            return
        if stop is not None:
            self.propose(Finish("stop", matched=stop[1]), stop[0], "detokenizer")
        self.examined = tokens
        self._decide()

    def propose(self, finish: Finish, tokens: int, by: Proposer) -> None:
        """Propose to end after ``tokens`` tokens; without effect when the end is decided
        already."""
        if self.terminal is not None:
            return
        proposal = Terminal(tokens, finish, by)
        if self._best is None or proposal.order < self._best.order:
            self._best = proposal
        self._decide()

    def _decide(self) -> None:
        if self._best is not None and self._best.tokens <= self.examined:
            self.terminal = self._best

    @property
    def needs_stop(self) -> bool:
        """Whether the engine still computes for a member whose end is decided: it has to
        be told."""
        return self.terminal is not None and not self.settled


class FrontendRecord:
    """One open request: its members, and who waits for it to settle."""

    __slots__ = ("_on_settled", "members", "rid", "submitted")

    def __init__(self, rid: str, n: int) -> None:
        self.rid = rid
        self.submitted = False
        """Whether it was handed to the engine. Before that, only the server can end it."""
        names = [rid] if n == 1 else [f"{rid}#{index}" for index in range(n)]
        self.members = [Member(name, self) for name in names]
        self._on_settled: list[Callable[[], None]] = []

    @property
    def answered(self) -> bool:
        """Every member's end is decided."""
        return all(member.terminal is not None for member in self.members)

    @property
    def settled(self) -> bool:
        """Answered, and the engine has nothing more to say about it."""
        return self.answered and (not self.submitted or all(m.settled for m in self.members))

    def end(self, finish: Finish) -> None:
        """The server ends every member that has no terminal yet, after the tokens examined
        so far."""
        for member in self.members:
            member.propose(finish, member.examined, "server")

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the table has let go of this record."""
        self._on_settled.append(callback)

    def let_go(self) -> None:
        """The table has removed this record: tell everyone who waits for that."""
        callbacks, self._on_settled = self._on_settled, []
        for callback in callbacks:
            callback()


@dataclass(frozen=True, slots=True)
class Finished:
    """What is remembered of a request after its end: a tombstone, bounded in number."""

    rid: str
    finishes: list[Finish] = field(default_factory=list)
    """One for each member, in their order."""
    tokens: list[int] = field(default_factory=list)


class FrontendTable:
    """All records of one server, by rid, and a bounded memory of the rids that ended last."""

    def __init__(self, remember: int = 4096) -> None:
        self._records: dict[str, FrontendRecord] = {}
        self._members: dict[str, Member] = {}
        self._finished: OrderedDict[str, Finished] = OrderedDict()
        self._remember = remember
        self.late_outputs = 0
        """Outputs for rids that no record waits for. Not a fault by itself; growth at rest
        would be one."""

    def __len__(self) -> int:
        """Records that are open or not settled: the ``frontend_records`` of the ledger."""
        return len(self._records)

    def __iter__(self) -> Iterator[FrontendRecord]:
        return iter(list(self._records.values()))

    @property
    def finished_count(self) -> int:
        """How many ended rids are remembered."""
        return len(self._finished)

    def get(self, rid: str) -> FrontendRecord | None:
        """The record of ``rid`` (a request's, or one of its members'), open or settling."""
        if (record := self._records.get(rid)) is not None:
            return record
        member = self._members.get(rid)
        return None if member is None else member.record

    def open(self, rid: str, n: int = 1) -> FrontendRecord:
        """A new record.

        Raises:
            ReservedRid: ``rid`` looks like a member's name.
            DuplicateRid: A request with this rid is open; nothing is changed.
            StillSettling: It is answered, but the engine has not confirmed its end yet.
        """
        if MEMBER_SUFFIX.search(rid):
            raise ReservedRid(
                f"rid {rid!r} ends like the name of a group's member ('#' and digits)"
            )
        if (old := self._records.get(rid)) is not None:
            if not old.answered:
                raise DuplicateRid(f"a request with rid {rid!r} is running (duplicate rid)")
            raise StillSettling(old)
        record = FrontendRecord(rid, n)
        self._records[rid] = record
        for member in record.members:
            self._members[member.rid] = member
        return record

    def route(self, output: Output) -> list[Member]:
        """The members that ``output`` is for: one, or all of a group that is refused by
        its own rid."""
        if (member := self._members.get(output.rid)) is not None:
            return [member]
        if (record := self._records.get(output.rid)) is not None:
            return record.members
        self.late_outputs += 1
        return []

    def retire_if_settled(self, record: FrontendRecord) -> bool:
        """Remove ``record`` if nothing more can come for it. Call it after anything that
        may end one."""
        if not record.settled or self._records.get(record.rid) is not record:
            return False
        del self._records[record.rid]
        for member in record.members:
            del self._members[member.rid]
        ends = [member.terminal for member in record.members if member.terminal is not None]
        self._finished[record.rid] = Finished(
            record.rid, [end.finish for end in ends], [end.tokens for end in ends]
        )
        self._finished.move_to_end(record.rid)
        while len(self._finished) > self._remember:
            self._finished.popitem(last=False)
        record.let_go()
        return True

    def finished(self, rid: str) -> Finished | None:
        """What is remembered of the last request of ``rid`` (or of the group whose member
        it names)."""
        return self._finished.get(rid) or self._finished.get(MEMBER_SUFFIX.sub("", rid))

    def standing(self, rid: str) -> Literal["open", "finished", "unknown"]:
        """How an abort finds ``rid``: its client waits, it has its answer, or nobody knows it."""
        member = self._members.get(rid)
        if member is not None:
            return "open" if member.terminal is None else "finished"
        if (record := self._records.get(rid)) is not None:
            return "finished" if record.answered else "open"
        return "finished" if self.finished(rid) is not None else "unknown"
