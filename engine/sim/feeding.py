"""Clusters for workloads, and how a workload is sent into one."""

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from engine.config import EngineConfig
from engine.sim.checks import cluster_faults
from engine.sim.client import Submission
from engine.sim.deployment import Cluster, ClusterSettings
from engine.sim.drive import Drive
from engine.sim.node import NodeSettings
from engine.sim.paired_node import PairSettings
from engine.sim.runner import DEFAULT_COSTS, Costs
from engine.sim.workload import Arrival, WorkloadError
from engine.sim.world import US_PER_MS, US_PER_S, World
from transport.messages import SamplingParams, Submit

SLICE_US: Final = 100 * US_PER_MS
"""How often a cluster that nobody sends anything to is asked whether it is at rest."""

STUCK_US: Final = 600 * US_PER_S
"""A cluster with open requests that has not written a trace line for so long is stuck."""

STAY_US: Final = 2 * US_PER_MS
"""A client that leaves has not stayed longer than this for each token that it asked for."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What each node of a cluster for workloads has."""

    page_size: int = 64
    pages: int = 4_800
    rows: int = 64
    """Requests that run at a time."""
    chunk: int = 8_192
    """Prompt tokens in a step."""
    queue: int = 4_096
    costs: Costs = DEFAULT_COSTS

    @property
    def tokens(self) -> int:
        """Positions that fit into a node."""
        return self.page_size * self.pages


DEFAULT_SIZES: Final = Sizes()


def build(shape: str, sizes: Sizes, checks: bool = False) -> Cluster:
    """A cluster: ``P+D`` is prefill and decode nodes, ``N`` unified ones. Those of more than one
    node are behind a router. ``checks``: schedulers audit themselves after every move.

    Raises :class:`WorkloadError` for another shape.
    """
    found = re.fullmatch(r"([1-9]\d*)(?:\+([1-9]\d*))?", shape)
    if found is None:
        raise WorkloadError(
            f"unknown cluster {shape!r}: P+D is prefill and decode nodes, as in 8+8; N is so many "
            "unified nodes"
        )
    config = EngineConfig(
        model="hash",
        page_size=sizes.page_size,
        context_length=sizes.tokens,
        max_running_requests=sizes.rows,
        max_queued_requests=sizes.queue,
        chunked_prefill_size=sizes.chunk,
        checks=checks,
    )
    roles = ("unified",) if found[2] is None else ("prefill", "decode")
    counts = zip(roles, found.groups(), strict=False)
    names = [f"{role}-{index}" for role, count in counts for index in range(int(count))]
    settings = ClusterSettings(
        dict.fromkeys(names, NodeSettings(config, sizes.pages, sizes.costs)),
        routers=int(len(names) > 1),
        pair=PairSettings(metadata=sizes.rows, host_pages=sizes.pages),
    )
    return Cluster(World(), settings)


@dataclass(frozen=True, slots=True)
class Leave:
    """A client that does not wait for the end of its answer."""

    how: Literal["abort", "disconnect"]
    after_us: int
    """It has sent its request."""


def leaving(
    arrivals: Sequence[Arrival], aborts: float, disconnects: float, seed: int
) -> dict[int, Leave]:
    """Who leaves, by the number of the request: each by chance, at some time in its answer."""
    draw, leaves = random.Random(f"leaving {seed}"), {}
    for index, arrival in enumerate(arrivals):
        chance, after_us = draw.random(), draw.randrange(STAY_US * arrival.output)
        if chance < aborts + disconnects:
            leaves[index] = Leave("abort" if chance < aborts else "disconnect", after_us)
    return leaves


class Feeder:
    """Sends a workload into a cluster, and runs the cluster until it is at rest."""

    def __init__(self, cluster: Cluster, check: bool = False, fast_forward: bool = True) -> None:
        """``check``: every invariant is checked after every event, and the first fault raises
        :class:`engine.sim.drive.Fault`. Without it uneventful steps are fast-forwarded, unless
        ``fast_forward`` says otherwise; that changes nothing but the time it takes."""
        self.cluster: Final = cluster
        self.sent = 0
        self._world = cluster.world
        self._clients = cluster.clients_of(cluster.entrance)
        self._drive = Drive(cluster.world, cluster, event_limit=math.inf) if check else None
        for node in cluster.nodes.values():
            node.fast_forward = fast_forward and not check

    @property
    def answered(self) -> int:
        """Requests that are over, for their client and for the engine."""
        return self.sent - len(self._clients.table)

    def feed(
        self,
        arrivals: Sequence[Arrival],
        leaves: dict[int, Leave] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Send everything, and wait for rest; a cluster that is stuck is left as it is.
        ``progress`` is called now and then."""
        for index, arrival in enumerate(arrivals):
            self._run(arrival.time_us)
            self._send(arrival)
            leave = (leaves or {}).get(index)
            if leave is not None:
                self._leave(f"r{index}", leave)
            progress()
        lines, since_us = 0, self._world.now_us
        while len(self._clients.table) or self.cluster.unrest():
            if len(self.cluster.lines) > lines:
                lines, since_us = len(self.cluster.lines), self._world.now_us
            elif self._world.now_us - since_us > STUCK_US:
                break
            self._run(self._world.now_us + SLICE_US)
            progress()

    def faults(self) -> list[str]:
        """What is wrong when everything should be over; empty when nothing is."""
        unanswered = [
            f"{node.name}: {life.name} has no answer in the trace"
            for node in self.cluster.processes()
            for life in node.book.lives.values()
            if life.answer is None
        ]
        return [*cluster_faults(self.cluster), *self.cluster.unrest(), *unanswered]

    def _send(self, arrival: Arrival) -> None:
        name = f"r{self.sent}"
        sampling = SamplingParams(max_new_tokens=arrival.output, temperature=0.0)
        self._clients.submit(name, Submit(name, arrival.prompt(), sampling), (), _forget)
        self.sent += 1

    def _leave(self, name: str, leave: Leave) -> None:
        """What clients see is looked at in three steps, as it gets to them: nodes give out what
        they owe, then routers pass it on, then the client acts."""
        world, clients = self._world, self._clients

        def act() -> None:
            if leave.how == "disconnect":
                clients.disconnect(name)
            else:
                clients.abort((name,), everything=False)

        def look() -> None:
            for node in self.cluster.nodes.values():
                node.catch_up()
            world.after(0, lambda: world.after(0, act))

        world.after(leave.after_us, look)

    def _run(self, until_us: int) -> None:
        """Run everything up to ``until_us``, and leave the clock there."""
        world = self._world
        if self._drive is not None:
            self._drive.until_time(max(world.now_us, until_us))
            return
        while world.next_us is not None and world.next_us <= until_us:
            world.step()
        world.advance(max(world.now_us, until_us))


def _forget(submission: Submission) -> None:
    """A prompt is kept no longer than its request: those of a day of traffic fill gigabytes."""
    if submission.answered:
        submission.message.prompt.clear()
