"""Commands about nodes, their network and the wire: what operators do, and what goes wrong."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.core import PauseMode
from engine.sim import rank_commands
from engine.sim.language import Command
from engine.sim.network import FRAMES, Mischief, Rule
from engine.sim.node import SimNode
from engine.sim.paired_node import PairedNode, PrefillNode
from engine.sim.wire import WireRule

if TYPE_CHECKING:
    from engine.sim.scenario import Run

Handler = Callable[["Run", Command], None]


def _mischief(what: Mischief) -> Handler:
    """``drop|delay|duplicate message KIND from NODE to NODE [count=N] [by=DURATION]``, and what
    else can be late, lost or come twice."""

    def handler(run: "Run", command: Command) -> None:
        words = command.words
        if what == "delay" and words[0] == "rank":
            rank_commands.delay(run, command)
            return
        if what != "delay" and words[0] == "plan":
            rank_commands.damage(run, command, what)
            return
        if what == "delay" and words[0] == "wire":
            if len(words) != 2 or "by" not in command.options:
                raise command.error("write 'delay wire RID by=DURATION'")
            count = command.integer("count", 1)
            wire_rule(run, command, words[1], count, command.integer("by", 0))
            return
        if len(words) != 6 or (words[0], words[2], words[4]) != ("message", "from", "to"):
            raise command.error(f"write '{what} message KIND from NODE to NODE'")
        if what == "delay" and "by" not in command.options:
            raise command.error("by= says how long")
        if words[1] not in FRAMES:
            raise command.unknown("kind of message", words[1], FRAMES)
        for name in (words[3], words[5]):
            _paired(run, command, name)
        run.cluster.network.rules.append(
            Rule(
                what,
                words[1],
                words[3],
                words[5],
                command.integer("count", 1),
                command.integer("by", 0),
            )
        )

    return handler


def wire_rule(run: "Run", command: Command, name: str, count: int, by_us: int | None) -> None:
    """The next ``count`` writes of a request, sent already or later, fail or take longer by
    ``by_us``."""
    prefills = [node for node in run.cluster.nodes.values() if isinstance(node, PrefillNode)]
    if not prefills:
        raise command.error("this cluster has no wire")
    for rid in run.rids(command, name):
        for node in prefills:
            node.wire.rules.append(WireRule(rid, count, by_us))


def _paired(run: "Run", command: Command, name: str) -> PairedNode:
    node = run.check_node(command, name)
    if not isinstance(node, PairedNode):
        raise command.error(f"{name} has no peers")
    return node


def pause(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    modes: dict[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "in_place"}
    node.scheduler.pause(modes[command.string("mode", "abort")])
    _told(run, node)


def resume(run: "Run", command: Command) -> None:
    node = run.check_node(command, command.words[0])
    node.scheduler.resume()
    _told(run, node)


def weights(run: "Run", command: Command) -> None:
    """``weights NODE W2``: the answer says whether they were taken. ``in_place``, or a pause in
    that mode, takes them under requests that keep their KV."""
    node = run.check_node(command, command.words[0])
    name = command.words[1]
    in_place = "in_place" in command.flags or node.scheduler.pause_mode == "in_place"
    done, why = node.scheduler.use_weights(f"hash:{name}", in_place)
    if done:
        node.ranks.load_weights(name)
    node.clients.reply({"updated": done, "message": why})
    _told(run, node)


def _told(run: "Run", node: SimNode) -> None:
    node.last_touch_us = run.world.now_us
    node.wake()


def kill(run: "Run", command: Command) -> None:
    if len(command.words) > 1:
        rank_commands.kill(run, command)
        return
    where = run.check_any(command, command.words[0])
    if where.dead:
        raise command.error(f"{where.name} is dead already")
    run.cluster.kill(where.name)


def restart(run: "Run", command: Command) -> None:
    run.cluster.restart(run.check_any(command, command.words[0]).name)


def freeze(run: "Run", command: Command) -> None:
    run.check_any(command, command.words[0]).freeze()


def thaw(run: "Run", command: Command) -> None:
    where = run.check_any(command, command.words[0])
    if not where.frozen:
        raise command.error(f"{where.name} is not frozen")
    where.thaw()
    for router in run.cluster.routers.values():
        router.catch_up()


def partition(run: "Run", command: Command) -> None:
    one, other = (run.check_any(command, name).name for name in command.words)
    run.cluster.network.partition(one, other)


def heal(run: "Run", _: Command) -> None:
    run.cluster.heal()


def skew(run: "Run", command: Command) -> None:
    """A node's clock goes ahead of the others' by so much from now on."""
    node = run.check_node(command, command.words[0])
    node.skew_us += command.integer("by", 0)
    node.wake()


FAULTS: Final[dict[str, Handler]] = {
    "drop": _mischief("drop"),
    "delay": _mischief("delay"),
    "duplicate": _mischief("duplicate"),
    "corrupt": rank_commands.corrupt,
    "pause": pause,
    "continue": resume,
    "weights": weights,
    "kill": kill,
    "restart": restart,
    "freeze": freeze,
    "thaw": thaw,
    "partition": partition,
    "heal": heal,
    "skew": skew,
}
