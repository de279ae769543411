"""The generation behind ``/health_generate``."""

import asyncio
import contextlib
import uuid

from server.calls import Submission
from server.errors import ApiError
from server.front_end import FrontEnd
from transport.messages import SamplingParams


class HealthProbe:
    """A generation of one token, shared by everyone who asks while it runs.

    There is never a second. Callers come and go, often with a time-out of their own; the probe is
    nobody's, so it neither piles up nor is left behind. It ends by its own time-out, which aborts
    it like any request.

    Its rid is drawn for each, so that no client can take it or end it by its name. A client that
    ends *all* requests ends the probe too, which says nothing about the engine: it is tried again.
    """

    def __init__(self, front: FrontEnd, timeout_s: float) -> None:
        self._front = front
        self._timeout_s = timeout_s
        self._running: asyncio.Task[None] | None = None

    async def alive(self) -> None:
        """Wait for the probe that runs, or for a new one.

        Raises:
            ApiError: 503, when no token came.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._generate(), name="health-probe")
        await asyncio.shield(self._running)

    async def _generate(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                while not await self._attempt():
                    pass
        except TimeoutError:
            raise ApiError(503, f"no token within {self._timeout_s:g} s") from None

    async def _attempt(self) -> bool:
        """Generate one token; False when somebody ended it before.

        Raises:
            ApiError: It was refused, or it failed.
        """
        probe = Submission(
            rid=f"health-{uuid.uuid4().hex}",
            prompt=[0],
            sampling=SamplingParams(temperature=0.0, ignore_eos=True),
            max_new_tokens=1,
        )
        async with self._front.open([probe], stream=False) as call:
            await call.all_output()
            return call.choices[0].member.visible > 0

    async def close(self) -> None:
        """End a probe that runs."""
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await self._running
