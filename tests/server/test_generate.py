"""``/generate`` and the control and info routes, in the shapes that clients parse."""

import asyncio
import itertools
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.settings import ServerSettings
from tests.support.harness import serving
from transport.messages import CloseSession, StopMatched


def value(text: str, name: str, **labels: str) -> float:
    """The value of the one sample of that name that has these labels."""
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, found)
    return found[0]


def greedy(tokens: int, **params: object) -> dict[str, object]:
    return {"max_new_tokens": tokens, "temperature": 0, **params}


async def test_an_answer_has_text_ids_and_meta_info() -> None:
    async with serving() as server:
        body: dict[str, Any] = {"text": "hi", "sampling_params": greedy(4), "rid": "x"}
        status, answer = await server.post("/generate", body)
        assert status == 200
        assert answer["text"] == "abcd"
        assert answer["output_ids"] == [97, 98, 99, 100]
        meta = answer["meta_info"]
        assert 0 < meta.pop("e2e_latency") < 2
        assert meta == {
            "id": "x",
            "finish_reason": {"type": "length", "length": 4},
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cached_tokens": 2,
            "reasoning_tokens": 0,
            "weight_version": "default",
            "num_retractions": 0,
        }
        async with server.http.put(server.url + "/generate", json=body) as response:
            assert response.status == 200
        body = {"input_ids": [104, 105], "sampling_params": greedy(1)}
        status, answer = await server.post("/generate", body | {"return_prompt_token_ids": True})
        assert answer["prompt_token_ids"] == [104, 105]
        assert server.engine.submits[-1].prompt == [104, 105]
        await server.at_rest()


async def test_a_stream_is_cumulative_and_ends_with_the_reason() -> None:
    async with serving() as server:
        body = {"text": "hi", "sampling_params": greedy(6), "stream": True}
        events = await server.events("/generate", body)
        texts = [event["text"] for event in events]
        assert texts[-1] == "abcdef"
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
        assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
        assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
        assert all(
            len(event["output_ids"]) == event["meta_info"]["completion_tokens"] for event in events
        )
        assert "index" not in events[0]
        await server.at_rest()


async def test_batches_and_n_are_lists_in_order_and_streams_carry_an_index() -> None:
    script = {"a": b"AAAA", "b": b"BBBB"}
    async with serving(script=script) as server:
        body: dict[str, Any] = {"text": ["a", "b"], "sampling_params": greedy(2), "rid": "g"}
        status, answers = await server.post("/generate", body)
        assert status == 200
        assert [answer["text"] for answer in answers] == ["AA", "BB"]
        assert [answer["meta_info"]["id"] for answer in answers] == ["g_0", "g_1"]
        body["sampling_params"] = greedy(2, n=2)
        body["rid"] = ["p", "q"]
        status, answers = await server.post("/generate", body)
        assert [a["meta_info"]["id"] for a in answers] == ["p#0", "p#1", "q#0", "q#1"]
        assert [a["text"] for a in answers] == ["AA", "AA", "BB", "BB"]
        body["sampling_params"] = [greedy(1), greedy(3)]
        status, answers = await server.post("/generate", body)
        assert [answer["text"] for answer in answers] == ["A", "BBB"]
        events = await server.events("/generate", body | {"stream": True})
        last = {event["index"]: event for event in events}
        assert [last[0]["text"], last[1]["text"]] == ["A", "BBB"]
        ends = [event["meta_info"]["finish_reason"] for event in events]
        assert sum(end is not None for end in ends) == 2
        status, answers = await server.post(
            "/generate", {"text": "a", "sampling_params": greedy(1, n=2)}
        )
        assert isinstance(answers, list)
        status, answers = await server.post(
            "/generate", {"text": ["a"], "sampling_params": greedy(1)}
        )
        assert isinstance(answers, list)
        await server.at_rest()


async def test_logprobs_are_triples() -> None:
    async with serving() as server:
        body: dict[str, Any] = {
            "text": "hi",
            "sampling_params": greedy(2),
            "return_logprob": True,
            "top_logprobs_num": 2,
            "token_ids_logprob": [65, 66],
            "return_text_in_logprobs": True,
        }
        meta = (await server.post("/generate", body))[1]["meta_info"]
        assert meta["output_token_logprobs"] == [[-0.1, 97, "a"], [-0.2, 98, "b"]]
        assert meta["output_token_logprobs_length"] == 2
        assert meta["output_top_logprobs"][0] == [[-0.1, 97, "a"], [-1.1, 98, "b"]]
        assert meta["output_token_ids_logprobs"][1] == [[-65.0, 65, "A"], [-66.0, 66, "B"]]
        assert meta["input_token_logprobs"] == []
        del body["return_text_in_logprobs"]
        events = await server.events("/generate", body | {"stream": True})
        assert events[-1]["meta_info"]["output_token_logprobs"] == [
            [-0.1, 97, None],
            [-0.2, 98, None],
        ]
        meta = (await server.post("/generate", {"text": "hi", "sampling_params": greedy(1)}))[1]
        assert "output_token_logprobs" not in meta["meta_info"]


async def test_logprobs_are_numbers_that_json_has() -> None:
    """Goal: the infinities of forbidden tokens, and NaN, leave as -9999 on every surface."""

    def numbers(value: Any) -> list[float]:
        if isinstance(value, dict):
            return [n for each in value.values() for n in numbers(each)]
        if isinstance(value, list):
            return [n for each in value for n in numbers(each)]
        return [value] if isinstance(value, float) else []

    async with serving() as server:
        body: dict[str, Any] = {
            "text": "hi",
            "sampling_params": greedy(3, min_new_tokens=2),
            "return_logprob": True,
            "top_logprobs_num": 2,
            "token_ids_logprob": [65],
        }
        meta = (await server.post("/generate", body))[1]["meta_info"]
        assert meta["output_top_logprobs"][0] == [[-0.1, 97, None], [-9999.0, 98, None]]
        assert meta["output_token_ids_logprobs"][:2] == [[[-9999.0, 65, None]]] * 2
        assert meta["output_token_ids_logprobs"][2] == [[-65.0, 65, None]]
        events = await server.events("/generate", body | {"stream": True})
        assert -9999.0 in numbers(events[-1]["meta_info"]["output_top_logprobs"])

        params = {"max_tokens": 3, "min_tokens": 2}
        completion = {"prompt": "hi", "logprobs": 2, **params}
        answer = (await server.post("/v1/completions", completion))[1]["choices"][0]["logprobs"]
        assert answer["top_logprobs"][0] == {"a": -0.1, "b": -9999.0}
        chat = {"messages": [{"role": "user", "content": "hi"}], **params}
        chat |= {"logprobs": True, "top_logprobs": 2}
        answer = (await server.post("/v1/chat/completions", chat))[1]["choices"][0]["logprobs"]
        assert [top["logprob"] for top in answer["content"][0]["top_logprobs"]] == [-0.1, -9999.0]
        for path, wanted in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            chunks = await server.events(path, wanted | {"stream": True})
            shown = [chunk["choices"][0]["logprobs"] for chunk in chunks]
            assert -9999.0 in numbers(shown)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 40])
async def test_a_stop_string_ends_the_answer_and_the_engine(tokens_per_step: int) -> None:
    async with serving(tokens_per_step=tokens_per_step) as server:
        for stop, text in (("fg", "abcde"), (["zz", "klm"], "abcdefghij"), ("e", "abcd")):
            params = greedy(1000, stop=stop)
            status, answer = await server.post(
                "/generate", {"text": "x", "sampling_params": params}
            )
            assert status == 200
            assert answer["text"] == text
            matched = stop if isinstance(stop, str) else stop[1]
            assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
            count = len(text) + len(matched)
            assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == count
            events = await server.events(
                "/generate", {"text": "x", "stream": True, "sampling_params": params}
            )
            assert events[-1]["text"] == text
            assert all(text.startswith(event["text"]) for event in events), "nothing of it leaks"
            params["no_stop_trim"] = True
            answer = (await server.post("/generate", {"text": "x", "sampling_params": params}))[1]
            assert answer["text"] == text + matched
        await server.at_rest()
        stops = [m for m in server.engine.received if isinstance(m, StopMatched)]
        assert len(stops) == 9
        assert all(stop.tokens < 30 for stop in stops)


async def test_a_stop_on_the_last_allowed_token_and_a_false_start() -> None:
    async with serving(script={"x": b"own fog", "y": b"own fox"}) as server:
        params = greedy(7, stop="own fox")
        answer = (await server.post("/generate", {"text": "x", "sampling_params": params}))[1]
        assert answer["text"] == "own fog"
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        answer = (await server.post("/generate", {"text": "y", "sampling_params": params}))[1]
        assert answer["text"] == ""
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "own fox"}
        await server.at_rest()


async def test_stop_tokens_belong_to_the_ids_and_not_to_the_text() -> None:
    async with serving() as server:
        params = greedy(99, stop_token_ids=[100])
        answer = (await server.post("/generate", {"text": "x", "sampling_params": params}))[1]
        assert (answer["text"], answer["output_ids"]) == ("abc", [97, 98, 99, 100])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 100}
        params["no_stop_trim"] = True
        answer = (await server.post("/generate", {"text": "x", "sampling_params": params}))[1]
        assert answer["text"] == "abcd"
        params = greedy(99, custom_params={"eos_at": 2})
        answer = (await server.post("/generate", {"text": "x", "sampling_params": params}))[1]
        assert (answer["text"], answer["output_ids"]) == ("ab", [97, 98, 257])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 257}


async def test_characters_that_span_tokens_stream_once_and_whole() -> None:
    text = "A 世界 👍 é"
    async with serving(script={"x": text.encode()}) as server:
        for tokens in range(1, len(text.encode()) + 1):
            body = {"text": "x", "sampling_params": greedy(tokens)}
            whole = (await server.post("/generate", body))[1]["text"]
            assert whole == text.encode()[:tokens].decode(errors="replace")
            events = await server.events("/generate", body | {"stream": True})
            assert events[-1]["text"] == whole
            chat = await server.events(
                "/v1/completions", {"prompt": "x", "max_tokens": tokens, "stream": True}
            )
            assert "".join(chunk["choices"][0]["text"] for chunk in chat) == whole


async def test_a_session_appends_turns() -> None:
    async with serving() as server:
        status, session = await server.post("/open_session", {"capacity_of_str_len": 1000})
        assert status == 200
        assert isinstance(session, str)
        params = {"session_params": {"id": session}, "sampling_params": greedy(2)}
        first = (await server.post("/generate", {"text": "x", **params}))[1]
        second = (await server.post("/generate", {"text": "y", **params}))[1]
        assert first["meta_info"]["prompt_tokens"] == 2
        assert second["meta_info"]["prompt_tokens"] == 6, "history, and this turn's prompt"
        status, answer = await server.post("/open_session", {"session_id": session})
        assert status == 400
        assert "exists already" in answer["error"]["message"]
        assert (await server.post("/close_session", {"session_id": session}))[0] == 200
        assert isinstance(server.engine.received[-1], CloseSession)
        status, answer = await server.post("/generate", {"text": "x", **params})
        assert status == 400
        assert "does not exist" in answer["error"]["message"]
        assert (await server.post("/close_session", {"session_id": session}))[0] == 200
        await server.at_rest()


async def test_flush_is_400_while_busy_and_can_wait() -> None:
    async with serving() as server:
        server.engine.held.set()
        running = asyncio.create_task(
            server.post("/generate", {"text": "x", "sampling_params": greedy(3)})
        )
        await server.until(lambda: len(server.engine.members) == 1)
        assert (await server.post("/flush_cache", {}))[0] == 400
        status, text = await server.get("/flush_cache")
        assert status == 400
        assert "1 requests are not done" in text
        waiting = asyncio.create_task(server.get("/flush_cache?timeout=5"))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        server.engine.held.clear()
        assert (await waiting)[0] == 200
        assert (await running)[0] == 200
        assert (await server.get("/flush_cache?timeout=x"))[0] == 400


async def test_tokens_and_text() -> None:
    async with serving() as server:
        for path in ("/tokenize", "/v1/tokenize"):
            status, answer = await server.post(path, {"prompt": "hi", "return_token_strs": True})
            assert status == 200
            assert answer == {
                "tokens": [256, 104, 105],
                "count": 3,
                "max_model_len": 4096,
                "token_strs": [answer["token_strs"][0], "h", "i"],
            }
        answer = (
            await server.post("/tokenize", {"prompt": ["a", "bc"], "add_special_tokens": False})
        )[1]
        assert answer["tokens"] == [[97], [98, 99]]
        assert answer["count"] == [1, 2]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        answer = (await server.post("/tokenize", chat))[1]
        assert answer["count"] > 4
        assert (await server.post("/tokenize", {}))[0] == 400
        for path in ("/detokenize", "/v1/detokenize"):
            assert (await server.post(path, {"tokens": [104, 105]}))[1]["text"] == "hi"
        assert (await server.post("/detokenize", {"tokens": [[104], [105]]}))[1]["text"] == [
            "h",
            "i",
        ]
        status, answer = await server.post("/detokenize", {"tokens": [999]})
        assert status == 400
        assert "999" in answer["error"]["message"]


async def test_what_routers_and_scrapers_read() -> None:
    async with serving(ServerSettings()) as server:
        await server.post("/generate", {"text": "x", "sampling_params": greedy(3)})
        server.engine.held.set()
        running = asyncio.create_task(
            server.post("/generate", {"text": "x", "rid": "r1", "sampling_params": greedy(3)})
        )
        await server.until(lambda: len(server.engine.members) == 1)
        assert (await server.get("/get_load"))[1] == [
            {"dp_rank": 0, "num_reqs": 1, "num_waiting_reqs": 0, "num_tokens": 2}
        ]
        loads = (await server.get("/v1/loads?include=core"))[1]["loads"]
        assert (loads[0]["num_running_reqs"], loads[0]["num_waiting_reqs"]) == (1, 0)
        assert (await server.get("/v1/loads?include=core,disagg,queues,memory"))[0] == 200
        assert (await server.get("/v1/loads?include=nonsense"))[0] == 400
        requests = (await server.get("/requests"))[1]
        assert requests["requests"] == [{"rid": "r1"}]
        assert requests["front_end"][0]["rid"] == "r1"
        assert (await server.get("/requests/r1"))[1]["phase"] == "decoding"
        assert (await server.get("/requests/never"))[0] == 404
        ledger = (await server.get("/ledger"))[1]
        assert ledger["at_rest"] is False
        assert ledger["counts"]["frontend_records"] == ledger["counts"]["open_calls"] == 1
        assert ledger["pools"]["rows"]["held"] == 1
        server.engine.held.clear()
        await running
        assert (await server.get("/requests/r1"))[1]["finished"][0]["type"] == "length"
        await server.at_rest()
        for path in ("/server_info", "/get_server_info"):
            info = (await server.get(path))[1]
            assert info["max_req_input_len"] == 4095
            assert info["served_model_name"] == "toy"
            assert isinstance(info["internal_states"], list)
        for path in ("/model_info", "/get_model_info"):
            assert (await server.get(path))[1]["is_generation"] is True
        assert (await server.get("/version"))[1]["version"]
        async with server.http.get(server.url + "/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            text = await response.text()
        assert value(text, "sglang:num_running_reqs", model_name="toy", engine_type="unified") == 0
        assert value(text, "sglang:num_requests_total") == 2
        assert value(text, "sglang:time_to_first_token_seconds_count", is_streaming="false") == 2
        assert value(text, "sglang:e2e_request_latency_seconds_count") == 2
        assert value(text, "sglang:http_responses_total", endpoint="/generate") == 2
        assert value(text, "sglang:prompt_tokens_total") == 10
        assert "_created" not in text
