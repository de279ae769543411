"""The executor of real models: a Llama, its KV pool and an attention back end, one step at a time.

It keeps one :class:`RowSampler` for each request row. Everything else about a request arrives
with the batch."""

from __future__ import annotations

import time
from array import array
from pathlib import Path

import torch
from torch import Tensor

from engine.attention import PagedIndex, attention_backend
from engine.batch import FEED, Batch, BatchItem, Sampled, StepResult
from engine.config import DType, EngineConfig
from engine.kv import KVLayout, KVPool, WritableBuffer
from engine.model.config import ModelLoadError
from engine.model.llama import Llama
from engine.model.loader import open_checkpoint
from engine.sampler import RowSampler, sample

DEFAULT_POOL_TOKENS = 32_768


def load_torch_executor(
    config: EngineConfig, memory: WritableBuffer | None = None
) -> TorchExecutor:
    """Load the model at ``config.model_path`` and allocate its KV pool, or lay the pool over
    ``memory``.

    Raises:
        ModelLoadError: the model cannot be served as configured.
        AttentionUnavailable: the attention back end cannot run here.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = torch.device(config.device)
    checkpoint = open_checkpoint(Path(config.model_path))
    compute_type = config.dtype
    if compute_type == "auto":
        few_bits = checkpoint.four_bit and device.type == "cpu"
        compute_type = "int4" if few_bits else "bfloat16"
    dtype = torch.float32 if compute_type == "float32" else torch.bfloat16
    limit = checkpoint.config.context_length
    if config.context_length > limit:
        raise ModelLoadError(
            f"{config.model_path}: context length {config.context_length} was asked for, "
            f"the model has {limit}"
        )
    with torch.inference_mode():
        model = Llama(checkpoint, dtype, device, int4=compute_type == "int4")
        context_length = config.context_length or limit
        layout = KVLayout(
            num_layers=model.config.num_layers,
            page_size=config.page_size,
            num_kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            dtype=dtype,
        )
        num_pages = config.kv_pages or -(
            -max(DEFAULT_POOL_TOKENS, context_length) // config.page_size
        )
        kv = KVPool(layout, num_pages, device, memory)
        return TorchExecutor(
            model, kv, config.attention, context_length, checkpoint.digest, compute_type
        )


class TorchExecutor:
    """Implements :class:`engine.batch.Executor`."""

    def __init__(
        self,
        model: Llama,
        kv: KVPool,
        attention: str,
        context_length: int,
        weights_digest: str,
        dtype: DType,
    ) -> None:
        self.kv = kv
        self._model = model
        self._attention = attention_backend(attention, kv, model.config.num_heads)
        self._context_length = context_length
        self._weights_digest = weights_digest
        self._dtype = dtype
        self._rows: dict[int, RowSampler] = {}
        self._device = kv.pages.device

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._model.config.eos_token_ids

    @property
    def weights_digest(self) -> str:
        return self._weights_digest

    @property
    def architecture(self) -> str:
        return self._model.config.architecture

    @property
    def dtype(self) -> DType:
        return self._dtype

    @property
    def kv_layout(self) -> str:
        return str(self.kv.layout)

    @property
    def num_pages(self) -> int:
        return self.kv.num_pages

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Run one step. An item that cannot be computed as the batch says (:meth:`_errors`) gets an
        error, the others their tokens.

        Raises:
            ValueError: the batch has another page size than the pool.
        """
        started = time.perf_counter()
        logits, errors = self._compute(batch)
        sampling = [item for item in batch.items if item.sample]
        good = [
            place
            for place, index in enumerate(i for i, item in enumerate(batch.items) if item.sample)
            if index not in errors
        ]
        if len(good) < len(sampling):
            logits = logits[good]
        chosen = [sampling[place] for place in good]
        tokens = iter(
            sample(
                logits,
                [self._rows[item.row] for item in chosen],
                [item.start + item.count for item in chosen],
            )
            if chosen
            else ()
        )
        sampled = tuple(
            Sampled(None, error=errors[index])
            if index in errors
            else next(tokens)
            if item.sample
            else Sampled(None)
            for index, item in enumerate(batch.items)
        )
        return StepResult(batch.step, sampled, compute_s=time.perf_counter() - started)

    def logits(self, batch: Batch) -> Tensor:
        """Apply the batch's row inits, compute it without sampling, and return logits ``[S,
        vocab]``, one row for each item that samples, in the compute type. Those of an item that
        :meth:`execute` would give an error mean nothing."""
        return self._compute(batch)[0].clone()

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> tuple[Tensor, dict[int, str]]:
        """:meth:`logits`, and what is wrong with which item."""
        layout = self.kv.layout
        for init in batch.rows:
            self._rows[init.row] = RowSampler(init, self.vocab_size, self._device)
        if batch.page_size != layout.page_size:
            raise ValueError(
                f"batch has pages of {batch.page_size} tokens, the pool {layout.page_size}"
            )
        tokens = array("q", batch.tokens)
        errors = self._feed(batch, tokens)
        self.kv.clear(_begun_pages(batch))
        sampled = [batch.qo_indptr[i + 1] - 1 for i, item in enumerate(batch.items) if item.sample]
        positions = torch.frombuffer(batch.positions(), dtype=torch.int64)
        self._attention.plan(
            PagedIndex(
                page_size=batch.page_size,
                qo_indptr=batch.qo_indptr,
                kv_indptr=batch.kv_indptr,
                kv_indices=batch.kv_indices,
                kv_last_page_len=batch.kv_last_page_len,
            )
        )
        logits = self._model.forward(
            tokens=torch.frombuffer(tokens, dtype=torch.int64).to(self._device),
            positions=positions.to(self._device),
            sampled=torch.tensor(sampled, dtype=torch.int64, device=self._device),
            kv=self.kv,
            slots=self._slots(batch, positions),
            attention=self._attention,
            decodes=all(
                item.count == 1 and index not in errors and self._is_output(item)
                for index, item in enumerate(batch.items)
            ),
        )
        return logits, errors

    def _is_output(self, item: BatchItem) -> bool:
        return item.start >= self._rows[item.row].prompt_len

    def _feed(self, batch: Batch, tokens: array[int]) -> dict[int, str]:
        """Put fed tokens into ``tokens``, and find the items that cannot be computed: by their
        index in the batch, with the reason.

        A row is not where the batch says it is when the step before failed, and an id may lie
        outside the vocabulary only if the door was passed by. Such an item is computed with token 0
        in its own pages, and nothing of it is used.
        """
        errors: dict[int, str] = {}
        for index, item in enumerate(batch.items):
            row = self._rows.get(item.row)
            end = item.start + item.count
            last = batch.qo_indptr[index + 1] - 1
            fed = tokens[last] == FEED
            if row is None or ((item.sample or fed) and row.length != end):
                known = 0 if row is None else row.length
                errors[index] = f"row {item.row} has {known} tokens, the batch computes {end}"
            if fed:
                tokens[last] = 0 if row is None else row.last_token
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            for index in range(len(batch.items)):
                for place in range(batch.qo_indptr[index], batch.qo_indptr[index + 1]):
                    if not 0 <= tokens[place] < self.vocab_size:
                        errors[index] = f"token id {tokens[place]} is outside the vocabulary"
                        tokens[place] = 0
        return errors

    def export_pages(self, pages: array[int]) -> list[bytes]:
        return self.kv.read_pages(pages)

    @torch.inference_mode()
    def import_pages(self, pages: array[int], blobs: list[bytes]) -> None:
        self.kv.write_pages(pages, blobs)

    def _slots(self, batch: Batch, positions: Tensor) -> tuple[Tensor, ...]:
        """Where each new token's keys and values go: its position's page in its item's table."""
        counts = torch.tensor([item.count for item in batch.items])
        tables = torch.frombuffer(batch.kv_indptr, dtype=torch.int64)[:-1].repeat_interleave(counts)
        indices = torch.frombuffer(batch.kv_indices, dtype=torch.int64)
        pages = indices[tables + positions // batch.page_size]
        return self.kv.slots(pages.to(self._device), (positions % batch.page_size).to(self._device))


def _begun_pages(batch: Batch) -> list[int]:
    """Pages that a step writes from their start and does not fill."""
    return [
        batch.kv_indices[batch.kv_indptr[index + 1] - 1]
        for index, (item, filled) in enumerate(
            zip(batch.items, batch.kv_last_page_len, strict=True)
        )
        if filled <= item.count and filled < batch.page_size
    ]
