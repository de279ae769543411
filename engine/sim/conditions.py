"""``run``: letting time pass, or waiting for a condition; and the names that conditions use."""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from engine.sim.drive import RUN_LIMIT_US, Fault
from engine.sim.language import Command
from engine.sim.values import BadValue, Word, duration
from fsm.resources import PHASES
from fsm.trace import MoveLine
from transport.messages import Finish

if TYPE_CHECKING:
    from engine.sim.scenario import Run

Test = Callable[[], bool]

FINISHES: Final = ("stop", "length", "abort", "error")

USAGE: Final = (
    "write 'run until RID PHASE', '… finished[=KIND]', '… state=S [on=NODE]' or '… tokens=N'"
)


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
        raise Fault(f"this never happens; {standing(run, words[1])}")


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


def _condition(run: "Run", command: Command) -> Test:
    """``RID PHASE``, ``RID phase=P``, ``RID state=S [on=NODE]``, ``RID tokens=N``, ``RID finished``
    or ``RID finished=KIND``: one of them. A phase or state that is passed through counts."""
    _, name, word = (*command.words, "", "")[:3]
    given = command.options.keys() - {"on", "within"}
    misplaced = "on" in command.options and "state" not in given
    if not name or bool(word) + len(given) != 1 or misplaced:
        raise command.error(USAGE)
    if "tokens" in given:
        return _tokens(run, command, name, command.integer("tokens", 0))
    if word == "finished" or "finished" in given:
        return _finished(run, command, name)
    if "state" in given:
        return _state(run, command, name)
    return _phase(run, command, name, word or command.string("phase"))


def _tokens(run: "Run", command: Command, name: str, wanted: int) -> Test:
    views = run.views(command, name)
    return lambda: all(view is not None and len(view.tokens) >= wanted for _, view in views)


def _finished(run: "Run", command: Command, name: str) -> Test:
    kinds = command.string("finished", "|".join(FINISHES)).split("|")
    check_finishes(command, kinds)
    pairs = run.views(command, name)

    def finished() -> bool:
        finishes = [each.refused if view is None else view.finish for each, view in pairs]
        return all(finish is not None and ended_as(finish, kinds) for finish in finishes)

    return finished


def _phase(run: "Run", command: Command, name: str, phase: str) -> Test:
    check_phase(command, phase)
    since = len(run.cluster.lines)
    names = [each.name if view is None else view.name for each, view in run.views(command, name)]
    return lambda: all(run.phases.reached(each, {phase}, since) for each in names)


def _state(run: "Run", command: Command, name: str) -> Test:
    on = check_on(run, command)
    state = check_state(run, command, command.string("state"), on)
    since = len(run.cluster.lines)
    run.submissions(command, name.partition("#")[0])

    def reached() -> bool:
        newest = {life.name.partition("@")[0]: life for life in run.lives(command, name, on, state)}
        lives = newest.values()
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


def ended_as(finish: Finish, kinds: Collection[str]) -> bool:
    """Whether an answer is of one of ``kinds``. To its client, one with an error status is an error
    too, whatever the engine calls it."""
    failed = finish.status is not None and finish.status >= 400
    return finish.type in kinds or (failed and "error" in kinds)


def check_finishes(command: Command, kinds: list[str]) -> None:
    for kind in kinds:
        if kind not in FINISHES:
            raise command.unknown("way to finish", kind, FINISHES)


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


def standing(run: "Run", name: str) -> str:
    """Where a request is, for the message of a fault."""
    where = [
        f"{life.name} is {life.where}" + ("" if run.cluster.single else f" on {node.name}")
        for node in run.cluster.nodes.values()
        for life in node.book.lives.values()
        if life.name.startswith(name)
    ]
    return ", ".join(where) or f"{name} has no life"
