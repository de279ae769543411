"""One HTTP call's generation: what it submits, and its completions as they grow.

A :class:`Choice` is one completion on its way to a client. It feeds the engine's tokens to the
detokenizer, tells the record what was found, and hands out what is new since it was last asked. So
a slow reader makes pieces larger, not more: what waits for it is bounded by the completion itself.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.frontend import FrontendRecord, Member, Terminal
from server.detokenizer import OutputText
from server.errors import ApiError, bad_value
from server.tokenizer import Tokenizer
from transport.messages import FILL, Finish, Hello, Output, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How a completion's text is made of its tokens."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    """Whether the stop string or stop token that ended it shows in its text."""
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt to complete ``n`` times: validated, not yet tokenized."""

    rid: str
    prompt: str | list[int]
    sampling: SamplingParams
    """Complete but for ``max_new_tokens``, which needs the prompt's length."""
    max_new_tokens: int | None
    """What the client asked for, or the default of its surface; None is to the context's end."""
    max_new_is_default: bool = False
    """The client did not ask: a limit that does not fit is lowered instead of refused."""
    text: TextOptions = field(default_factory=TextOptions)
    n: int = 1
    priority: int = 0
    session: str | None = None
    deadline_s: float | None = None
    add_special_tokens: bool = True
    prompt_param: str = "prompt"
    """How the client spells the prompt and the limit, for errors."""
    max_new_param: str = "max_tokens"

    def token_limit(self, prompt_len: int, limits: Hello) -> int:
        """The limit on output tokens, now that the prompt's length is known.

        Raises:
            ApiError: 400, when the prompt is empty or can never fit, or prompt and limit together
                exceed the context.
        """
        if prompt_len == 0:
            raise bad_value(self.prompt_param, "must not be empty: at least one token is needed")
        if prompt_len > limits.max_prompt_tokens:
            raise bad_value(
                self.prompt_param,
                f"has {prompt_len} tokens, at most {limits.max_prompt_tokens} fit into the context "
                f"length of {limits.context_length} and the KV pool",
            )
        room = min(limits.context_length, limits.max_prompt_tokens + 1) - prompt_len
        asked = self.max_new_tokens
        if asked is None:
            # How much room a session's history leaves is known to the engine alone.
            return room if self.session is None else FILL
        if self.max_new_is_default:
            return min(asked, room)
        if prompt_len + asked > limits.context_length:
            raise bad_value(
                self.max_new_param,
                f"is {asked}, which with the prompt's {prompt_len} tokens exceeds the context "
                f"length of {limits.context_length}",
            )
        return asked


@dataclass(frozen=True, slots=True)
class Piece:
    """What became visible of a completion since the last piece."""

    text: str
    start: int
    """Its tokens are those from ``start`` to before ``end``."""
    end: int
    finish: Finish | None
    """Set on the last piece, and only there."""


class Choice:
    """One completion: a member of a record, its text, and how far its reader is."""

    __slots__ = (
        "_taken_parts",
        "_taken_tokens",
        "_text",
        "arrived",
        "call",
        "closed",
        "drained",
        "ended",
        "first_token",
        "index",
        "last_token",
        "member",
        "parts",
        "prompt_ids",
        "prompt_index",
        "submission",
    )

    def __init__(
        self, call: "Call", member: Member, index: int, prompt_index: int, submission: Submission
    ) -> None:
        self.call = call
        self.member = member
        self.index = index
        """Its place among all completions of the call."""
        self.prompt_index = prompt_index
        self.submission = submission
        self.prompt_ids: list[int] = []
        """The submitted prompt; a session's history is not in it."""
        self.parts: list[str] = []
        self.arrived = time.monotonic()
        self.first_token: float | None = None
        self.last_token = self.arrived
        self.ended: float | None = None
        self.closed = False
        """The last piece was taken."""
        self.drained = False
        """It was ended by a shutdown."""
        options = submission.text
        self._text = OutputText(
            call.tokenizer,
            stops=options.stops,
            include_stop=options.include_stop,
            min_new_tokens=submission.sampling.min_new_tokens,
            skip_special_tokens=options.skip_special_tokens,
        )
        self._taken_parts = 0
        self._taken_tokens = 0

    @property
    def terminal(self) -> Terminal | None:
        """Its end, once decided."""
        return self.member.terminal

    @property
    def error(self) -> ApiError | None:
        """Its end, if that is an error and no answer."""
        if self.terminal is None:
            return None
        finish = self.terminal.finish
        if self.drained:
            # Who has seen nothing can go elsewhere; who has seen tokens gets an ordinary last
            # piece.
            unseen = self.member.visible == 0 or not self.call.streaming
            return ApiError(503, "the server is shutting down") if unseen else None
        if finish.type == "error" or (finish.status is not None and finish.status >= 400):
            return ApiError.from_finish(finish)
        return None

    @property
    def finish(self) -> Finish | None:
        """Why it ended, as the client is told; None before."""
        if self.terminal is None:
            return None
        if self.drained:
            return Finish("abort", message="the server is shutting down")
        return self.terminal.finish

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.parts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt, as the engine counts it (with a session's history)."""
        return self.member.prompt_tokens or len(self.prompt_ids)

    @property
    def unread_tokens(self) -> int:
        """Tokens that wait for the reader."""
        return self.member.visible - self._taken_tokens

    def deliver(self, output: Output) -> None:
        """The engine's next words on this completion."""
        fresh = self.member.deliver(output)
        if fresh:
            self._show(fresh, output.finish)
            self.last_token = time.monotonic()
            if self.first_token is None:
                self.first_token = self.last_token

    def _show(self, fresh: list[int], finish: Finish | None) -> None:
        # The token that ends the output belongs to output_ids, but not to the text.
        ends_with_stop_token = (
            finish is not None and finish.type == "stop" and finish.matched == fresh[-1]
        )
        hidden = ends_with_stop_token and not self.submission.text.include_stop
        delta = self._text.push(fresh[:-1] if hidden else fresh)
        self._append(delta.text)
        if finish is not None and delta.stop is None:
            delta = self._text.finish()  # what it releases can complete a stop string, too
            self._append(delta.text)
        stop = None if delta.stop is None else (delta.stop.tokens, delta.stop.matched)
        self.member.examine(len(self.member.tokens), stop)

    def _append(self, text: str) -> None:
        if text:
            self.parts.append(text)

    def close_text(self) -> None:
        """Its end is decided: release the text that was held back, if it was no stop string's."""
        self.ended = time.monotonic()
        if self.terminal is not None and self.terminal.by != "detokenizer":
            self._append(self._text.finish().text)

    def take(self) -> Piece | None:
        """What is new for the reader, or None. After the last piece there is none."""
        if self.closed:
            return None
        start, end = self._taken_tokens, self.member.visible
        finish = self.finish
        if start == end and finish is None and self._taken_parts == len(self.parts):
            return None
        text = "".join(self.parts[self._taken_parts :])
        self._taken_parts, self._taken_tokens = len(self.parts), end
        self.closed = finish is not None
        return Piece(text, start, end, finish)


class Call:
    """All completions of one HTTP call, and the event that something happened to one of them."""

    def __init__(self, tokenizer: Tokenizer, *, streaming: bool) -> None:
        self.tokenizer = tokenizer
        self.streaming = streaming
        self.records: list[FrontendRecord] = []
        self.choices: list[Choice] = []
        self.changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Every completion has its end."""
        return all(choice.terminal is not None for choice in self.choices)

    @property
    def error(self) -> ApiError | None:
        """The first completion's error, if one ended with an error."""
        return next((c.error for c in self.choices if c.error is not None), None)

    async def wait(self) -> None:
        """Wait until something happened since the last wait."""
        await self.changed.wait()
        self.changed.clear()

    async def first_output(self) -> None:
        """Wait for the first token or end of any completion.

        Raises:
            ApiError: One of them was refused, or failed before anything could be shown.
        """
        while not any(c.member.visible or c.terminal is not None for c in self.choices):
            await self.wait()
        self.changed.set()  # the reader has not seen it yet
        if self.error is not None and not any(c.member.visible for c in self.choices):
            raise self.error

    async def all_output(self) -> None:
        """Wait until every completion has its end.

        Raises:
            ApiError: One of them failed; the others are not waited for.
        """
        while not self.finished:
            await self.wait()
            if self.error is not None:
                break
        if self.error is not None:
            raise self.error

    async def pieces(self) -> Iterator[tuple[Choice, Piece]]:
        """The next pieces, in the order of the completions; waits for at least one."""
        while True:
            await self.wait()
            found = [(c, piece) for c in self.choices if (piece := c.take()) is not None]
            if found:
                return iter(found)

    @property
    def exhausted(self) -> bool:
        """The reader has the last piece of every completion."""
        return all(choice.closed for choice in self.choices)
