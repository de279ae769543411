"""Channels: order, bounds, malformed frames, and waking a poll from another thread."""

import asyncio
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from transport.channel import (
    HIGH_WATER_MARK,
    MAX_FRAME_BYTES,
    AsyncChannel,
    Channel,
    ChannelFull,
    FrameTooLarge,
    private_endpoint,
)
from transport.messages import (
    Abort,
    FromEngine,
    Hello,
    Output,
    Outputs,
    Reply,
    SamplingParams,
    Submit,
    ToEngine,
)


@pytest.fixture
def endpoint() -> Iterator[str]:
    address, folder = private_endpoint("test")
    yield address
    folder.cleanup()


def server_end(
    endpoint: str, *, high_water_mark: int = HIGH_WATER_MARK
) -> AsyncChannel[ToEngine, FromEngine]:
    return AsyncChannel(endpoint, receives=FromEngine, bind=True, high_water_mark=high_water_mark)


def engine_end(
    endpoint: str,
    *,
    high_water_mark: int = HIGH_WATER_MARK,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> Channel[FromEngine, ToEngine]:
    return Channel(
        endpoint,
        receives=ToEngine,
        high_water_mark=high_water_mark,
        max_frame_bytes=max_frame_bytes,
    )


def test_the_endpoint_lies_in_a_folder_of_this_user_only() -> None:
    endpoint, folder = private_endpoint("s")
    assert endpoint.startswith("ipc://")
    assert stat.S_IMODE(Path(folder.name).stat().st_mode) == 0o700
    folder.cleanup()
    assert not Path(folder.name).exists()


def test_a_long_temporary_folder_falls_back_to_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    endpoint, folder = private_endpoint("s")
    assert len(endpoint) < 107
    folder.cleanup()
    assert list(long.iterdir()) == []


async def test_every_message_arrives_once_and_in_order_in_both_directions(endpoint: str) -> None:
    submit = Submit("r", [1, 2, 3], SamplingParams(seed=-(2**62), logit_bias={7: -1.5}), n=2)
    outputs = Outputs([Output("r#0", 0, [5], logprobs=[-0.5], top_logprobs=[[(5, -0.5)]])])
    server, engine = server_end(endpoint), engine_end(endpoint)
    try:
        engine.send(Hello(1, "boot", "m", 10, 20, (1,), 19, {"sizes": [1, None, "x"]}))
        assert isinstance(await server.receive(), Hello)
        for number in range(200):
            server.send_nowait(submit if number % 2 else Abort(rids=(str(number),)))
            engine.send(outputs if number % 2 else Reply(number, {"n": number}))
        seen: list[ToEngine] = []
        while len(seen) < 200 and engine.poll(1.0):
            while (message := engine.receive_nowait()) is not None:
                seen.append(message)
        assert seen == [submit if n % 2 else Abort(rids=(str(n),)) for n in range(200)]
        replies = [await server.receive() for _ in range(200)]
        assert replies == [outputs if n % 2 else Reply(n, {"n": n}) for n in range(200)]
    finally:
        server.close()
        engine.close()


async def test_the_high_water_mark_refuses_and_loses_nothing(endpoint: str) -> None:
    server = server_end(endpoint, high_water_mark=10)
    engine = engine_end(endpoint, high_water_mark=10)
    try:
        engine.send(Reply(0, None))
        await server.receive()
        sent = refused = 0
        while refused < 20:  # the kernel's socket buffers come on top of both marks
            try:
                server.send_nowait(Abort(rids=("x" * 10_000,), query=sent))
            except ChannelFull:
                refused += 1
                await asyncio.sleep(0.005)
            else:
                sent, refused = sent + 1, 0
        waiting = asyncio.create_task(server.wait_writable())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        seen: list[int] = []
        while len(seen) < sent:
            assert engine.poll(1.0), f"lost {sent - len(seen)} of {sent}"
            while (message := engine.receive_nowait()) is not None:
                assert isinstance(message, Abort)
                seen.append(message.query)
            await asyncio.sleep(0)
        assert seen == list(range(sent))
        await asyncio.wait_for(waiting, 1.0)
        server.send_nowait(Abort(all=True))
        assert engine.poll(1.0)
    finally:
        server.close()
        engine.close(0)


def test_the_engines_end_refuses_as_well_and_says_when_it_is_writable(endpoint: str) -> None:
    server = Channel[ToEngine, FromEngine](
        endpoint, receives=FromEngine, bind=True, high_water_mark=5
    )
    with server, engine_end(endpoint, high_water_mark=5) as engine:
        writable = engine.writable
        assert writable
        sent = refused = 0
        while refused < 20:
            try:
                engine.send(Reply(sent, "x" * 100_000))
            except ChannelFull:
                refused += 1
                time.sleep(0.005)
            else:
                sent, refused = sent + 1, 0
        assert not engine.writable
        seen = 0
        while seen < sent and server.poll(1.0):
            seen += sum(1 for _ in iter(server.receive_nowait, None))
        assert seen == sent
        engine.poll(0.01)  # lets the socket notice that the peer has read
        assert engine.writable


async def test_a_malformed_frame_is_dropped_counted_and_the_next_one_read(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_end(endpoint, max_frame_bytes=1000)
    with zmq.Context() as context, context.socket(zmq.PAIR) as raw:
        raw.bind(endpoint)
        good = msgspec.msgpack.encode(Abort(rids=("x",)))
        raw.send(b"\xc1 no msgpack")
        raw.send(b"")
        raw.send(good[:-2])
        raw.send(msgspec.msgpack.encode({"type": "Unknown"}))
        raw.send(msgspec.msgpack.encode({"type": "Abort", "rids": [1]}))
        raw.send(msgspec.msgpack.encode(Abort(rids=("x" * 1000,))))
        raw.send(b"\x91" * 5000)
        raw.send_multipart([good, good])
        raw.send(good)
        assert engine.poll(1.0)
        deadline = time.monotonic() + 1.0
        message = None
        while message is None and time.monotonic() < deadline:
            message = engine.receive_nowait()
        assert message == Abort(rids=("x",))
        assert engine.malformed == 8
        assert "malformed frame number 8" in caplog.text
        engine.close(0)


def test_a_message_that_is_too_large_is_refused_before_it_is_sent(endpoint: str) -> None:
    server = Channel[ToEngine, FromEngine](endpoint, receives=FromEngine, bind=True)
    with server, engine_end(endpoint, max_frame_bytes=100) as engine:
        with pytest.raises(FrameTooLarge, match=r"Reply of \d+ bytes exceeds 100"):
            engine.send(Reply(1, "x" * 200))
        engine.send(Reply(1, "x" * 20))
        assert server.poll(1.0)
        assert server.receive_nowait() == Reply(1, "x" * 20)


def test_another_thread_ends_a_poll_and_wakes_before_it_are_not_lost(endpoint: str) -> None:
    with engine_end(endpoint) as engine:
        started = time.monotonic()
        waker = threading.Timer(0.05, engine.wake)
        waker.start()
        assert engine.poll(5.0) is False
        assert time.monotonic() - started < 1.0
        waker.join()
        engine.wake()
        engine.wake()
        assert engine.poll(5.0) is False
        started = time.monotonic()
        assert engine.poll(0.02) is False
        assert time.monotonic() - started >= 0.02, "two wakes merge into one"


async def test_sends_do_not_starve_a_pending_receive(endpoint: str) -> None:
    """zmq's descriptor is edge-triggered: a send can use up the edge of a frame that came in."""
    server, engine = server_end(endpoint), engine_end(endpoint)
    stop = threading.Event()

    def echo() -> None:
        while not stop.is_set():
            engine.poll(0.05)
            while engine.receive_nowait() is not None:
                engine.send(Reply(1, None))

    thread = threading.Thread(target=echo)
    engine.send(Reply(0, None))
    await server.receive()
    thread.start()
    try:
        for _ in range(300):
            receiving = asyncio.ensure_future(server.receive())
            server.send_nowait(Abort(all=True))
            for _ in range(3):
                await asyncio.sleep(0)
                server.send_nowait(Abort(all=True))
            for number in range(4):
                if number:
                    receiving = asyncio.ensure_future(server.receive())
                await asyncio.wait_for(receiving, 2.0)
    finally:
        stop.set()
        thread.join()
        server.close()
        engine.close(0)


def test_what_was_sent_before_close_still_arrives(endpoint: str) -> None:
    with Channel[ToEngine, FromEngine](endpoint, receives=FromEngine, bind=True) as server:
        with engine_end(endpoint) as engine:
            engine.send(Reply(9, "last words"))
        assert server.poll(1.0)
        assert server.receive_nowait() == Reply(9, "last words")
