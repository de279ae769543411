"""Figures of a workload that has run: latencies as clients saw them, and what it took of nodes."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from engine.sim.client import View
from engine.sim.deployment import Cluster
from engine.sim.node import SimNode
from engine.sim.world import US_PER_MS, US_PER_S
from fsm.trace import Header, LeaseLine, MoveLine

SHARES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of a time, in virtual milliseconds: each is one of the values (nearest rank)."""

    count: int
    quantiles: dict[str, float]
    """By their names in :data:`SHARES`; empty where there is no value."""

    @classmethod
    def of(cls, times_us: Iterable[float]) -> "Spread":
        values = sorted(times_us)
        if not values:
            return cls(0, {})
        ranks = {name: math.ceil(share * len(values)) - 1 for name, share in SHARES.items()}
        return cls(
            len(values),
            {name: round(values[rank] / US_PER_MS, 3) for name, rank in ranks.items()},
        )


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What a node had to do."""

    steps: int
    peak_pages: int
    """Pages that requests held at a time, most."""
    pages: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything counts whole requests and tokens; seconds are virtual, from the first request sent
    to the last answer."""

    requests: int
    ends: dict[str, int]
    """Answers by reason, with the status where there is one."""
    seconds: float
    prompt_tokens: int
    """Of requests whose prompts were computed."""
    cached_tokens: int
    """Of those, found in prefix caches."""
    output_tokens: int
    retractions: int
    first_token: Spread
    """From sending to the first token (TTFT)."""
    token_gap: Spread
    """Between two tokens of one request (ITL)."""
    token_mean: Spread
    """The mean of a request's gaps (TPOT)."""
    answer: Spread
    """From sending to the answer."""
    nodes: dict[str, NodeUse]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


def figures(cluster: Cluster) -> Figures:
    """The figures of all that clients have sent into ``cluster``."""
    sent = [each for _, each in cluster.submissions().values()]
    pairs = [(each.sent_us, view) for each in sent for view in each.views]
    views = [view for _, view in pairs]
    ends = Counter(_end(view) for view in views)
    ends.update("refused" for each in sent if each.refused is not None)
    begun = [(start, view) for start, view in pairs if view.times]
    gaps = [[b - a for a, b in pairwise(view.times)] for view in views]
    answers = [(start, view.answered_us) for start, view in pairs if view.answered_us is not None]
    first = min((each.sent_us for each in sent), default=0)
    last = max((end for _, end in answers), default=first)
    return Figures(
        len(sent),
        dict(sorted(ends.items(), key=lambda end: (-end[1], end[0]))),
        (last - first) / US_PER_S,
        sum(view.member.prompt_tokens for view in views if view.times),
        sum(view.member.cached_tokens for view in views if view.times),
        sum(len(view.tokens) for view in views),
        sum(view.member.retractions for view in views),
        Spread.of(view.times[0] - start for start, view in begun),
        Spread.of(gap for each in gaps for gap in each),
        Spread.of(sum(each) / len(each) for each in gaps if each),
        Spread.of(end - start for start, end in answers),
        {name: _use(node) for name, node in cluster.nodes.items()},
    )


def _end(view: View) -> str:
    finish = view.finish
    if finish is None:
        return "no answer"
    return finish.type if finish.status is None else f"{finish.type} {finish.status}"


def _use(node: SimNode) -> NodeUse:
    lines = node.book.lines
    total = next(line.pools["pages"] for line in lines if isinstance(line, Header))
    balances = [
        line.pool
        for line in lines
        if isinstance(line, MoveLine | LeaseLine) and line.pool is not None
    ]
    peak = max((total - balance.free - balance.cached for balance in balances), default=0)
    return NodeUse(node.steps_committed, peak, total)
