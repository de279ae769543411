"""The body of ``/generate``, by the names of the reference system."""

from typing import Any, ClassVar

from pydantic import ConfigDict, Field, field_validator

from server.schemas import (
    GUIDED,
    INT32,
    INT64,
    MAX_TOP_LOGPROBS_NATIVE,
    Body,
    SamplingFields,
)

MAX_RID_CHARS = 512
_MULTIMODAL = "multimodal inputs are not served by this engine"


class NativeSampling(SamplingFields):
    """``sampling_params``. Unlike elsewhere an unknown key is an error here."""

    model_config = ConfigDict(extra="forbid")
    keeps_null = frozenset({"max_new_tokens"})
    refused: ClassVar = GUIDED

    max_new_tokens: int | None = Field(default=128, ge=0, lt=INT32)
    """Null is to the context's end."""
    min_new_tokens: int = Field(default=0, ge=0, lt=INT32)
    sampling_seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    custom_params: dict[str, Any] = Field(default={})
    """Free form. ``eos_at`` tells the hash model at which output index its output ends."""
    stream_interval: int | None = None
    """Accepted and not needed: chunks are as large as the client's reading makes them."""

    @property
    def eos_at(self) -> int:
        """For the hash model; -1 is never."""
        value = self.custom_params.get("eos_at")
        return value if isinstance(value, int) and 0 <= value < INT32 else -1


class SessionParams(Body):
    """The turn of a session. A turn always continues the latest one."""

    refused: ClassVar = dict.fromkeys(
        ("rid", "replace", "drop_previous_output"), "a turn continues the session's latest turn"
    )

    id: str = Field(min_length=1)
    offset: int = Field(default=-1, ge=-1, le=-1)


class GenerateBody(Body):
    """``/generate``. Lists are checked against the batch by the handler."""

    refused: ClassVar = {
        "image_data": _MULTIMODAL,
        "video_data": _MULTIMODAL,
        "audio_data": _MULTIMODAL,
        "input_embeds": "send text or input_ids",
        "lora_path": "there are no adapters",
        "custom_logit_processor": "",
        "return_hidden_states": "",
        "return_routed_experts": "",
    }

    long_lists = frozenset({"text", "input_ids"})

    text: Any = None
    input_ids: Any = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] = Field(default={})
    rid: str | list[str] = ""
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[Any] = Field(default=[])
    """Token ids, or for each prompt a list of them or null."""
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    priority: int = Field(default=0, ge=-INT32, lt=INT32)
    session_params: SessionParams | None = None
    deadline_s: float | None = Field(default=None, gt=0)
    """Ours: the request ends by itself so many seconds after its arrival."""

    @field_validator("top_logprobs_num")
    @classmethod
    def _few_top_logprobs(cls, value: int | list[int]) -> int | list[int]:
        for count in as_list(value):
            if not 0 <= count <= MAX_TOP_LOGPROBS_NATIVE:
                limit = f"between 0 and {MAX_TOP_LOGPROBS_NATIVE}"
                raise ValueError(f"must be {limit}, got {count}")
        return value

    @field_validator("rid")
    @classmethod
    def _short_rids(cls, value: str | list[str]) -> str | list[str]:
        if any(len(rid) > MAX_RID_CHARS for rid in as_list(value)):
            raise ValueError(f"must have at most {MAX_RID_CHARS} characters")
        return value


def as_list(value: Any) -> list[Any]:
    """A value that may be given once for all prompts or once for each, as a list."""
    return value if isinstance(value, list) else [value]
