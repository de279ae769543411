"""The engine's loop: messages in, steps launched and committed, outputs out. The only place with
IO.

One turn takes everything that arrived, fires what follows from it, commits what the runner
finished, launches what fits, and sends. It then sleeps until a message, a result, a store
operation or a deadline is there."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from engine import views
from engine.batch import StepResult
from engine.runner import RunnerThread
from engine.scheduler import Scheduler
from transport.channel import Channel, ChannelFull
from transport.messages import (
    Abort,
    CloseSession,
    DebugHook,
    Drain,
    FromEngine,
    OpenSession,
    Query,
    StopMatched,
    Stopped,
    Submit,
    ToEngine,
)

logger = logging.getLogger(__name__)

BUSY_REPORT_S: Final = 0.25
IDLE_REPORT_S: Final = 1.0
MESSAGES_A_TURN: Final = 256
"""Messages handled before the device is looked at again, so that neither starves the other."""


class EngineLoop:
    """Drives one scheduler. ``info`` answers ``Query("info")``."""

    def __init__(
        self,
        channel: Channel[FromEngine, ToEngine],
        scheduler: Scheduler,
        runner: RunnerThread,
        clock: Callable[[], float],
        info: dict[str, object],
        server_gone: threading.Event,
    ) -> None:
        self._channel = channel
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._info = info
        self._server_gone = server_gone
        self._backlog: deque[FromEngine] = deque()
        self._next_report = 0.0
        self._unread = False
        self._held_back = False
        """This turn launched nothing because the server had not read what the last one sent."""

    def run(self) -> str:
        """Serve until drained or until the server is gone; returns which."""
        while True:
            self._turn()
            if self._scheduler.draining and self._scheduler.at_rest and not self._backlog:
                return "drained"
            if self._server_gone.is_set():
                return "server gone"
            self._channel.poll(0.0 if self._unread else self._patience())

    def stop(self, reason: str, error: str = "") -> None:
        """Say good-bye, if the server still listens."""
        try:
            self._channel.send(Stopped(reason, error))
        except ChannelFull:
            logger.warning("the server does not read: it is not told that the engine stops")

    def _turn(self) -> None:
        scheduler = self._scheduler
        self._unread = True
        for _ in range(MESSAGES_A_TURN):
            message = self._channel.receive_nowait()
            if message is None:
                self._unread = False
                break
            self._handle(message)
        scheduler.tick()
        for done in self._runner.poll():
            if isinstance(done, StepResult):
                scheduler.commit(done)
            else:
                scheduler.pages_done(done)
        scheduler.poll_store()
        # A server that does not read stops the device, instead of filling memory with outputs.
        self._held_back = bool(self._backlog)
        while not self._backlog and scheduler.launch() is not None:
            pass
        self._backlog.extend(scheduler.flush())
        self._report()
        self._send()

    def _handle(self, message: ToEngine) -> None:
        scheduler = self._scheduler
        match message:
            case Submit():
                scheduler.submit(message)
            case Abort():
                scheduler.abort(message)
            case StopMatched():
                scheduler.stop_matched(message)
            case OpenSession():
                scheduler.open_session(message)
            case CloseSession():
                scheduler.close_session(message)
            case Drain():
                scheduler.drain(message)
            case Query():
                scheduler.reply(message.query, self._answer(message))
            case DebugHook():
                scheduler.reply(message.query, self._debug(message))

    def _answer(self, query: Query) -> object:
        scheduler, now = self._scheduler, self._clock()
        match query.what:
            case "requests":
                lives = scheduler.roster.lives.values()
                return {"requests": [views.request_summary(scheduler, r, now) for r in lives]}
            case "request":
                return views.find_request(scheduler, query.rid, now)
            case "ledger":
                return views.ledger_view(scheduler)
            case "load":
                return msgspec.structs.asdict(scheduler.load())
            case "info":
                return self._info
            case "flush":
                flushed, message = scheduler.flush_cache()
                return {"flushed": flushed, "message": message}

    def _debug(self, hook: DebugHook) -> object:
        if not self._scheduler.config.debug:
            return {"error": "fault hooks need --debug", "status": 400}
        match hook.hook:
            case "hold_step":
                self._runner.hold()
            case "release_step":
                self._runner.release()
            case "retract":
                return {"retracted": self._scheduler.retract(hook.rid)}
        return {"done": hook.hook}

    def _patience(self) -> float:
        """Seconds until something is due without anybody's message."""
        now = self._clock()
        due = self._next_report
        deadline = self._scheduler.next_deadline()
        if deadline is not None:
            due = min(due, deadline)
        if self._backlog:
            due = min(due, now + 0.01)
        elif self._held_back:
            due = now  # the server has read since: nothing else would wake us for the launch
        return max(0.0, due - now)

    def _report(self) -> None:
        now = self._clock()
        if now >= self._next_report:
            load = self._scheduler.load()
            self._next_report = now + (IDLE_REPORT_S if load.at_rest else BUSY_REPORT_S)
            self._backlog.append(load)

    def _send(self) -> None:
        while self._backlog:
            try:
                self._channel.send(self._backlog[0])
            except ChannelFull:
                return
            self._backlog.popleft()
