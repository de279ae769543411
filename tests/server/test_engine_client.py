"""The server's side of the channel: handshake, questions, and the end of an engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from server.engine_client import EngineClient, EngineStartError, reply_error
from server.errors import ApiError
from tests.support.fake_engine import FakeEngine
from transport.channel import AsyncChannel, Channel, private_endpoint
from transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    FromEngine,
    Hello,
    Load,
    Output,
    Outputs,
    Query,
    Reply,
    SamplingParams,
    Stopped,
    Submit,
    ToEngine,
)


@contextlib.asynccontextmanager
async def connected(timeout_s: float = 0.2) -> AsyncIterator[tuple[EngineClient, str]]:
    endpoint, folder = private_endpoint("engine")
    with folder:
        channel: AsyncChannel[ToEngine, FromEngine] = AsyncChannel(
            endpoint, receives=FromEngine, bind=True, high_water_mark=10
        )
        client = EngineClient(channel, timeout_s)
        client.start()
        try:
            yield client, endpoint
        finally:
            await client.close()


def hello(version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(version, "boot", "m", 10, 20, (1,), 19, {})


async def test_nothing_can_be_asked_before_hello() -> None:
    async with connected() as (client, endpoint):
        with pytest.raises(ApiError, match="starting"):
            _ = client.available
        with pytest.raises(EngineStartError, match=r"not ready after 0\.05 s"):
            await client.ready(0.05)
        engine = FakeEngine(endpoint)
        engine.start()
        assert (await client.ready(2)).model == "hash"
        assert client.available.context_length == 4096
        await asyncio.to_thread(engine.stop)


async def test_another_protocol_is_refused_by_its_number() -> None:
    async with connected() as (client, endpoint):
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(hello(PROTOCOL_VERSION + 1))
            with pytest.raises(EngineStartError, match=f"protocol {PROTOCOL_VERSION + 1}"):
                await client.ready(1)


async def test_replies_find_their_questions_in_any_order_and_late_ones_nobody() -> None:
    async with connected() as (client, endpoint):
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(hello())
            await client.ready(1)
            asked = [asyncio.create_task(client.ask(lambda n: Query(n, "info"))) for _ in range(3)]
            numbers: list[int] = []
            while len(numbers) < 3:
                await asyncio.sleep(0.01)
                if isinstance(message := engine.receive_nowait(), Query):
                    numbers.append(message.query)
            for number in reversed(numbers[1:]):
                engine.send(Reply(number, f"answer {number}"))
            assert await asked[1] == f"answer {numbers[1]}"
            assert await asked[2] == f"answer {numbers[2]}"
            with pytest.raises(ApiError, match="in time"):
                await asked[0]
            engine.send(Reply(numbers[0], "late"))
            engine.send(Load(1, 0, 0, 9, 0, 0, 0, 0, 0, 0, at_rest=False))
            while client.load is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_a_lost_engine_fails_every_question_and_is_told_once() -> None:
    async with connected(timeout_s=5) as (client, endpoint):
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(hello())
            await client.ready(1)
            told: list[str | None] = []
            client.on_gone = lambda: told.append(client.gone)
            asked = asyncio.create_task(client.ask(lambda n: Query(n, "info")))
            await asyncio.sleep(0.01)
            client.lost("signal SIGKILL")
            client.lost("again")
            with pytest.raises(ApiError, match="gone"):
                await asked
            with pytest.raises(ApiError, match="gone"):
                await client.ask(lambda n: Query(n, "info"))
            client.post(Abort(all=True))
            assert told == ["signal SIGKILL"]


async def test_why_an_engine_stopped_is_in_the_error() -> None:
    async with connected() as (client, endpoint):
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(Stopped("model", "no such file"))
        await asyncio.sleep(0.05)
        client.lost("exit code 3")
        with pytest.raises(EngineStartError, match="exit code 3: no such file"):
            await client.ready(1)


async def test_control_messages_wait_for_a_full_channel_in_order() -> None:
    async with connected() as (client, endpoint):
        engine = Channel[FromEngine, ToEngine](endpoint, receives=ToEngine, high_water_mark=10)
        with engine:
            engine.send(hello())
            await client.ready(1)
            for number in range(300):
                client.post(Abort(rids=(f"{number}-" + "x" * 20_000,)))
            with pytest.raises(ApiError, match="keep up"):
                await client.ask(lambda n: Query(n, "info"))
            seen: list[str] = []
            while len(seen) < 8:  # now there is room, but what waits goes first
                assert engine.poll(1.0)
                if isinstance(message := engine.receive_nowait(), Abort):
                    seen.append(message.rids[0].partition("-")[0])
            time.sleep(0.05)  # noqa: ASYNC251 - the loop must not get to flush
            with pytest.raises(ApiError, match="keep up"):
                client.submit(Submit("late", [1], SamplingParams()))
            while len(seen) < 300:
                await asyncio.sleep(0.001)
                while isinstance(message := engine.receive_nowait(), Abort):
                    seen.append(message.rids[0].partition("-")[0])
            assert seen == [str(number) for number in range(300)]


async def test_a_fault_in_handling_outputs_does_not_end_the_reading(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected() as (client, endpoint):

        def broken(outputs: Outputs) -> None:
            raise RuntimeError("planted")

        client.on_outputs = broken
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(Outputs([]))
            engine.send(hello())
            await client.ready(1)
    assert "planted" in caplog.text


def test_errors_in_replies() -> None:
    assert reply_error({"session": "x"}) is None
    assert reply_error(None) is None
    error = reply_error({"error": "no", "status": 404})
    assert error is not None
    assert (error.status, error.message) == (404, "no")
    error = reply_error({"error": "no"})
    assert error is not None
    assert error.status == 400


async def test_an_engines_last_words_are_handled_before_it_counts_as_gone() -> None:
    """Goal: what an engine sends in the instant in which it exits is not lost to the news of its
    end."""
    async with connected() as (client, endpoint):
        seen: list[Outputs] = []
        client.on_outputs = seen.append
        with Channel[FromEngine, ToEngine](endpoint, receives=ToEngine) as engine:
            engine.send(Outputs([Output("r", 0, [1])]))
            engine.send(Stopped("drained"))
            assert client.stopped is None, "nothing was read yet"
            await client.last_words(5.0)
        assert client.stopped == Stopped("drained")
        assert [output.rid for outputs in seen for output in outputs.outputs] == ["r"]
    async with connected() as (client, _):
        started = time.monotonic()
        await client.last_words(0.05)
        assert 0.04 < time.monotonic() - started < 1.0, "it died without a word"
