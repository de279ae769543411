"""The ranks of a node: one leader that decides, and followers that apply what it decided.

Whatever changes a device's memory is a plan (:mod:`engine.plan`): a step, a copy of pages, other
weights, what a wire reads or writes. The leader encodes each once, when it is launched, and numbers
it when its own device has done it. The same bytes go to every follower, each over a connection of
its own with a delay of its own, and a follower (:mod:`engine.sim.follower`) applies them in the
order of their numbers to memory of its own. A plan that is missing, comes twice, or is damaged
cannot be applied in its place. A rank that has lost its place, or is gone, ends its node: to
everybody else the ranks are one process.

A write of a prefill node is one write for each rank: rank i reads its own pages and writes those of
rank i of the decode node. It is over when the last rank's is, and what it wrote takes its place in
the order of decode's plans.

What each rank made of each plan is a :class:`engine.sim.follower.Report`. Nothing here compares
them: the checks do (:mod:`engine.sim.rank_checks`).
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from engine.hash_model import HashModel
from engine.plan import Plan, PlanError, WeightLoad, WireLand, WireSend, encode, seal
from engine.sim.follower import Blobs, Follower, Outcome, Report, report
from engine.sim.runner import Done, Work
from engine.sim.world import US_PER_S, World

PATIENCE_US: Final = 10 * US_PER_S
"""A rank that has not applied a plan for so long is lost."""


@dataclass(frozen=True, slots=True)
class RankSettings:
    """``count`` ranks, the leader included. A plan takes up to ``delay_us`` to each follower, drawn
    from ``seed``."""

    count: int = 1
    delay_us: int = 200
    seed: int = 0


class Connection:
    """The way of plans to one follower: in order, and late by a drawn delay."""

    def __init__(self, rng: random.Random, delay_us: int) -> None:
        self.late_us = 0
        """How much longer a scenario makes every plan take."""
        self.drops = self.repeats = self.damages = 0
        """How many of the next plans are lost, come twice, or are damaged."""
        self._rng = rng
        self._delay_us = delay_us
        self._newest_us = 0

    def arrivals(self, sealed: bytes, now_us: int) -> tuple[int, list[bytes]]:
        """When what is sent now arrives, and what does."""
        delay = self._rng.randint(0, self._delay_us) + self.late_us
        self._newest_us = max(self._newest_us, now_us + delay)
        if self.drops:
            self.drops -= 1
            return self._newest_us, []
        if self.damages:
            self.damages -= 1
            middle = len(sealed) // 2
            sealed = sealed[:middle] + bytes([sealed[middle] ^ 1]) + sealed[middle + 1 :]
        if self.repeats:
            self.repeats -= 1
            return self._newest_us, [sealed, sealed]
        return self._newest_us, [sealed]


@dataclass(slots=True)
class _Read:
    """Pages that every rank reads for a wire: what each has read, and who waits for all of it."""

    shards: dict[int, Blobs]
    then: Callable[[list[Blobs]], None]


class Ranks:
    """All ranks of one process. With a ``count`` of 1 there is nobody to tell, and nothing is
    encoded."""

    def __init__(
        self, world: World, boot_id: str, settings: RankSettings, model: Callable[[], HashModel]
    ) -> None:
        """``model`` makes a device as the leader's is at its start: once for the leader, and once
        for each follower."""
        self.boot_id: Final = boot_id
        self.leader: Final = model()
        self.followers: Final = {rank: Follower(model()) for rank in range(1, settings.count)}
        self.connections: Final = {
            rank: Connection(
                random.Random(f"rank {rank} of {boot_id}, {settings.seed}"), settings.delay_us
            )
            for rank in self.followers
        }
        self.end: Callable[[], None] = self.stop
        """Ends the node, because a rank is lost."""
        self.dead = False
        self.lost = ""
        """Which rank was lost, and why."""
        self.numbered = 0
        """Number of the newest plan."""
        self.last_end_us = 0
        """When a follower has last applied a plan."""
        self.decided: Final[dict[int, Report]] = {}
        """The leader's reports, until every follower's was taken."""
        self.reports: Final[deque[tuple[int, Report]]] = deque()
        """(rank, report) of followers, in the order in which they were made."""
        self._world: Final = world
        self._chain = 0
        self._launched: deque[tuple[Work, bytes]] = deque()
        self._open: deque[tuple[int, int]] = deque()
        """(number, when it was sent) of plans that some follower has not applied."""
        self._reads: dict[int, _Read] = {}
        """What wires wait for, by the number of the plan."""
        self._watching = False

    # --- what the leader's device does ---

    def launched(self, work: Work) -> None:
        """The scheduler has decided: this is what every rank is going to do."""
        if self.followers:
            self._launched.append((work, encode(work)))

    def executed(self, done: Done) -> None:
        """The leader's device is through with the oldest launched work."""
        if self.followers:
            work, raw = self._launched.popleft()
            self._issue(work, raw, done)

    def load_weights(self, weights: str) -> None:
        """Every rank computes under other weights from here on."""
        self.leader.load_weights(weights)
        if self.followers:
            plan = WeightLoad(weights)
            self._issue(plan, encode(plan), [])

    def read(self, ticket: int, pages: array[int], then: Callable[[list[Blobs]], None]) -> None:
        """Every rank reads ``pages`` for a wire; ``then`` gets what each has read, leader first,
        when the last one has."""
        mine = self.leader.export_pages(pages)
        if not self.followers:
            then([mine])
            return
        plan = WireSend(ticket, pages)
        number = self._issue(plan, encode(plan), mine)
        self._reads[number] = _Read({0: mine}, then)

    def land(self, writer: str, ticket: int, pages: array[int], shards: list[Blobs]) -> None:
        """A wire has written ``shards[i]`` into ``pages`` of rank i."""
        self.leader.import_pages(pages, shards[0])
        if self.followers:
            for rank, follower in self.followers.items():
                follower.landing[writer, ticket] = shards[rank]
            plan = WireLand(writer, ticket, pages)
            self._issue(plan, encode(plan), [])

    def stop(self) -> None:
        """The node ends, and every rank with it."""
        self.dead = True

    def kill(self, rank: int) -> None:
        """One rank ends by itself: its connection closes."""
        self._lose(rank, "it is gone")

    # --- rest ---

    @property
    def behind(self) -> list[str]:
        """What followers have still to do; empty when they are where the leader is."""
        return [
            f"rank {rank} has applied {follower.applied} of {self.numbered} plans"
            for rank, follower in self.followers.items()
            if follower.applied != self.numbered
        ]

    # --- inside ---

    def _issue(self, work: Plan, raw: bytes, done: Outcome) -> int:
        """The leader's device has done ``work``: it is every follower's next plan. Returns its
        number."""
        self.numbered += 1
        self._chain = zlib.crc32(raw, self._chain)
        number = self.numbered
        self.decided[number] = report(number, self._chain, work, done, self.leader)
        self._open.append((number, self._world.now_us))
        sealed = seal(number, raw)
        for rank, connection in self.connections.items():
            when, copies = connection.arrivals(sealed, self._world.now_us)
            for each in copies:
                self._world.at(when, partial(self._arrive, rank, each))
        self._watch()
        return number

    def _arrive(self, rank: int, sealed: bytes) -> None:
        if self.dead:
            return
        try:
            made, blobs = self.followers[rank].apply(sealed)
        except PlanError as error:
            self._lose(rank, str(error))
            return
        self.last_end_us = self._world.now_us
        self.reports.append((rank, made))
        while self._open and self._open[0][0] <= self.slowest:
            self._open.popleft()
        read = self._reads.get(made.number)
        if read is not None:
            read.shards[rank] = blobs
            if len(read.shards) > len(self.followers):
                del self._reads[made.number]
                read.then([read.shards[each] for each in sorted(read.shards)])

    @property
    def slowest(self) -> int:
        """Number of the newest plan that every follower has applied."""
        return min(follower.applied for follower in self.followers.values())

    def _watch(self) -> None:
        """A plan that nobody answers for is noticed, although nothing follows it."""
        if not self._watching:
            self._watching = True
            _, sent_us = self._open[0]
            self._world.at(sent_us + PATIENCE_US, self._look)

    def _look(self) -> None:
        self._watching = False
        if self.dead or not self._open:
            return
        number, sent_us = self._open[0]
        if sent_us + PATIENCE_US > self._world.now_us:
            self._watch()
            return
        late = next(rank for rank, each in self.followers.items() if each.applied < number)
        self._lose(late, f"it has not applied plan {number} for {PATIENCE_US // US_PER_S} s")

    def _lose(self, rank: int, why: str) -> None:
        self.lost = f"rank {rank}: {why}"
        self.end()
