"""Aborts, sessions, the prefix cache, health probes, and text to tokens and back."""

import asyncio
import dataclasses
import uuid
from http import HTTPStatus
from typing import Any

from aiohttp import web
from pydantic import Field

from server.chat_template import ChatTemplateError
from server.engine_client import reply_error
from server.errors import ApiError, bad_value, unsupported
from server.front_end import CALL_UNITS, units_of
from server.schemas import INT32, MAX_ITEMS, Body, parse_body, token_ids
from server.service import read_body, service_of
from server.streaming import json_response
from transport.messages import CloseSession, DebugHook, OpenSession, Query


class AbortBody(Body):
    """``/abort_request``."""

    rid: str | list[str] = ""
    abort_all: bool = False


class AbortRequestsBody(Body):
    """``/abort_requests``, vLLM's form of the same."""

    request_ids: list[str] = Field(min_length=1)


class OpenSessionBody(Body):
    """``/open_session``."""

    session_id: str | None = Field(default=None, min_length=1, max_length=512)
    capacity_of_str_len: int | None = Field(default=None, ge=0, lt=INT32)
    """The reference's name; here it is the longest history in tokens, and 0 is the context
    length."""
    streaming: bool = True
    timeout: float | None = Field(default=None, gt=0)


class CloseSessionBody(Body):
    """``/close_session``."""

    session_id: str = Field(min_length=1)


class TokenizeBody(Body):
    """``/tokenize``: a prompt, prompts, or a chat."""

    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """``/detokenize``."""

    long_lists = frozenset({"tokens"})

    model: str | None = None
    tokens: list[Any]
    skip_special_tokens: bool = True


async def abort_request(request: web.Request) -> web.Response:
    """``POST /abort_request``: exact rids, or all; 200 whatever is found."""
    body = parse_body(AbortBody, await read_body(request))
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    if not body.abort_all and (not rids or not all(rids)):
        raise bad_value("rid", "must not be empty, unless abort_all is set")
    report = await service_of(request).front.abort(None if body.abort_all else rids)
    return json_response(dataclasses.asdict(report))


async def abort_requests(request: web.Request) -> web.Response:
    """``POST /abort_requests``."""
    body = parse_body(AbortRequestsBody, await read_body(request))
    report = await service_of(request).front.abort(body.request_ids)
    return json_response({"status": "aborted", "aborted": len(report.aborted)})


class DebugBody(Body):
    """``/debug/…``."""

    rid: str = ""


async def debug_hook(request: web.Request) -> web.Response:
    """``POST /debug/hold_step|release_step|retract``: faults on purpose, with ``--debug`` only."""
    service = service_of(request)
    body = parse_body(DebugBody, await read_body(request) or b"{}")
    hook: Any = request.match_info["hook"]
    reply = await service.engine.ask(lambda number: DebugHook(number, hook, body.rid))
    if (error := reply_error(reply)) is not None:
        raise error
    return json_response(reply)


async def open_session(request: web.Request) -> web.Response:
    """``POST /open_session``: the answer is the session's id, a JSON string."""
    service = service_of(request)
    body, _ = await service.body(request, OpenSessionBody)
    session = body.session_id or uuid.uuid4().hex
    reply = await service.engine.ask(
        lambda number: OpenSession(
            query=number,
            session=session,
            capacity=body.capacity_of_str_len or None,
            timeout_s=body.timeout,
        )
    )
    if (error := reply_error(reply)) is not None:
        raise error
    return json_response(session)


async def close_session(request: web.Request) -> web.Response:
    """``POST /close_session``: a turn in flight is aborted. Closing what is not open is no
    error."""
    service = service_of(request)
    body = parse_body(CloseSessionBody, await read_body(request))
    await service.engine.ask(lambda number: CloseSession(number, body.session_id))
    return web.Response()


async def flush_cache(request: web.Request) -> web.Response:
    """``GET|POST /flush_cache?timeout=S``: 400 while requests run (after waiting up to S
    seconds)."""
    service = service_of(request)
    try:
        patience = float(request.query.get("timeout") or 0)
    except ValueError:
        raise bad_value("timeout", "must be a number of seconds") from None
    deadline = asyncio.get_running_loop().time() + min(max(patience, 0.0), 600.0)
    while True:
        reply = await service.engine.ask(lambda number: Query(number, "flush"))
        answer: dict[str, Any] = reply if isinstance(reply, dict) else {}
        if answer.get("flushed"):
            return web.Response(text="Cache flushed.\n")
        if asyncio.get_running_loop().time() >= deadline:
            message = str(answer.get("message") or "requests are running")
            return web.Response(
                text=f"Cache not flushed: {message}\n", status=HTTPStatus.BAD_REQUEST
            )
        await asyncio.sleep(0.05)


async def tokenize(request: web.Request) -> web.Response:
    """``POST /tokenize``."""
    service = service_of(request)
    body, limits = await service.body(request, TokenizeBody)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "exactly one of prompt and messages must be given", param="prompt")
    front, tokenizer = service.front, service.tokenizer
    if body.messages is not None:
        template = service.text.chat_template
        if template is None:
            raise unsupported("messages", "this model has no chat template")
        try:
            ids = await front.off_loop(
                len(await request.read()) + CALL_UNITS * len(body.messages),
                template.encode,
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
            )
        except ChatTemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        rows, single = [ids], True
    else:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
        rows = await front.off_loop(
            units_of(texts),
            lambda: [tokenizer.encode(text, body.add_special_tokens) for text in texts],
        )
        single = isinstance(body.prompt, str)
    answer: dict[str, object] = {
        "tokens": rows[0] if single else rows,
        "count": len(rows[0]) if single else [len(row) for row in rows],
        "max_model_len": limits.context_length,
    }
    if body.return_token_strs:
        names = await front.off_loop(
            units_of(rows), lambda: [[tokenizer.token_text(i) for i in row] for row in rows]
        )
        answer["token_strs"] = names[0] if single else names
    return json_response(answer)


async def detokenize(request: web.Request) -> web.Response:
    """``POST /detokenize``: one list of token ids, or several."""
    service = service_of(request)
    body, limits = await service.body(request, DetokenizeBody)
    service.check_model(body.model)
    several = bool(body.tokens) and isinstance(body.tokens[0], list)
    rows = body.tokens if several else [body.tokens]
    if several and len(rows) > MAX_ITEMS:
        raise bad_value("tokens", f"has {len(rows)} lists, at most {MAX_ITEMS} are allowed")
    ids = [
        token_ids(row, f"tokens.{index}" if several else "tokens", limits.vocab_size)
        for index, row in enumerate(rows)
    ]
    decode, skip = service.tokenizer.decode, body.skip_special_tokens
    texts = await service.front.off_loop(
        units_of(ids), lambda: [decode(row, skip_special_tokens=skip) for row in ids]
    )
    text = texts if several else texts[0]
    return json_response({"text": text, "prompt": text})


async def health(request: web.Request) -> web.Response:
    """``GET /health``: at once; 503 while the server cannot take requests."""
    service = service_of(request)
    service.front.admit()
    if service.engine.silence_s > service.settings.engine_silence_s:
        raise ApiError(503, f"the engine has been silent for {service.engine.silence_s:.0f} s")
    return web.Response()


async def health_generate(request: web.Request) -> web.Response:
    """``GET /health_generate``: one token must come out, soon."""
    service = service_of(request)
    service.front.admit()
    await service.probe.alive()
    return web.Response()
