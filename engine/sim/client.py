"""The clients of a node and the front end between them, in virtual time.

The front end is the server's, less the text: it keeps the production front-end records, looks at
every token for stop strings, and tells the engine of an end that the engine does not know. Looking
at tokens takes ``detok_us``; what a client sends arrives at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from engine.frontend import (
    DuplicateRid,
    FrontendRecord,
    FrontendTable,
    Member,
    ReservedRid,
    StillSettling,
)
from engine.sim.matcher import StopSearch
from engine.sim.world import World
from transport.messages import (
    Abort,
    Finish,
    FromEngine,
    Output,
    Outputs,
    Reply,
    StopMatched,
    Submit,
    ToEngine,
)

Post = Callable[[ToEngine, str], None]
"""Sends a message to the node, with the name of the submission that it is about."""

GONE: Final = "the client went away"


@dataclass(slots=True)
class View:
    """One completion as its client sees it."""

    name: str
    member: Member
    search: StopSearch
    answered_us: int | None = None
    seen_at_answer: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.member.tokens[: self.member.visible]

    @property
    def finish(self) -> Finish | None:
        return self.member.terminal.finish if self.member.terminal is not None else None


@dataclass(slots=True)
class Submission:
    """One ``submit`` of a scenario."""

    name: str
    message: Submit
    stops: tuple[bytes, ...]
    earlier: tuple["Submission", ...]
    """Earlier turns of its session."""
    views: list[View] = field(default_factory=list)
    refused: Finish | None = None
    """The front end's own refusal: the engine never heard of it."""

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def history(self) -> list[int]:
        """What its session held when it came: the finished turns before it, as their clients saw
        them. One turn is in flight at a time, so whatever came before has ended before."""
        return [
            token
            for turn in self.earlier
            for view in turn.views
            if view.finish is not None and view.finish.type in ("stop", "length")
            for token in (*turn.message.prompt, *view.tokens)
        ]

    @property
    def answered(self) -> bool:
        return self.refused is not None or (
            bool(self.views) and all(view.finish is not None for view in self.views)
        )


class Clients:
    """Every client of one node, and their front end."""

    def __init__(self, world: World, post: Post, detok_us: int) -> None:
        self.table: Final = FrontendTable()
        self.submissions: Final[dict[str, Submission]] = {}
        self.replies: list[object] = []
        """Answers to what was asked, newest last."""
        self.faults: list[str] = []
        self.last_answer_us = 0
        self._world = world
        self._post = post
        self._detok_us = detok_us
        self._views: dict[Member, View] = {}
        self._last_words: set[str] = set()
        self._session_began: dict[str, int] = {}

    def open_session(self, session: str) -> None:
        """A session of this name begins, empty: earlier turns are of another one."""
        self._session_began[session] = len(self.submissions)

    def submit(self, name: str, message: Submit, stops: tuple[bytes, ...]) -> None:
        submission = Submission(name, message, stops, self._turns(message.session))
        self.submissions[name] = submission
        self._open(submission)

    def abort(self, rids: tuple[str, ...], everything: bool) -> None:
        self._post(Abort(rids=rids, all=everything, query=1), "")

    def disconnect(self, name: str) -> None:
        """The client closes its connection: its record ends, and the engine is told."""
        record = self.table.get(self.submissions[name].rid)
        if record is None or record.answered:
            return
        record.end(Finish("abort", message=GONE))
        self._notice(record)
        if record.submitted:
            self._post(Abort(rids=(record.rid,), cause="disconnect"), "")
        self.table.retire_if_settled(record)

    def receive(self, frame: FromEngine) -> None:
        """A frame of the engine has arrived."""
        if isinstance(frame, Reply):
            self.replies.append(frame.data)
        elif isinstance(frame, Outputs):
            for output in frame.outputs:
                self._check_order(output)
            self._world.after(self._detok_us, lambda: self._look(frame.outputs))

    @property
    def open(self) -> list[Submission]:
        """Submissions without their whole answer."""
        return [each for each in self.submissions.values() if not each.answered]

    @property
    def at_rest(self) -> bool:
        return not self.open and not len(self.table)

    def check(self) -> list[str]:
        """Faults in what clients were told: a terminal that changed, or tokens after it."""
        faults, self.faults = self.faults, []
        for view in self._views.values():
            if view.answered_us is not None and len(view.tokens) != view.seen_at_answer:
                faults.append(f"{view.name} was shown tokens after its answer")
        return faults

    def _open(self, submission: Submission) -> None:
        message = submission.message
        try:
            record = self.table.open(message.rid, message.n)
        except StillSettling as settling:
            settling.record.when_settled(lambda: self._open(submission))
            return
        except (DuplicateRid, ReservedRid) as error:
            submission.refused = Finish("abort", message=str(error), status=400)
            self.last_answer_us = self._world.now_us
            return
        for index, member in enumerate(record.members):
            name = submission.name if message.n == 1 else f"{submission.name}#{index}"
            search = StopSearch(submission.stops, message.sampling.min_new_tokens)
            view = View(name, member, search)
            submission.views.append(view)
            self._views[member] = view
            self._last_words.discard(member.rid)
        self._last_words.discard(message.rid)
        record.submitted = True
        self._post(message, submission.name)

    def _check_order(self, output: Output) -> None:
        """The engine's own stream has no token after its last word, and no gap."""
        if output.rid in self._last_words:
            self.faults.append(f"the engine spoke of {output.rid} after its last word")
        if output.finish is not None:
            self._last_words.add(output.rid)

    def _look(self, outputs: list[Output]) -> None:
        for output in outputs:
            for member in self.table.route(output):
                view = self._views[member]
                if member.terminal is None and output.index != len(member.tokens):
                    self.faults.append(
                        f"{view.name}: token {output.index} came where {len(member.tokens)} was due"
                    )
                fresh = member.deliver(output)
                if member.terminal is None:
                    hit = view.search.push(fresh)
                    member.examine(len(member.tokens), hit)
                    self._tell_stop(view)
                self._notice(member.record)
                self.table.retire_if_settled(member.record)

    def _tell_stop(self, view: View) -> None:
        member, end = view.member, view.member.terminal
        if end is not None and end.by == "detokenizer":
            in_session = self._submission_of(view).message.session is not None
            if member.needs_stop or in_session:
                matched = str(end.finish.matched)
                self._post(StopMatched(member.rid, end.tokens, matched), "")

    def _notice(self, record: FrontendRecord) -> None:
        """Note when each member's answer was decided."""
        for member in record.members:
            view = self._views[member]
            if member.terminal is not None and view.answered_us is None:
                view.answered_us = self.last_answer_us = self._world.now_us
                view.seen_at_answer = len(view.tokens)

    def _submission_of(self, view: View) -> Submission:
        return self.submissions[view.name.partition("#")[0]]

    def _turns(self, session: str | None) -> tuple[Submission, ...]:
        """The turns of a session so far, since it was opened."""
        if session is None:
            return ()
        began = self._session_began.get(session, 0)
        turns = list(self.submissions.values())[began:]
        return tuple(turn for turn in turns if turn.message.session == session)
