"""A trace of hundreds of requests served over HTTP, aborted and disconnected ones among them,
replays clean, and says of every request what its client was told."""

import asyncio
from pathlib import Path

import psutil
import pytest

from fsm.replay_faults import Fault
from fsm.replay_join import replay
from fsm.trace_read import TraceReader
from server.replay import main
from tests.support.serving import serving
from tests.support.soak import soak

OPTIONS = ("--model", "hash", "--hash-step-ms", "0.2", "--kv-pages", "120")
"""So few pages that requests are retracted and cached pages evicted."""


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_served_trace_replays_clean(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    with serving(*OPTIONS, "--trace", str(path)) as server:
        report = asyncio.run(soak(server, seconds=4.0, streams=24, seed=3))
        server.signal()
        assert server.wait() == 0
    assert not report.errors
    streams = sum(report.outcomes.values())
    assert streams >= 200

    assert main(["--complete", str(path)]) == 0, capsys.readouterr().out
    out = capsys.readouterr().out
    assert "fits: " in out
    faults: list[Fault] = []
    (node,) = replay([TraceReader(path)], faults.append)
    assert node.finish("", complete=True) == []
    assert (faults, node.requests) == ([], streams)
    assert node.answers.total() == streams
    assert node.answers["length"] >= report.outcomes["length"]
    assert node.answers["abort"] > 20
    assert not node.lives
    assert main(["stats", str(path)]) == 0
    assert "decoding" in capsys.readouterr().out


def test_a_killed_engine_leaves_a_trace_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with serving("--model", "hash", "--trace", str(path)) as server:
        server.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 5}})
        engine = psutil.Process(server.engine_pid())
        server.process.kill()
        server.wait()
        engine.wait(10)  # it sees that its server is gone, and writes what it had
    faults: list[Fault] = []
    reader = TraceReader(path)
    (node,) = replay([reader], faults.append)
    node.finish(reader.cut, complete=False)
    assert faults == []
    assert node.answers["length"] == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_disturb_serving() -> None:
    with serving("--model", "hash", "--trace", "/dev/full") as server:
        for _ in range(20):
            body = {"text": "x", "sampling_params": {"max_new_tokens": 5}}
            status, reply = server.post("/generate", body)
            assert (status, reply["meta_info"]["completion_tokens"]) == (200, 5)
        log = server.log.read_text()
    assert log.count("tracing to /dev/full stops: [Errno 28] No space left on device") == 1
