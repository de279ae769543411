"""The real model behind the unchanged ``openai`` package."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.serving import Server, serving

pytestmark = [pytest.mark.model]

QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_names_paris(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[QUESTION], temperature=0, max_tokens=32
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="default", messages=[QUESTION], temperature=0, max_tokens=32
    )
    text, finish, usage = "", None, None
    for chunk in client.chat.completions.create(
        model="default",
        messages=[QUESTION],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage == whole.usage or (usage and usage.total_tokens == whole.usage.total_tokens)


def test_completion_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="default", prompt="One two three four", temperature=0, max_tokens=8, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == answer.usage.completion_tokens  # type: ignore[union-attr]
    assert logprobs.token_logprobs is not None
    assert all(value is not None and value <= 0 for value in logprobs.token_logprobs)


def test_several_choices(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=[QUESTION], temperature=1.0, max_tokens=12, n=3, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_bad_value_is_a_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="default", messages=[QUESTION], temperature=-1.0)


def test_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-nonexistent", messages=[QUESTION])


def test_everything_comes_back(server: Server) -> None:
    assert server.wait_at_rest(1.0) <= 1.0
