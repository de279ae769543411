"""Whatever a client sends, the event loop goes on: long work is counted as a whole, and done in a
thread."""

import asyncio
import io
import json
import time
from typing import Any

import pytest

from server.throughput import WINDOW_S, Throughput
from server.tokenizer import ByteTokenizer
from tests.support.harness import Served, serving

SLOW_CHAR_S = 2e-6
"""What a character costs in these tests, more than in a real vocabulary on a slow machine."""


class SlowTokenizer(ByteTokenizer):
    """Takes its time, without the interpreter lock, as the real one does."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(len(text) * SLOW_CHAR_S)
        return super().encode(text, add_special_tokens)


async def worst_delay(server: Served, path: str, body: object) -> tuple[int, Any, float, float]:
    """Status, answer and seconds of a call, and the longest that the loop stood still meanwhile.

    The body is written out before, and the answer is read after the measurement: both would block
    this loop, which is the server's too.
    """
    payload = io.BytesIO(json.dumps(body).encode())
    done = asyncio.Event()

    async def probe() -> float:
        worst = 0.0
        while not done.is_set():
            started = time.monotonic()
            await asyncio.sleep(0.001)
            worst = max(worst, time.monotonic() - started)
        return worst

    watching = asyncio.create_task(probe())
    started = time.monotonic()
    async with server.http.post(
        server.url + path, data=payload, headers={"Content-Type": "application/json"}
    ) as response:
        raw = await response.read()
        seconds = time.monotonic() - started
        done.set()
        worst = await watching
        return response.status, json.loads(raw), seconds, worst


LONG_CALLS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": ["x" * 300] * 1000, "max_tokens": 0}, "choices"),
    ("/generate", {"text": ["x" * 300] * 1000, "sampling_params": {"max_new_tokens": 0}}, ""),
    ("/tokenize", {"prompt": ["x" * 250] * 1900}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "key"), LONG_CALLS)
async def test_many_short_texts_are_one_long_call(
    path: str, body: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text alone is short enough to be tokenized at once; together they take half a second."""
    async with serving(max_running=2000, max_queued=2000) as server:
        slow = SlowTokenizer()
        monkeypatch.setattr(server.service.text, "tokenizer", slow)
        monkeypatch.setattr(server.service.front, "tokenizer", slow)
        status, answer, seconds, worst = await worst_delay(server, path, body)
        assert status == 200
        assert len(answer[key] if key else answer) == len(body.get("prompt") or body["text"])
        assert seconds > 0.5
        assert worst < 0.3, "not the half second that tokenizing takes"


async def test_many_prompts_leave_others_their_turn() -> None:
    """Goal: a thousand submissions, and a thousand answers to them, do not go in one piece."""
    async with serving(max_running=2000, max_queued=2000) as server:
        body = {"prompt": [[120]] * 1000, "max_tokens": 2}
        turns = 0
        done = asyncio.Event()

        async def count_turns() -> None:
            nonlocal turns
            while not done.is_set():
                await asyncio.sleep(0)
                turns += len(server.engine.submits) in range(1, 1000)

        counting = asyncio.create_task(count_turns())
        status, answer, seconds, worst = await worst_delay(server, "/v1/completions", body)
        done.set()
        await counting
        assert (status, len(answer["choices"])) == (200, 1000)
        assert turns >= 5
        # A machine that does something else stops both; in one piece, one would be the other.
        assert worst < max(0.3, 0.6 * seconds)
        await server.at_rest()


async def test_many_tokens_are_turned_into_text_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as server:
        threads = []
        in_thread = server.service.front._tokenizing.submit

        def submit(*args: Any, **kwargs: Any) -> Any:
            threads.append(args)
            return in_thread(*args, **kwargs)

        monkeypatch.setattr(server.service.front._tokenizing, "submit", submit)
        status, answer, _, worst = await worst_delay(
            server, "/detokenize", {"tokens": [120] * 800_000}
        )
        assert (status, len(answer["text"])) == (200, 800_000)
        assert worst < 0.3
        assert len(threads) == 1
        rows = {"tokens": [[120] * 10] * 1000}
        status, answer, _, _ = await worst_delay(server, "/detokenize", rows)
        assert answer["text"] == ["x" * 10] * 1000
        assert len(threads) == 2, "many short lists are one long call"
        echo = {"prompt": [120] * 4000, "max_tokens": 1, "echo": True}
        status, answer = await server.post("/v1/completions", echo)
        assert answer["choices"][0]["text"] == "x" * 4000 + "a"
        assert len(threads) == 3
        await server.post("/detokenize", {"tokens": [120] * 10})
        await server.post("/tokenize", {"prompt": ["short", "shorter"], "return_token_strs": True})
        assert len(threads) == 3, "what is short is done at once"


async def test_a_chat_is_as_long_as_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message without content costs a round of the template's loop all the same."""
    chat = {"messages": [{"role": "user", "content": ""}] * 4000, "max_tokens": 1}
    async with serving(context_length=200_000) as server:
        inline = []
        off_loop = server.service.front.off_loop

        async def watched(units: int, function: Any, *args: Any, **kwargs: Any) -> Any:
            inline.append(units <= 2048)
            return await off_loop(units, function, *args, **kwargs)

        monkeypatch.setattr(server.service.front, "off_loop", watched)
        for path in ("/v1/chat/completions", "/tokenize"):
            body = chat if path != "/tokenize" else {"messages": chat["messages"]}
            status, _, _, worst = await worst_delay(server, path, body)
            assert status == 200
            assert not inline[0]
            assert worst < 2.0  # seconds of a busy machine, not the fifteen of a long body inline
            inline.clear()


TOO_MANY = 200_000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "u"}] * TOO_MANY}, "messages"),
        ("/tokenize", {"messages": [{"role": "u"}] * TOO_MANY}, "messages"),
        ("/tokenize", {"prompt": [1] * TOO_MANY}, "prompt"),
        ("/detokenize", {"tokens": [[]] * TOO_MANY}, "tokens"),
        ("/v1/completions", {"prompt": "x", "stop": [1] * TOO_MANY}, "stop"),
        ("/v1/completions", {"prompt": "x", "rid": [1] * TOO_MANY}, "rid"),
        ("/v1/completions", {"prompt": ["x"] * TOO_MANY}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * TOO_MANY}, "prompt"),
        ("/v1/completions", {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(TOO_MANY)))},
         "logit_bias"),
        ("/generate", {"text": ["x"] * TOO_MANY}, "text"),
        ("/generate", {"text": "x", "sampling_params": [1] * TOO_MANY}, "sampling_params"),
        ("/generate", {"text": "x", "sampling_params": {"stop": [1] * TOO_MANY}},
         "sampling_params.stop"),
        ("/generate", {"text": "x", "token_ids_logprob": [["a"] * TOO_MANY]}, "token_ids_logprob"),
        ("/abort_request", {"rid": [1] * TOO_MANY}, "rid"),
    ],
)  # fmt: skip
async def test_too_much_of_anything_is_refused_by_name_and_at_once(
    path: str, body: object, param: str
) -> None:
    """A list of a million wrong items once made a million errors, for half a minute."""
    async with serving() as server:
        status, answer, seconds, worst = await worst_delay(server, path, body)
        assert status == 400
        assert answer["error"]["param"] == param
        assert "at most" in answer["error"]["message"] or "more than" in answer["error"]["message"]
        assert worst < 0.5
        assert seconds < 1.5
        await server.at_rest()


def test_throughput_is_over_a_sliding_window() -> None:
    rate = Throughput()
    assert (rate.rate, rate.last) == (0.0, 0.0)
    rate.add(10.0, 100)
    assert rate.rate == 0.0
    rate.add(12.0, 300)
    assert rate.rate == 100.0
    rate.add(12.0 + WINDOW_S, 300)
    assert rate.rate == 0.0, "nothing within the window"
    assert rate.last > 0
    rate.add(30.0, 5)  # an engine that was started anew
    assert rate.rate == 0.0
    for second in range(100):
        rate.add(31.0 + second, 10 * second)
    assert rate.rate == 10.0
    assert len(rate._samples) < 10
