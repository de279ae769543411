"""Figures of traces: lines a second of a replay, and what tracing costs the scheduler.

``python -m benchmarks.replay`` makes a trace on the simulated node (hash model, aborts, shared
prefixes), replays it, and runs the scheduler with and without tracing to a file. Each figure is
the best of several rounds of processor time, so that a busy machine disturbs little; ratios
compare rounds that took turns."""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.sim.node import NodeSettings, SimNode
from engine.sim.world import World
from engine.trace_file import TraceFile
from fsm.replay_faults import Fault
from fsm.replay_join import replay
from fsm.trace import Balance, Line, Sink, Tracer
from fsm.trace_read import TraceReader
from fsm.trace_stats import NodeStats
from tests.support.node import Node, Shape
from transport.messages import SamplingParams, Submit


def simulate(requests: int, seed: int = 0) -> list[Line]:
    """The trace of ``requests`` on a node with too few pages, one in seven aborted."""
    rng, world = random.Random(seed), World()
    config = EngineConfig(
        model="hash", page_size=16, max_running_requests=64, max_queued_requests=requests
    )
    node = SimNode(world, NodeSettings(config, 1024))
    texts = [[rng.randrange(256) for _ in range(512)] for _ in range(8)]
    for number in range(requests):
        shared = rng.choice(texts)[: rng.randrange(400)]
        prompt = shared + [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        sampling = SamplingParams(max_new_tokens=rng.randrange(1, 64))
        rid = f"request-{number}"

        def submit(
            rid: str = rid, text: list[int] = prompt, how: SamplingParams = sampling
        ) -> None:
            node.clients.submit(rid, Submit(rid, text, how), ())

        world.at(number * 3000, submit)
        if rng.random() < 0.15:
            later = number * 3000 + rng.randrange(60_000)
            world.at(later, lambda rid=rid: node.clients.abort((rid,), False))
    while world.next_us is not None:
        world.step()
    node.scheduler.tracer.footer(node.scheduler.at_rest)
    return node.book.lines


def best(rounds: int, work: Callable[[], object]) -> float:
    """Seconds of processor time of the quickest round."""
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def reading(path: Path, lines: int, rounds: int) -> dict[str, object]:
    """Microseconds a line: of parsers alone, of a replay, of statistics."""
    raw = path.read_bytes().splitlines()
    plain = msgspec.json.Decoder()

    def decode() -> None:
        for _ in TraceReader(path):
            pass

    def check() -> None:
        faults: list[Fault] = []
        (node,) = replay([TraceReader(path)], faults.append)
        assert not faults
        assert not node.lives

    def stats() -> None:
        reader = TraceReader(path)
        node = NodeStats(reader.header)
        for _, batch in reader:
            for line in batch:
                node.feed(line)

    seconds = {
        "json_loads": best(rounds, lambda: [json.loads(line) for line in raw]),
        "msgspec_to_dicts": best(rounds, lambda: [plain.decode(line) for line in raw]),
        "msgspec_to_lines": best(rounds, decode),
        "replay": best(rounds, check),
        "stats": best(rounds, stats),
    }
    return {
        "lines": lines,
        "bytes_a_line": round(path.stat().st_size / lines),
        "us_a_line": {name: round(took / lines * 1e6, 2) for name, took in seconds.items()},
        "replayed_lines_per_s": round(lines / seconds["replay"]),
    }


def serve(requests: int, sink: Sink | None) -> None:
    """The scheduler on the hash model, without simulator and clients."""
    node = Node(Shape(pages=2048, page_size=16, rows=64, queued=requests, chunk=512), checks=False)
    scheduler = node.scheduler
    scheduler.tracer._sink = sink  # noqa: SLF001 - a node of tests traces to a list
    scheduler.kv._observer = scheduler.tracer.lease if sink is not None else None  # noqa: SLF001
    rng = random.Random(1)
    for number in range(requests):
        prompt = [rng.randrange(256) for _ in range(128)]
        scheduler.submit(Submit(f"request-{number}", prompt, SamplingParams(max_new_tokens=64)))
    while scheduler.roster.lives:
        while scheduler.launch() is not None:
            pass
        node.commit()
        scheduler.flush()


def alone(rounds: int) -> float:
    """Microseconds of a traced move that takes pages, the dearest line, and of its encoding."""
    lines: list[Line] = []
    tracer = Tracer("unified-0", time.monotonic, lines.append, lambda: Balance(1, 2, 3))
    encoder = msgspec.json.Encoder()
    move = ("boot:1", 0, "request-1", "admit", "scheduler", "waiting", "prefilling")

    def work() -> None:
        lines.clear()
        for _ in range(10_000):
            tracer.move(*move, ("prefix_locks", "pages", "rows"), (), "", 0, 3)
        encoder.encode_lines(lines)

    return best(2 * rounds, work) / 10_000 * 1e6


def writing(folder: Path, requests: int, rounds: int) -> dict[str, object]:
    """What tracing to a file costs: processor time of the whole process, writer included.

    The ratio is that of the quickest rounds: what disturbs a round only makes it slower.
    """
    path = folder / "served.jsonl"
    without, traced = [], []
    for _ in range(rounds):
        began = time.process_time()
        serve(requests, None)
        without.append(time.process_time() - began)
        file = TraceFile(path)
        began = time.process_time()
        serve(requests, file.write)
        file.close()
        traced.append(time.process_time() - began)
    lines = path.read_bytes().count(b"\n")
    return {
        "requests": requests,
        "lines": lines,
        "seconds": {
            "without": [round(took, 4) for took in sorted(without)[:5]],
            "traced": [round(took, 4) for took in sorted(traced)[:5]],
        },
        "us_a_line": round((min(traced) - min(without)) / lines * 1e6, 2),
        "us_of_one_line_alone": round(alone(rounds), 2),
        "ratio": round(min(traced) / min(without), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Lines a second, and what tracing costs.")
    parser.add_argument("--requests", type=int, default=2000, help="in the trace [default 2000]")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure [default 5]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = simulate(options.requests)
        path = folder / "trace.jsonl"
        path.write_bytes(msgspec.json.Encoder().encode_lines(lines))
        figures = {
            "reading": reading(path, len(lines), options.rounds),
            "writing": writing(folder, 64, 8 * options.rounds),
        }
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
