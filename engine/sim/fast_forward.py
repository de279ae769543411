"""Fast-forward: which of a node's next steps are uneventful, and how they are made up for.

While nothing arrives, nobody ends, nobody comes and nobody needs a page, a decoding node repeats
one turn: a step ends, it is committed, the next is launched, and clients get a token each. In a
workload that is most of what happens, and most of its cost is not in the commits but around them:
events, looking for messages and deadlines, frames, the copies that a router makes.

So a node whose next steps are uneventful *dozes*. Its device keeps their time, one small event for
each, and nothing else happens. Whatever touches the node (a message, a frame, a write into its
memory, an alarm, the first step that is not uneventful) first makes it catch up: the production
scheduler commits and launches every step that was due, each at its own time, and clients get the
tokens in one frame, each with its own time. So the state that is touched is the state that a node
that never dozes has then, to the byte; the order of events of one instant is kept too
(:meth:`engine.sim.world.World.reserve`).

A scenario, or a check, that looks at every event leaves this off.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from engine.batch import Batch
from engine.hash_model import BYTES
from engine.pages import Pages
from engine.request import Request

if TYPE_CHECKING:
    from engine.sim.node import SimNode

DEPTH: Final = 2
"""Steps in flight at a node that keeps its device busy; one that waits for commits is never alike
from step to step."""


class Eventful(AssertionError):  # noqa: N818 - it names what it is
    """Something happened in a step that was taken to be uneventful: a bug of the simulator."""


def uneventful(node: "SimNode") -> int:
    """How many steps from now on end without anything but one token for everybody.

    ``node`` has just had a turn, in which admission was settled. Deadlines are the caller's.
    """
    scheduler, runner = node.scheduler, node.runner
    if scheduler.frozen or node.store is not None or node.clients.looks_at_tokens:
        return 0
    if node.ranks.followers:
        return 0  # they are told of every step
    if runner.fail_steps or any(gate.armed for gate in node.gates.values()):
        return 0
    steps = [work for work in runner.queue if isinstance(work, Batch)]
    if len(steps) != DEPTH or len(runner.queue) != DEPTH:
        return 0
    device = {request.life: request for request in scheduler.roster.device}
    for step in steps:
        if len(step.items) != len(device) or len(step.tokens) != len(device):
            return 0
        if any(item.life not in device or not item.sample for item in step.items):
            return 0
    return max(0, _shortest(device.values()))


def make_up(node: "SimNode", owed: list[tuple[int, int]]) -> None:
    """Do what the steps are owed that ended while the node dozed, each at its own time.

    ``owed`` is when each of them ended, in microseconds, and the place of its turn in that instant.
    """
    world, scheduler = node.world, node.scheduler
    when_us, place = owed[-1]
    # What is being run now may stand between the end of the last step and the turn it causes.
    due = when_us == world.now_us and world.place < place
    times = [when for when, _ in owed[: len(owed) - due]]
    before = scheduler.tracer.last
    node.turn_due = True
    for when in times:
        node.behind_us = world.now_us - when
        node.runner.repay(when)
        node.commit()
        if scheduler.launch() is None:
            raise Eventful(f"{node.name}: that nothing is launched was not foreseen")
    node.behind_us = 0
    for frame in scheduler.flush():
        node.clients.receive(frame, node.model.weights, times)
    if scheduler.tracer.last != before:
        raise Eventful(f"{node.name}: trace line {scheduler.tracer.last} was not foreseen")
    if due:
        node.runner.repay(when_us)
        world.take(place, node.turn)
    else:
        node.turn_due = False


def _shortest(requests: Iterable[Request]) -> int:
    """How long everybody goes on as now: nobody may end, or need a page, at any of these steps."""
    lengths = []
    for request in requests:
        pages = request.leases.get("pages")
        if request.state != "decoding" or request.withheld or not isinstance(pages, Pages):
            return 0
        if request.sampling.eos_at >= 0 or any(token < BYTES for token in request.stop_ids):
            return 0
        tokens = request.max_new_tokens - request.output_len - request.feeds
        lengths.append(min(tokens, pages.capacity - request.launched))
    return min(lengths, default=0)
