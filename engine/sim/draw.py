"""Random scenarios: a whole cluster, a workload, and faults of every kind, drawn from one seed.

What is drawn is the text of a scenario. So a seed that fails can be read, shortened and kept like
any other file, and nothing but the language decides what can happen.
"""

import random
from typing import Final

from engine.sim.draft import Draft
from engine.sim.draw_faults import FAULTS, slow_rank
from engine.sim.draw_traffic import CALM

SHAPES: Final[dict[str, str]] = {
    "unified": "unified=1",
    "pool": "unified=2 router=1",
    "1+1": "prefill=1 decode=1 router=1",
    "2+1": "prefill=2 decode=1 router=1",
    "2+2": "prefill=2 decode=2 router=1",
}
"""Clusters by name."""

RANKS: Final = 0.15
"""Share of the clusters whose nodes have three ranks, and compute every step three times."""

COMMANDS: Final = 120
"""Commands of one scenario, about."""


def scenario(seed: int, shape: str = "", commands: int = COMMANDS) -> str:
    """The scenario of ``seed``: on the cluster ``shape``, or on one that the seed chooses."""
    draw = random.Random(f"simulation {seed}")
    chosen = shape or draw.choice(list(SHAPES))
    draft = Draft(
        draw,
        _names(SHAPES[chosen], ("unified", "prefill", "decode")),
        _names(SHAPES[chosen], ("router",)),
        draw.random() < 0.25 and chosen not in ("unified", "pool"),
        random.Random(f"ranks {seed}"),
    )
    draft.ranks = 3 if draft.aside.random() < RANKS else 1
    draft.say(_cluster(draft, SHAPES[chosen], seed))
    calm = draft.chance(0.25)
    deeds = [*CALM, *([] if calm else FAULTS)]
    weights = [weight for weight, _ in deeds]
    for _ in range(draw.randrange(commands // 3, commands)):
        (deed,) = draw.choices([deed for _, deed in deeds], weights)
        deed(draft)
        if draft.ranks > 1 and draft.aside.random() < 0.05:
            slow_rank(draft)
    _mend(draft)
    return "\n".join(draft.lines) + "\n"


def _names(shape: str, roles: tuple[str, ...]) -> list[str]:
    counts = dict(part.split("=") for part in shape.split())
    return [f"{role}-{i}" for role in roles for i in range(int(counts.get(role, 0)))]


def _cluster(draft: Draft, shape: str, seed: int) -> str:
    """A cluster that is short of everything now and then."""
    draw = draft.draw
    page_size = draw.choice([4, 16, 16])
    pages = draw.choice([24, 40, 96]) * (16 // page_size if page_size == 4 else 1)
    parts = [
        f"cluster {shape} seed={seed} trace=moves",
        f"pages={pages} page_size={page_size} rows={draw.choice([1, 2, 4, 8])}",
        f"chunk={draw.choice([8, 32, 64, 256])} depth={draw.choice([1, 2, 2])}",
        f"queue={draw.choice([2, 8, 40])} prefix_cache={draw.choice(['on', 'on', 'on', 'off'])}",
        f"detok={draw.choice([0, 0, 5, 20])}ms overtakes={draw.choice([0, 2, 64])}",
        f"copy={draw.choice([100, 100, 2000])}us",
    ]
    if draw.random() < 0.1:
        parts.append("waiting_timeout=80ms")
    if draw.random() < 0.1:
        parts.append("running_timeout=60ms")
    if draw.random() < 0.3:
        parts.append(f"store=on store_latency={draw.choice([0, 2, 30])}ms prefetch_timeout=20ms")
    if draft.routers:
        parts.append(f"retries={draw.choice([0, 0, 1, 2])}")
    if draft.pairs:
        parts.append(f"metadata={draw.choice([1, 2, 8])} host_pages={draw.choice([0, 8, 64])}")
        parts.append(f"latency={draw.choice([0, 100, 2000])}us jitter={draw.choice([0, 300])}us")
        parts.append(f"wire_page={draw.choice([10, 300])}us")
        parts.append(f"meeting_timeout={draw.choice([2, 30])}s transfer_timeout=4s")
    if draft.lossy:
        parts.append(f"loss={draw.choice([0.01, 0.1])} duplication={draw.choice([0, 0.1])}")
    if draft.ranks > 1:
        parts.append(f"ranks={draft.ranks} rank_delay={draft.aside.choice([0, 200, 3000])}us")
    return " ".join(parts)


def _mend(draft: Draft) -> None:
    """Everything that is broken is mended, and everything has to come to rest."""
    for where in sorted(draft.dead):
        draft.say(f"restart {where}")
    for node in sorted(draft.frozen):
        draft.say(f"thaw {node}")
    if draft.cut:
        draft.say("heal")
    for gate, node in sorted(draft.held):
        draft.say(f"release {gate} {node}")
    for node in sorted(draft.paused):
        draft.say(f"continue {node}")
    draft.say("run until idle within=100s")
    if draft.names:
        draft.say("expect r* golden")
    if draft.lossy:
        draft.say("run 20s")
    draft.say("expect base")
    draft.say("run 5s")
    draft.say("expect base")
