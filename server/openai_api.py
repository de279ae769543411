"""``/v1/completions`` and ``/v1/chat/completions``: deltas, choices, usage."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from server.calls import Call, Choice, Piece, Submission, TextOptions
from server.chat_template import ChatTemplate, ChatTemplateError
from server.errors import ApiError, bad_value, unsupported
from server.front_end import CALL_UNITS, units_of
from server.openai_schemas import ChatBody, CompletionBody, OpenAIFields
from server.openai_shapes import TokenShapes, ending, usage, weight_version, whole
from server.schemas import prompts
from server.service import Service, service_of
from server.streaming import EventStream, json_response, stream_error
from transport.messages import Hello

DEFAULT_COMPLETION_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/completions``."""
    service = service_of(request)
    body, limits = await service.body(request, CompletionBody)
    body.check()
    most = service.settings.max_completions_per_call
    found, _ = prompts(body.prompt, "prompt", limits.vocab_size, most)
    answer = _CompletionAnswer(service, body, _base_rid(body, "cmpl"))
    if body.echo:
        ids = [prompt for prompt in found if isinstance(prompt, list)]
        answer.echoed = await service.front.off_loop(units_of(ids), _as_texts, service, found)
    limit = DEFAULT_COMPLETION_TOKENS if body.token_limit is None else body.token_limit
    rids = _rids(body, answer.rid, len(found))
    submissions = [
        _submission(
            body,
            limits,
            rid=rid,
            prompt=prompt,
            prompt_param="prompt" if len(found) == 1 else f"prompt.{index}",
            max_new_tokens=limit,
            logprobs=body.logprobs is not None,
            top_logprobs=body.logprobs or 0,
        )
        for index, (rid, prompt) in enumerate(zip(rids, found, strict=True))
    ]
    return await _respond(request, answer, submissions)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """``POST /v1/chat/completions``."""
    service = service_of(request)
    body, limits = await service.body(request, ChatBody)
    body.check()
    answer = _ChatAnswer(service, body, _base_rid(body, "chatcmpl"))
    limit_param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    submission = _submission(
        body,
        limits,
        rid=answer.rid,
        prompt=await _render(service, body, len(await request.read())),
        prompt_param="messages",
        max_new_tokens=body.token_limit,
        max_new_param=limit_param,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )
    return await _respond(request, answer, [submission])


def _as_texts(service: Service, found: Sequence[str | list[int]]) -> list[str]:
    decode = service.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in found]


def _base_rid(body: OpenAIFields, kind: str) -> str:
    if isinstance(body.rid, str) and body.rid:
        return body.rid
    return f"{kind}-{uuid.uuid4().hex}"


def _rids(body: OpenAIFields, base: str, count: int) -> Sequence[str]:
    if isinstance(body.rid, list):
        if len(body.rid) != count or not all(body.rid):
            raise bad_value("rid", f"must have one item for each of {count} prompts")
        return body.rid
    return [base] if count == 1 else [f"{base}_{index}" for index in range(count)]


async def _render(service: Service, body: ChatBody, body_bytes: int) -> list[int]:
    """The chat as token ids.

    Everything in the body may be shown by the template, and each message is a round of its loop;
    so the body's length and the number of messages say what it costs, not the contents alone.

    Raises:
        ApiError: 400 for messages that the model's template cannot show.
    """
    template = service.text.chat_template
    if template is None:
        raise unsupported("messages", "this model has no chat template, use /v1/completions")
    if isinstance(body.rid, list):
        raise bad_value("rid", "must be a single string for a chat")
    units = body_bytes + CALL_UNITS * len(body.messages)
    try:
        return await service.front.off_loop(units, _encode_chat, template, body)
    except ChatTemplateError as error:
        param = str(error).partition(":")[0]
        raise ApiError(400, str(error), param=param) from None


def _encode_chat(template: ChatTemplate, body: ChatBody) -> list[int]:
    return template.encode(
        body.messages,
        tools=body.tools or None,
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )


def _submission(
    body: OpenAIFields,
    limits: Hello,
    *,
    rid: str,
    prompt: str | list[int],
    prompt_param: str,
    max_new_tokens: int | None,
    logprobs: bool,
    top_logprobs: int,
    max_new_param: str = "max_tokens",
) -> Submission:
    return Submission(
        rid=rid,
        prompt=prompt,
        sampling=body.to_engine(
            limits.vocab_size,
            max_new=0,
            min_new=body.min_tokens,
            seed=body.seed,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        ),
        max_new_tokens=max_new_tokens,
        max_new_is_default=body.token_limit is None,
        text=TextOptions(
            stops=body.stops,
            include_stop=body.no_stop_trim or body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
        ),
        n=body.n,
        priority=body.priority,
        session=None if body.session_params is None else body.session_params.id,
        deadline_s=body.deadline_s,
        prompt_param=prompt_param,
        max_new_param=max_new_param,
    )


class _Answer(ABC):
    """Makes the answer of one call, whole or in chunks."""

    object_name: str
    chunk_name: str

    def __init__(self, service: Service, body: OpenAIFields, rid: str) -> None:
        self.service = service
        self.body = body
        self.rid = rid
        self._model = service.check_model(body.model)
        self._created = int(time.time())
        self._shapes = TokenShapes(service.tokenizer, as_ids=body.return_tokens_as_token_ids)

    def _envelope(self, name: str, choices: Sequence[object]) -> dict[str, Any]:
        return {
            "id": self.rid,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, call: Call) -> dict[str, Any]:
        """The answer of a call whose completions have all ended."""
        answer = self._envelope(self.object_name, [self.choice(c) for c in call.choices])
        answer["usage"] = usage(call.choices)
        answer["metadata"] = weight_version(call)
        return answer

    def chunks(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a completion as chunks of a stream."""
        chunks = [self._envelope(self.chunk_name, [delta]) for delta in self.deltas(choice, piece)]
        if self.body.usage_in_every_chunk:
            for chunk in chunks:
                chunk["usage"] = usage([choice])
        return chunks

    def usage_chunk(self, call: Call) -> dict[str, Any]:
        """The chunk before ``[DONE]``, for who asked for usage."""
        return self._envelope(self.chunk_name, []) | {"usage": usage(call.choices)}

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """A whole completion."""

    @abstractmethod
    def deltas(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a completion; possibly nothing, when no character is complete."""


class _CompletionAnswer(_Answer):
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, rid: str) -> None:
        super().__init__(service, body, rid)
        self._with_logprobs = body.logprobs is not None
        self._offsets: dict[int, int] = {}
        self.echoed: list[str] = []
        """The prompts, where the client wants them in front of their completions."""

    def choice(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, whole(choice))

    def deltas(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        delta = self._choice(choice, piece)
        return [delta] if delta["text"] or delta["logprobs"] or piece.finish is not None else []

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        echo = self.echoed[choice.prompt_index] if self.echoed and piece.start == 0 else ""
        if echo and choice.index in self._offsets:
            echo = ""  # a first piece without a token was sent before
        shown = {"index": choice.index, "text": echo + piece.text, "logprobs": None}
        if self._with_logprobs and piece.end > piece.start:
            start = self._offsets.get(choice.index, 0)
            logprobs = self._shapes.completion(choice, piece, start)
            self._offsets[choice.index] = start + sum(map(len, logprobs["tokens"]))
            shown["logprobs"] = logprobs
        else:
            self._offsets.setdefault(choice.index, 0)
        return shown | ending(piece.finish)


class _ChatAnswer(_Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatBody, rid: str) -> None:
        super().__init__(service, body, rid)
        self._with_logprobs = body.logprobs
        self._begun: set[int] = set()

    def choice(self, choice: Choice) -> dict[str, Any]:
        piece = whole(choice)
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._shapes.chat(choice, piece) if self._with_logprobs else None,
        }
        return shown | ending(piece.finish)

    def deltas(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        deltas = []
        if choice.index not in self._begun:
            # With the first token and not before it: clients take it for the first token's time.
            self._begun.add(choice.index)
            deltas.append(self._delta(choice, {"role": "assistant", "content": ""}))
        if piece.text or (self._with_logprobs and piece.end > piece.start):
            delta = self._delta(choice, {"content": piece.text})
            if self._with_logprobs:
                delta["logprobs"] = self._shapes.chat(choice, piece)
            deltas.append(delta)
        if piece.finish is not None:
            deltas.append(self._delta(choice, {}) | ending(piece.finish))
        return deltas

    def _delta(self, choice: Choice, delta: dict[str, str]) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": choice.index, "delta": delta, "logprobs": None}
        return shown | ending(None)


async def _respond(
    request: web.Request, answer: _Answer, submissions: Sequence[Submission]
) -> web.StreamResponse:
    service, body = answer.service, answer.body
    async with service.front.open(submissions, stream=body.stream) as call:
        if not body.stream:
            await call.all_output()
            return json_response(answer.whole(call))
        await call.first_output()
        stream = EventStream(request, service.settings.write_stall_s)
        while not call.exhausted:
            for choice, piece in await call.pieces():
                error = choice.error
                if error is not None:
                    await stream.fail(stream_error(error, request.path))
                    return await stream.close()
                chunks = answer.chunks(choice, piece)
                if chunks:
                    await stream.send(*chunks)
        if body.with_usage:
            await stream.send(answer.usage_chunk(call))
        return await stream.close()
