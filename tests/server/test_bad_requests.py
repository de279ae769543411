"""What is wrong with a request is said by name, with a proper status, and leaves nothing behind."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from server.settings import ServerSettings
from tests.support.harness import Served, http_post, raw_request, serving


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Served]:
    async with serving(ServerSettings(), context_length=200) as served:
        yield served
        assert served.engine.submits == []
        await served.at_rest()


HI: dict[str, Any] = {"text": "hi"}
PROMPT: dict[str, Any] = {"prompt": "hi"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def sampling(**params: object) -> dict[str, object]:
    return {"text": "hi", "sampling_params": params}


GENERATE = [
    ({}, "text", "exactly one of text and input_ids"),
    ({"text": "hi", "input_ids": [1]}, "text", "exactly one"),
    ({"text": ""}, "text", "must not be empty"),
    ({"text": []}, "text", "must not be empty"),
    ({"input_ids": []}, "input_ids", "must not be empty"),
    ({"text": ["a", ""]}, "text.1", "must not be empty"),
    ({"text": ["a", 3]}, "text", "texts only"),
    ({"text": 5}, "text", "must be text"),
    ({"text": [1, 2]}, "text", "token ids go into input_ids"),
    ({"input_ids": "hi"}, "input_ids", "list of token ids"),
    ({"input_ids": [1, "2"]}, "input_ids", "list of token ids"),
    ({"input_ids": [1, True]}, "input_ids", "list of token ids"),
    ({"input_ids": [1, 1.0]}, "input_ids", "list of token ids"),
    ({"input_ids": [1, 258]}, "input_ids", "258, which is outside 0..257"),
    ({"input_ids": [1, -1]}, "input_ids", "-1, which is outside 0..257"),
    ({"input_ids": [[1], [2, 900]]}, "input_ids.1", "900"),
    ({"text": "x" * 199}, "text", "has 200 tokens, at most 199 fit"),
    ({"input_ids": [7] * 500}, "input_ids", "has 500 tokens, at most 199 fit"),
    (sampling(max_new_tokens=198), "sampling_params.max_new_tokens", "exceeds the context length"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens", "greater than or equal to 0"),
    (sampling(max_new_tokens="5"), "sampling_params.max_new_tokens", "valid integer, got '5'"),
    (sampling(max_new_tokens=True), "sampling_params.max_new_tokens", "valid integer"),
    (sampling(max_new_tokens=10**30), "sampling_params.max_new_tokens", "less than"),
    (sampling(min_new_tokens=9, max_new_tokens=8), "sampling_params.min_new_tokens", "at most"),
    (sampling(temperature=-0.5), "sampling_params.temperature", "greater than or equal to 0"),
    (sampling(temperature="hot"), "sampling_params.temperature", "valid number"),
    (sampling(top_p=0), "sampling_params.top_p", "greater than 0"),
    (sampling(top_p=1.1), "sampling_params.top_p", "less than or equal to 1"),
    (sampling(top_k=0), "sampling_params.top_k", "-1 (off) or at least 1"),
    (sampling(top_k=1.5), "sampling_params.top_k", "integer"),
    (sampling(min_p=1.5), "sampling_params.min_p", "less than or equal to 1"),
    (sampling(frequency_penalty=3), "sampling_params.frequency_penalty", "equal to 2"),
    (sampling(presence_penalty=-3), "sampling_params.presence_penalty", "equal to -2"),
    (sampling(repetition_penalty=0), "sampling_params.repetition_penalty", "equal to 0.01"),
    (sampling(repetition_penalty=1e-42), "sampling_params.repetition_penalty", "equal to 0.01"),
    (sampling(repetition_penalty=2.5), "sampling_params.repetition_penalty", "equal to 2"),
    (sampling(n=0), "sampling_params.n", "greater than or equal to 1"),
    (sampling(n=129), "sampling_params.n", "less than or equal to 128"),
    (sampling(stop=["x"] * 33), "sampling_params.stop", "at most 32"),
    (sampling(stop=["x" * 2000]), "sampling_params.stop", "more than 1024 characters"),
    (sampling(stop=[5]), "sampling_params.stop.0", "string"),
    (sampling(stop_token_ids=[999]), "sampling_params.stop_token_ids", "999"),
    (sampling(logit_bias={"x": 1}), "sampling_params.logit_bias", "'x'"),
    (sampling(logit_bias={"7": 1e39}), "sampling_params.logit_bias.7", "equal to 100"),
    (sampling(logit_bias={"7": -101}), "sampling_params.logit_bias.7", "equal to -100"),
    (sampling(logit_bias={"300": 1}), "sampling_params.logit_bias", "outside 0..257"),
    (sampling(sampling_seed=2**63), "sampling_params.sampling_seed", "less than"),
    (sampling(seed=1), "sampling_params.seed", "unknown field 'seed', expected one of"),
    (sampling(json_schema="{}"), "sampling_params.json_schema", "not supported"),
    (sampling(regex="a+"), "sampling_params.regex", "not supported"),
    ({**HI, "sampling_params": [{}, {}]}, "sampling_params", "2 items for 1 prompts"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "sampling_params", "same n"),
    ({"text": ["a", "b"], "sampling_params": [{}, {"n": 0}]}, "sampling_params.1.n", "equal to 1"),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", "1 items for 2 prompts"),
    ({"text": ["a", "b"], "rid": ["x", "x"]}, "rid", "duplicate"),
    ({**HI, "rid": "x#1"}, "rid", "group's member"),
    ({**HI, "rid": "x" * 600}, "rid", "at most 512 characters"),
    ({**HI, "rid": 5}, "rid", "string"),
    ({**HI, "stream": "yes"}, "stream", "boolean"),
    ({**HI, "return_logprob": True, "top_logprobs_num": 129}, "top_logprobs_num", "0 and 128"),
    ({**HI, "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num", "0 and 128"),
    ({**HI, "return_logprob": True, "logprob_start_len": 0}, "logprob_start_len", "not supported"),
    ({**HI, "return_logprob": True, "token_ids_logprob": [400]}, "token_ids_logprob", "400"),
    ({**HI, "image_data": ["x"]}, "image_data", "multimodal"),
    ({**HI, "audio_data": "x"}, "audio_data", "multimodal"),
    ({**HI, "lora_path": "a"}, "lora_path", "not supported"),
    ({**HI, "session_params": {"id": ""}}, "session_params.id", "at least 1"),
    ({**HI, "session_params": {"id": "s", "offset": 3}}, "session_params.offset", "equal to -1"),
    (
        {**HI, "session_params": {"id": "s", "replace": True}},
        "session_params.replace",
        "not supported",
    ),
    ({**HI, "deadline_s": 0}, "deadline_s", "greater than 0"),
]

COMPLETION: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": [[1], []]}, "prompt.1", "must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", "must be text"),
    ({**PROMPT, "max_tokens": -1}, "max_tokens", "greater than or equal to 0, got -1"),
    ({**PROMPT, "max_tokens": 1.5}, "max_tokens", "integer"),
    ({**PROMPT, "max_tokens": 500}, "max_tokens", "exceeds the context length of 200"),
    ({**PROMPT, "logprobs": 21}, "logprobs", "less than or equal to 20, got 21"),
    ({**PROMPT, "logprobs": -1}, "logprobs", "greater than or equal to 0"),
    ({**PROMPT, "logprobs": 1, "echo": True}, "echo", "not supported"),
    ({**PROMPT, "suffix": "x"}, "suffix", "not supported"),
    ({**PROMPT, "best_of": 3}, "best_of", "not supported"),
    ({**PROMPT, "stream_options": {"include_usage": True}}, "stream_options", "with stream"),
    ({**PROMPT, "seed": "x"}, "seed", "integer"),
    ({**PROMPT, "temperature": None, "n": "2"}, "n", "integer, got '2'"),
    ({**PROMPT, "guided_json": {"a": 1}}, "guided_json", "not supported"),
    ({**PROMPT, "min_tokens": 9, "max_tokens": 3}, "min_tokens", "at most"),
    ({**PROMPT, "rid": ["a", "b"]}, "rid", "one item for each of 1 prompts"),
]

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,xx"}}
CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "required"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": [5]}, "messages.0", "dictionary"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "string"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type", "image"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "string"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "at most 199 fit"),
    ({**CHAT, "max_completion_tokens": -5}, "max_completion_tokens", "greater than or equal"),
    ({**CHAT, "max_completion_tokens": 500}, "max_completion_tokens", "exceeds the context"),
    ({**CHAT, "top_logprobs": 5}, "top_logprobs", "together with logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "equal to 20, got 21"),
    ({**CHAT, "logprobs": 5}, "logprobs", "boolean"),
    ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools", "not supported"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice", "not supported"),
    ({**CHAT, "functions": [{"name": "f"}]}, "functions", "not supported"),
    ({**CHAT, "modalities": ["text", "audio"]}, "modalities.1", "'text'"),
    ({**CHAT, "audio": {"voice": "x"}}, "audio", "not supported"),
    ({**CHAT, "frequency_penalty": "x"}, "frequency_penalty", "number"),
]


@pytest.mark.parametrize(("body", "param", "says"), GENERATE)
async def test_generate_names_what_is_wrong(
    server: Served, body: dict[str, Any], param: str, says: str
) -> None:
    for stream in (False, True):
        status, answer = await server.post("/generate", {"stream": stream, **body})
        assert status == 400, answer
        error = answer["error"]
        assert error["param"] in (param, param.rpartition(".")[2]), error
        assert param.rpartition(".")[2] in error["message"], error
        assert says in error["message"]


@pytest.mark.parametrize(("body", "param", "says"), COMPLETION)
async def test_completions_name_what_is_wrong(
    server: Served, body: dict[str, Any], param: str, says: str
) -> None:
    await openai_refuses(server, "/v1/completions", body, param, says)


@pytest.mark.parametrize(("body", "param", "says"), CHATS)
async def test_chats_name_what_is_wrong(
    server: Served, body: dict[str, Any], param: str, says: str
) -> None:
    await openai_refuses(server, "/v1/chat/completions", body, param, says)


async def openai_refuses(
    server: Served, path: str, body: dict[str, Any], param: str, says: str
) -> None:
    streams = (False,) if "stream_options" in body else (False, True)
    for stream in streams:
        status, answer = await server.post(path, {"stream": stream, **body})
        assert status == 400, answer
        error = answer["error"]
        assert error["type"] == "BadRequestError"
        assert error["param"] == param
        assert says in error["message"], error
        assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"prompt": "x"', "not valid JSON"),
        (b"[1, 2]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'\xff\xfe{"a":1}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
async def test_malformed_json(server: Served, path: str, raw: bytes, says: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with server.http.post(server.url + path, data=raw, headers=headers) as response:
        assert response.status == 400
        assert says in (await response.json())["error"]["message"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
async def test_numbers_that_are_none(server: Served, field: str, value: str) -> None:
    headers = {"Content-Type": "application/json"}
    for path, body in (
        ("/v1/completions", f'{{"prompt": "hi", "{field}": {value}}}'),
        ("/generate", f'{{"text": "hi", "sampling_params": {{"{field}": {value}}}}}'),
    ):
        async with server.http.post(server.url + path, data=body, headers=headers) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
            assert field in message
            assert "finite number" in message


async def test_logit_bias_must_be_finite(server: Served) -> None:
    headers = {"Content-Type": "application/json"}
    body = '{"prompt": "hi", "logit_bias": {"5": NaN}}'
    url = server.url + "/v1/completions"
    async with server.http.post(url, data=body, headers=headers) as response:
        assert response.status == 400
        assert "logit_bias.5" in (await response.json())["error"]["message"]


async def test_an_unknown_model_is_404_and_fillers_are_not() -> None:
    async with serving() as server:
        for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
            status, answer = await server.post(path, {**body, "model": "gpt-5"})
            assert status == 404
            assert answer["error"]["code"] == "model_not_found"
            assert answer["error"]["param"] == "model"
            assert "'gpt-5'" in answer["error"]["message"]
            for model in ("toy", "default", "unknown", "", None):
                status, answer = await server.post(path, {**body, "model": model, "max_tokens": 1})
                assert status == 200, answer
                assert answer["model"] == "toy"
        assert (await server.get("/v1/models/gpt-5"))[0] == 404
        assert (await server.get("/v1/models/toy"))[1]["id"] == "toy"
        await server.at_rest()
    async with serving(ServerSettings(any_model=True)) as server:
        status, answer = await server.post("/v1/completions", {**PROMPT, "model": "gpt-5"})
        assert (status, answer["model"]) == (200, "gpt-5")


async def test_a_body_of_10_mb_is_413_and_does_not_block_the_loop(server: Served) -> None:
    body = b'{"text": "' + b"x" * 10_000_000 + b'"}'

    async def slowest_health() -> float:
        slowest = 0.0
        while not done.is_set():
            started = time.monotonic()
            assert (await server.get("/health"))[0] == 200
            slowest = max(slowest, time.monotonic() - started)
            await asyncio.sleep(0.001)
        return slowest

    done = asyncio.Event()
    watching = asyncio.create_task(slowest_health())
    for path in ("/generate", "/v1/completions", "/abort_request"):
        reader, writer = await raw_request(
            server.port,
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode(),
        )
        # Answered before the body is sent: nothing of it was waited for.
        status = await asyncio.wait_for(reader.readline(), 1.0)
        assert b" 413 " in status
        writer.close()
    async with server.http.post(
        server.url + "/generate",
        data=_chunks(body),
        headers={"Content-Type": "application/json"},
    ) as response:
        assert response.status == 413
        assert "at most 4194304 bytes" in (await response.json())["error"]["message"]
    done.set()
    assert await watching < 0.2


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]


async def test_content_types(server: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        async with server.http.post(
            server.url + "/v1/completions", data=b"{}", headers={"Content-Type": kind}
        ) as response:
            assert response.status == 400
            assert "Content-Type" in (await response.json())["error"]["message"]
    # The native routes take what curl sends by default.
    async with server.http.post(
        server.url + "/generate",
        data=b"{}",
        headers={"Content-Type": "application/x-www-form-urlencoded"},
    ) as response:
        assert "exactly one of text" in (await response.json())["error"]["message"]


async def test_an_api_key_is_asked_for_everywhere_but_for_probes() -> None:
    async with serving(ServerSettings(api_key="sesame")) as server:
        for path in ("/generate", "/v1/completions", "/abort_request"):
            status, answer = await server.post(path, HI)
            assert status == 401
            assert answer["error"] == "Unauthorized" or answer["error"]["code"] == 401
        assert (await server.get("/v1/models"))[0] == 401
        for path in ("/health", "/metrics", "/health_generate"):
            assert (await server.get(path))[0] == 200
        for key, expected in (("sesame", 200), ("sesam", 401), ("sesameé", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            async with server.http.get(server.url + "/v1/models", headers=headers) as response:
                assert response.status == expected


async def test_unknown_paths_and_methods(server: Served) -> None:
    status, answer = await server.get("/v2/nothing")
    assert (status, answer["error"]["message"]) == (404, "Not Found")
    async with server.http.get(server.url + "/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == 405


async def test_explicit_nulls_are_defaults_and_unknown_keys_are_ignored() -> None:
    names = (
        "temperature top_p top_k min_p n stop stop_token_ids logit_bias seed stream stream_options"
    )
    nulls = dict.fromkeys([*names.split(), "max_tokens", "echo", "logprobs", "user", "model"])
    async with serving() as server:
        status, answer = await server.post("/v1/completions", {**PROMPT, **nulls, "whatever": [1]})
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 16
        nulls = dict.fromkeys(["tools", "tool_choice", "response_format", "max_tokens"])
        status, answer = await server.post(
            "/v1/chat/completions", {**CHAT, **nulls, "max_completion_tokens": 2, "tools": []}
        )
        assert status == 200, answer
        nulls = dict.fromkeys(["rid", "image_data", "lora_path", "session_params", "stream"])
        status, answer = await server.post(
            "/generate", {**HI, **nulls, "input_ids": None, "sampling_params": None, "x": 1}
        )
        assert status == 200, answer
        assert answer["meta_info"]["completion_tokens"] == 128
        status, answer = await server.post("/generate", sampling(max_new_tokens=None, stop=["n"]))
        assert status == 200
        assert server.engine.submits[-1].sampling.max_new_tokens == 4096 - 3


async def test_bad_requests_are_answered_while_long_ones_run() -> None:
    async with serving(step_s=0.005) as server:
        reader, writer = await raw_request(
            server.port, http_post("/generate", {**HI, "stream": True})
        )
        await reader.readline()
        took = []
        for _ in range(100):
            started = time.monotonic()
            assert (await server.post("/generate", sampling(top_p=7)))[0] == 400
            took.append(time.monotonic() - started)
        assert sorted(took)[98] < 0.05
        writer.close()
        await server.at_rest()


async def test_a_call_makes_a_bounded_number_of_completions() -> None:
    async with serving(ServerSettings(max_completions_per_call=4)) as server:
        body = {"text": ["a", "b"], "sampling_params": {"n": 3, "max_new_tokens": 1}}
        status, answer = await server.post("/generate", body)
        assert status == 400
        assert "n makes 6 completions with these prompts, at most 4" in answer["error"]["message"]
        body["sampling_params"] = {"n": 2, "max_new_tokens": 1}
        assert (await server.post("/generate", body))[0] == 200
        await server.at_rest()


async def test_fault_hooks_exist_only_with_debug() -> None:
    async with serving() as server:
        assert (await server.post("/debug/hold_step", {}))[0] == 404
    async with serving(ServerSettings(debug=True)) as server:
        assert await server.post("/debug/hold_step", {}) == (200, {"done": "hold_step"})
        assert await server.post("/debug/retract", {"rid": "x"}) == (200, {"done": "retract"})
        assert (await server.post("/debug/explode", {}))[0] == 404
