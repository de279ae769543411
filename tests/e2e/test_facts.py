"""What a server says about itself and its requests comes from its engine, over real processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.serving import Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = (
        "--context-length",
        "100",
        "--max-queued-requests",
        "8",
        "--max-running-requests",
        "1",
    )
    with serving("--model", "hash", "--hash-step-ms", "20", "--debug", "--waiting-timeout", "50",
                 "--running-timeout", "70", *options) as server:  # fmt: skip
        yield server


def _turn(server: Server, session: str, prompt: str, **body: object) -> tuple[int, Any]:
    params = {"prompt": prompt, "session_params": {"id": session}, "ignore_eos": True}
    return server.post("/v1/completions", {**params, **body})


def test_the_engine_says_what_it_is(server: Server) -> None:
    info = server.get("/model_info")
    assert (info["model_type"], info["architectures"]) == ("hash", ["HashModel"])
    loads = server.get("/v1/loads")
    assert loads["accelerator"] == server.get("/server_info")["device"] == "cpu"
    assert "num_waiting_uncached_tokens" not in loads["loads"][0], "nobody counts them"


def test_a_default_limit_is_lowered_to_what_a_session_still_holds(server: Server) -> None:
    """Goal: who names no limit is not refused because of the default that the server put there;
    who names one is."""
    session = server.post("/open_session", {"capacity_of_str_len": 40})[1]
    status, answer = _turn(server, session, "x" * 19, max_tokens=10)
    assert (status, answer["usage"]["total_tokens"]) == (200, 30)
    status, answer = _turn(server, session, "yyy", max_tokens=16)
    assert status == 400
    assert "its capacity is 40" in answer["error"]["message"]
    status, answer = _turn(server, session, "yyy")
    assert status == 200, answer
    usage = answer["usage"]
    assert (usage["total_tokens"], usage["completion_tokens"]) == (40, 6), "16 is the default"
    assert answer["choices"][0]["finish_reason"] == "length"
    server.post("/close_session", {"session_id": session})

    session = server.post("/open_session", {})[1]  # the context length of 100 is its limit
    assert _turn(server, session, "x" * 80, max_tokens=10)[0] == 200
    status, answer = _turn(server, session, "y")
    assert (status, answer["usage"]["total_tokens"]) == (200, 100), answer
    server.post("/close_session", {"session_id": session})


def test_deadlines_throughput_and_queues_are_those_of_now(server: Server) -> None:
    """Goal: seconds left by kind of deadline, and a rate that generation makes and rest unmakes."""

    def generate(rid: str) -> threading.Thread:
        params = {"max_new_tokens": 90, "ignore_eos": True}
        body = {"text": "x", "rid": rid, "deadline_s": 60, "sampling_params": params}
        thread = threading.Thread(target=server.post, args=("/generate", body))
        thread.start()
        _until(lambda: _known(server, rid))
        return thread

    threads = [generate("runs"), generate("waits")]
    _until(lambda: server.get("/requests/runs")["phase"] == "decoding")
    running = server.get("/requests/runs")
    assert set(running["deadlines"]) == {"client", "running"}
    assert 55 < running["deadlines"]["client"] <= 60
    assert 65 < running["deadlines"]["running"] <= 70
    waiting = server.get("/requests/waits")
    assert waiting["state"] == "waiting"
    assert set(waiting["deadlines"]) == {"client", "waiting"}
    assert 45 < waiting["deadlines"]["waiting"] <= 50
    (load,) = server.get("/v1/loads?include=all")["loads"]
    assert (load["queues"]["retracted"], load["queues"]["paused"]) == (0, 0)
    server.post("/debug/hold_step", {})
    server.post("/debug/retract", {"rid": "runs"})
    server.post("/debug/release_step", {})
    for thread in threads:
        thread.join()
    assert server.get("/v1/loads")["loads"][0]["gen_throughput"] > 1
    assert server.get("/server_info")["internal_states"][0]["last_gen_throughput"] > 1
    assert server.get("/requests/runs")["deadlines"] == {}, "it has ended"


def _known(server: Server, rid: str) -> bool:
    requests = server.get("/requests")["requests"]
    return any(each["rid"] == rid and each["state"] != "prefilling" for each in requests)


def _until(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, json.dumps("the condition did not come true")
        time.sleep(0.01)
