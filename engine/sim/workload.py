"""Workloads for whole clusters: synthetic ones, and trace files of the Mooncake form.

A line of such a file is ``{"timestamp": ms, "input_length": N, "output_length": N, "hash_ids":
[…]}``. Each hash id names a block of 512 prompt tokens; equal ids are equal blocks, so prefixes
are shared as they were in production. The format is that of the traces published with Mooncake
(FAST '25).
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine.hash_model import BYTES
from engine.sim.deployment import Cluster
from engine.sim.world import US_PER_MS, World
from transport.messages import SamplingParams, Submit

BLOCK: Final = 512
"""Prompt tokens that one hash id stands for."""
REST_US: Final = 100 * US_PER_MS
"""How often a cluster that nobody sends anything to is asked whether it is at rest."""


class Arrival(NamedTuple):
    """One request and when it is sent, in microseconds."""

    time_us: int
    prompt: list[int]
    output: int


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def synthetic(count: int, prompt: int, output: int, every_us: int, seed: int = 0) -> list[Arrival]:
    """``count`` requests of ``prompt`` random tokens for ``output`` ones, ``every_us`` apart."""
    draw = random.Random(seed)
    return [
        Arrival(index * every_us, list(draw.randbytes(prompt)), output) for index in range(count)
    ]


def mooncake(path: Path, count: int, speed: float = 1.0) -> Iterator[Arrival]:
    """The first ``count`` requests of a trace, ``speed`` times as fast as they came.

    Raises OSError for a file that cannot be read, and ``msgspec.DecodeError`` for a line of another
    form.
    """
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        for _, raw in zip(range(count), file, strict=False):
            line = decoder.decode(raw)
            tokens = [token for block in line.hash_ids for token in _block(block)]
            if len(tokens) < line.input_length:
                tokens += _block(-len(tokens))[: line.input_length - len(tokens)]
            time_us = round(line.timestamp * US_PER_MS / speed)
            yield Arrival(time_us, tokens[: line.input_length], line.output_length)


def _block(number: int) -> list[int]:
    """The tokens of a block: the same for the same number, everywhere."""
    return [byte % BYTES for byte in random.Random(number).randbytes(BLOCK)]


def feed(cluster: Cluster, arrivals: Iterable[Arrival], fast_forward: bool = True) -> int:
    """Send requests into a cluster and run it until it is at rest; returns how many were sent.

    Nothing is checked on the way: that is what scenarios and seeds are for. Uneventful steps are
    fast-forwarded, which changes nothing but the time it takes.
    """
    world, clients = cluster.world, cluster.clients_of(cluster.entrance)
    for node in cluster.nodes.values():
        node.fast_forward = fast_forward
    sent = 0
    for arrival in arrivals:
        _run(world, arrival.time_us)
        name = f"r{sent}"
        sampling = SamplingParams(max_new_tokens=arrival.output, temperature=0.0)
        clients.submit(name, Submit(name, arrival.prompt, sampling), ())
        sent += 1
    while len(clients.table) or cluster.unrest():
        _run(world, world.now_us + REST_US)
    return sent


def _run(world: World, until_us: int) -> None:
    """Run everything up to ``until_us``, and leave the clock there."""
    while world.next_us is not None and world.next_us <= until_us:
        world.step()
    world.advance(max(world.now_us, until_us))
