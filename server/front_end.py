"""The server's table of open requests, and everything that can happen to them.

Tokens and ends come from the engine, stop strings from the detokenizer, aborts from clients that
ask for one or go away, and ends from the server itself when it drains or its engine dies. All of
it meets in the front-end records (``engine.frontend``), which decide each request's one terminal.
What this module adds is the order of things: a rid is reserved before its prompt is tokenized, so
that a second request with it is refused and an abort finds it; nothing of a call is submitted
before all of it is valid; and whatever way a call ends, the engine is told exactly once.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, ParamSpec, TypeVar

import msgspec

from engine.frontend import (
    DuplicateRid,
    FrontendRecord,
    FrontendTable,
    Member,
    ReservedRid,
    StillSettling,
)
from server.calls import Call, Choice, Submission
from server.engine_client import ENGINE_GONE, EngineClient
from server.errors import ApiError, bad_value, overloaded
from server.metrics import ServerMetrics
from server.settings import ServerSettings
from server.tokenizer import Tokenizer
from transport.messages import Abort, Drain, Finish, Hello, Outputs, StopMatched, Submit

logger = logging.getLogger(__name__)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
AbortCause = Literal["api", "disconnect", "drain", "slow_reader"]

INLINE_UNITS = 2048
"""What is larger is converted in a thread, which does not hold the event loop. A unit is a
character to tokenize or a token to turn into text (about 1 µs), or a byte of a chat's body."""
AT_A_TIME = 32
"""Prompts of a call handed to the engine before others get their turn on the event loop."""
CALL_UNITS = 32
"""Each text, list of tokens or message costs as much as so many of its units, however short."""

_REASONS: dict[AbortCause, str] = {
    "api": "Aborted",
    "disconnect": "the client went away",
    "drain": "the server is shutting down",
    "slow_reader": "the client does not read its answer",
}


@dataclass(slots=True)
class AbortReport:
    """What ``/abort_request`` answers."""

    aborted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class FrontEnd:
    """All open calls of one server. Belongs to one event loop."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        metrics: ServerMetrics,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.metrics = metrics
        self.table = FrontendTable()
        self.calls: set[Call] = set()
        self.draining = False
        self._choices: dict[Member, Choice] = {}
        self._tokenizing = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._quiet = asyncio.Event()
        self._quiet.set()
        engine.on_outputs = self._on_outputs
        engine.on_gone = self._on_engine_gone

    def admit(self) -> Hello:
        """The engine's limits, if a new request may be taken at all.

        Raises:
            ApiError: 503, while the engine starts, when it is gone, or when the server drains.
        """
        if self.draining:
            raise overloaded(_REASONS["drain"])
        return self.engine.available

    @contextlib.asynccontextmanager
    async def open(self, submissions: Sequence[Submission], *, stream: bool) -> AsyncIterator[Call]:
        """Submit a call's prompts; on leaving, whatever still runs of them is aborted.

        Raises:
            ApiError: 400 for a live rid or a prompt or limit that does not fit, 503 as
                :meth:`admit`.
        """
        self.admit()
        count, most = sum(each.n for each in submissions), self.settings.max_completions_per_call
        if count > most:
            raise bad_value("n", f"makes {count} completions with these prompts, at most {most}")
        call = Call(self.tokenizer, streaming=stream)
        self.calls.add(call)
        self._quiet.clear()
        cause: AbortCause = "api"  # a call that fails by itself takes its other members with it
        try:
            for submission in submissions:
                call.records.append(await self._reserve(submission))
            prompts = await self.off_loop(
                units_of(each.prompt for each in submissions if isinstance(each.prompt, str)),
                self._tokenize,
                submissions,
            )
            await self._submit(call, submissions, prompts)
            yield call
        except (asyncio.CancelledError, ConnectionError):
            cause = "disconnect"
            raise
        except SlowReader:
            cause = "slow_reader"
            raise
        finally:
            self._close(call, cause)

    async def off_loop(
        self,
        units: int,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call ``function``, which converts ``units`` (:data:`INLINE_UNITS`): here if they are
        few, else in one of the few threads that handle what is long.

        A call is one piece of work: sum up all that it converts, because a thousand short texts
        hold the event loop as long as one long text.
        """
        if units <= INLINE_UNITS:
            return function(*args, **kwargs)
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)

    async def abort(self, rids: Sequence[str] | None) -> AbortReport:
        """End the requests of these rids (exact; a group's ends its members), or all open ones.

        Returns:
            For every rid, once the engine has confirmed: aborted now, had its answer, or not known.
        """
        report = AbortReport()
        if rids is None:
            asked = [record.rid for record in self.table if not record.answered]
        else:
            asked = list(dict.fromkeys(rids))
        running: list[str] = []
        for rid in asked:
            standing = self.table.standing(rid)
            record = self.table.get(rid)
            if standing == "unknown":
                report.unknown.append(rid)
            elif standing == "finished" or record is None:
                report.finished.append(rid)
            elif record.submitted:
                running.append(rid)
            else:
                record.end(Finish("abort", message="Abort in waiting queue"))
                self.table.retire_if_settled(record)
                report.aborted.append(rid)
        if running:
            members = {rid: self._member_names(rid) for rid in running}
            confirmed = await self._ask_abort(running if rids is not None else None)
            for rid in running:
                gone = confirmed is not None and confirmed.isdisjoint(members[rid])
                (report.finished if gone else report.aborted).append(rid)
        return report

    def _member_names(self, rid: str) -> set[str]:
        record = self.table.get(rid)
        members = record.members if record is not None and record.rid == rid else []
        return {rid, *(member.rid for member in members)}

    async def _ask_abort(self, rids: Sequence[str] | None) -> set[str] | None:
        """The rids that the engine has aborted, or None if it does not say (then: all of them)."""
        try:
            data = await self.engine.ask(
                lambda number: Abort(rids=tuple(rids or ()), all=rids is None, query=number)
            )
        except ApiError:
            return None  # it is gone, and so are they; or it is late, and they will be
        aborted = data.get("aborted") if isinstance(data, dict) else None
        return set(aborted) if isinstance(aborted, list) else None

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let open ones go on for ``grace_s``, then end them; wait for
        the answers."""
        self.draining = True
        self.engine.post(Drain(grace_s=grace_s))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + 0.3):  # the engine ends them at grace_s
                await self._quiet.wait()
        for record in self.table:
            self._end(record, "drain")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):  # handlers write their last words
                await self._quiet.wait()

    async def answered(self, timeout_s: float) -> None:
        """Wait until no call is open, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()

    def close(self) -> None:
        """Let go of threads."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    async def _reserve(self, submission: Submission) -> FrontendRecord:
        while True:
            try:
                return self.table.open(submission.rid, submission.n)
            except StillSettling as settling:
                free = asyncio.Event()
                settling.record.when_settled(free.set)
                await free.wait()
            except (DuplicateRid, ReservedRid) as error:
                raise ApiError(400, str(error), param="rid") from None

    def _tokenize(self, submissions: Sequence[Submission]) -> list[list[int]]:
        return [
            each.prompt
            if isinstance(each.prompt, list)
            else self.tokenizer.encode(each.prompt, each.add_special_tokens)
            for each in submissions
        ]

    async def _submit(
        self, call: Call, submissions: Sequence[Submission], prompts: Sequence[list[int]]
    ) -> None:
        hello = self.admit()  # tokenizing takes time, and things happen meanwhile
        limits = [
            submission.token_limit(len(prompt), hello)
            for submission, prompt in zip(submissions, prompts, strict=True)
        ]
        for position, submission in enumerate(submissions):
            record, prompt = call.records[position], prompts[position]
            for member in record.members:
                choice = Choice(call, member, len(call.choices), position, submission)
                choice.prompt_ids = prompt
                call.choices.append(choice)
                self._choices[member] = choice
        for position, submission in enumerate(submissions):
            record, prompt = call.records[position], prompts[position]
            if position % AT_A_TIME == AT_A_TIME - 1:
                await asyncio.sleep(0)
            if record.answered:
                continue  # aborted before its turn came: the engine never hears of it
            sampling = msgspec.structs.replace(submission.sampling, max_new_tokens=limits[position])
            self.engine.submit(
                Submit(
                    rid=submission.rid,
                    prompt=prompt,
                    sampling=sampling,
                    n=submission.n,
                    priority=submission.priority,
                    session=submission.session,
                    deadline_s=submission.deadline_s,
                    limit_is_default=submission.max_new_is_default,
                )
            )
            record.submitted = True
        if any(record.answered for record in call.records):
            call.changed.set()

    def _on_outputs(self, outputs: Outputs) -> None:
        for output in outputs.outputs:
            for member in self.table.route(output):
                choice = self._choices.get(member)
                if choice is None or member.terminal is not None:
                    member.deliver(output)
                else:
                    choice.deliver(output)
                    if choice.terminal is not None:
                        self._ended(choice)
                    elif choice.unread_tokens > self.settings.max_unread_tokens:
                        self._end(member.record, "slow_reader")
                    choice.call.changed.set()
                self.table.retire_if_settled(member.record)

    def _ended(self, choice: Choice) -> None:
        """A completion's end was just decided: tell the engine if it does not know, and
        count it."""
        member, end = choice.member, choice.terminal
        assert end is not None
        choice.close_text()
        if end.by == "detokenizer":
            # A session is told even when its turn has ended: what was cut off is not its history.
            if member.needs_stop or choice.submission.session is not None:
                self.engine.post(StopMatched(member.rid, end.tokens, str(end.finish.matched)))
        elif end.by == "server" and member.needs_stop:
            self.engine.post(Abort(rids=(member.rid,)))
        # The engine drains as well, and says so by an abort or a refusal.
        choice.drained = self.draining and (end.finish.type == "abort" or end.finish.status == 503)
        self.metrics.ended(choice)

    def _end(self, record: FrontendRecord, cause: AbortCause) -> None:
        """The server ends what is still open of a request."""
        if record.answered:
            return
        open_members = [member for member in record.members if member.terminal is None]
        record.end(Finish("abort", message=_REASONS[cause]))
        if record.submitted and any(member.needs_stop for member in open_members):
            self.engine.post(Abort(rids=(record.rid,), cause=cause))
        for member in open_members:
            choice = self._choices.get(member)
            if choice is not None:
                choice.close_text()
                choice.drained = cause == "drain"
                self.metrics.ended(choice)
                choice.call.changed.set()
        self.table.retire_if_settled(record)

    def _close(self, call: Call, cause: AbortCause) -> None:
        for record in call.records:
            self._end(record, cause)
            self.table.retire_if_settled(record)
            for member in record.members:
                self._choices.pop(member, None)
        self.calls.discard(call)
        if not self.calls:
            self._quiet.set()

    def _on_engine_gone(self) -> None:
        finish = Finish("error", message=ENGINE_GONE, status=503)
        for record in self.table:
            for member in record.members:
                undecided = member.terminal is None
                member.propose(finish, member.examined, "server")
                member.settled = True
                choice = self._choices.get(member)
                if choice is not None and undecided:
                    choice.close_text()
                    self.metrics.ended(choice)
                    choice.call.changed.set()
            self.table.retire_if_settled(record)


def units_of(items: Iterable[Sized]) -> int:
    """What texts or lists of tokens cost to convert, in units (:data:`INLINE_UNITS`)."""
    return sum(len(item) + CALL_UNITS for item in items)


class SlowReader(Exception):  # noqa: N818
    """A client does not take what it asked for; its connection is dropped and its request ended."""
