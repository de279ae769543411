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

Watch = Callable[["Submission"], None]
"""Is told whenever what a client was shown has changed."""

GONE: Final = "the client went away"
REFUSED: Final = "the connection was refused"
LOST: Final = "the connection to the server was lost"


@dataclass(slots=True)
class View:
    """One completion as its client sees it."""

    name: str
    member: Member
    submission: "Submission"
    search: StopSearch | None
    """None: nobody looks for stop strings."""
    answered_us: int | None = None
    seen_at_answer: int = 0
    weights: list[str] = field(default_factory=list)
    """The weights that each token was computed under."""
    times: list[int] = field(default_factory=list)
    """When the front end of the node that computed it was shown each token, in microseconds."""

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
    watch: Watch | None = None
    sent_us: int = 0
    """When its client sent it."""
    waits: bool = False
    """For the last request of its rid to settle; the engine has not heard of it."""

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
    """Every client of one node, and their front end. ``matches``: it looks for stop strings."""

    def __init__(self, world: World, detok_us: int, matches: bool = True) -> None:
        self.table = FrontendTable()
        self.submissions: Final[dict[str, Submission]] = {}
        self.replies: list[tuple[int, object]] = []
        """Answers to what was asked, newest last, with a number that orders them with those of
        other nodes."""
        self.faults: list[str] = []
        self.last_answer_us = 0
        self.looks_at_tokens = detok_us > 0
        """What a token is, or when it comes, may decide what happens next: looking at one takes
        time, or somebody has asked for a stop string."""
        self._down = False
        self._world = world
        self._detok_us = detok_us
        self._matches = matches
        self._views: dict[Member, View] = {}
        self._touched: list[View] = []
        """Views that may have changed since the last check."""
        self._last_words: set[str] = set()
        self._session_began: dict[str, int] = {}

    def attach(self, post: Post) -> None:
        """Messages go to this process from now on."""
        self._post, self._down = post, False

    def connection_lost(self) -> None:
        """The process is gone: whoever waits for an answer gets an error instead, and so does
        whoever calls before there is another one."""
        self._down = True
        for record in self.table:
            record.end(Finish("error", message=LOST, status=503))
            self._notice(record)
        self.table = FrontendTable()
        self._last_words.clear()
        for submission in list(self.submissions.values()):
            if submission.waits:
                self._refuse(submission, Finish("error", message=LOST, status=503))
            elif submission.watch is not None:
                submission.watch(submission)

    def knows_session(self, session: str) -> bool:
        """Whether a session of this name was ever opened or closed here."""
        return session in self._session_began

    def open_session(self, session: str) -> None:
        """A session of this name begins, empty: earlier turns are of another one."""
        self._session_began[session] = len(self.submissions)

    def submit(
        self, name: str, message: Submit, stops: tuple[bytes, ...], watch: Watch | None = None
    ) -> Submission:
        submission = Submission(
            name,
            message,
            stops,
            self._turns(message.session),
            watch=watch,
            sent_us=self._world.now_us,
        )
        self.submissions[name] = submission
        self.looks_at_tokens |= self._matches and bool(stops)
        self._open(submission)
        return submission

    def abort(self, rids: tuple[str, ...], everything: bool) -> None:
        if self._down:
            return
        self._post(Abort(rids=rids, all=everything, query=1), "")

    def disconnect(self, name: str) -> None:
        """The client closes its connection: its record ends, and the engine is told."""
        submission = self.submissions[name]
        submission.watch = None
        if submission.waits:
            self._refuse(submission, Finish("abort", message=GONE))
            return
        record = self.table.get(submission.rid)
        if record is None or record.answered:
            return
        record.end(Finish("abort", message=GONE))
        self._notice(record)
        if record.submitted:
            self._post(Abort(rids=(record.rid,), cause="disconnect"), "")
        self.table.retire_if_settled(record)

    def receive(
        self,
        frame: FromEngine,
        weights: str | list[str] = "",
        times: list[int] | None = None,
    ) -> None:
        """A frame of the engine has arrived; ``weights`` are those it computed under (of each
        token, in a list). ``times`` are those of the tokens of each output, where that is not when
        they are looked at."""
        if isinstance(frame, Reply):
            if frame.query:  # 0 is what nobody waits for
                self.reply(frame.data)
        elif isinstance(frame, Outputs):
            for output in frame.outputs:
                self._check_order(output)
            self._world.after(self._detok_us, lambda: self._look(frame.outputs, weights, times))

    def reply(self, data: object) -> None:
        """What was asked here has its answer."""
        self.replies.append((self._world.reserve(), data))

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
        touched, self._touched = self._touched, []
        for view in touched:
            if view.answered_us is not None and len(view.tokens) != view.seen_at_answer:
                faults.append(f"{view.name} was shown tokens after its answer")
        return faults

    def _open(self, submission: Submission) -> None:
        message = submission.message
        if self._down:
            self._refuse(submission, Finish("error", message=REFUSED, status=503))
            return
        try:
            record = self.table.open(message.rid, message.n)
        except StillSettling as settling:
            submission.waits = True
            settling.record.when_settled(lambda: self._reopen(submission))
            return
        except (DuplicateRid, ReservedRid) as error:
            if message.room and self._superseded(submission):
                self._open(submission)
                return
            self._refuse(submission, Finish("abort", message=str(error), status=400))
            return
        for index, member in enumerate(record.members):
            name = submission.name if message.n == 1 else f"{submission.name}#{index}"
            search = None
            if submission.stops and self._matches:
                search = StopSearch(submission.stops, message.sampling.min_new_tokens)
            view = View(name, member, submission, search)
            submission.views.append(view)
            self._views[member] = view
            self._last_words.discard(member.rid)
        self._last_words.discard(message.rid)
        record.submitted = True
        self._post(message, submission.name.partition("~")[0])

    def _superseded(self, submission: Submission) -> bool:
        """A live rid that comes again in another room is a router's retry: the old one ends."""
        for old in list(self.submissions.values()):
            same = old is not submission and old.rid == submission.rid and not old.answered
            if same and old.message.room != submission.message.room:
                self.disconnect(old.name)
                return True
        return False

    def _reopen(self, submission: Submission) -> None:
        if submission.waits:
            submission.waits = False
            self._open(submission)

    def _refuse(self, submission: Submission, finish: Finish) -> None:
        """The front end's own answer."""
        submission.waits, submission.refused = False, finish
        self.last_answer_us = self._world.now_us
        if submission.watch is not None:
            submission.watch(submission)

    def _check_order(self, output: Output) -> None:
        """The engine's own stream has no token after its last word, and no gap."""
        if output.rid in self._last_words:
            self.faults.append(f"the engine spoke of {output.rid} after its last word")
        if output.finish is not None:
            self._last_words.add(output.rid)

    def _look(
        self, outputs: list[Output], weights: str | list[str], times: list[int] | None
    ) -> None:
        for output in outputs:
            for member in self.table.route(output):
                view = self._views[member]
                self._touched.append(view)
                if member.terminal is None and output.index != len(member.tokens):
                    self.faults.append(
                        f"{view.name}: token {output.index} came where {len(member.tokens)} was due"
                    )
                fresh = member.deliver(output)
                view.weights += [weights] * len(fresh) if isinstance(weights, str) else weights
                view.times += (
                    [self._world.now_us] * len(fresh)
                    if times is None
                    else times[len(times) - len(fresh) :]
                )
                if member.terminal is None:
                    hit = view.search.push(fresh) if view.search is not None else None
                    member.examine(len(member.tokens), hit)
                    self._tell_stop(view)
                if member.terminal is not None:
                    self._notice(member.record)
                    self.table.retire_if_settled(member.record)
                submission = view.submission
                if submission.watch is not None:
                    submission.watch(submission)

    def _tell_stop(self, view: View) -> None:
        member, end = view.member, view.member.terminal
        if end is not None and end.by == "detokenizer":
            in_session = view.submission.message.session is not None
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

    def _turns(self, session: str | None) -> tuple[Submission, ...]:
        """The turns of a session so far, since it was opened."""
        if session is None:
            return ()
        began = self._session_began.get(session, 0)
        turns = list(self.submissions.values())[began:]
        return tuple(turn for turn in turns if turn.message.session == session)
