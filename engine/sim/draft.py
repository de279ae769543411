"""A scenario while it is being drawn: its lines so far, and what is broken in it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(slots=True)
class Draft:
    """One scenario."""

    draw: random.Random
    nodes: list[str]
    routers: list[str]
    lossy: bool
    aside: random.Random
    """Draws about ranks come from a stream of their own: they change nothing else of a seed."""
    ranks: int = 1
    lines: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    held: set[tuple[str, str]] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    cut: bool = False
    weights: int = 1

    def say(self, line: str) -> None:
        self.lines.append(line)

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def of(self, role: str) -> list[str]:
        return [node for node in self.nodes if node.startswith(role)]

    @property
    def pairs(self) -> bool:
        return bool(self.of("prefill"))


Deed: TypeAlias = Callable[[Draft], None]
"""Something that happens: it says its commands."""
