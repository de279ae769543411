"""The soak run: many concurrent streams with random aborts and disconnects against a real server.

``python -m tests.support.soak --seconds 120`` runs it in full and prints what it saw (``make
soak``); the test suite runs a shorter form. Every stream must end in a way that was asked for,
the ledger must be at rest within a second of the last one, and resident memory must not grow:
less than 2 % between the first and the last third of the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tests.support.serving import Server, serving

WORDS = ["the", "of", "lock", "gate", "state", "page", "token", "batch", "queue", "river", "stone"]


@dataclass
class Report:
    """What a soak run saw. ``outcomes`` counts streams by how they ended."""

    seconds: float
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    resident: list[int] = field(default_factory=list)
    at_rest_s: float = 0.0

    @property
    def growth(self) -> float:
        """Relative growth of resident memory from the first to the last third (of the medians)."""
        third = len(self.resident) // 3
        first = statistics.median(self.resident[:third])
        return statistics.median(self.resident[-third:]) / first - 1

    def as_dict(self) -> dict[str, object]:
        return {
            "seconds": round(self.seconds, 1),
            "streams": dict(self.outcomes),
            "tokens": self.tokens,
            "errors": self.errors[:10],
            "resident_mib": [round(self.resident[i] / 2**20) for i in (0, -1)],
            "growth": round(self.growth, 4),
            "at_rest_s": round(self.at_rest_s, 3),
        }


async def _stream(
    session: aiohttp.ClientSession, url: str, rng: random.Random, rid: str, report: Report
) -> None:
    """One stream, ended by itself, by an abort, or by leaving."""
    fate = rng.choices(["finish", "abort", "leave"], [6, 2, 2])[0]
    after = rng.randrange(1, 24)
    body = {
        "rid": rid,
        "text": " ".join(rng.choices(WORDS, k=rng.randrange(4, 160))),
        "stream": True,
        "sampling_params": {
            "max_new_tokens": rng.randrange(8, 64),
            "temperature": rng.choice([0.0, 0.8]),
            "ignore_eos": True,
        },
    }
    finish: dict[str, object] | None = None
    chunks = 0
    async with session.post(url + "/generate", json=body) as reply:
        if reply.status != 200:
            report.errors.append(f"{rid}: status {reply.status}: {(await reply.text())[:200]}")
            return
        async for raw in reply.content:
            line = raw.decode().strip()
            if not line or line == "data: [DONE]":
                continue
            meta = json.loads(line.removeprefix("data: "))
            if "error" in meta:
                report.errors.append(f"{rid}: {line[:200]}")
                return
            if finish is not None:
                report.errors.append(f"{rid}: a chunk after its end")
            finish = meta["meta_info"]["finish_reason"]
            chunks += 1
            report.tokens = report.tokens + 1
            if chunks == after and fate == "leave":
                reply.close()
                report.outcomes["left"] += 1
                return
            if chunks == after and fate == "abort":
                async with session.post(url + "/abort_request", json={"rid": rid}) as answer:
                    if answer.status != 200:
                        report.errors.append(f"{rid}: abort answered {answer.status}")
    if finish is None:
        report.errors.append(f"{rid}: ended without a terminal")
        return
    kind = str(finish["type"])
    if kind == "abort" and fate != "abort":
        report.errors.append(f"{rid}: aborted by nobody: {finish}")
    report.outcomes[kind] += 1


async def soak(server: Server, seconds: float, streams: int, seed: int) -> Report:
    """Keep ``streams`` streams open for ``seconds``; then wait for rest."""
    report = Report(seconds)
    started = time.monotonic()
    serial = 0

    async def client(index: int, session: aiohttp.ClientSession) -> None:
        nonlocal serial
        rng = random.Random(f"{seed}/{index}")
        while time.monotonic() - started < seconds:
            serial += 1
            await _stream(session, server.url, rng, f"soak-{serial}", report)

    async def sampler() -> None:
        while True:
            report.resident.append(await asyncio.to_thread(server.resident_bytes))
            await asyncio.sleep(0.5)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        watching = asyncio.create_task(sampler())
        async with asyncio.TaskGroup() as group:
            for index in range(streams):
                group.create_task(client(index, session))
        watching.cancel()
    report.at_rest_s = await asyncio.to_thread(server.wait_at_rest, 1.0)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak a server; exits 1 if anything was wrong.")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    with serving("--model", options.model) as server:
        report = asyncio.run(soak(server, options.seconds, options.streams, options.seed))
    print(json.dumps(report.as_dict(), indent=2))
    return 1 if report.errors or report.growth >= 0.02 else 0


if __name__ == "__main__":
    sys.exit(main())
