"""What ``--trace`` costs a served model, end to end: ``python -m benchmarks.tracing``.

Two servers, one of which traces to a file, take turns under the same load (32 streams, 128 tokens
in and 64 out); the one whose turn it is not is idle. A figure is the ratio of the two rounds of a
pair, and the median over all pairs: what disturbs both rounds cancels, what disturbs one moves a
pair and not the median. The order within a pair alternates."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path

import aiohttp
from rich.console import Console

from benchmarks.serving import many_streams, prompt, stream
from tests.support.serving import Server, serving


async def rounds(plain: Server, traced: Server, pairs: int) -> list[tuple[float, float]]:
    """Output tokens per second of (plain, traced), for each pair of rounds."""
    measured: list[tuple[float, float]] = []
    async with aiohttp.ClientSession() as session:
        for server in (plain, traced):
            await stream(session, server.url, prompt(64, 0), 16)
            await many_streams(session, server.url)
        for number in range(pairs):
            order = (plain, traced) if number % 2 == 0 else (traced, plain)
            speed = {id(server): await many_streams(session, server.url) for server in order}
            measured.append((speed[id(plain)], speed[id(traced)]))
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--pairs", type=int, default=10, help="pairs of rounds [default 10]")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with serving() as plain, serving("--trace", str(trace)) as traced:
            measured = asyncio.run(rounds(plain, traced, options.pairs))
        lines = trace.read_bytes().count(b"\n")
    ratios = sorted(without / with_ for without, with_ in measured)
    Console().print(
        f"32 streams of 128 in and 64 out, {options.pairs} pairs of rounds: "
        f"{statistics.median(without for without, _ in measured):.0f} tok/s without a trace, "
        f"{statistics.median(with_ for _, with_ in measured):.0f} with one ({lines:,} lines); "
        f"time with / without: median {statistics.median(ratios):.4f}, "
        f"{ratios[len(ratios) // 4]:.4f} to {ratios[-1 - len(ratios) // 4]:.4f} in the middle half"
    )


if __name__ == "__main__":
    main()
