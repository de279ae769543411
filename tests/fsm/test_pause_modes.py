"""What a pause makes of a node, in every mode, after other pauses, and in each role.

Method: every sequence of three pauses on idle schedulers of each role. What must come of it is said
a second way: the first pause that drops KV lasts."""

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
def test_pauses_upon_pauses_go_further_and_take_nothing_back(asked: tuple[PauseMode, ...]) -> None:
    for scheduler in schedulers():
        for number, one in enumerate(asked, 1):
            scheduler.pause(one)
            mode = next((m for m in asked[:number] if m != "in_place"), "in_place")
            assert scheduler.pause_mode == mode
            assert scheduler.frozen == (scheduler.role != "prefill" or mode == "in_place")
            assert scheduler.drops_kv == (mode != "in_place")
        scheduler.resume()
        assert (scheduler.frozen, scheduler.drops_kv) == (False, False)


def test_what_is_explored_unpaused_is_not_frozen() -> None:
    for role in ("unified", "prefill", "decode"):
        assert not pauses.is_frozen(role, None)
    assert pauses.admits(None)
    assert not pauses.drops_kv(None)
    assert not any(pauses.admits(mode) for mode in MODES)
