"""Answers of ``/v1/*`` as JSON values."""

from collections.abc import Iterable, Sequence
from typing import Any

from server.calls import Call, Choice, Piece
from server.streaming import shown_logprob
from server.tokenizer import Tokenizer
from transport.messages import Finish


def usage(choices: Sequence[Choice]) -> dict[str, object]:
    """Token counts; a prompt that is completed several times counts once."""
    prompts = {choice.prompt_index: choice for choice in choices}.values()
    prompt = sum(choice.prompt_tokens for choice in prompts)
    cached = sum(choice.member.cached_tokens for choice in prompts)
    completion = sum(choice.member.visible for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def ending(finish: Finish | None) -> dict[str, object]:
    """``finish_reason`` and ``matched_stop`` of a choice."""
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    reason = "abort" if finish.type == "error" else finish.type
    return {"finish_reason": reason, "matched_stop": finish.matched}


class TokenShapes:
    """Tokens and their log-probabilities, as either surface of OpenAI's API shows them."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token: int) -> str:
        """The token's text, or ``token:<id>`` for clients that need the id."""
        return f"token:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def chat(self, choice: Choice, piece: Piece) -> dict[str, object]:
        """``logprobs`` of a chat's choice, for the tokens of ``piece``."""
        member, wanted = choice.member, choice.submission.sampling.top_logprobs
        content = []
        for position in range(piece.start, piece.end):
            entry = self._chat_token(member.tokens[position], member.logprobs[position])
            row = member.top_logprobs[position][:wanted] if wanted else []
            entry["top_logprobs"] = [self._chat_token(token, value) for token, value in row]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token),
            "logprob": shown_logprob(logprob),
            "bytes": list(self._tokenizer.token_bytes(token)),
        }

    def completion(self, choice: Choice, piece: Piece, offset: int) -> dict[str, list[Any]]:
        """``logprobs`` of a completion's choice; ``offset`` is where its first token begins."""
        member, wanted = choice.member, choice.submission.sampling.top_logprobs
        shape: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for position in range(piece.start, piece.end):
            token, logprob = member.tokens[position], member.logprobs[position]
            name = self.name(token)
            row = member.top_logprobs[position][:wanted] if wanted else []
            shape["tokens"].append(name)
            shape["token_logprobs"].append(shown_logprob(logprob))
            shape["top_logprobs"].append(self._top([*row, (token, logprob)]))
            shape["text_offset"].append(offset)
            offset += len(name)
        return shape

    def _top(self, row: Iterable[tuple[int, float]]) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in row:  # best first: of two with the same text the better one stays
            top.setdefault(self.name(token), shown_logprob(logprob))
        return top


def whole(choice: Choice) -> Piece:
    """All of a completion that has its end, as one piece."""
    return Piece(choice.text, 0, choice.member.visible, choice.finish)


def weight_version(call: Call) -> dict[str, str]:
    """``metadata``: the version of the weights that made the answer."""
    return {"weight_version": call.choices[-1].member.weight_version}
