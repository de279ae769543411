"""What the commands of a scenario do, except ``submit`` (:mod:`engine.sim.submitting`) and
``expect`` (:mod:`engine.sim.expectations`)."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.sim.client import Clients
from engine.sim.cluster_commands import FAULTS, wire_rule
from engine.sim.conditions import run_until, standing
from engine.sim.drive import RUN_LIMIT_US, Fault
from engine.sim.gates import GATES, GateName
from engine.sim.language import Command
from engine.sim.node import SimNode
from engine.sim.paired_node import PrefillNode
from engine.sim.submitting import submit
from engine.sim.world import US_PER_S
from transport.messages import CloseSession, Drain, OpenSession

if TYPE_CHECKING:
    from engine.sim.scenario import Run

Handler = Callable[["Run", Command], None]


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
    gate, node = _gate(run, command)
    chunk = command.optional("chunk")
    if chunk is not None and command.words[0] != "step":
        raise command.error("chunk= is for 'hold step'")
    node.gates[gate].hold(chunk)


def release(run: "Run", command: Command) -> None:
    if command.words[0] == "pages":
        restore(run, command)
        return
    name, node = _gate(run, command)
    held = [
        process
        for process in run.cluster.processes()
        if process.name == node.name and process.gates[name].armed
    ]
    if not held:
        raise command.error(f"{name} is not held")
    for process in held:
        process.gates[name].release()
        if not process.dead:  # what held it may have died with its process
            process.last_touch_us = run.world.now_us
            process.look()


def _gate(run: "Run", command: Command) -> tuple[GateName, SimNode]:
    """What a command is about, and the node where that is."""
    what, where = (*command.words, "")[:2]
    node = run.check_node(command, where)
    for name in GATES:
        if name == what:
            if name == "store" and node.store is None:
                raise command.error("this cluster has no store (store=on)")
            if name == "wire" and not isinstance(node, PrefillNode):
                raise command.error("only a prefill node writes to a wire")
            return name, node
    raise command.unknown("thing to hold", what, GATES)


def fail(run: "Run", command: Command) -> None:
    """The next steps raise, or what is read, copied or written next fails."""
    what, where = command.words
    count = command.integer("count", 1)
    if what == "wire":
        wire_rule(run, command, where, count, None)
        return
    node = run.check_node(command, where)
    if what == "step":
        node.runner.fail_steps.extend(["injected fault"] * count)
    elif what == "copy":
        node.runner.fail_copies.extend(["injected fault"] * count)
    elif what == "store":
        if node.store is None:
            raise command.error("this cluster has no store (store=on)")
        node.store.fail_reads.extend(["injected fault"] * count)
    else:
        raise command.unknown("thing to fail", what, ("step", "copy", "store", "wire"))


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
    """Force a retraction. Memory and priority take the same edge on a unified node. One that is
    being retracted already is no mistake, nor is one that ends because its copy fits nowhere."""
    name = command.words[0]
    for each, view in run.views(command, name):
        done = run.phases.now(each.name if view is None else view.name) == "retracted"
        for node in run.cluster.nodes.values():
            if view is not None and not done and not node.dead:
                before = node.scheduler.tracer.last
                node.scheduler.retract(view.member.rid)
                done = node.scheduler.tracer.last != before
                if done:
                    node.wake()
        if not done and "maybe" not in command.flags:
            raise Fault(f"it is not on the device: {standing(run, name)}")


def exhaust(run: "Run", command: Command) -> None:
    node = _pages(run, command)
    if "leave" not in command.options:
        raise command.error("write 'exhaust pages NODE leave=N'")
    leave = command.integer("leave", 0)
    if leave > node.settings.kv_pages:
        raise command.error(f"leave={leave}: there are only {node.settings.kv_pages} pages")
    node.exhaust(leave)


def restore(run: "Run", command: Command) -> None:
    _pages(run, command).restore()


def _pages(run: "Run", command: Command) -> SimNode:
    what, where = (*command.words, "")[:2]
    if what != "pages":
        raise command.unknown("pool to exhaust", what, ("pages",))
    return run.check_node(command, where)


def flush(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    flushed, message = node.scheduler.flush_cache()
    node.clients.reply({"flushed": flushed, "message": message})


def drain(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    node.post(Drain(command.integer("grace", 0) / US_PER_S))


def open_session(run: "Run", command: Command) -> None:
    node, name = _session(run, command)
    timeout = command.optional("timeout")
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
    node, name = _session(run, command)
    node.clients.open_session(name)
    node.post(CloseSession(1, name))


def _session(run: "Run", command: Command) -> tuple[SimNode, str]:
    """The session that a command names, and the node that has it."""
    what, name = command.words
    if what != "session":
        raise command.unknown("thing", what, ("session",))
    if run.only_worker is None:
        raise command.error("a session is at one node, and this cluster has several")
    return run.only_worker, name


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
