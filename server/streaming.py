"""Server-sent events as clients and routers need them: one ``data:`` line for each event,
line feeds, no comments, ``text/event-stream``.

The status and headers leave with the first event, so whatever goes wrong before the first token is
still answered by a proper status. A client that does not read is noticed by a write that does not
end.
"""

import asyncio
from http import HTTPStatus

import msgspec
from aiohttp import web

from server.errors import ApiError
from server.front_end import SlowReader

DONE = b"data: [DONE]\n\n"

STREAMING: web.RequestKey[bool] = web.RequestKey("streaming", bool)
"""Set on a request whose response has begun: no other response can be sent for it."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks: the log-probability of a token that is forbidden."""

_encoder = msgspec.json.Encoder()


def to_json(value: object) -> bytes:
    """``value`` as compact JSON. NaN and infinities, which JSON lacks, become null."""
    return _encoder.encode(value)


def json_response(value: object, status: int = HTTPStatus.OK) -> web.Response:
    """A JSON answer."""
    return web.Response(body=to_json(value), status=status, content_type="application/json")


def shown_logprob(logprob: float) -> float:
    """A log-probability as clients see it: a finite number, NaN included."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


class EventStream:
    """One streamed response. Nothing is sent before the first :meth:`send`."""

    def __init__(self, request: web.Request, stall_s: float) -> None:
        self._request = request
        self._stall_s = stall_s
        self._response: web.StreamResponse | None = None

    async def send(self, *events: object) -> None:
        """Send events, each a JSON value.

        Raises:
            SlowReader: The client took nothing for too long; its connection is dropped.
            ConnectionError: The client is gone.
        """
        await self._write(b"".join([b"data: %b\n\n" % to_json(event) for event in events]))

    async def fail(self, error: dict[str, object]) -> None:
        """Send the event of an error that came after the headers."""
        await self.send({"error": error})

    async def close(self) -> web.StreamResponse:
        """Send ``[DONE]`` and end the response."""
        await self._write(DONE)
        response = await self._started()
        await response.write_eof()
        return response

    async def _write(self, data: bytes) -> None:
        response = await self._started()
        try:
            async with asyncio.timeout(self._stall_s):
                await response.write(data)
        except TimeoutError:
            transport = self._request.transport
            if transport is not None:
                transport.abort()  # closing would wait for the client to read what is buffered
            raise SlowReader from None

    async def _started(self) -> web.StreamResponse:
        if self._response is None:
            self._request[STREAMING] = True
            self._response = web.StreamResponse()
            self._response.headers["Content-Type"] = "text/event-stream"
            self._response.headers["Cache-Control"] = "no-cache"
            await self._response.prepare(self._request)
        return self._response


def stream_error(error: ApiError, path: str) -> dict[str, object]:
    """An error after the headers, in the shape of the route's surface."""
    return error.fields() if path.startswith("/v1/") else error.native_event()
