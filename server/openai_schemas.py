"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``, extensions of other engines
included."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from server.errors import bad_value, unsupported
from server.native_schemas import MAX_RID_CHARS, SessionParams
from server.schemas import (
    GUIDED,
    INT32,
    INT64,
    MAX_TOP_LOGPROBS_OPENAI,
    Body,
    SamplingFields,
)

_UNSUPPORTED = GUIDED | dict.fromkeys(
    (
        *("allowed_token_ids", "bad_words", "custom_logit_processor", "lora_path"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("truncate_prompt_tokens", "use_beam_search", "return_hidden_states"),
    ),
    "",
)

TokenLimit = Annotated[int, Field(ge=0, lt=INT32)]


class StreamOptions(Body):
    """What a stream carries beside the tokens."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Body):
    """Only ``text`` is served."""

    type: str = "text"


class OpenAIFields(SamplingFields):
    """What both bodies have in common."""

    model: str | None = None
    max_tokens: TokenLimit | None = None
    min_tokens: TokenLimit = 0
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat = ResponseFormat()
    include_stop_str_in_output: bool = False
    return_tokens_as_token_ids: bool = False
    rid: str | list[str] = ""
    priority: int = Field(default=0, ge=-INT32, lt=INT32)
    session_params: SessionParams | None = None
    deadline_s: float | None = Field(default=None, gt=0)
    """Ours: the request ends by itself so many seconds after its arrival."""
    best_of: int | None = None
    prompt_logprobs: int | None = None

    @property
    def token_limit(self) -> int | None:
        """What the client asked for; None where it did not."""
        return self.max_tokens

    def check(self) -> None:
        """What no single field can say.

        Raises:
            ApiError: 400.
        """
        if self.response_format.type != "text":
            raise unsupported("response_format", f"only 'text', not {self.response_format.type!r}")
        if self.stream_options is not None and not self.stream:
            raise bad_value("stream_options", "is only allowed together with stream")
        if self.best_of not in (None, 1, self.n):
            raise unsupported("best_of", "every one of n completions is returned")
        if self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs")
        if self.token_limit is not None and self.min_tokens > self.token_limit:
            limit = f"the token limit ({self.token_limit})"
            raise bad_value("min_tokens", f"must be at most {limit}, got {self.min_tokens}")
        for rid in self.rid if isinstance(self.rid, list) else [self.rid]:
            if len(rid) > MAX_RID_CHARS:
                raise bad_value("rid", f"must have at most {MAX_RID_CHARS} characters")

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_every_chunk(self) -> bool:
        """Whether every chunk has a usage."""
        return self.with_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )


class CompletionBody(OpenAIFields):
    """``/v1/completions``."""

    refused: ClassVar = {**_UNSUPPORTED, "suffix": ""}

    long_lists = frozenset({"prompt"})

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS_OPENAI)

    def check(self) -> None:
        super().check()
        if self.prompt is None:
            raise bad_value("prompt", "is required")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "not together with logprobs, which prompts do not have")


class ChatBody(OpenAIFields):
    """``/v1/chat/completions``."""

    refused: ClassVar = {**_UNSUPPORTED, "audio": "only text is generated", "functions": "",
                         "web_search_options": ""}  # fmt: skip

    messages: list[dict[str, Any]]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS_OPENAI)
    tools: list[Any] = Field(default=[])
    tool_choice: str | dict[str, Any] = "auto"
    modalities: list[Literal["text"]] = Field(default=["text"])
    chat_template_kwargs: dict[str, Any] = Field(default={})
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise bad_value("messages", "must not be empty")
        if self.tools and self.tool_choice != "none":
            raise unsupported("tools", "send tool_choice 'none', or no tools")
        if not self.tools and self.tool_choice not in ("auto", "none"):
            raise unsupported("tool_choice", "there are no tools")
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "is only allowed together with logprobs")
