"""Random scenarios: a whole cluster, a workload, and faults of every kind, drawn from one seed.

What is drawn is the text of a scenario. So a seed that fails can be read, shortened and kept like
any other file, and nothing but the language decides what can happen.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

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


@dataclass(slots=True)
class _Draft:
    """A scenario being drawn, and what is broken in it so far."""

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


def scenario(seed: int, shape: str = "", commands: int = COMMANDS) -> str:
    """The scenario of ``seed``: on the cluster ``shape``, or on one that the seed chooses."""
    draw = random.Random(f"simulation {seed}")
    chosen = shape or draw.choice(list(SHAPES))
    draft = _Draft(
        draw,
        _names(SHAPES[chosen], ("unified", "prefill", "decode")),
        _names(SHAPES[chosen], ("router",)),
        draw.random() < 0.25 and chosen not in ("unified", "pool"),
        random.Random(f"ranks {seed}"),
    )
    draft.ranks = 3 if draft.aside.random() < RANKS else 1
    draft.say(_cluster(draft, SHAPES[chosen], seed))
    calm = draft.chance(0.25)
    deeds = [*_CALM, *([] if calm else _FAULTS)]
    weights = [weight for weight, _ in deeds]
    for _ in range(draw.randrange(commands // 3, commands)):
        (deed,) = draw.choices([deed for _, deed in deeds], weights)
        deed(draft)
        if draft.ranks > 1 and draft.aside.random() < 0.05:
            _slow_rank(draft)
    _mend(draft)
    return "\n".join(draft.lines) + "\n"


def _names(shape: str, roles: tuple[str, ...]) -> list[str]:
    counts = dict(part.split("=") for part in shape.split())
    return [f"{role}-{i}" for role in roles for i in range(int(counts.get(role, 0)))]


def _cluster(draft: _Draft, shape: str, seed: int) -> str:
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


# --- deeds ----------------------------------------------------------------------------------------


def _submit(draft: _Draft) -> None:
    draw, name = draft.draw, f"r{len(draft.names) + 1}"
    parts = [f"submit {name} prompt={draw.choice([1, 15, 16, 17, draw.randrange(1, 200)])}"]
    parts.append(f"max_tokens={draw.choice([0, 1, 2, draw.randrange(40), draw.randrange(80)])}")
    wishes: tuple[tuple[float, Callable[[], str]], ...] = (
        (0.4, lambda: f"prefix={draw.choice('AB')}:{draw.randrange(1, 100)}"),
        (0.2, lambda: f"priority={draw.randrange(3)}"),
        (0.2, lambda: f'stop="{chr(draw.randrange(97, 122))}"'),
        (0.1, lambda: f"eos={draw.randrange(10)}"),
        (0.1, lambda: f"stop_token_ids={draw.randrange(256)},{draw.randrange(256)}"),
        (0.1, lambda: f"min_tokens={draw.randrange(5)}"),
        (0.2, lambda: "logprobs"),
        (0.3, lambda: f"temperature=1 seed={draw.randrange(100)}"),
        (0.1, lambda: f"deadline={draw.randrange(1, 80)}ms"),
        (0.05, lambda: f"rid={draw.choice(draft.names or [name])}"),
    )
    parts += [wish() for chance, wish in wishes if draft.chance(chance)]
    if draft.chance(0.1):
        parts.append(f"n={draw.randrange(1, 4)}")
    draft.names.append(name)
    draft.say(" ".join(parts))


def _run(draft: _Draft) -> None:
    draw = draft.draw
    draft.say(f"run {draw.choice([0, 500, 1000, 3000, 8000, 30_000, draw.randrange(5000)])}us")


def _wait(draft: _Draft) -> None:
    """Long enough for heartbeats to be missed, and for deadlines."""
    draft.say(f"run {draft.draw.choice([1000, 1500, 2600, 5000])}ms")


def _abort(draft: _Draft) -> None:
    if not draft.names:
        return
    name = draft.draw.choice(draft.names)
    where = draft.draw.choice([*draft.nodes, "", ""])
    at = f" at={where}" if where and where not in draft.dead else ""
    draft.say(draft.draw.choice([f"abort {name}{at}", f"disconnect {name}"]))
    if draft.chance(0.05):
        draft.say(f"abort all{at}")


def _retract(draft: _Draft) -> None:
    if draft.names:
        which = draft.draw.choice([draft.draw.choice(draft.names), "r*"])
        draft.say(f"retract {which} maybe")
        if draft.chance(0.5):
            draft.say(f"run {draft.draw.choice([0, 200, 1500])}us")
            _abort(draft)


def _push(draft: _Draft) -> None:
    """Requests are pushed out, or held, and stay on their way out or back while something ends
    them: every state between running and running again is left by every way that there is."""
    node = draft.draw.choice([*draft.of("decode"), *draft.of("unified")])
    if node in draft.dead or node in draft.frozen:
        return
    gate = draft.draw.choice(["step", "schedule", ""])
    if gate and (gate, node) in draft.held:
        return
    name = f"r{len(draft.names) + 1}"
    draft.names.append(name)
    wish = draft.draw.choice(["", f"deadline={draft.draw.randrange(12, 60)}ms", "stop=@2..3"])
    length = draft.draw.randrange(20, 80)
    draft.say(f"submit {name} prompt={draft.draw.randrange(1, 40)} max_tokens={length} {wish}")
    draft.say(f"run {draft.draw.choice([6, 12, 25])}ms")
    pause = node not in draft.paused and draft.chance(0.5)
    if gate:
        draft.say(f"hold {gate} {node}")
    draft.say(f"pause {node} mode=retract" if pause else "retract r* maybe")
    draft.say(f"run {draft.draw.choice([0, 1, 4, 12])}ms")
    draft.say(
        draft.draw.choice(
            [
                f"abort {name}",
                "abort all",
                f"disconnect {name}",
                f"fail step {node}",
                f"fail copy {node}",
                "run 25ms",
                f"pause {node} mode=retract\ncontinue {node}",
            ]
        )
    )
    if gate:
        draft.say(f"release {gate} {node}")
    if pause:
        draft.say(f"continue {node}")


def _starve(draft: _Draft) -> None:
    """A node has no memory to give for a while."""
    node = draft.draw.choice(draft.nodes)
    if node in draft.dead or node in draft.frozen:
        return
    draft.say(f"exhaust pages {node} leave={draft.draw.choice([0, 0, 2])}")
    for deed in draft.draw.sample([_submit, _run, _push, _abort, _run], 3):
        deed(draft)
    draft.say(f"restore pages {node}")


def _hold(draft: _Draft) -> None:
    if draft.held and draft.chance(0.7):
        gate, node = draft.draw.choice(sorted(draft.held))
        draft.held.discard((gate, node))
        draft.say(f"release {gate} {node}")
        return
    node = draft.draw.choice(draft.nodes)
    gates = ["step", "commit", "schedule"] + (["wire"] * 3 if node.startswith("prefill") else [])
    gate = draft.draw.choice(gates)
    if node in draft.dead:
        return
    draft.say(f"{'release' if (gate, node) in draft.held else 'hold'} {gate} {node}")
    draft.held ^= {(gate, node)}


def _pause(draft: _Draft) -> None:
    """Mostly short, with something happening in it; now and then it lasts."""
    node = draft.draw.choice([*draft.nodes, *draft.of("decode")])
    if node in draft.dead:
        return
    if node in draft.paused:
        draft.paused.discard(node)
        draft.say(f"continue {node}")
        return
    mode = draft.draw.choice(["abort", "retract", "retract", "retract", "in_place"])
    draft.say(f"pause {node} mode={mode}")
    if draft.chance(0.2):
        draft.paused.add(node)
        return
    for deed in draft.draw.sample([_abort, _run, _submit, _run, _retract], 3):
        deed(draft)
    draft.say(f"continue {node}")


def _weights(draft: _Draft) -> None:
    """A change of weights everywhere, as a trainer does it: pause, wait, change, go on."""
    if draft.dead or draft.frozen:
        return
    draft.weights += 1
    for node in draft.nodes:
        draft.say(f"pause {node} mode=retract")
    draft.say(f"run {draft.draw.choice([10, 100, 400])}ms")
    for node in draft.nodes:
        draft.say(f"weights {node} W{draft.weights}")
    for node in draft.nodes:
        draft.say(f"continue {node}")
    draft.paused.clear()


def _flush(draft: _Draft) -> None:
    node = draft.draw.choice(draft.nodes)
    if node not in draft.dead:
        draft.say(f"flush {node}")


def _step_fails(draft: _Draft) -> None:
    node = draft.draw.choice(draft.nodes)
    if node not in draft.dead:
        draft.say(f"fail step {node}")


def _wire(draft: _Draft) -> None:
    if draft.pairs and draft.names:
        name = draft.draw.choice(draft.names)
        late = draft.draw.choice([2, 300, 3000])
        draft.say(draft.draw.choice([f"fail wire {name}", f"delay wire {name} by={late}ms"]))


def _message(draft: _Draft) -> None:
    if not draft.pairs:
        return
    draw = draft.draw
    ends = [draw.choice(draft.of("prefill")), draw.choice(draft.of("decode"))]
    draw.shuffle(ends)
    kind = draw.choice(["hello", "grant", "done", "landed", "abort", "quiet", "reject", "any"])
    verb, by = draw.choice([("drop", ""), ("duplicate", ""), ("delay", " by=30ms")])
    draft.say(f"{verb} message {kind} from {ends[0]} to {ends[1]}{by}")


def _soon(draft: _Draft) -> bool:
    """Whether what was broken is mended at once, with something happening before."""
    if draft.chance(0.25):
        return False
    for deed in draft.draw.sample([_run, _submit, _abort, _run, _wait], 2):
        deed(draft)
    return True


def _kill(draft: _Draft) -> None:
    where = draft.draw.choice([*draft.nodes, *draft.routers])
    if where in draft.dead:
        draft.dead.discard(where)
        draft.say(f"restart {where}")
        return
    draft.dead.add(where)
    draft.frozen.discard(where)
    draft.paused.discard(where)
    draft.held = {(gate, node) for gate, node in draft.held if node != where}
    draft.say(_death(draft, where))
    if _soon(draft):
        draft.dead.discard(where)
        draft.say(f"restart {where}")


def _death(draft: _Draft, where: str) -> str:
    """A node ends, or one of its ranks and so the node."""
    if draft.ranks > 1 and where in draft.nodes and draft.aside.random() < 0.5:
        return f"kill rank {where} {draft.aside.randrange(1, draft.ranks)}"
    return f"kill {where}"


def _slow_rank(draft: _Draft) -> None:
    """One rank is late with everything for a while."""
    node = draft.aside.choice(draft.nodes)
    rank = draft.aside.randrange(1, draft.ranks)
    draft.say(f"delay rank {node} {rank} by={draft.aside.choice([0, 1, 20])}ms")


def _freeze(draft: _Draft) -> None:
    where = draft.draw.choice(draft.nodes)
    if where in draft.dead:
        return
    draft.say(f"{'thaw' if where in draft.frozen else 'freeze'} {where}")
    draft.frozen ^= {where}
    if where in draft.frozen and _soon(draft):
        draft.frozen.discard(where)
        draft.say(f"thaw {where}")


def _partition(draft: _Draft) -> None:
    if draft.cut:
        draft.say("heal")
    elif len(draft.nodes) > 1:
        one, other = draft.draw.sample([*draft.nodes, *draft.routers], 2)
        draft.say(f"partition {one} {other}")
        if _soon(draft):
            draft.say("heal")
            return
    else:
        return
    draft.cut = not draft.cut


_Deed = Callable[[_Draft], None]

_CALM: Final[tuple[tuple[float, _Deed], ...]] = (
    (30, _submit),
    (25, _run),
    (8, _abort),
    (6, _retract),
    (4, _push),
    (2, _starve),
    (6, _hold),
    (4, _pause),
    (1, _weights),
    (1, _flush),
)
"""What happens on a good day, with how often."""

_FAULTS: Final[tuple[tuple[float, _Deed], ...]] = (
    (2, _wait),
    (1, _step_fails),
    (3, _wire),
    (4, _message),
    (2, _kill),
    (2, _freeze),
    (2, _partition),
)
"""And on a bad one."""


def _mend(draft: _Draft) -> None:
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
