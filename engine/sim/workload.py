"""Workloads for whole clusters: made up, or read from a public trace file.

Two forms of trace files are read.

- *Mooncake* (FAST '25), JSON lines: ``{"timestamp": ms, "input_length": N, "output_length": N,
  "hash_ids": […]}``. Each hash id names a block of :data:`BLOCK` prompt tokens; equal ids are equal
  blocks, so prefixes are shared as they were in production.
- *Azure LLM inference*, CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens`` with a date and time. It
  says nothing of what prompts share, so they share nothing.

A workload is read as lengths; the tokens of a prompt are made when it is sent.
"""

import csv
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from engine.sim.world import US_PER_MS, US_PER_S

BLOCK: Final = 512
"""Prompt tokens that one hash id stands for."""

SYNTHETIC: Final = "synthetic"
"""How the description of a workload that is made up begins."""

COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""The columns of a file of the Azure form."""

UNITS_US: Final = {"us": 1, "ms": US_PER_MS, "s": US_PER_S}


class WorkloadError(ValueError):
    """A workload cannot be read, or not be served: which line, and what of it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, and when it is sent in microseconds."""

    time_us: int
    length: int
    """Tokens of its prompt."""
    output: int
    blocks: tuple[int, ...] = ()
    """Numbers of the blocks that the prompt begins with."""
    seed: int = 0
    """Of the tokens after those."""
    where: str = ""
    """Where it was read."""

    def prompt(self) -> list[int]:
        """Its tokens: bytes. A block's are the same wherever its number stands."""
        tokens: list[int] = []
        for number in self.blocks:
            tokens += random.Random(number).randbytes(BLOCK)
        rest = max(0, self.length - len(tokens))
        tokens += random.Random(f"own {self.seed}").randbytes(rest)
        return tokens[: self.length]


def load(what: str, count: int | None = None, speed: float = 1.0, seed: int = 0) -> list[Arrival]:
    """The first ``count`` requests of a workload, ``speed`` times as fast as they came.

    ``what`` is a file, or describes a synthetic workload, of 1,000 requests unless ``count`` is
    given: ``synthetic:prompt=256,output=16-64,every=2ms``. Raises :class:`WorkloadError`.
    """
    if what.partition(":")[0] == SYNTHETIC:
        number = 1_000 if count is None else count
        arrivals = list(_described(what.partition(":")[2], number, speed, seed))
    else:
        arrivals = list(islice(_read(Path(what), speed, seed), count))
    if not arrivals:
        raise WorkloadError(f"{what}: no requests")
    return arrivals


def check_fit(arrivals: list[Arrival], tokens: int) -> None:
    """Raise :class:`WorkloadError` for the first request that needs more than ``tokens``."""
    for each in arrivals:
        if each.length + each.output > tokens:
            raise WorkloadError(
                f"{each.where}: a prompt of {each.length} tokens and {each.output} more never fit: "
                f"a node's pages hold {tokens}"
            )


# --- made up ---


def synthetic(
    count: int,
    prompt: tuple[int, int],
    output: tuple[int, int],
    every_us: int,
    speed: float = 1.0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """``count`` requests ``every_us`` apart. ``prompt`` and ``output`` are ranges of lengths, both
    ends included."""
    draw = random.Random(f"synthetic {seed}")
    for index in range(count):
        yield Arrival(
            round(index * every_us / speed),
            draw.randint(*prompt),
            draw.randint(*output),
            seed=_own(seed, index),
            where=f"synthetic request {index + 1}",
        )


def _described(text: str, count: int, speed: float, seed: int) -> Iterator[Arrival]:
    words = {"prompt": "256", "output": "32", "every": "2ms"}
    for word in filter(None, text.split(",")):
        key, equals, value = word.partition("=")
        if key not in words or not equals:
            known = ", ".join(f"{name}=" for name in words)
            raise WorkloadError(f"synthetic workload: {word!r} is none of {known}")
        words[key] = value
    lengths = _range("prompt", words["prompt"]), _range("output", words["output"])
    every = re.fullmatch(r"(\d+)(us|ms|s)", words["every"])
    if every is None:
        raise WorkloadError(f"synthetic workload: every={words['every']} is no time, as 2ms is")
    return synthetic(count, *lengths, int(every[1]) * UNITS_US[every[2]], speed, seed)


def _range(name: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found is not None else (0, 0)
    if not 1 <= low <= high:
        raise WorkloadError(
            f"synthetic workload: {name}={text} is no length: N, or LOW-HIGH, from 1 on"
        )
    return low, high


def _own(seed: int, index: int) -> int:
    """What the tokens of a prompt that nobody shares are drawn from."""
    return (seed << 32) + index


# --- files ---


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def _read(path: Path, speed: float, seed: int) -> Iterator[Arrival]:
    read = _azure if path.suffix.lower() == ".csv" else _mooncake
    last_us, index = 0, 0
    try:
        for where, time_us, length, output, blocks in read(path):
            for name, value in (("prompt", length), ("output", output)):
                if value < 1:
                    raise WorkloadError(f"{where}: {name} of {value} tokens")
            if time_us < last_us:
                raise WorkloadError(f"{where}: sent before the line above it")
            last_us = time_us
            at_us = round(time_us / speed)
            yield Arrival(at_us, length, output, blocks, _own(seed, index), where)
            index += 1
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: {error}") from error


_Row = tuple[str, int, int, int, tuple[int, ...]]
"""Where, time in microseconds, prompt and output tokens, blocks."""


def _mooncake(path: Path) -> Iterator[_Row]:
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            if not raw.strip():
                continue
            try:
                line = decoder.decode(raw)
            except msgspec.MsgspecError as error:
                raise WorkloadError(f"{where}: {error}") from error
            used = -(-line.input_length // BLOCK)
            yield (
                where,
                round(line.timestamp * US_PER_MS),
                line.input_length,
                line.output_length,
                tuple(line.hash_ids[:used]),
            )


def _azure(path: Path) -> Iterator[_Row]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        if tuple(header) != COLUMNS:
            raise WorkloadError(f"{path}:1: the columns are {header}, not {list(COLUMNS)}")
        start: datetime | None = None
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if not row:
                continue
            if len(row) != len(COLUMNS):
                raise WorkloadError(f"{where}: {len(row)} fields, not {len(COLUMNS)}")
            try:
                time = datetime.fromisoformat(row[0])
            except ValueError as error:
                raise WorkloadError(f"{where}: {COLUMNS[0]}: {error}") from error
            start = start or time
            seconds = (time - start).total_seconds()
            yield where, round(seconds * US_PER_S), *_counts(where, row), ()


def _counts(where: str, row: list[str]) -> tuple[int, int]:
    for name, value in zip(COLUMNS[1:], row[1:], strict=True):
        if not value.isdecimal():
            raise WorkloadError(f"{where}: {name}: {value!r} is no number of tokens")
    return int(row[1]), int(row[2])
