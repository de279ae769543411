"""The loop's own decisions: when it launches, and how long it may sleep."""

from __future__ import annotations

import threading
from collections import deque
from typing import cast

from engine.basics import Parts
from engine.config import EngineConfig
from engine.hash_model import HashModel
from engine.loop import EngineLoop
from engine.runner import RunnerThread
from engine.scheduler import ModelFacts, Scheduler
from transport.channel import Channel, ChannelFull
from transport.messages import Drain, FromEngine, SamplingParams, Submit, ToEngine


class StalledChannel:
    """Refuses to send while ``full``; hands over ``arriving``. Remembers how long it was to wait,
    and ends the test's patience after ``polls``."""

    def __init__(self) -> None:
        self.full = True
        self.arriving: deque[ToEngine] = deque()
        self.sent: list[FromEngine] = []
        self.waits: list[float] = []

    def send(self, message: FromEngine) -> None:
        if self.full:
            raise ChannelFull
        self.sent.append(message)

    def receive_nowait(self) -> ToEngine | None:
        return self.arriving.popleft() if self.arriving else None

    def poll(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)

    def wake(self) -> None:
        """Nobody sleeps here."""


def test_a_launch_that_was_held_back_is_made_up_for_at_once() -> None:
    """Goal: while the server does not read, nothing is launched; once it has read, the loop does
    not sleep until its next report before it computes again."""
    channel = StalledChannel()
    config = EngineConfig(model="hash", kv_pages=16, page_size=4)
    model = HashModel(16, 4)
    runner = RunnerThread(model, channel.wake)
    facts = ModelFacts(258, 64, (257,), "hash:W1")
    now = 0.0
    scheduler = Scheduler(Parts(config, facts, 16, lambda: now, runner))
    gone = threading.Event()
    loop = EngineLoop(
        cast("Channel[FromEngine, ToEngine]", channel), scheduler, runner, lambda: now, {}, gone
    )
    loop._turn()  # its first report finds no room
    assert 0 < loop._patience() <= 0.01, "looks again soon whether the server reads"
    channel.arriving.append(Submit("r", [1, 2, 3], SamplingParams(max_new_tokens=1)))
    channel.full = False
    loop._turn()
    assert scheduler.steps_in_flight == 0, "decided before what was left over had gone"
    assert channel.sent
    assert loop._patience() == 0.0
    loop._turn()
    assert scheduler.steps_in_flight == 1
    channel.arriving.append(Drain(grace_s=5.0))
    while loop.run() != "drained":
        pass
    runner.close()
