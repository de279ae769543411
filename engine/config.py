"""The engine's settings: read once, validated, frozen. The command line and ``INTERLOCK_…``
variables fill it.

The server hands it to the engine process as one JSON line on standard input.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["auto", "float32", "bfloat16", "int4"]


class EngineConfig(BaseModel):
    """Every field has a default that works. Sizes are in the unit their name says; times are in
    seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "smollm2-135m"
    """A name (``smollm2-135m``), ``hash`` / ``hash:W2``, a GGUF file, a Hugging Face folder, or
    ``org/name``."""
    model_path: str = ""
    """Where ``model`` was resolved to on this machine; empty for the hash model."""
    device: str = "cpu"
    """Where the model computes, in torch's names."""
    dtype: DType = "auto"
    """Compute type. ``int4`` keeps weight matrices as 4-bit groups of 32 (CPU only) and computes
    in bfloat16. ``auto`` is int4 for 4-bit models on a CPU, bfloat16 for all others."""
    attention: Literal["torch", "flashinfer"] = "torch"
    """Attention back end; ``flashinfer`` needs an NVIDIA GPU and the extra of that name."""
    threads: int = Field(default=0, ge=0)
    """Compute threads of the model; 0 is one for each core."""

    page_size: int = Field(default=16, ge=1, le=1024)
    """Tokens in one KV page."""
    kv_pages: int = Field(default=0, ge=0)
    """KV pages in the pool; 0 chooses 32,768 tokens' worth, or the context length if that is
    more."""
    context_length: int = Field(default=0, ge=0)
    """Longest prompt plus output in tokens; 0 takes the model's own."""
    max_running_requests: int = Field(default=64, ge=1, le=4096)
    """Request rows: how many requests hold pages at once."""
    max_queued_requests: int = Field(default=256, ge=0)
    """Requests that wait for admission; one more is refused with 503."""
    chunked_prefill_size: int = Field(default=256, ge=1)
    """Prompt tokens in one step, beside the decodes; a longer prompt is computed in chunks."""
    depth: Literal[1, 2] = 2
    """Steps in flight: with 2, the next step is launched before the last one is committed."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts and outputs, and share it with requests that begin alike."""
    max_overtakes: int = Field(default=64, ge=0)
    """How often requests behind it may be admitted before one that does not fit, before it blocks
    the queue."""

    waiting_timeout_s: float | None = Field(default=None, gt=0)
    """Longest wait for admission; off by default. A request past it is refused with 503."""
    running_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time from admission to the end; off by default."""

    kv_store: str = ""
    """Directory of stored KV pages (prefetched before admission, written after prefill); empty is
    off."""
    prefetch_timeout_s: float = Field(default=0.5, gt=0)
    """A prefetch that is later than this is given up, and its request runs as a miss."""
    max_prefetches: int = Field(default=16, ge=1)
    """Loads from the KV store at a time."""
    max_sessions: int = Field(default=1024, ge=1)
    """Streaming sessions that may be open."""

    hash_step_ms: float = Field(default=1.0, ge=0)
    """Hash model: how long a step takes."""
    checks: bool = False
    """Run every invariant check after every transition (always on in tests and simulation)."""
    trace: str = ""
    """Write a transition trace (JSON lines) to this file; empty is off."""
    debug: bool = False
