"""What the commands of a scenario do, except ``submit`` (:mod:`engine.sim.submitting`) and
``expect`` (:mod:`engine.sim.expectations`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.sim.client import Clients
from engine.sim.cluster_commands import FAULTS, wire_rule
from engine.sim.drive import RUN_LIMIT_US, Fault
from engine.sim.gates import GATES, Gate
from engine.sim.language import Command
from engine.sim.node import SimNode
from engine.sim.paired_node import PrefillNode
from engine.sim.submitting import submit
from engine.sim.vocabulary import BadValue, Word, duration
from engine.sim.world import US_PER_S
from fsm.resources import PHASES
from fsm.trace import MoveLine
from transport.messages import CloseSession, Drain, OpenSession

if TYPE_CHECKING:
    from engine.sim.scenario import Run

Handler = Callable[["Run", Command], None]


def run_until(run: "Run", command: Command) -> None:
    """``run 50ms``, ``run until idle``, ``run until RID CONDITION``."""
    words = command.words
    if words[0] != "until":
        try:
            amount = duration(Word(words[0]))
        except BadValue as error:
            raise command.error(f"run {words[0]}: {error}, or 'until'") from None
        if len(words) > 1 or command.options:
            raise command.error("write 'run DURATION'")
        run.drive.until_time(run.world.now_us + amount)
        return
    limit = run.world.now_us + command.integer("within", RUN_LIMIT_US)
    if words[1:] == ("idle",) and not command.options.keys() - {"within"}:
        _until_idle(run, limit)
        return
    test = _condition(run, command)
    if not run.drive.until(test, limit):
        raise Fault(f"this never happens; {_standing(run, command.words[1])}")


def _until_idle(run: "Run", limit_us: int) -> None:
    cluster = run.cluster
    if not run.drive.until(lambda: cluster.idle, limit_us):
        held = [
            name if cluster.single else f"{name} of {node.name}"
            for node in cluster.nodes.values()
            for name, gate in node.gates.items()
            if gate.armed
        ]
        hint = f" (held: {', '.join(held)})" if held else ""
        what = "node" if cluster.single else "cluster"
        raise Fault(f"the {what} never gets idle{hint}:\n  " + "\n  ".join(cluster.unrest()))


def _condition(run: "Run", command: Command) -> Callable[[], bool]:
    """``RID PHASE``, ``RID state=S [on=NODE]`` or ``RID tokens=N``; a phase passed through
    counts."""
    extra = len(command.options.keys() & {"on", "within"})
    if len(command.words) + len(command.options) - extra != 3 or len(command.words) < 2:
        raise command.error("write 'run until RID PHASE', '… state=S [on=NODE]' or '… tokens=N'")
    name = command.words[1]
    if "tokens" in command.options:
        wanted = command.integer("tokens", 0)
        views = run.views(command, name)
        return lambda: all(view is not None and len(view.tokens) >= wanted for _, view in views)
    since = len(run.cluster.lines)
    if "state" not in command.options:
        phase = check_phase(command, command.words[2])
        names = [
            each.name if view is None else view.name for each, view in run.views(command, name)
        ]
        return lambda: all(run.phases.reached(each, {phase}, since) for each in names)
    on = check_on(run, command)
    state = check_state(run, command, command.string("state"), on)
    run.submissions(command, name.partition("#")[0])

    def reached() -> bool:
        lives = run.lives(command, name, on)
        if lives and all(life.where == state for life in lives):
            return True
        passed = {
            line.life
            for _, line in run.cluster.lines[since:]
            if isinstance(line, MoveLine) and line.target == state
        }
        return bool(lives) and all(life.where == state or life.life in passed for life in lives)

    return reached


def check_phase(command: Command, phase: str) -> str:
    if phase not in PHASES:
        raise command.unknown("phase", phase, PHASES)
    return phase


def check_on(run: "Run", command: Command) -> str:
    """The node that ``on=`` names; empty without it."""
    on = command.string("on")
    return run.check_node(command, on).name if on else ""


def check_state(run: "Run", command: Command, state: str, on: str = "") -> str:
    nodes = [run.cluster.nodes[on]] if on else run.cluster.nodes.values()
    known = {name for node in nodes for name in node.chart.by_name}
    if state not in known:
        raise command.unknown("state", state, known)
    return state


def _standing(run: "Run", name: str) -> str:
    standing = [
        f"{life.name} is {life.where}" + ("" if run.cluster.single else f" on {node.name}")
        for node in run.cluster.nodes.values()
        for life in node.book.lives.values()
        if life.name.startswith(name)
    ]
    return ", ".join(standing) or f"{name} has no life"


def step(run: "Run", command: Command) -> None:
    """Let exactly one step through to its commit, whatever is held."""
    node = run.check_node(command, command.words[0])
    gates = [node.gates["step"], node.gates["commit"]]
    if not node.scheduler.steps_in_flight:
        gates.append(node.gates["schedule"])
    for gate in gates:
        gate.permits = 1
    before = node.steps_committed
    node.look()
    done = run.drive.until(lambda: node.steps_committed > before, run.world.now_us + RUN_LIMIT_US)
    for gate in gates:
        gate.permits = 0
    if not done:
        raise Fault("there is no step to do")


def hold(run: "Run", command: Command) -> None:
    gate, _ = _gate(run, command)
    chunk = command.optional("chunk")
    if chunk is not None and command.words[0] != "step":
        raise command.error("chunk= is for 'hold step'")
    gate.hold(chunk)


def release(run: "Run", command: Command) -> None:
    gate, node = _gate(run, command)
    if not gate.armed:
        raise command.error(f"{command.words[0]} is not held")
    gate.release()
    node.last_touch_us = run.world.now_us
    node.look()


def _gate(run: "Run", command: Command) -> tuple[Gate, SimNode]:
    what, where = command.words
    node = run.check_node(command, where)
    for name in GATES:
        if name == what:
            if name == "store" and node.store is None:
                raise command.error("this cluster has no store (store=on)")
            if name == "wire" and not isinstance(node, PrefillNode):
                raise command.error("only a prefill node writes to a wire")
            return node.gates[name], node
    raise command.unknown("thing to hold", what, GATES)


def fail(run: "Run", command: Command) -> None:
    """The next steps raise, the next reads of the store fail, or the next writes of a request."""
    what, where = command.words
    count = command.integer("count", 1)
    if what == "wire":
        wire_rule(run, command, where, count, None)
        return
    node = run.check_node(command, where)
    if what == "step":
        node.runner.fail_steps.extend(["injected fault"] * count)
    elif what == "store":
        if node.store is None:
            raise command.error("this cluster has no store (store=on)")
        node.store.fail_reads.extend(["injected fault"] * count)
    else:
        raise command.unknown("thing to fail", what, ("step", "store", "wire"))


def abort(run: "Run", command: Command) -> None:
    """Ask the engine (through the router, where there is one) to end requests by rid, whatever the
    front end knows of them; ``at=`` asks one node."""
    at = command.string("at")
    clients = run.check_any(command, at).clients if at else None
    if command.words == ("all",):
        (clients or run.entrance()).abort((), True)
        return
    rids: dict[str, Clients] = {}
    for name in command.words:
        if "unseen" in command.flags:
            rids[name] = clients or run.entrance()
            continue
        for each, view in run.views(command, name):
            rid = view.member.rid if view is not None and "#" in name else each.rid
            rids[rid] = clients or run.clients_of(each)
    for target in dict.fromkeys(rids.values()):
        target.abort(tuple(rid for rid, where in rids.items() if where is target), False)


def disconnect(run: "Run", command: Command) -> None:
    for name in command.words:
        for each in run.submissions(command, name):
            run.clients_of(each).disconnect(each.name)


def retract(run: "Run", command: Command) -> None:
    """Force a retraction. Memory and priority take the same edge on a unified node."""
    name = command.words[0]
    for _, view in run.views(command, name):
        done = False
        for node in run.cluster.nodes.values():
            if view is not None and not done and not node.dead:
                done = node.scheduler.retract(view.member.rid)
                if done:
                    node.wake()
        if not done and "maybe" not in command.flags:
            raise Fault(f"it is not on the device: {_standing(run, name)}")


def exhaust(run: "Run", command: Command) -> None:
    node = _pages(run, command)
    if "leave" not in command.options:
        raise command.error("write 'exhaust pages NODE leave=N'")
    if not node.exhaust(command.integer("leave", 0)):
        available = node.scheduler.kv.available
        raise Fault(f"only {available} pages are available")


def restore(run: "Run", command: Command) -> None:
    _pages(run, command).restore()


def _pages(run: "Run", command: Command) -> SimNode:
    what, where = command.words
    if what != "pages":
        raise command.unknown("pool to exhaust", what, ("pages",))
    return run.check_node(command, where)


def flush(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    flushed, message = node.scheduler.flush_cache()
    node.clients.replies.append({"flushed": flushed, "message": message})


def drain(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    node.post(Drain(command.integer("grace", 0) / US_PER_S))


def open_session(run: "Run", command: Command) -> None:
    name = _session(command)
    timeout = command.optional("timeout")
    node = run.check_node(command)
    node.clients.open_session(name)
    node.post(
        OpenSession(
            1,
            name,
            command.optional("capacity"),
            None if timeout is None else timeout / US_PER_S,
        )
    )


def close_session(run: "Run", command: Command) -> None:
    run.check_node(command).post(CloseSession(1, _session(command)))


def _session(command: Command) -> str:
    what, name = command.words
    if what != "session":
        raise command.unknown("thing", what, ("session",))
    return name


COMMANDS: Final[dict[str, Handler]] = {
    "submit": submit,
    "run": run_until,
    "step": step,
    "hold": hold,
    "release": release,
    "fail": fail,
    "abort": abort,
    "disconnect": disconnect,
    "retract": retract,
    "preempt": retract,
    "exhaust": exhaust,
    "restore": restore,
    "flush": flush,
    "drain": drain,
    "open": open_session,
    "close": close_session,
    **FAULTS,
}
