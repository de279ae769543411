"""What exploration takes a pause for is what the schedulers of every role do.

Method: every sequence of three pauses on idle schedulers of each role, against
:mod:`fsm.pauses`."""

from itertools import product

import pytest

from engine.core import SchedulerCore
from fsm import pauses
from fsm.pauses import MODES, PauseMode
from tests.support.node import Node, Shape
from tests.support.pair import Pair


def schedulers() -> list[SchedulerCore]:
    pair = Pair(0)
    return [Node(Shape()).scheduler, pair.prefill, pair.decode]


@pytest.mark.parametrize("asked", list(product(MODES, repeat=3)), ids="-".join)
def test_pauses_are_what_schedulers_do(asked: tuple[PauseMode, ...]) -> None:
    for scheduler in schedulers():
        mode: PauseMode | None = None
        for one in asked:
            scheduler.pause(one)
            mode = pauses.after_pause(mode, one)
            assert scheduler.pause_mode == mode
            assert scheduler.frozen == pauses.is_frozen(scheduler.role, mode)
            assert scheduler.drops_kv == pauses.drops_kv(mode)
        scheduler.resume()
        assert (scheduler.frozen, scheduler.drops_kv) == (False, False)


def test_what_is_explored_unpaused_is_not_frozen() -> None:
    for role in ("unified", "prefill", "decode"):
        assert not pauses.is_frozen(role, None)
    assert pauses.admits(None)
    assert not pauses.drops_kv(None)
    assert not any(pauses.admits(mode) for mode in MODES)
