"""The ``openai`` package, unchanged, against the server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from server.settings import ServerSettings
from tests.support.harness import Served, serving

HI: Any = [{"role": "user", "content": "hi"}]


def client(server: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key="none", **{"max_retries": 0, **options}
    )


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served
        await served.at_rest()


async def test_a_chat(server: Served) -> None:
    async with client(server) as api:
        answer = await api.chat.completions.create(
            model="toy", messages=HI, max_tokens=5, logprobs=True, top_logprobs=2, seed=7
        )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "toy"
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "abcde")
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.logprob, first.bytes) == ("a", -0.1, [97])
    assert [top.token for top in first.top_logprobs] == ["a", "b"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert server.engine.submits[-1].sampling.seed == 7


async def test_a_chat_with_parts_and_both_names_of_the_limit(server: Served) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    async with client(server) as api:
        limits: list[dict[str, Any]] = [{"max_tokens": 3}, {"max_completion_tokens": 3}]
        for limit in limits:
            answer = await api.chat.completions.create(model="toy", messages=parts, **limit)
            assert answer.choices[0].message.content == "abc"
        answer = await api.chat.completions.create(model="toy", messages=parts, stop=["z"])
        assert answer.choices[0].finish_reason == "stop"
    submits = server.engine.submits
    assert submits[-1].sampling.max_new_tokens == 4096 - len(submits[-1].prompt)


async def test_a_streamed_chat(server: Served) -> None:
    async with client(server) as api:
        stream = await api.chat.completions.create(
            model="toy",
            messages=HI,
            max_completion_tokens=4,
            stream=True,
            n=2,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    texts = {0: "", 1: ""}
    roles = []
    ends = {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        if choice.delta.role:
            roles.append(choice.index)
            assert texts[choice.index] == ""
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == {0: "abcd", 1: "abcd"}
    assert sorted(roles) == [0, 1]
    assert ends == {0: "length", 1: "length"}
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 8
    assert usage.prompt_tokens == len(server.engine.submits[-1].prompt), "counted once"


async def test_usage_in_every_chunk_and_none_unasked(server: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"messages": HI, "max_tokens": 3, "stream": True}
    chunks = await server.events("/v1/chat/completions", body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[-1] == 3
    assert counts == sorted(counts)
    chunks = await server.events("/v1/chat/completions", body)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["delta"] == {}


async def test_the_role_comes_with_the_first_token(server: Served) -> None:
    server.engine.held.set()
    asking = asyncio.create_task(
        server.http.post(
            server.url + "/v1/chat/completions",
            json={"messages": HI, "max_tokens": 2, "stream": True},
        )
    )
    await server.until(lambda: len(server.engine.members) == 1)
    await asyncio.sleep(0.03)
    assert not asking.done(), "not even the headers leave before the first token"
    server.engine.step()
    response = await asking
    await response.content.readuntil(b"\n\n")
    second = await response.content.readuntil(b"\n\n")
    assert b'"content":"a"' in second
    server.engine.held.clear()
    await response.read()


async def test_completions_of_texts_and_token_ids(server: Served) -> None:
    async with client(server) as api:
        answer = await api.completions.create(model="toy", prompt="hi", max_tokens=3, logprobs=2)
        assert answer.object == "text_completion"
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("abc", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "c"]
        assert choice.logprobs.token_logprobs == [-0.1, -0.2, -0.3]
        assert choice.logprobs.top_logprobs == [
            {"a": -0.1, "b": -1.1},
            {"b": -0.2, "c": -1.2},
            {"c": -0.3, "d": -1.3},
        ]
        assert choice.logprobs.text_offset == [0, 1, 2]
        answer = await api.completions.create(model="toy", prompt="x")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16
        prompts: list[Any] = [["a", "b"], [1, 2, 3], [[1], [2], [3]]]
        for prompt, count in zip(prompts, (2, 1, 3), strict=True):
            answer = await api.completions.create(model="toy", prompt=prompt, n=2, max_tokens=1)
            assert [choice.index for choice in answer.choices] == list(range(count * 2))
        answer = await api.completions.create(
            model="toy", prompt=["x", "yz"], echo=True, max_tokens=2
        )
        assert [choice.text for choice in answer.choices] == ["xab", "yzab"]
        answer = await api.completions.create(
            model="toy",
            prompt="x",
            max_tokens=1,
            logprobs=0,
            extra_body={"return_tokens_as_token_ids": True},
        )
        assert answer.choices[0].logprobs is not None
        assert answer.choices[0].logprobs.tokens == ["token:97"]


async def test_a_streamed_completion(server: Served) -> None:
    async with client(server) as api:
        stream = await api.completions.create(
            model="toy", prompt="hi", max_tokens=6, stream=True, echo=True, stop="ef"
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "hiabcd"
        assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
            "stop"
        ]
        stream = await api.completions.create(
            model="toy", prompt="hi", max_tokens=5, stream=True, logprobs=1
        )
        tokens: list[str] = []
        offsets: list[int] = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                tokens += chunk.choices[0].logprobs.tokens or []
                offsets += chunk.choices[0].logprobs.text_offset or []
        assert tokens == list("abcde")
        assert offsets == [0, 1, 2, 3, 4]


async def test_the_synchronous_client(server: Served) -> None:
    def work() -> tuple[str, str]:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as api:
            assert [model.id for model in api.models.list()] == ["toy"]
            assert api.models.retrieve("toy").id == "toy"
            answer = api.chat.completions.create(model="toy", messages=HI, max_tokens=2)
            stream = api.chat.completions.create(
                model="toy", messages=HI, max_tokens=2, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with pytest.raises(openai.NotFoundError):
                api.models.retrieve("other")
            return answer.choices[0].message.content or "", text

    assert await asyncio.to_thread(work) == ("ab", "ab")


async def test_errors_become_the_right_exceptions(server: Served) -> None:
    async with client(server) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(model="toy", messages=HI, temperature=-1)
        assert bad.value.param == "temperature"
        assert bad.value.type == "BadRequestError"
        assert "greater than or equal to 0" in bad.value.message
        with pytest.raises(openai.NotFoundError) as missing:
            await api.chat.completions.create(model="gpt-4", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError):
            await api.chat.completions.create(model="toy", messages=HI, stream=True, n=0)


async def test_overload_is_retried_and_a_wrong_key_is_not() -> None:
    async with serving(max_running=1, max_queued=0) as server:
        server.engine.held.set()
        running = asyncio.create_task(server.post("/generate", {"text": "x"}))
        await server.until(lambda: len(server.engine.members) == 1)
        async with client(server) as api:
            for stream in (False, True):
                with pytest.raises(openai.InternalServerError) as full:
                    await api.chat.completions.create(model="toy", messages=HI, stream=stream)
                assert full.value.status_code == 503
                assert full.value.response.headers["Retry-After"] == "1"
                assert "queue is full" in full.value.message
        async with client(server, max_retries=1) as api:
            asking = asyncio.create_task(
                api.chat.completions.create(model="toy", messages=HI, max_tokens=1)
            )
            await asyncio.sleep(0.05)
            server.engine.held.clear()
            assert (await asking).choices[0].message.content == "a"
        assert (await running)[0] == 200
        await server.at_rest()
    async with serving(ServerSettings(api_key="k")) as server, client(server) as api:
        with pytest.raises(openai.AuthenticationError):
            await api.models.list()


async def test_an_aborted_request_ends_with_abort(server: Served) -> None:
    server.engine.held.set()
    async with client(server) as api:
        asking = asyncio.create_task(
            api.chat.completions.create(model="toy", messages=HI, extra_body={"rid": "mine"})
        )
        await server.until(lambda: len(server.engine.members) == 1)
        server.engine.step(3)
        record = server.service.front.table.get("mine")
        assert record is not None
        await server.until(lambda: record.members[0].visible == 3)
        status, report = await server.post("/abort_request", {"rid": "mine"})
        assert (status, report) == (200, {"aborted": ["mine"], "finished": [], "unknown": []})
        answer = await asking
    assert answer.id == "mine"
    assert str(answer.choices[0].finish_reason) == "abort"
    assert answer.choices[0].message.content == "abc"


async def test_closing_a_stream_early_aborts_the_request(server: Served) -> None:
    async with client(server) as api:
        for n in (1, 3):
            stream = await api.chat.completions.create(
                model="toy", messages=HI, stream=True, n=n, max_tokens=3000
            )
            async for _ in stream:
                break
            await stream.close()
            took = await server.until(lambda: not server.engine.members)
            assert took < 0.5
    assert [abort.cause for abort in server.engine.aborts] == ["disconnect", "disconnect"]


async def test_a_client_timeout_aborts_the_request(server: Served) -> None:
    server.engine.held.set()
    async with client(server) as api:
        with pytest.raises(openai.APITimeoutError):
            await api.chat.completions.create(model="toy", messages=HI, timeout=0.1)
    await server.until(lambda: not server.engine.members)
    assert len(server.engine.aborts) == 1


async def test_an_engine_that_dies_is_an_error_event_on_a_stream(server: Served) -> None:
    async with client(server) as api:
        server.engine.held.set()
        asking = asyncio.create_task(
            api.chat.completions.create(model="toy", messages=HI, stream=True)
        )
        await server.until(lambda: len(server.engine.members) == 1)
        server.engine.step()
        stream = await asking
        waiting = asyncio.create_task(api.chat.completions.create(model="toy", messages=HI))
        await server.until(lambda: len(server.engine.members) == 2)
        server.service.engine.lost("exit code 1")
        with pytest.raises(openai.APIError, match="engine process is gone"):
            async for _ in stream:
                pass
        with pytest.raises(openai.InternalServerError, match="engine process is gone"):
            await waiting
        with pytest.raises(openai.InternalServerError):
            await api.chat.completions.create(model="toy", messages=HI)
    assert (await server.get("/health"))[0] == 503
    assert len(server.service.front.table) == 0
    server.engine.members.clear()
    server.service.engine.gone = None  # for the ledger of the fixture's last check
