"""``/generate``: the native surface, with cumulative streams and ``meta_info``."""

import uuid
from typing import Any

from aiohttp import web

from engine.intake import MAX_CHOSEN_LOGPROBS
from server.calls import Call, Choice, Submission, TextOptions
from server.errors import ApiError, bad_value, unsupported
from server.native_schemas import GenerateBody, NativeSampling
from server.schemas import prompts, token_ids, validate
from server.service import Service, service_of
from server.streaming import EventStream, json_response, shown_logprob, stream_error
from transport.messages import Finish, Hello, TopLogprobs


async def generate(request: web.Request) -> web.StreamResponse:
    """``POST|PUT /generate``: one prompt or a batch, ``n`` completions each."""
    service = service_of(request)
    body, limits = await service.body(request, GenerateBody)
    submissions, batch = _submissions(body, limits, service.settings.max_completions_per_call)
    async with service.front.open(submissions, stream=body.stream) as call:
        many = batch or len(call.choices) > 1
        writer = _Writer(service, body, call)
        if not body.stream:
            await call.all_output()
            answers = [writer.answer(choice) for choice in call.choices]
            return json_response(answers if many else answers[0])
        await call.first_output()
        stream = EventStream(request, service.settings.write_stall_s)
        while not call.exhausted:
            for choice, piece in await call.pieces():
                error = choice.error
                if error is not None and not many:
                    await stream.fail(stream_error(error, request.path))
                elif piece.start < piece.end or piece.text or piece.finish is not None:
                    answer = writer.answer(choice)
                    if many:
                        answer["index"] = choice.index
                    await stream.send(answer)
        return await stream.close()


def _submissions(body: GenerateBody, limits: Hello, most: int) -> tuple[list[Submission], bool]:
    """The call's prompts, at most ``most``, and whether it is a batch.

    Raises:
        ApiError: 400 for what is wrong in the body.
    """
    if (body.text is None) == (body.input_ids is None):
        raise ApiError(400, "exactly one of text and input_ids must be given", param="text")
    param = "text" if body.input_ids is None else "input_ids"
    found, batch = prompts(
        body.text if body.input_ids is None else body.input_ids, param, limits.vocab_size, most
    )
    if param == "input_ids" and any(isinstance(prompt, str) for prompt in found):
        raise bad_value(param, "must be a list of token ids, or a list of such lists")
    if param == "text" and not all(isinstance(prompt, str) for prompt in found):
        raise bad_value(param, "must be a text or a list of texts; token ids go into input_ids")
    count = len(found)
    rids = _rids(body.rid, count, batch)
    sampling = [
        validate(NativeSampling, params, _prefix(body.sampling_params, index))
        for index, params in enumerate(_spread(body.sampling_params, count, "sampling_params"))
    ]
    if len({each.n for each in sampling}) > 1:
        raise bad_value("sampling_params", "must have the same n for all prompts of a batch")
    with_logprobs = _spread(body.return_logprob, count, "return_logprob")
    starts = _spread(body.logprob_start_len, count, "logprob_start_len")
    tops = _spread(body.top_logprobs_num, count, "top_logprobs_num")
    chosen = _chosen_ids(body, count, limits.vocab_size)
    if any(given and start >= 0 for given, start in zip(with_logprobs, starts, strict=True)):
        raise unsupported("logprob_start_len", "logprobs of the prompt; leave it at -1")
    submissions = []
    for index, (prompt, params) in enumerate(zip(found, sampling, strict=True)):
        prefix = _prefix(body.sampling_params, index)
        _check_min_new(params, prefix)
        submissions.append(
            Submission(
                rid=rids[index],
                prompt=prompt,
                sampling=params.to_engine(
                    limits.vocab_size,
                    max_new=0,
                    min_new=params.min_new_tokens,
                    seed=params.sampling_seed,
                    logprobs=with_logprobs[index],
                    top_logprobs=tops[index] if with_logprobs[index] else 0,
                    token_ids_logprob=chosen[index] if with_logprobs[index] else (),
                    eos_at=params.eos_at,
                    prefix=prefix,
                ),
                max_new_tokens=params.max_new_tokens,
                max_new_is_default="max_new_tokens" not in params.model_fields_set,
                text=TextOptions(
                    stops=params.stops,
                    include_stop=params.no_stop_trim,
                    skip_special_tokens=params.skip_special_tokens,
                ),
                n=params.n,
                priority=body.priority,
                session=None if body.session_params is None else body.session_params.id,
                deadline_s=body.deadline_s,
                prompt_param=f"{param}.{index}" if batch else param,
                max_new_param=f"{prefix}max_new_tokens",
            )
        )
    return submissions, batch


def _check_min_new(params: NativeSampling, prefix: str) -> None:
    most = params.max_new_tokens
    if most is not None and params.min_new_tokens > most:
        raise bad_value(
            f"{prefix}min_new_tokens",
            f"must be at most max_new_tokens ({most}), got {params.min_new_tokens}",
        )


def _prefix(given: object, index: int) -> str:
    return f"sampling_params.{index}." if isinstance(given, list) else "sampling_params."


def _spread(value: Any, count: int, param: str) -> list[Any]:
    """``value`` once for each prompt: a list must match the batch."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise bad_value(param, f"has {len(value)} items for {count} prompts")
    return value


def _chosen_ids(body: GenerateBody, count: int, vocab_size: int) -> list[list[int]]:
    given: list[Any] = body.token_ids_logprob
    nested = any(isinstance(item, list) or item is None for item in given)
    rows = _spread(given, count, "token_ids_logprob") if nested else [given] * count
    if any(isinstance(row, list) and len(row) > MAX_CHOSEN_LOGPROBS for row in rows):
        raise bad_value("token_ids_logprob", f"has more than {MAX_CHOSEN_LOGPROBS} ids")
    return [token_ids(row or [], "token_ids_logprob", vocab_size) for row in rows]


def _rids(given: str | list[str], count: int, batch: bool) -> list[str]:
    if isinstance(given, list):
        rids = _spread(given, count, "rid")
        if not all(rids):
            raise bad_value("rid", "must not have empty items")
        return rids
    base = given or uuid.uuid4().hex
    return [f"{base}_{index}" for index in range(count)] if batch else [base]


def finish_reason(finish: Finish) -> dict[str, object]:
    """How an answer ended, in the reference's form."""
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length}
    return {
        "type": "abort",
        "message": finish.message or "Aborted",
        "status_code": finish.status,
        "err_type": finish.err_type,
    }


class _Writer:
    """Makes answers of one call, cumulative ones while it streams."""

    def __init__(self, service: Service, body: GenerateBody, call: Call) -> None:
        self._tokenizer = service.tokenizer
        self._with_text = body.return_text_in_logprobs
        self._with_prompt = body.return_prompt_token_ids
        self._logprobs = [bool(c.submission.sampling.logprobs) for c in call.choices]

    def answer(self, choice: Choice) -> dict[str, object]:
        """What is visible of a completion, from its beginning."""
        member, tokens = choice.member, choice.member.visible
        meta: dict[str, object] = {
            "id": member.rid,
            "finish_reason": None if choice.finish is None else finish_reason(choice.finish),
            "prompt_tokens": choice.prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": member.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": member.weight_version,
            "num_retractions": member.retractions,
        }
        if choice.ended is not None:
            meta["e2e_latency"] = choice.ended - choice.arrived
        if self._logprobs[choice.index]:
            self._add_logprobs(meta, choice, tokens)
        answer: dict[str, object] = {
            "text": choice.text,
            "output_ids": member.tokens[:tokens],
            "meta_info": meta,
        }
        if self._with_prompt:
            answer["prompt_token_ids"] = choice.prompt_ids
        return answer

    def _add_logprobs(self, meta: dict[str, object], choice: Choice, tokens: int) -> None:
        member, sampling = choice.member, choice.submission.sampling
        pairs = zip(member.tokens[:tokens], member.logprobs[:tokens], strict=True)
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [self._triple(token, value) for token, value in pairs]
        meta["output_token_logprobs_length"] = tokens
        if sampling.top_logprobs:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = self._triples(member.top_logprobs[:tokens])
        if sampling.token_ids_logprob:
            meta["input_token_ids_logprobs"] = []
            meta["output_token_ids_logprobs"] = self._triples(member.chosen_logprobs[:tokens])

    def _triples(self, rows: list[TopLogprobs]) -> list[object]:
        return [[self._triple(token, value) for token, value in row] for row in rows]

    def _triple(self, token: int, logprob: float) -> tuple[float, int, str | None]:
        text = self._tokenizer.token_text(token) if self._with_text else None
        return (shown_logprob(logprob), token, text)
