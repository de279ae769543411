"""The control network between nodes, in virtual time: one connection for each direction.

Frames of one connection keep their order; they may be lost, repeated or late, by chance (from a
seed) or because a scenario says so. Connections know nothing of each other, so frames of different
ones overtake. A partition loses everything between two nodes, and nobody is told. A process that
ends closes its connections: what it had sent arrives first.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, TypeAlias

from engine.sim.world import World
from transport.control import ControlFrame, Heartbeat, Recompute

FrameName: TypeAlias = str
FRAMES: Final = (
    "hello",
    "grant",
    "done",
    "landed",
    "reject",
    "abort",
    "quiet",
    "heartbeat",
    "recompute",
    "any",
)
"""Kinds of frames that a scenario can name; ``any`` is all but heartbeats."""

Mischief: TypeAlias = Literal["drop", "delay", "duplicate"]
Deliver: TypeAlias = Callable[[str, str, ControlFrame | None], None]
"""(source, destination, frame); None is the end of the connection."""


def kind_of(frame: ControlFrame) -> FrameName:
    """A frame's kind as scenarios name it."""
    if isinstance(frame, Heartbeat):
        return "heartbeat"
    if isinstance(frame, Recompute):
        return "recompute"
    return type(frame).__name__.removeprefix("Peer").lower()


@dataclass(slots=True)
class Quality:
    """How a network behaves by itself; chances are between 0 and 1, times in microseconds."""

    latency_us: int = 100
    jitter_us: int = 0
    """A frame takes up to so much longer."""
    loss: float = 0.0
    duplication: float = 0.0


@dataclass(slots=True)
class Rule:
    """What a scenario does to the next frames of one kind on one connection."""

    what: Mischief
    kind: FrameName
    source: str
    target: str
    left: int
    by_us: int = 0

    def meets(self, source: str, target: str, kind: FrameName) -> bool:
        if (source, target) != (self.source, self.target) or self.left == 0:
            return False
        return kind == self.kind or (self.kind == "any" and kind != "heartbeat")


class Network:
    """Every control connection of a cluster."""

    def __init__(self, world: World, rng: Random, quality: Quality, deliver: Deliver) -> None:
        self.quality: Final = quality
        self.rules: Final[list[Rule]] = []
        self.lost = 0
        """Frames lost so far, by chance, rule or partition."""
        self.in_flight = 0
        """Frames under way that are no heartbeats."""
        self.last_end_us = 0
        """When a connection last became usable again."""
        self._world = world
        self._rng = rng
        self._deliver = deliver
        self._cut: set[frozenset[str]] = set()
        self._arrival: dict[tuple[str, str], int] = defaultdict(int)

    # --- partitions ---

    def partition(self, one: str, other: str) -> None:
        self._cut.add(frozenset((one, other)))

    def heal(self) -> None:
        """Every partition ends."""
        self._cut.clear()
        self.last_end_us = self._world.now_us

    def cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    # --- frames ---

    def send(self, source: str, target: str, frame: ControlFrame) -> None:
        """Put a frame on the connection."""
        kind = kind_of(frame)
        extra, copies = 0, 1
        for rule in self.rules:
            if rule.meets(source, target, kind):
                rule.left -= 1
                if rule.what == "drop":
                    self.lost += 1
                    return
                if rule.what == "delay":
                    extra += rule.by_us
                else:
                    copies += 1
        quality = self.quality
        if quality.loss and self._rng.random() < quality.loss:
            self.lost += 1
            return
        if quality.duplication and self._rng.random() < quality.duplication:
            copies += 1
        if quality.jitter_us:
            extra += self._rng.randrange(quality.jitter_us)
        for _ in range(copies):
            self._put(source, target, frame, extra)

    def close(self, source: str, target: str) -> None:
        """``source``'s end of the connection is closed: ``target`` learns it after all frames."""
        self._put(source, target, None, 0)

    def _put(self, source: str, target: str, frame: ControlFrame | None, extra_us: int) -> None:
        link = (source, target)
        when = self._world.now_us + self.quality.latency_us + extra_us
        when = max(when, self._arrival[link])
        self._arrival[link] = when
        counts = frame is not None and not isinstance(frame, Heartbeat)
        self.in_flight += counts

        def arrive() -> None:
            self.in_flight -= counts
            if self.cut(source, target):
                self.lost += frame is not None
                return
            self._deliver(source, target, frame)

        self._world.at(when, arrive)
