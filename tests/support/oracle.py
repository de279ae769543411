"""What the hash model must say, computed a second way: from token ids alone.

No pages, no batches, no scheduler. A request's tokens, log-probabilities and end follow from its
prompt and its sampling parameters, so this is *golden* without running an engine. That it equals
the request alone on a fresh engine is itself a test."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from engine.hash_model import BYTES, EOS, VOCAB_SIZE, mix
from transport.messages import FILL, SamplingParams, TopLogprobs

MASK = (1 << 64) - 1


@dataclass(slots=True)
class Golden:
    """The whole output of a request, and how it ends when nobody interferes."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    chosen: list[TopLogprobs] = field(default_factory=list)
    stopped: int | None = None
    """The token that ends it; None where the length does."""


class Context:
    """The running hash of everything that attention reads."""

    def __init__(self, weights: str) -> None:
        self.seed = mix(int.from_bytes(weights.encode().ljust(8, b"\0")[:8], "little"))
        self.length = 0
        self._entry = 0
        self._sum = 0

    def read(self, token: int) -> None:
        position = self.length
        self._entry = mix(self._entry ^ mix(self.seed ^ mix(token ^ (position << 20))))
        self._sum = (self._sum + mix(self._entry ^ mix(position))) & MASK
        self.length += 1

    @property
    def value(self) -> int:
        return mix(self._sum ^ self.seed)


def logprob(context: int, token: int) -> float:
    return -(mix(context ^ token) % 10_000 + 1) / 1000.0


def golden(
    prompt: Sequence[int], sampling: SamplingParams, pool_tokens: int, weights: str = "W1"
) -> Golden:
    """The output of ``prompt``; a pool of ``pool_tokens`` bounds its length (B121)."""
    eos = EOS if sampling.eos_at >= 0 else None
    room = pool_tokens - len(prompt)
    return _golden(
        tuple(prompt),
        room if sampling.max_new_tokens == FILL else min(sampling.max_new_tokens, room),
        sampling.min_new_tokens,
        sampling.seed if sampling.temperature >= 1e-6 else None,
        sampling.eos_at,
        frozenset(sampling.stop_token_ids) | ({eos} if eos and not sampling.ignore_eos else set()),
        sampling.top_logprobs,
        sampling.token_ids_logprob,
        weights,
    )


@lru_cache(maxsize=4096)
def _golden(
    prompt: tuple[int, ...],
    length: int,
    min_new: int,
    seed: int | None,
    eos_at: int,
    stops: frozenset[int],
    top: int,
    chosen: tuple[int, ...],
    weights: str,
) -> Golden:
    context = Context(weights)
    for token in prompt:
        context.read(token)
    out = Golden()
    while len(out.tokens) < length:
        choice = context.value
        if seed is not None:
            choice = mix(choice ^ mix((seed & MASK) ^ (context.length << 1)))
        token = EOS if len(out.tokens) == eos_at else choice % BYTES
        out.tokens.append(token)
        out.logprobs.append(logprob(context.value, token))
        others = [other % VOCAB_SIZE for other in range(token, token + top)]
        out.top.append([(other, logprob(context.value, other)) for other in others])
        out.chosen.append([(other, logprob(context.value, other)) for other in chosen])
        if token in stops and len(out.tokens) >= min_new:
            out.stopped = token
            break
        context.read(token)
    return out
