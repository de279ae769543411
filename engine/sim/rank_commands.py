"""Commands about single ranks of a node: plans that do not come as they were sent, and a rank that
ends."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from engine.sim.language import Command
from engine.sim.node import SimNode
from engine.sim.ranks import Connection

if TYPE_CHECKING:
    from engine.sim.scenario import Run

Damage: TypeAlias = Literal["drop", "duplicate", "corrupt"]


def damage(run: "Run", command: Command, what: Damage) -> None:
    """``drop|duplicate|corrupt plan NODE RANK [count=N]``: the next plans for this rank."""
    connection = _connection(run, command, f"{what} plan NODE RANK")
    count = command.integer("count", 1)
    if what == "drop":
        connection.drops += count
    elif what == "duplicate":
        connection.repeats += count
    else:
        connection.damages += count


def corrupt(run: "Run", command: Command) -> None:
    damage(run, command, "corrupt")


def delay(run: "Run", command: Command) -> None:
    """``delay rank NODE RANK by=DURATION``: every plan takes so much longer from now on."""
    if "by" not in command.options or "count" in command.options:
        raise command.error("write 'delay rank NODE RANK by=DURATION'")
    connection = _connection(run, command, "delay rank NODE RANK by=DURATION")
    connection.late_us = command.integer("by", 0)


def kill(run: "Run", command: Command) -> None:
    """``kill rank NODE RANK``: one rank ends, and its node with it."""
    node, rank = _rank(run, command, "kill rank NODE RANK")
    if node.dead:
        raise command.error(f"{node.name} is dead already")
    node.ranks.kill(rank)


def _connection(run: "Run", command: Command, usage: str) -> Connection:
    node, rank = _rank(run, command, usage)
    return node.ranks.connections[rank]


def _rank(run: "Run", command: Command, usage: str) -> tuple[SimNode, int]:
    """The node and the follower that a command names after its first word."""
    what = usage.split()[1]
    if len(command.words) != 3 or command.words[0] != what:
        raise command.error(f"write '{usage}'")
    node = run.check_node(command, command.words[1])
    known = {str(rank): rank for rank in node.ranks.followers}
    if not known:
        raise command.error(f"{node.name} has no followers (ranks=N)")
    if command.words[2] not in known:
        raise command.unknown("follower", command.words[2], known)
    return node, known[command.words[2]]
