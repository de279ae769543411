"""Goal: workloads are what they say: shared blocks are shared, and everybody is served.

Method: a trace of two lines on one pair, and a synthetic burst.
"""

from pathlib import Path

import msgspec
import pytest

from benchmarks.simulate import cluster
from engine.sim.workload import BLOCK, feed, mooncake, synthetic

LINES = (
    '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [4, 5]}\n'
    '{"timestamp": 9, "input_length": 1030, "output_length": 2, "hash_ids": [4, 6]}\n'
)


def test_equal_hash_ids_are_equal_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES, encoding="utf-8")
    first, second = mooncake(path, 10)
    assert (len(first.prompt), len(second.prompt)) == (700, 1030)
    assert first.prompt[:BLOCK] == second.prompt[:BLOCK]
    assert first.prompt[BLOCK:] != second.prompt[BLOCK:700]
    assert (second.time_us, second.output) == (9_000, 2)


def test_a_trace_of_another_form_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrived": 3}\n', encoding="utf-8")
    with pytest.raises(msgspec.ValidationError):
        list(mooncake(path, 1))


def test_a_burst_is_served() -> None:
    where = cluster(1, 16, 256, 256, 8192)
    assert feed(where, synthetic(20, 64, 8, 500)) == 20
    assert not where.unrest()
    ends = [each.views[0].finish for _, each in where.submissions().values()]
    assert {end.type for end in ends if end is not None} == {"length"}
