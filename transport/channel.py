"""Typed, bounded, non-blocking message channels between two processes, over pyzmq.

A channel is one PAIR socket on an ``ipc://`` path in a private folder: frames keep their order in
each direction, so a message that answers another can rely on everything before it having been seen.
A frame is one ``msgspec`` msgpack value of the direction's union type; nothing is ever unpickled.

Who is at fault decides what happens:

- the peer sent something that is no message (or one beyond :data:`MAX_FRAME_BYTES`): the frame is
  dropped, counted in ``malformed`` and logged, and the next one is read. No loop ends over it.
- we send faster than the peer reads: :class:`ChannelFull`, and the message is still the caller's.
  Nothing is lost silently, and memory is bounded by the high-water mark.
- we try to send a message that is too large: :class:`FrameTooLarge`, before anything is sent.

:class:`Channel` is for a synchronous loop (the engine's); another thread may :meth:`~Channel.wake`
its poll. :class:`AsyncChannel` is the same for an asyncio loop (the server's).
"""

import logging
import math
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 32 * 1024 * 1024
"""The largest frame. A million token ids take at most 5 MB; the rest is room for dumps."""

HIGH_WATER_MARK = 4096
"""Frames that may wait on each side of a socket before :class:`ChannelFull`."""

_MAX_IPC_PATH = 107  # sockaddr_un.sun_path on Linux, less its final NUL

SendT = TypeVar("SendT")
ReceiveT = TypeVar("ReceiveT")


class ChannelFull(Exception):  # noqa: N818 - a state of the channel, named like queue.Full
    """The peer does not keep up: the high-water mark is reached. The message was not sent."""


class FrameTooLarge(ValueError):  # noqa: N818
    """The encoded message exceeds :data:`MAX_FRAME_BYTES`. It was not sent."""


def private_endpoint(name: str) -> tuple[str, tempfile.TemporaryDirectory[str]]:
    """A fresh ``ipc://`` endpoint in a folder that only this user can enter.

    Returns:
        The endpoint, and the folder that holds its socket; cleaning that up removes both.

    Raises:
        OSError: The folder cannot be made, or no folder with a short enough path is writable.
    """
    for parent in (None, "/tmp"):  # the second for a TMPDIR whose path is too long
        folder = tempfile.TemporaryDirectory(prefix="interlock-", dir=parent)
        path = Path(folder.name) / name
        if len(os.fsencode(path)) <= _MAX_IPC_PATH:
            return f"ipc://{path}", folder
        folder.cleanup()
    raise OSError(f"a socket path may have at most {_MAX_IPC_PATH} bytes, set TMPDIR: {path}")


class _Codec(Generic[SendT, ReceiveT]):
    """Messages to frames and back, with the bounds of both directions."""

    def __init__(self, receives: object, max_frame_bytes: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ReceiveT] = msgspec.msgpack.Decoder(receives)
        self._max_frame_bytes = max_frame_bytes
        self.malformed = 0

    def encode(self, message: SendT) -> bytes:
        frame = self._encoder.encode(message)
        if len(frame) > self._max_frame_bytes:
            raise FrameTooLarge(
                f"a {type(message).__name__} of {len(frame)} bytes exceeds {self._max_frame_bytes}"
            )
        return frame

    def decode(self, frames: list[bytes]) -> ReceiveT | None:
        """The message in ``frames`` (one frame, as we send them), or None if it is none of ours."""
        try:
            if len(frames) != 1:
                raise msgspec.DecodeError(f"{len(frames)} parts instead of one")
            if len(frames[0]) > self._max_frame_bytes:
                raise msgspec.DecodeError(
                    f"{len(frames[0])} bytes, at most {self._max_frame_bytes}"
                )
            return self._decoder.decode(frames[0])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.malformed += 1
            logger.warning("dropped malformed frame number %d: %s", self.malformed, error)
            return None


def _open(socket: "zmq.Socket[bytes]", endpoint: str, *, bind: bool, high_water_mark: int) -> None:
    """Set the bounds, then bind or connect. Options only count for connections made after them."""
    socket.set(zmq.SNDHWM, high_water_mark)
    socket.set(zmq.RCVHWM, high_water_mark)
    socket.set(zmq.LINGER, 0)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)


class Channel(Generic[SendT, ReceiveT]):
    """The synchronous end of a channel. One thread owns it; others may only :meth:`wake` it.

    Args:
        endpoint: ``ipc://…`` (or any other zmq endpoint).
        receives: The union type of the messages that arrive here.
        bind: Whether this end binds; the other one connects.
        high_water_mark: Frames that may wait in each direction.
        max_frame_bytes: The largest frame sent or accepted.

    Raises:
        zmq.ZMQError: The endpoint cannot be bound or connected.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        receives: object,
        bind: bool = False,
        high_water_mark: int = HIGH_WATER_MARK,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._codec: _Codec[SendT, ReceiveT] = _Codec(receives, max_frame_bytes)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        try:
            _open(self._socket, endpoint, bind=bind, high_water_mark=high_water_mark)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    @property
    def malformed(self) -> int:
        """Frames dropped because they were no valid message."""
        return self._codec.malformed

    @property
    def writable(self) -> bool:
        """Whether :meth:`send` would succeed now: what a loop checks before it produces more."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def send(self, message: SendT) -> None:
        """Queue ``message`` for the peer; never blocks.

        Raises:
            ChannelFull: The high-water mark is reached, or no peer is connected. It was not sent.
            FrameTooLarge: The message can never be sent.
        """
        frame = self._codec.encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelFull(f"{type(message).__name__}: the peer does not keep up") from None

    def receive_nowait(self) -> ReceiveT | None:
        """The next message, or None when none is waiting. Malformed frames are skipped."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            message = self._codec.decode(frames)
            if message is not None:
                return message

    def poll(self, timeout_s: float | None = None) -> bool:
        """Wait until a message can be received, :meth:`wake` is called, or the time is over.

        Args:
            timeout_s: The longest wait in seconds; None is without limit.

        Returns:
            Whether a message is waiting.
        """
        # Rounded up: 0.4 ms that became 0 would turn a waiting loop into a spinning one.
        timeout_ms = None if timeout_s is None else math.ceil(max(0.0, timeout_s) * 1000)
        ready = dict(self._poller.poll(timeout_ms))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return self._socket in ready

    def wake(self) -> None:
        """End a running (or the next) :meth:`poll`, from any thread. Wakes merge into one."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self, linger_s: float = 1.0) -> None:
        """Close the channel, waiting up to ``linger_s`` seconds for sent messages to leave."""
        if self._socket.closed:
            return
        self._context.destroy(linger=int(linger_s * 1000))
        os.close(self._wake_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncChannel(Generic[SendT, ReceiveT]):
    """The asyncio end of a channel, for one event loop; arguments as for :class:`Channel`."""

    def __init__(
        self,
        endpoint: str,
        *,
        receives: object,
        bind: bool = False,
        high_water_mark: int = HIGH_WATER_MARK,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._codec: _Codec[SendT, ReceiveT] = _Codec(receives, max_frame_bytes)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        try:
            _open(self._socket, endpoint, bind=bind, high_water_mark=high_water_mark)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        # The same socket twice: sends go through the plain one and never wait, asyncio's waits.
        self._waiter = zmq.asyncio.Socket.shadow(self._socket.underlying)

    @property
    def malformed(self) -> int:
        """Frames dropped because they were no valid message."""
        return self._codec.malformed

    def send_nowait(self, message: SendT) -> None:
        """Queue ``message`` for the peer.

        Raises:
            ChannelFull: The high-water mark is reached, or no peer is connected. It was not sent.
            FrameTooLarge: The message can never be sent.
        """
        frame = self._codec.encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise ChannelFull(f"{type(message).__name__}: the peer does not keep up") from None
        finally:
            # zmq's descriptor is edge-triggered, and the send may have used up the edge of a frame
            # that came in. Reading the events makes the asyncio side look again, so that a
            # pending receive is not left waiting.
            self._waiter.get(zmq.EVENTS)

    async def wait_writable(self) -> None:
        """Wait until :meth:`send_nowait` can succeed."""
        poller = zmq.asyncio.Poller()
        poller.register(self._waiter, zmq.POLLOUT)
        await poller.poll()

    async def receive(self) -> ReceiveT:
        """Wait for the next message. Malformed frames are skipped."""
        while True:
            frames = await self._waiter.recv_multipart()
            message = self._codec.decode(frames)
            if message is not None:
                return message

    def close(self, linger_s: float = 0.0) -> None:
        """Close the channel, blocking up to ``linger_s`` seconds for sent messages to leave."""
        if self._socket.closed:
            return
        self._waiter.close()
        self._context.destroy(linger=int(linger_s * 1000))
