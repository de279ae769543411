"""What every request body has in common: how it is parsed, and the fields that choose tokens.

Types are strict (``"5"`` is no number, ``true`` is no 1), numbers are finite, unknown keys at the
top level are ignored, and an explicit null means the default. What is wrong is reported by the
field's name, the limit, and the value that broke it.
"""

import gc
import re
import reprlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.intake import MAX_CHOSEN_LOGPROBS, MAX_GROUP, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from server.errors import ApiError, bad_value
from transport.messages import SamplingParams

INT32 = 2**31
INT64 = 2**63
MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS_OPENAI = 20
MAX_TOP_LOGPROBS_NATIVE = 128
MAX_TEMPERATURE = 1e6
MAX_ITEMS = 4096
"""Items of a list or object, whatever it is (messages, texts, stop strings, …), but for lists of
token ids and of prompts, which have limits of their own."""
_SHOWN_VALUE_CHARS = 60
_UNION_MEMBER = re.compile(r"(str|int|bool|float|none)$|(list|dict|constrained)\W")
_REFUSED = "refused"
"""Our own type of validation error: a field that is known, and not supported or too long."""

BodyT = TypeVar("BodyT", bound="Body")


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    keeps_null: ClassVar[frozenset[str]] = frozenset()
    """Fields whose null means something else than leaving them out."""
    long_lists: ClassVar[frozenset[str]] = frozenset()
    """Fields that may have more than :data:`MAX_ITEMS` items. Their types must not be checked item
    by item: two million wrong items are two million errors, which take half a minute to make."""
    refused: ClassVar[Mapping[str, str]] = {}
    """What exists elsewhere, would change the answer, and is not supported here, with a hint for
    each. A value that asks for nothing (null, false, 0, empty) passes, and is dropped."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        for name, hint in cls.refused.items():
            if data.get(name):
                problem = f"is not supported{hint and ': ' + hint}"
                raise PydanticCustomError(_REFUSED, "{problem}", {"name": name, "problem": problem})
        for name, value in data.items():
            if (
                isinstance(value, list | dict)
                and len(value) > MAX_ITEMS
                and name in cls.model_fields
                and name not in cls.long_lists
            ):
                problem = f"has {len(value)} items, at most {MAX_ITEMS} are allowed"
                raise PydanticCustomError(_REFUSED, "{problem}", {"name": name, "problem": problem})
        return {
            name: value
            for name, value in data.items()
            if (value is not None or name in cls.keeps_null) and name not in cls.refused
        }


def parse_body(schema: type[BodyT], raw: bytes) -> BodyT:
    """The request body as ``schema``.

    Raises:
        ApiError: 400, for malformed JSON or the first field that is wrong.
    """
    collecting = gc.isenabled()
    gc.disable()  # or a body of a million small lists is searched for cycles again and again
    try:
        data = pydantic_core.from_json(raw)
    except ValueError as error:
        raise ApiError(
            400, f"the body is not valid JSON: {error}", code="json_parse_error"
        ) from None
    finally:
        if collecting:
            gc.enable()
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    return validate(schema, data)


def validate(schema: type[BodyT], data: dict[str, Any], prefix: str = "") -> BodyT:
    """``data`` as ``schema``; errors name fields with ``prefix`` in front."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
        # One cause often gives several errors, one for each member of a union: the deepest says
        # most.
        worst = max(details, key=lambda detail: len(detail["loc"]))
        path = prefix + ".".join(str(part) for part in worst["loc"] if _is_name(part))
        if worst["type"] == "extra_forbidden":
            expected = ", ".join(schema.model_fields)
            problem = f"unknown field '{worst['loc'][-1]}', expected one of {expected}"
            raise ApiError(400, problem, param=path) from None
        if worst["type"] == _REFUSED:
            path += ("." if path and not path.endswith(".") else "") + worst["ctx"]["name"]
            raise bad_value(path, worst["msg"]) from None
        message = worst["msg"].removeprefix("Value error, ").replace("Input should", "must")
        if worst["type"] not in ("missing", "value_error"):
            message += f", got {_shown(worst['input'])}"
        raise ApiError(400, f"{path or 'the body'}: {message}", param=path or None) from None


def _is_name(part: int | str) -> bool:
    """Whether a step of an error's path is a field or an index, not the name of a union's
    member."""
    return isinstance(part, int) or _UNION_MEMBER.match(part) is None


_repr = reprlib.Repr()
_repr.maxlist = _repr.maxdict = _repr.maxstring = _repr.maxlong = 2 * _SHOWN_VALUE_CHARS


def _shown(value: object) -> str:
    text = _repr.repr(value)  # without writing out what is cut off
    return text if len(text) <= _SHOWN_VALUE_CHARS else text[:_SHOWN_VALUE_CHARS] + "…"


def token_ids(value: object, param: str, vocab_size: int) -> list[int]:
    """``value`` as token ids.

    Raises:
        ApiError: 400, when it is no list of integers within the vocabulary.
    """
    # Without a loop in Python: a body may hold two million of them.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise bad_value(param, f"must be a list of token ids, got {_shown(value)}")
    if value and not (min(value) >= 0 and max(value) < vocab_size):
        bad = next(token for token in value if not 0 <= token < vocab_size)
        raise bad_value(param, f"has token id {bad}, which is outside 0..{vocab_size - 1}")
    return value


def prompts(
    value: object, param: str, vocab_size: int, most: int
) -> tuple[list[str | list[int]], bool]:
    """The prompts in ``value``: text, token ids, or a list of at most ``most`` of either.

    Returns:
        The prompts, and whether ``value`` was a list of prompts (a batch) and not a single one.

    Raises:
        ApiError: 400, for anything else, for an empty batch, and for an empty prompt in it.
    """
    if isinstance(value, str):
        found: list[str | list[int]] = [value]
        batch = False
    elif not isinstance(value, list):
        raise bad_value(param, f"must be text, token ids, or a list of either, got {_shown(value)}")
    elif not value:
        raise bad_value(param, "must not be empty")
    elif isinstance(value[0], str | list) and len(value) > most:
        raise bad_value(param, f"has {len(value)} prompts, at most {most} are allowed in one call")
    elif isinstance(value[0], str):
        if not all(isinstance(item, str) for item in value):
            raise bad_value(param, "must be a list of texts only, or of token ids only")
        found, batch = value, True
    elif isinstance(value[0], list):
        found = [token_ids(item, f"{param}.{i}", vocab_size) for i, item in enumerate(value)]
        batch = True
    else:
        found, batch = [token_ids(value, param, vocab_size)], False
    for index, item in enumerate(found):
        if not item:
            where = f"{param}.{index}" if batch else param
            raise bad_value(where, "must not be empty: at least one token is needed")
    return found, batch


GUIDED = dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "stop_regex"), "")
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
"""Added to a logit: 100 all but forces a token, -100 all but forbids it."""


class SamplingFields(Body):
    """How tokens are chosen, by the names that all surfaces share."""

    refused = GUIDED

    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, lt=INT32)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=2)
    logit_bias: dict[str, Bias] = Field(default={}, max_length=MAX_LOGIT_BIAS)
    n: int = Field(default=1, ge=1, le=MAX_GROUP)
    stop: str | list[str] = Field(default=[], union_mode="left_to_right")
    stop_token_ids: list[int] = Field(default=[], max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False

    @field_validator("top_k")
    @classmethod
    def _top_k_is_off_or_positive(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError(f"must be -1 (off) or at least 1, got {value}")
        return value

    @field_validator("stop")
    @classmethod
    def _few_and_short_stops(cls, value: str | list[str]) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        stops = [stop for stop in stops if stop]
        if len(stops) > MAX_STOP_STRINGS:
            raise ValueError(f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
        if any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"has a string of more than {MAX_STOP_CHARS} characters")
        return stops

    @property
    def stops(self) -> list[str]:
        """The stop strings, without empty ones."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def to_engine(
        self,
        vocab_size: int,
        *,
        max_new: int,
        min_new: int,
        seed: int | None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        token_ids_logprob: Sequence[int] = (),
        eos_at: int = -1,
        prefix: str = "",
    ) -> SamplingParams:
        """The engine's record of it; what depends on the vocabulary is checked here.

        Raises:
            ApiError: 400, for a token id outside of the vocabulary.
        """
        chosen = token_ids(list(token_ids_logprob), "token_ids_logprob", vocab_size)
        if len(chosen) > MAX_CHOSEN_LOGPROBS:
            raise bad_value("token_ids_logprob", f"has more than {MAX_CHOSEN_LOGPROBS} ids")
        return SamplingParams(
            max_new_tokens=max_new,
            min_new_tokens=min_new,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self._bias_by_token(prefix, vocab_size),
            seed=secrets.randbits(63) if seed is None else seed,
            stop_token_ids=tuple(
                token_ids(self.stop_token_ids, prefix + "stop_token_ids", vocab_size)
            ),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            token_ids_logprob=tuple(chosen),
            eos_at=eos_at,
        )

    def _bias_by_token(self, prefix: str, vocab_size: int) -> dict[int, float]:
        biases: dict[int, float] = {}
        for key, bias in self.logit_bias.items():
            token = int(key) if key.isdecimal() and len(key) <= 19 else -1
            if not 0 <= token < vocab_size:
                limit = f"outside 0..{vocab_size - 1}"
                raise bad_value(f"{prefix}logit_bias", f"has token id {key!r}, which is {limit}")
            biases[token] = bias
        return biases
