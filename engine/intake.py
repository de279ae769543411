"""The door: every limit that a submission must satisfy, checked before it owns anything.

The server checks the same limits earlier and in the client's words; this is the check that
counts. A refusal is a :class:`Refusal` with the HTTP status and the field, and the request
retires from ``arrived`` with it."""

from dataclasses import dataclass
from typing import Final

from transport.messages import FILL, Finish, SamplingParams, Submit

MAX_STOP_TOKEN_IDS: Final = 64
MAX_LOGIT_BIAS: Final = 1024
MAX_TOP_LOGPROBS: Final = 128
MAX_CHOSEN_LOGPROBS: Final = 128
MAX_GROUP: Final = 128
MAX_BIAS: Final = 100.0
"""Largest magnitude of a logit bias, as in the OpenAI API. It decides any choice already."""
MIN_REPETITION_PENALTY: Final = 0.01
MAX_REPETITION_PENALTY: Final = 2.0
"""Logits are divided by it: a divisor near zero leaves the range of float32."""


class Refusal(Exception):  # noqa: N818 - an answer, not a fault
    """Why a submission is not accepted."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.finish: Final = Finish(
            type="abort",
            message=message,
            status=status,
            err_type="BadRequestError" if status == 400 else "ServiceUnavailableError",
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What this node can serve. ``pool_tokens`` is the size of its KV pool in tokens."""

    vocab_size: int
    context_length: int
    pool_tokens: int

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one output token in context and pool."""
        return min(self.context_length, self.pool_tokens) - 1


def check_submission(submit: Submit, prompt: list[int], limits: Limits) -> int:
    """Raise :class:`Refusal` for anything out of bounds; returns the effective ``max_new_tokens``.

    ``prompt`` includes the session's history. A request that fits the context but not the whole
    pool ends with ``length`` when the pool is full (B121): alone on the device it always fits
    what was promised here."""
    sampling = submit.sampling
    if not prompt:
        raise Refusal("prompt: is empty; at least one token is needed")
    if not 1 <= submit.n <= MAX_GROUP:
        raise Refusal(f"n: {submit.n} is outside 1..{MAX_GROUP}")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise Refusal(f"prompt: token id {bad} is outside 0..{limits.vocab_size - 1}")
    if len(prompt) > limits.context_length - 1:
        raise Refusal(
            f"prompt: {len(prompt)} tokens; the context length is {limits.context_length}, "
            f"which leaves room for {limits.context_length - 1}"
        )
    if len(prompt) > limits.max_prompt_tokens:
        raise Refusal(
            f"prompt: {len(prompt)} tokens can never fit; the KV pool holds {limits.pool_tokens}, "
            f"which leaves room for {limits.max_prompt_tokens}"
        )
    overlong = len(prompt) + sampling.max_new_tokens > limits.context_length
    if overlong and not submit.limit_is_default:
        raise Refusal(
            f"max_new_tokens: {len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones "
            f"exceed the context length of {limits.context_length}"
        )
    if submit.deadline_s is not None and not submit.deadline_s > 0:
        raise Refusal(f"deadline_s: {submit.deadline_s} is not positive")
    check_sampling(sampling, limits.vocab_size)
    room = min(limits.context_length, limits.pool_tokens) - len(prompt)
    return room if sampling.max_new_tokens == FILL else min(sampling.max_new_tokens, room)


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise :class:`Refusal` for a sampling value out of bounds, NaN and infinities included."""
    most = 2**31 - 1 if sampling.max_new_tokens == FILL else sampling.max_new_tokens
    ranges: tuple[tuple[str, float, float, float], ...] = (
        ("max_new_tokens", most, 0, 2**31 - 1),
        ("min_new_tokens", sampling.min_new_tokens, 0, most),
        ("temperature", sampling.temperature, 0, 1e6),
        ("min_p", sampling.min_p, 0, 1),
        ("presence_penalty", sampling.presence_penalty, -2, 2),
        ("frequency_penalty", sampling.frequency_penalty, -2, 2),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
        ("top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS),
        ("seed", sampling.seed, -(2**63), 2**63 - 1),
    )
    for name, value, low, high in ranges:
        if not low <= value <= high:  # false for NaN
            raise Refusal(f"{name}: {value} is outside {low}..{high}")
    if not 0 < sampling.top_p <= 1:
        raise Refusal(f"top_p: {sampling.top_p} is outside (0, 1]")
    if sampling.top_k != -1 and sampling.top_k < 1:
        raise Refusal(f"top_k: {sampling.top_k} is neither -1 (off) nor at least 1")
    for name, ids, most in (
        ("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ("token_ids_logprob", sampling.token_ids_logprob, MAX_CHOSEN_LOGPROBS),
        ("logit_bias", tuple(sampling.logit_bias), MAX_LOGIT_BIAS),
    ):
        if len(ids) > most:
            raise Refusal(f"{name}: {len(ids)} entries; at most {most} are allowed")
        for token in ids:
            if not 0 <= token < vocab_size:
                raise Refusal(f"{name}: token id {token} is outside 0..{vocab_size - 1}")
    for token, bias in sampling.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:  # false for NaN
            raise Refusal(
                f"logit_bias: {bias} for token {token} is outside {-MAX_BIAS}..{MAX_BIAS}"
            )
