"""A simulated cluster: nodes of every role, their network, and what can befall them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from engine.sim.book import Book
from engine.sim.client import Clients, Submission
from engine.sim.network import Network, Quality
from engine.sim.node import NodeSettings, SimNode
from engine.sim.paired_node import (
    DecodeNode,
    PairedNode,
    PairSettings,
    PrefillNode,
    Surroundings,
)
from engine.sim.router_node import RouterNode
from engine.sim.wire import Target
from engine.sim.world import World
from fsm.trace import Line
from transport.control import ControlFrame


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Everything that a cluster is built from. ``nodes`` are settings by node name."""

    nodes: dict[str, NodeSettings]
    routers: int = 0
    pair: PairSettings = field(default_factory=PairSettings)
    quality: Quality = field(default_factory=Quality)
    retries: int = 0
    seed: int = 0


class Cluster:
    """All nodes as they are now, and the processes that there were before."""

    def __init__(self, world: World, settings: ClusterSettings) -> None:
        self.world: Final = world
        self.settings: Final = settings
        self.lines: Final[list[tuple[Book, Line]]] = []
        """Trace lines of all nodes, in the order in which they were written."""
        rng = random.Random(f"network {settings.seed}")
        self.network: Final = Network(world, rng, settings.quality, self._deliver)
        self.nodes: Final[dict[str, SimNode]] = {}
        self.past: Final[list[SimNode]] = []
        """Processes that were killed."""
        self.boots: Final[dict[str, int]] = {}
        self._rooms = 0
        prefills = [name for name in settings.nodes if name.startswith("prefill")]
        self._around = Surroundings(
            self.network, self._memory_of, self._mint_room, lambda: prefills
        )
        for name in settings.nodes:
            self._boot(name, None)
        self.routers: Final[dict[str, RouterNode]] = {}
        for index in range(settings.routers):
            self._boot_router(f"router-{index}", None)

    # --- who is there ---

    @property
    def single(self) -> bool:
        """One unified node, and nothing else."""
        return len(self.nodes) == 1 and not self.routers

    @property
    def names(self) -> list[str]:
        return [*self.nodes, *self.routers]

    def processes(self) -> Iterator[SimNode]:
        """Every worker process there ever was."""
        yield from self.past
        yield from self.nodes.values()

    def clients_of(self, name: str) -> Clients:
        node = self.routers.get(name) or self.nodes[name]
        return node.clients

    @property
    def entrance(self) -> str:
        """Where clients send what names no node: the router, or the only node."""
        return next(iter(self.routers or self.nodes))

    def submissions(self) -> dict[str, tuple[str, Submission]]:
        """What clients have sent, by name, with the node that they sent it to. Calls of a router
        are none of theirs."""
        return {
            name: (node, each)
            for node in self.names
            for name, each in self.clients_of(node).submissions.items()
            if "~" not in name
        }

    # --- what befalls it ---

    def kill(self, name: str) -> None:
        if name in self.routers:
            self.routers[name].kill()
            return
        node = self.nodes[name]
        node.kill()
        if isinstance(node, PairedNode):
            for other in self.nodes:
                if other != name:
                    self.network.close(name, other)
        for router in self.routers.values():
            if not self.network.cut(router.name, name):
                router.lost(name)

    def restart(self, name: str) -> None:
        """Another process under the same name; the one that was there is killed first."""
        if name in self.routers:
            if not self.routers[name].dead:
                self.kill(name)
            self._boot_router(name, self.routers[name].clients)
            return
        old = self.nodes[name]
        if not old.dead:
            self.kill(name)
        self.past.append(old)
        self._boot(name, old.clients)

    def heal(self) -> None:
        self.network.heal()
        for router in self.routers.values():
            router.catch_up()

    def end(self) -> None:
        """The run is over: whoever is alive ends its trace, as a process that stops does."""
        for node in self.nodes.values():
            if not node.dead:
                node.scheduler.tracer.footer(node.scheduler.at_rest)

    @property
    def idle(self) -> bool:
        """Nothing is under way anywhere."""
        return (
            self.network.in_flight == 0
            and all(node.dead or node.idle for node in self.nodes.values())
            and all(router.idle for router in self.routers.values())
        )

    def unrest(self) -> list[str]:
        """Why the cluster is not back at its start; empty when it is."""
        if self.single:
            return next(iter(self.nodes.values())).unrest()
        faults = []
        for name, node in self.nodes.items():
            if not node.dead:
                faults += [f"{name}: {fault}" for fault in node.unrest()]
        for name, router in self.routers.items():
            faults += [f"{name}: {fault}" for fault in router.unrest()]
        return faults

    @property
    def rest_due_from_us(self) -> int:
        ends = [node.rest_due_from_us for node in self.nodes.values()]
        ends += [router.clients.last_answer_us for router in self.routers.values()]
        return max(*ends, self.network.last_end_us)

    # --- inside ---

    def _boot(self, name: str, clients: Clients | None) -> None:
        settings = self.settings.nodes[name]
        self.boots[name] = number = self.boots.get(name, 0) + 1
        role = name.partition("-")[0]
        if role == "unified":
            boot_id = "boot" if len(self.settings.nodes) == 1 else f"{name}.{number}"
            node = SimNode(self.world, settings, name, boot_id, clients, self.lines)
        else:
            kind = PrefillNode if role == "prefill" else DecodeNode
            node = kind(
                self.world,
                settings,
                self.settings.pair,
                self._around,
                name,
                f"{name}.{number}",
                clients,
                self.lines,
            )
        node.ranks.end = partial(self.kill, name)
        self.nodes[name] = node

    def _boot_router(self, name: str, clients: Clients | None) -> None:
        self.routers[name] = RouterNode(
            self.world,
            name,
            lambda: self.nodes,
            self.network,
            self._mint_room,
            self.settings.retries,
            clients,
        )

    def _mint_room(self) -> str:
        self._rooms += 1
        return f"room-{self._rooms}"

    def _memory_of(self, name: str) -> Target | None:
        node = self.nodes.get(name)
        return node if isinstance(node, DecodeNode) and not node.dead else None

    def _deliver(self, source: str, target: str, frame: ControlFrame | None) -> None:
        node = self.nodes.get(target)
        if not isinstance(node, PairedNode):
            return
        if node.dead:
            if frame is not None:
                self.network.close(target, source)  # nobody listens: the connection is refused
            return
        node.arrive(source, frame)
