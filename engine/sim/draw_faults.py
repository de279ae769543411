"""What happens on a bad day: steps, writes and messages fail, and processes and connections with
them. Most of it is mended soon, with something happening before."""

from typing import Final

from engine.sim.draft import Deed, Draft
from engine.sim.draw_traffic import abort, run, submit


def _wait(draft: Draft) -> None:
    """Long enough for heartbeats to be missed, and for deadlines."""
    draft.say(f"run {draft.draw.choice([1000, 1500, 2600, 5000])}ms")


def _step_fails(draft: Draft) -> None:
    node = draft.draw.choice(draft.nodes)
    if node not in draft.dead:
        draft.say(f"fail step {node}")


def _wire(draft: Draft) -> None:
    if draft.pairs and draft.names:
        name = draft.draw.choice(draft.names)
        late = draft.draw.choice([2, 300, 3000])
        draft.say(draft.draw.choice([f"fail wire {name}", f"delay wire {name} by={late}ms"]))


def _message(draft: Draft) -> None:
    if not draft.pairs:
        return
    draw = draft.draw
    ends = [draw.choice(draft.of("prefill")), draw.choice(draft.of("decode"))]
    draw.shuffle(ends)
    kind = draw.choice(["hello", "grant", "done", "landed", "abort", "quiet", "reject", "any"])
    verb, by = draw.choice([("drop", ""), ("duplicate", ""), ("delay", " by=30ms")])
    draft.say(f"{verb} message {kind} from {ends[0]} to {ends[1]}{by}")


def _soon(draft: Draft) -> bool:
    """Whether what was broken is mended at once, with something happening before."""
    if draft.chance(0.25):
        return False
    for deed in draft.draw.sample([run, submit, abort, run, _wait], 2):
        deed(draft)
    return True


def _kill(draft: Draft) -> None:
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


def _death(draft: Draft, where: str) -> str:
    """A node ends, or one of its ranks and so the node."""
    if draft.ranks > 1 and where in draft.nodes and draft.aside.random() < 0.5:
        return f"kill rank {where} {draft.aside.randrange(1, draft.ranks)}"
    return f"kill {where}"


def slow_rank(draft: Draft) -> None:
    """One rank is late with everything for a while."""
    node = draft.aside.choice(draft.nodes)
    rank = draft.aside.randrange(1, draft.ranks)
    draft.say(f"delay rank {node} {rank} by={draft.aside.choice([0, 1, 20])}ms")


def _freeze(draft: Draft) -> None:
    where = draft.draw.choice(draft.nodes)
    if where in draft.dead:
        return
    draft.say(f"{'thaw' if where in draft.frozen else 'freeze'} {where}")
    draft.frozen ^= {where}
    if where in draft.frozen and _soon(draft):
        draft.frozen.discard(where)
        draft.say(f"thaw {where}")


def _partition(draft: Draft) -> None:
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


FAULTS: Final[tuple[tuple[float, Deed], ...]] = (
    (2, _wait),
    (1, _step_fails),
    (3, _wire),
    (4, _message),
    (2, _kill),
    (2, _freeze),
    (2, _partition),
)
"""What else happens on a bad day, with how often."""
