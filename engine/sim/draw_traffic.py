"""What happens to a cluster on a good day: requests come, run, are pushed out and leave, and nodes
are held, paused and given other weights."""

from collections.abc import Callable
from typing import Final

from engine.sim.draft import Deed, Draft


def submit(draft: Draft) -> None:
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


def run(draft: Draft) -> None:
    draw = draft.draw
    draft.say(f"run {draw.choice([0, 500, 1000, 3000, 8000, 30_000, draw.randrange(5000)])}us")


def abort(draft: Draft) -> None:
    if not draft.names:
        return
    name = draft.draw.choice(draft.names)
    where = draft.draw.choice([*draft.nodes, "", ""])
    at = f" at={where}" if where and where not in draft.dead else ""
    draft.say(draft.draw.choice([f"abort {name}{at}", f"disconnect {name}"]))
    if draft.chance(0.05):
        draft.say(f"abort all{at}")


def _retract(draft: Draft) -> None:
    if draft.names:
        which = draft.draw.choice([draft.draw.choice(draft.names), "r*"])
        draft.say(f"retract {which} maybe")
        if draft.chance(0.5):
            draft.say(f"run {draft.draw.choice([0, 200, 1500])}us")
            abort(draft)


def _push(draft: Draft) -> None:
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


def _starve(draft: Draft) -> None:
    """A node has no memory to give for a while."""
    node = draft.draw.choice(draft.nodes)
    if node in draft.dead or node in draft.frozen:
        return
    draft.say(f"exhaust pages {node} leave={draft.draw.choice([0, 0, 2])}")
    for deed in draft.draw.sample([submit, run, _push, abort, run], 3):
        deed(draft)
    draft.say(f"restore pages {node}")


def _hold(draft: Draft) -> None:
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


def _pause(draft: Draft) -> None:
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
    for deed in draft.draw.sample([abort, run, submit, run, _retract], 3):
        deed(draft)
    draft.say(f"continue {node}")


def _weights(draft: Draft) -> None:
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


def _flush(draft: Draft) -> None:
    node = draft.draw.choice(draft.nodes)
    if node not in draft.dead:
        draft.say(f"flush {node}")


CALM: Final[tuple[tuple[float, Deed], ...]] = (
    (30, submit),
    (25, run),
    (8, abort),
    (6, _retract),
    (4, _push),
    (2, _starve),
    (6, _hold),
    (4, _pause),
    (1, _weights),
    (1, _flush),
)
"""What happens on a good day, with how often."""
