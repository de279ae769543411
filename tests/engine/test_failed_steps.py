"""A step that fails takes its own requests with it, and nobody who only came after it."""

import pytest

from engine.batch import FEED, StepResult
from tests.support.cases import complete
from tests.support.node import Node, Shape


@pytest.mark.parametrize("computed", [False, True])
def test_a_request_that_is_new_in_the_step_behind_a_failed_one_lives(computed: bool) -> None:
    """Depth 2: that step is launched, and fed by the one that fails, before anybody knows."""
    node = Node(Shape(depth=2))
    old = node.ask("old", [1, 2, 3], 12)
    node.until_tokens(old, 2)
    while len(node.runner.work) > 1:
        node.commit()
    new = node.ask("new", [7, 8, 9], 6)
    node.launch()
    fails, behind = node.runner.work
    assert FEED in behind.tokens
    assert {item.life for item in behind.items} > {item.life for item in fails.items}
    if computed:
        node.commit(error="planted")
    else:  # the device fails before anything of the step is done
        node.runner.work.popleft()
        node.scheduler.commit(StepResult(fails.step, error="planted"))
    node.settle()
    assert old.finish is not None
    assert (old.reason, old.finish.message) == ("error", "step failed: planted")
    complete(node, new)


def test_an_item_with_an_error_fails_its_request_only() -> None:
    node = Node(Shape(depth=1))
    clients = [node.ask(f"r{number}", [number, 8, 9], 6) for number in range(3)]
    for client in clients:
        node.until_tokens(client, 1)
    while node.runner.work:
        node.commit()
    node.launch()
    batch = node.runner.work[0]
    row = batch.items[1].row
    victim = node.request("r1")
    assert batch.items[1].life == victim.life
    del node.model._rows[row]
    node.settle()
    assert clients[1].finish is not None
    assert clients[1].reason == "error"
    assert f"row {row} has not come so far" in clients[1].finish.message
    for client in (clients[0], clients[2]):
        complete(node, client)
