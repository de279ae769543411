"""The ``cluster`` command: what a simulated cluster is built from."""

from typing import Final, cast

from engine.config import EngineConfig
from engine.sim.deployment import ClusterSettings
from engine.sim.language import Command
from engine.sim.network import Quality
from engine.sim.node import NodeSettings
from engine.sim.paired_node import PairSettings
from engine.sim.ranks import RankSettings
from engine.sim.render import Detail
from engine.sim.runner import Costs
from engine.sim.wire import WireCosts
from engine.sim.world import US_PER_S

DEFAULT_PAGES: Final = 64

_NEEDS_STORE: Final = ("store_latency", "prefetch_timeout", "prefetches")


def build(command: Command) -> tuple[ClusterSettings, Detail]:
    """The settings of every node of the cluster, and how much of its trace is shown.

    ``metadata`` sizes the hand-over slots of decode nodes; a cluster without any has no such slots,
    whatever the number.
    """
    counts = {role: command.integer(role, 0) for role in ("unified", "prefill", "decode")}
    if not any(counts.values()):
        counts["unified"] = 1
    if bool(counts["prefill"]) != bool(counts["decode"]) and "router" in command.options:
        raise command.error("prefill= and decode= go together behind a router")
    has_store = command.string("store", "off") == "on"
    for option in _NEEDS_STORE:
        if option in command.options and not has_store:
            raise command.error(f"{option}= needs store=on")
    if command.integer("depth", 2) not in (1, 2):
        raise command.error("depth= is 1 or 2")
    for option in ("pages", "page_size", "rows", "chunk", "prefetches", "sessions", "ranks"):
        if command.integer(option, 1) < 1:
            raise command.error(f"{option}= is at least 1")
    for option in ("waiting_timeout", "running_timeout", "prefetch_timeout"):
        if command.integer(option, 1) < 1:
            raise command.error(f"{option}= is longer than 0")
    config = EngineConfig(
        model="hash",
        page_size=command.integer("page_size", 16),
        context_length=command.integer("context", 0),
        max_running_requests=command.integer("rows", 8),
        max_queued_requests=command.integer("queue", 64),
        chunked_prefill_size=command.integer("chunk", 64),
        depth=1 if command.integer("depth", 2) == 1 else 2,
        prefix_cache=command.string("prefix_cache", "on") == "on",
        max_overtakes=command.integer("overtakes", 64),
        waiting_timeout_s=_seconds(command, "waiting_timeout"),
        running_timeout_s=_seconds(command, "running_timeout"),
        prefetch_timeout_s=_seconds(command, "prefetch_timeout") or 0.5,
        max_prefetches=command.integer("prefetches", 16),
        max_sessions=command.integer("sessions", 16),
        checks=True,
    )
    default = Costs()
    costs = Costs(
        command.integer("step", default.step_us),
        command.integer("token", default.token_us),
        command.integer("copy", default.copy_us),
    )
    ranks = RankSettings(
        command.integer("ranks", 1),
        command.integer("rank_delay", RankSettings().delay_us),
        command.integer("seed", 0),
    )
    nodes = {}
    for role, count in counts.items():
        for index in range(count):
            nodes[f"{role}-{index}"] = NodeSettings(
                _of_role(command, role, config),
                command.integer(f"{role}_pages", command.integer("pages", DEFAULT_PAGES)),
                costs,
                command.string("weights", "W1"),
                command.integer("store_latency", 1_000) if has_store else None,
                command.integer("detok", 0),
                command.optional("held_timeout"),
                ranks,
            )
    pair = PairSettings()
    wire = pair.wire
    settings = ClusterSettings(
        nodes,
        command.integer("router", 0),
        PairSettings(
            command.integer("metadata", pair.metadata),
            command.integer("host_pages", pair.host_pages),
            WireCosts(
                command.integer("wire_latency", wire.latency_us),
                command.integer("wire_page", wire.page_us),
            ),
            command.optional("meeting_timeout"),
            command.optional("transfer_timeout"),
            command.optional("held_timeout"),
        ),
        Quality(
            command.integer("latency", Quality().latency_us),
            command.integer("jitter", 0),
            _chance(command, "loss"),
            _chance(command, "duplication"),
        ),
        command.integer("retries", 0),
        command.integer("seed", 0),
    )
    return settings, cast("Detail", command.string("trace", "full"))


def _of_role(command: Command, role: str, config: EngineConfig) -> EngineConfig:
    """What differs between roles: rows and page size may be given for one of them."""
    rows = command.integer(f"{role}_rows", config.max_running_requests)
    size = command.integer(f"{role}_page_size", config.page_size)
    return config.model_copy(update={"max_running_requests": rows, "page_size": size})


def _chance(command: Command, option: str) -> float:
    value = command.options.get(option, 0.0)
    if not isinstance(value, float) or not 0 <= value < 1:
        raise command.error(f"{option}= is a chance: 0 or more, and less than 1")
    return value


def _seconds(command: Command, option: str) -> float | None:
    value = command.optional(option)
    return None if value is None else value / US_PER_S
