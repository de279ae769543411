"""What clients, the engine and the server do at the same time (scenario numbers in the names)."""

import asyncio
import threading
import time
from typing import Any

import pytest

from engine.frontend import FrontendRecord
from server.settings import ServerSettings
from tests.support.harness import Served, http_post, parse_events, raw_request, serving
from transport.messages import Abort, Finish, Output, Outputs, StopMatched

STREAM: dict[str, Any] = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 2000}}
WHOLE: dict[str, Any] = {"text": "x", "sampling_params": {"max_new_tokens": 2000}}


def with_rid(body: dict[str, Any], rid: str, **params: object) -> dict[str, Any]:
    return {**body, "rid": rid, "sampling_params": {**body["sampling_params"], **params}}


def record(server: Served, rid: str) -> FrontendRecord:
    found = server.service.front.table.get(rid)
    assert found is not None
    return found


async def test_b01_a_client_that_leaves_a_stream_is_noticed_once() -> None:
    async with serving() as server:
        reader, writer = await raw_request(
            server.port, http_post("/generate", with_rid(STREAM, "r1"))
        )
        for _ in range(3):
            await reader.readuntil(b"\n\n")
        writer.close()
        assert await server.until(lambda: not server.engine.members) < 0.5
        assert server.engine.aborts == [Abort(rids=("r1",), cause="disconnect")]
        await server.until(lambda: len(server.service.front.table) == 0)
        status, report = await server.post("/abort_request", {"rid": "r1"})
        assert (status, report) == (200, {"aborted": [], "finished": ["r1"], "unknown": []})
        assert len(server.engine.aborts) == 1
        await server.at_rest()


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_b11_a_client_that_leaves_without_streaming_is_noticed(path: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    body: dict[str, Any] = {"text": "x", "prompt": "x", **chat, "max_tokens": 3000}
    async with serving() as server:
        for n in (1, 4):
            body |= {"n": n, "sampling_params": {"n": n, "max_new_tokens": 3000}}
            _, writer = await raw_request(server.port, http_post(path, body))
            await server.until(lambda n=n: len(server.engine.members) == n)  # type: ignore[misc]
            writer.close()
            assert await server.until(lambda: not server.engine.members) < 0.5
        assert [abort.cause for abort in server.engine.aborts] == ["disconnect"] * 2
        await server.at_rest()
        for _ in range(20):
            assert (await server.post("/generate", with_rid(WHOLE, "", max_new_tokens=1)))[0] == 200
        await server.at_rest()
        assert 'status_code="499"' in (await server.get("/metrics"))[1]


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_never_reaches_the_engine() -> (
    None
):
    async with serving() as server:
        encode = server.service.tokenizer.encode
        entered, leave = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(text: str, add_special_tokens: bool = True) -> list[int]:
            loop.call_soon_threadsafe(entered.set)
            leave.wait(2)
            return encode(text, add_special_tokens)

        server.service.tokenizer.encode = slow  # type: ignore[method-assign]
        long = {**with_rid(WHOLE, "long", max_new_tokens=9), "text": "x" * 3000}
        _, writer = await raw_request(server.port, http_post("/generate", long))
        await entered.wait()
        status, answer = await server.post("/generate", long)
        assert status == 400, "the rid is reserved before the prompt is tokenized"
        writer.close()
        await server.until(lambda: len(server.service.front.table) == 0)
        # An abort finds a request that the engine has not seen, and it never will.
        entered.clear()
        asking = asyncio.create_task(server.post("/generate", long))
        await entered.wait()
        report = (await server.post("/abort_request", {"rid": "long"}))[1]
        assert report["aborted"] == ["long"]
        leave.set()
        status, answer = await asking
        assert status == 200
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert answer["output_ids"] == []
        assert server.engine.submits == []
        assert server.engine.aborts == []
        await server.at_rest()


async def test_b03_aborts_of_finishing_finished_and_unknown_rids() -> None:
    async with serving(step_s=0.0005) as server:

        async def one(number: int) -> tuple[int, Any]:
            body = with_rid(WHOLE, f"r{number}", max_new_tokens=1 + number % 7)
            return await server.post("/generate", body)

        async def abort(number: int) -> dict[str, list[str]]:
            await asyncio.sleep(0.0004 * (number % 13))
            report: dict[str, list[str]] = (
                await server.post("/abort_request", {"rid": f"r{number}"})
            )[1]
            return report

        pairs = await asyncio.gather(*(one(n) for n in range(50)), *(abort(n) for n in range(50)))
        answers, reports = pairs[:50], pairs[50:]
        for number, ((status, answer), report) in enumerate(zip(answers, reports, strict=True)):
            assert status == 200
            reason = answer["meta_info"]["finish_reason"]["type"]
            places = [key for key, rids in report.items() if rids]
            assert len(places) == 1
            if reason == "abort":
                assert places == ["aborted"], (number, answer, report)
        report = (await server.post("/abort_request", {"rid": ["never", "r1", "never"]}))[1]
        assert report == {"aborted": [], "finished": ["r1"], "unknown": ["never"]}
        report = (await server.post("/abort_request", {"abort_all": True}))[1]
        assert report == {"aborted": [], "finished": [], "unknown": []}
        await server.at_rest()


async def test_abort_all_is_200_with_partial_text_and_empty_rids_are_400() -> None:
    async with serving() as server:
        server.engine.held.set()
        asking = [
            asyncio.create_task(server.post("/generate", with_rid(WHOLE, "a"))),
            asyncio.create_task(server.post("/generate", with_rid(WHOLE, "g", n=2))),
        ]
        await server.until(lambda: len(server.engine.members) == 3)
        server.engine.step(4)
        await server.until(lambda: record(server, "g").members[1].visible == 4)
        for rid in ("", None, [], ["a", ""]):
            status, answer = await server.post("/abort_request", {"rid": rid})
            assert status == 400
            assert "rid must not be empty" in answer["error"]["message"]
        report = (await server.post("/abort_request", {"abort_all": True}))[1]
        assert sorted(report["aborted"]) == ["a", "g"]
        (_, alone), (_, group) = await asyncio.gather(*asking)
        for answer in (alone, *group):
            assert answer["text"] == "abcd"
            assert answer["output_ids"] == [97, 98, 99, 100]
            assert answer["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
        assert (await server.post("/abort_request", {"rid": "a"}))[1]["finished"] == ["a"]
        # Exact match: a prefix is another rid.
        asking = [asyncio.create_task(server.post("/generate", with_rid(WHOLE, "name-1")))]
        await server.until(lambda: len(server.engine.members) == 1)
        assert (await server.post("/abort_request", {"rid": "name"}))[1]["unknown"] == ["name"]
        assert (await server.post("/abort_requests", {"request_ids": ["name-1"]}))[1] == {
            "status": "aborted",
            "aborted": 1,
        }
        await asking[0]
        await server.at_rest()


async def test_b06_a_live_rid_is_refused_and_free_after_its_end() -> None:
    async with serving() as server:
        server.engine.held.set()
        first = asyncio.create_task(
            server.post("/generate", with_rid(WHOLE, "x", max_new_tokens=5))
        )
        await server.until(lambda: len(server.engine.members) == 1)
        for path, body in (
            ("/generate", with_rid(WHOLE, "x")),
            ("/generate", with_rid(STREAM, "x", n=2)),
            ("/v1/completions", {"prompt": "x", "rid": "x"}),
        ):
            status, answer = await server.post(path, body)
            assert status == 400
            assert "duplicate" in answer["error"]["message"]
            assert answer["error"]["param"] == "rid"
        assert len(server.engine.submits) == 1
        server.engine.held.clear()
        assert (await first)[1]["text"] == "abcde"
        assert (await server.post("/generate", with_rid(WHOLE, "x", max_new_tokens=2)))[0] == 200
        await server.at_rest()


async def test_a_rid_waits_until_the_engine_is_done_with_its_last_request() -> None:
    async with serving() as server:
        server.engine.echo_stops = False  # the engine's last word on a stopped request is late
        body = with_rid(WHOLE, "x", stop="d")
        assert (await server.post("/generate", body))[1]["text"] == "abc"
        again = asyncio.create_task(server.post("/generate", body))
        await asyncio.sleep(0.05)
        assert not again.done()
        assert len(server.engine.submits) == 1
        late = Output("x", 9, [0x58, 0x58], finish=Finish("abort", message="old"))
        server.service.front._on_outputs(Outputs([late]))
        await server.until(lambda: len(server.engine.submits) == 2)
        status, answer = await again
        assert (status, answer["text"]) == (200, "abc"), "no token of the old life is in it"
        server.service.front._on_outputs(Outputs([late]))
        await server.at_rest()


async def test_b07_all_members_of_a_group_leave_with_their_client() -> None:
    async with serving() as server:
        body = with_rid(STREAM, "g", n=3, ignore_eos=True)
        reader, writer = await raw_request(server.port, http_post("/generate", body))
        for _ in range(5):
            await reader.readuntil(b"\n\n")
        writer.close()
        assert await server.until(lambda: not server.engine.members) < 0.5
        assert [abort.rids for abort in server.engine.aborts] == [("g",)]
        # A batch leaves as a whole, too.
        batch = {"text": ["a", "b"], "stream": True, "rid": ["p", "q"], "sampling_params": {"n": 2}}
        reader, writer = await raw_request(server.port, http_post("/generate", batch))
        await reader.readuntil(b"\n\n")
        writer.close()
        await server.until(lambda: not server.engine.members)
        assert [abort.rids for abort in server.engine.aborts[1:]] == [("p",), ("q",)]
        await server.at_rest()


async def test_a_member_can_be_aborted_alone() -> None:
    async with serving() as server:
        server.engine.held.set()
        asking = asyncio.create_task(
            server.post("/generate", with_rid(WHOLE, "g", n=2, max_new_tokens=3))
        )
        await server.until(lambda: len(server.engine.members) == 2)
        assert (await server.post("/abort_request", {"rid": "g#0"}))[1]["aborted"] == ["g#0"]
        server.engine.held.clear()
        answers = (await asking)[1]
        reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
        assert reasons == ["abort", "length"]
        await server.at_rest()


async def test_b05_a_full_queue_refuses_at_once() -> None:
    async with serving(max_running=1, max_queued=1) as server:
        server.engine.held.set()
        asking = [
            asyncio.create_task(server.post("/generate", with_rid(body, "", max_new_tokens=2)))
            for body in [WHOLE, STREAM] * 6
        ]
        done, running = await asyncio.wait(asking, timeout=0.2)
        assert len(running) == 2
        assert {task.result()[0] for task in done} == {503}
        server.engine.held.clear()
        assert {(await task)[0] for task in running} == {200}
        await server.at_rest()


async def test_a_group_that_is_refused_takes_its_batch_with_it() -> None:
    async with serving(max_running=2, max_queued=2) as server:
        server.engine.held.set()
        for stream in (False, True):
            body = {"text": ["a", "b", "c"], "stream": stream, "sampling_params": {"n": 2}}
            status, answer = await server.post("/generate", body)
            assert status == 503
            assert "queue is full" in answer["error"]["message"]
        server.engine.held.clear()
        await server.at_rest()


async def test_b12_twenty_rounds_of_aborted_streams_leave_nothing() -> None:
    async with serving(max_running=4, max_queued=0) as server:
        for round_number in range(20):
            streams = [
                await raw_request(server.port, http_post("/generate", STREAM)) for _ in range(4)
            ]
            for reader, _ in streams:
                await reader.readuntil(b"\n\n")
            if round_number % 2:
                await server.post("/abort_request", {"abort_all": True})
                for reader, _ in streams:
                    body = await reader.readuntil(b"[DONE]\n\n")
                    assert b'"type":"abort"' in body
            for _, writer in streams:
                writer.close()
            await server.at_rest()
        answers = await asyncio.gather(
            *(server.post("/generate", with_rid(WHOLE, "", max_new_tokens=3)) for _ in range(4))
        )
        assert [status for status, _ in answers] == [200] * 4
        await server.at_rest()


async def test_b123_health_probes_never_pile_up() -> None:
    settings = ServerSettings(probe_timeout_s=0.3)
    async with serving(settings) as server:
        assert (await server.get("/health_generate"))[0] == 200
        server.engine.held.set()
        for _ in range(5):
            _, writer = await raw_request(
                server.port, b"GET /health_generate HTTP/1.1\r\nHost: x\r\n\r\n"
            )
            await asyncio.sleep(0.02)
            writer.close()
            assert len(server.engine.members) <= 1
        assert (await server.get("/health_generate"))[0] == 503
        await server.until(lambda: not server.engine.members)
        assert (await server.get("/health"))[0] == 200, "at once, whatever the engine does"
        server.engine.held.clear()
        assert (await server.get("/health_generate"))[0] == 200
        rids = [submit.rid for submit in server.engine.submits]
        assert len(set(rids)) == 3, "each has a rid of its own, which nobody can guess"
        assert [abort.rids for abort in server.engine.aborts] == [(rids[1],)]
        await server.at_rest()


async def test_stop_and_abort_and_end_at_once_give_one_answer() -> None:
    """The engine runs ahead of the detokenizer's stop, while aborts arrive in between."""
    for delay in range(12):
        async with serving(step_s=0.0003, tokens_per_step=2) as server:
            body = with_rid(WHOLE, "x", stop=["fg"], max_new_tokens=9)
            asking = asyncio.create_task(server.post("/generate", body))
            await asyncio.sleep(delay * 0.0007)
            report = (await server.post("/abort_request", {"rid": "x"}))[1]
            status, answer = await asking
            assert status == 200
            reason = answer["meta_info"]["finish_reason"]
            assert reason["type"] in ("stop", "abort")
            if reason["type"] == "stop":
                assert answer["text"] == "abcde"
                assert answer["meta_info"]["completion_tokens"] == 7
            else:
                assert report["aborted"] == ["x"]
                assert "abcdefg".startswith(answer["text"])
            await server.at_rest()


async def test_an_ended_session_turn_is_told_about_a_stop_before_its_end() -> None:
    async with serving(tokens_per_step=10) as server:
        await server.post("/open_session", {"session_id": "s"})
        body = with_rid(WHOLE, "t", stop="cd", max_new_tokens=10)
        answer = (await server.post("/generate", body | {"session_params": {"id": "s"}}))[1]
        assert answer["text"] == "ab"
        await server.until(lambda: any(isinstance(m, StopMatched) for m in server.engine.received))
        assert server.engine.received[-1] == StopMatched("t", 4, "cd")


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_a_slow_reader_is_given_up_and_costs_no_memory(path: str) -> None:
    settings = ServerSettings(write_stall_s=0.3)
    async with serving(
        settings, send_buffer=4096, step_s=0.0002, tokens_per_step=8, context_length=60_000
    ) as server:
        body = {
            "text": "x",
            "messages": [{"role": "user", "content": "x"}],
            "stream": True,
            "max_tokens": 50_000,
            "sampling_params": {"max_new_tokens": 50_000},
            "logprobs": True,
            "rid": "slow",
        }
        _, writer = await raw_request(server.port, http_post(path, body))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await server.until(lambda: len(server.engine.members) == 1)
        (call,) = server.service.front.calls
        await server.until(lambda: not server.engine.members, 5)
        assert server.engine.aborts == [Abort(rids=("slow",), cause="slow_reader")]
        assert call.choices[0].unread_tokens < 60_000
        await server.at_rest()
        writer.transport.abort()


async def test_unread_tokens_are_bounded() -> None:
    settings = ServerSettings(max_unread_tokens=100)
    async with serving(settings, tokens_per_step=50) as server:
        reader, writer = await raw_request(
            server.port, http_post("/generate", with_rid(STREAM, "slow"))
        )
        await reader.readuntil(b"\n\n")
        front = server.service.front
        (call,) = front.calls
        call.pieces = _never  # type: ignore[method-assign]
        await server.until(lambda: any(a.cause == "slow_reader" for a in server.engine.aborts))
        writer.close()
        await server.at_rest()


async def _never() -> Any:
    """In place of a handler's wait for more: it never gets to write."""
    await asyncio.Event().wait()


async def test_a_lost_output_is_an_error_and_the_engine_is_told() -> None:
    async with serving() as server:
        server.engine.held.set()
        asking = asyncio.create_task(server.post("/generate", with_rid(WHOLE, "x")))
        await server.until(lambda: len(server.engine.members) == 1)
        server.service.front._on_outputs(Outputs([Output("x", 3, [97])]))
        status, answer = await asking
        assert status == 500
        assert "were lost" in answer["error"]["message"]
        await server.at_rest()


async def test_a_batch_whose_later_prompt_is_wrong_submits_nothing() -> None:
    async with serving(context_length=100) as server:
        body = {"text": ["ok", "y" * 300], "rid": ["a", "b"]}
        status, answer = await server.post("/generate", body)
        assert status == 400
        assert "text.1 has 301 tokens" in answer["error"]["message"]
        assert server.engine.submits == []
        await server.at_rest()


async def test_a_full_channel_refuses_new_requests_and_loses_no_abort() -> None:
    async with serving() as server:
        client = server.service.engine
        asking = asyncio.create_task(server.post("/generate", with_rid(WHOLE, "x")))
        await server.until(lambda: len(server.engine.members) == 1)
        server.engine.frozen.set()
        for _ in range(3):  # the engine may be in the middle of reading when it freezes
            await asyncio.sleep(0.02)
            while not client._owed:
                client.post(Abort(rids=("nobody" * 1000,)))
        status, answer = await server.post("/generate", with_rid(WHOLE, "y"))
        assert status == 503
        assert "does not keep up" in answer["error"]["message"]
        client.post(Abort(rids=("x",)))
        server.engine.frozen.clear()
        status, answer = await asking
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await server.post("/generate", with_rid(WHOLE, "y", max_new_tokens=1)))[0] == 200
        await server.at_rest()


async def test_ending_all_requests_makes_nothing_healthy() -> None:
    """Goal: the probe must see a token; one that was ended is tried again, one at a time."""
    async with serving(ServerSettings(probe_timeout_s=1.0)) as server:
        server.engine.held.set()
        probing = asyncio.create_task(server.get("/health_generate"))
        for round_ in range(1, 4):
            await server.until(lambda: len(server.engine.submits) == round_)  # noqa: B023
            assert len(server.engine.members) == 1
            assert (await server.post("/abort_request", {"abort_all": True}))[0] == 200
            assert not probing.done()
        assert (await server.post("/abort_request", {"rid": "health-probe"}))[0] == 200
        assert (await probing)[0] == 503, "no token ever came"
        probing = asyncio.create_task(server.get("/health_generate"))
        await server.until(lambda: len(server.engine.submits) == 5)
        await server.post("/abort_request", {"abort_all": True})
        server.engine.held.clear()
        assert (await probing)[0] == 200, "the engine is well, whoever ended its first probe"
        await server.at_rest()


@pytest.mark.parametrize("grace", [0.0, 0.4])
async def test_b126_a_drain_answers_everyone(grace: float) -> None:
    async with serving(step_s=0.01) as server:
        streams = [await raw_request(server.port, http_post("/generate", STREAM)) for _ in range(3)]
        for reader, _ in streams:
            await reader.readuntil(b"\n\n")
        short = asyncio.create_task(
            server.post("/generate", with_rid(WHOLE, "", max_new_tokens=15))
        )
        long = asyncio.create_task(server.post("/generate", WHOLE))
        await server.until(lambda: len(server.engine.members) == 5)
        started = time.monotonic()
        draining = asyncio.create_task(server.service.front.drain(grace))
        await asyncio.sleep(0)
        status, answer = await server.post("/generate", WHOLE)
        assert (status, answer["error"]["message"]) == (503, "the server is shutting down")
        assert (await server.get("/health"))[0] == 503
        await draining
        assert time.monotonic() - started < grace + 0.8
        for reader, writer in streams:
            events = parse_events(
                _chunked(await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 1))
            )
            assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            assert events[-1]["output_ids"]
            writer.close()
        status, answer = await short
        assert status == (200 if grace else 503)
        status, answer = await long
        assert status == 503, "it has seen nothing: it can go elsewhere"
        assert not server.service.front.calls


def _chunked(raw: bytes) -> bytes:
    """The payload of an HTTP/1.1 chunked body, of which the first chunk's data may be missing."""
    events = [line for line in raw.split(b"\r\n") if line.startswith(b"data: ")]
    return b"".join(events)


async def test_b126_an_engine_that_does_not_drain_cannot_hold_the_clients() -> None:
    async with serving() as server:
        server.engine.deaf_to_drain = True
        server.engine.held.set()
        asking = asyncio.create_task(server.post("/generate", WHOLE))
        await server.until(lambda: len(server.engine.members) == 1)
        await server.service.front.drain(0.1)
        assert (await asking)[0] == 503
        await server.until(lambda: bool(server.engine.aborts))
        assert [abort.cause for abort in server.engine.aborts] == ["drain"]


async def test_before_the_engine_is_ready_everything_is_503() -> None:
    async with serving(wait=False) as server:
        bodies: dict[str, dict[str, object]] = {
            "/generate": WHOLE,
            "/v1/completions": {"prompt": "x"},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
            "/open_session": {},
            "/close_session": {"session_id": "x"},
            "/flush_cache": {},
            "/tokenize": {"prompt": "x"},
        }
        for path in (
            *("/health", "/ready", "/health_generate", "/v1/models", "/server_info", "/model_info"),
            *("/ledger", "/requests", "/requests/x", "/get_load", "/v1/loads", *bodies),
        ):
            method = "POST" if path in bodies else "GET"
            async with server.http.request(
                method, server.url + path, json=bodies.get(path)
            ) as response:
                assert response.status == 503, path
                assert response.headers["Retry-After"] == "1"
                answer = await response.json()
                assert answer["error"]["message"] == "the engine is starting", path
        server.engine.start()
        await server.service.engine.ready(5)
        assert (await server.get("/health"))[0] == 200


async def test_a_silent_engine_is_unhealthy() -> None:
    async with serving(ServerSettings(engine_silence_s=0.05)) as server:
        server.engine.frozen.set()
        await asyncio.sleep(0.1)
        status, answer = await server.get("/health")
        assert status == 503
        assert "silent" in answer["error"]["message"]
