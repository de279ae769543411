"""One step of computation as a value: what the scheduler plans, ranks apply, and runners execute.

A :class:`Batch` is frozen, serialisable and free of tensors. It carries flashinfer's ragged
indexing, so that a paged-attention back end consumes it unchanged: with ``b`` items,

- ``qo_indptr[b+1]``: where each item's new tokens start in the flat token list;
- ``kv_indptr[b+1]`` into ``kv_indices``: each item's pages in order, covering its history and its
new tokens;
- ``kv_last_page_len[b]``: tokens in the last of those pages once this step has written.

A token of :data:`FEED` stands for "the token that the previous step sampled for this row". It
lets a step be launched before the one before it has committed (depth 2): the runner, which works
in launch order, fills it in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

from engine.config import DType
from transport.messages import SamplingParams, TopLogprobs

FEED = -1


@dataclass(frozen=True, slots=True)
class RowInit:
    """A request takes row ``row`` (admission, or readmission after a retraction): what sampling
    must know.

    ``token_ids`` is the history so far, prompt first, then the output tokens that a retracted
    request already has. The runner appends what it samples; rows need no teardown, the next init
    overwrites."""

    row: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    """End-of-sequence and stop token ids that are forbidden while fewer than ``min_new_tokens``
    exist."""


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One request's share of a step."""

    life: str
    attempt: int
    """Life and attempt key the result: a result for an attempt that is over is dropped."""
    row: int
    start: int
    """Absolute position of this item's first new token."""
    count: int
    """How many new tokens (1 for decode, up to the chunk size for prefill)."""
    sample: bool
    """Whether the last new token's logits are sampled (false for every chunk of a prompt but the
    last)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Items are ordered: decodes first, then prefill chunks.

    All arrays have type code ``q``: torch indexes with int64, and a GPU back end narrows once.
    """

    step: int
    page_size: int
    items: tuple[BatchItem, ...]
    tokens: array[int]
    """Flat new tokens of all items; :data:`FEED` where the previous step's sample
    goes."""
    qo_indptr: array[int]
    kv_indptr: array[int]
    kv_indices: array[int]
    kv_last_page_len: array[int]
    rows: tuple[RowInit, ...] = ()
    """Rows taken since the last launched step; applied before the items run."""

    def positions(self) -> array[int]:
        """Absolute position of every flat token, ``array('q')`` of ``len(tokens)``."""
        out = array("q")
        for item in self.items:
            out.extend(range(item.start, item.start + item.count))
        return out

    def pages_of(self, index: int) -> array[int]:
        """The pages of item ``index``, in order."""
        return self.kv_indices[self.kv_indptr[index] : self.kv_indptr[index + 1]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one item of a step produced. ``token`` is None for items that did not sample, and for
    those with an ``error``."""

    token: int | None
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    """``top_logprobs`` most likely tokens, best first."""
    chosen_logprobs: TopLogprobs | None = None
    error: str | None = None
    """Why this item could not be computed, although the step was: a step that failed before it left
    its row behind, for example. Its request fails, the step's others do not."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a launched batch. With ``error`` set, nothing of the step counts and
    ``sampled`` is empty."""

    step: int
    sampled: tuple[Sampled, ...] = ()
    error: str | None = None
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PageExport:
    """Copy pages out of the pool, in launch order with the steps (``kv_store`` and, later,
    backups)."""

    ticket: int
    pages: array[int]


@dataclass(frozen=True, slots=True)
class PageImport:
    """Write page contents into the pool, in launch order with the steps."""

    ticket: int
    pages: array[int]
    blobs: list[bytes]


@dataclass(frozen=True, slots=True)
class PagesDone:
    """An export or import has run; ``blobs`` is filled for an export."""

    ticket: int
    blobs: list[bytes] = field(default_factory=list)
    error: str | None = None


class Executor(Protocol):
    """A model with its KV pool: computes steps synchronously, in the order it is called.

    It is called from one thread only (the runner's, or the simulator's). It owns the per-row
    sampling state."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def weights_digest(self) -> str:
        """Identifies the weights by their content (invariant 9); pages are only valid under one
        digest."""
        ...

    @property
    def dtype(self) -> DType:
        """The compute type, with nothing left to choose."""
        ...

    @property
    def kv_layout(self) -> str:
        """How a page is laid out, in words; pages can be exchanged only where these are equal."""
        ...

    def execute(self, batch: Batch) -> StepResult:
        """Run one step. Raises only on faults of the model or device; the caller turns that into
        a failed step."""
        ...

    def export_pages(self, pages: array[int]) -> list[bytes]:
        """The contents of ``pages``, one blob each, all layers of a page contiguous."""
        ...

    def import_pages(self, pages: array[int], blobs: list[bytes]) -> None:
        """Write blobs that :meth:`export_pages` produced under the same layout and weights
        digest."""
        ...
