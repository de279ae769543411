"""Logits: the output matrix, and the most likely tokens scored once more.

Shapes: ``S`` sampled tokens, ``H`` hidden size, ``V`` vocabulary size.
"""

import torch
from torch import Tensor

from engine.model.checkpoint import Weight
from engine.model.linear import multiply, product_of

SCORED_BLOCK = 256
SCORED_BLOCKS = 16
SCORED_TOKENS = 32
"""The most likely tokens are looked for in the best blocks of consecutive ids: a search through the
whole vocabulary takes ten times as long, and the best 16 are found in any case."""


class PackedHead:
    """The output matrix in bfloat16 on a CPU."""

    def __init__(self, weight: Weight) -> None:
        """``weight`` is ``[V, H]``."""
        self._product = product_of([weight], int4=False)
        self._logits = torch.empty(0, weight.shape[0])

    def __call__(self, x: Tensor) -> Tensor:
        """``float32[S, V]`` of ``bfloat16[S, H]``; the next call overwrites it.

        6 MB of new memory for 32 tokens would cost three times as much as writing to them, because
        the kernel has to provide each page anew.
        """
        if len(x) > len(self._logits):
            self._logits = torch.empty(len(x), self._logits.shape[1])
        return self._logits[: len(x)].copy_(multiply(x, self._product, few_bits=False))


def rescored(logits: Tensor, hidden: Tensor, table: Tensor) -> Tensor:
    """Replace the largest of ``logits`` (``float32[S, V]``, in place) with exact ones.

    Args:
        logits: of a rounded output matrix.
        hidden: ``float32[S, H]``, what they were computed from.
        table: ``[V, H]``, the output matrix as the file has it.
    """
    ids = likely(logits)
    rows = table.index_select(0, ids.flatten()).float().view(*ids.shape, -1)
    return logits.scatter_(1, ids, torch.bmm(rows, hidden.unsqueeze(2)).squeeze(2))


def likely(logits: Tensor) -> Tensor:
    """``int64[S, n]``: ids of the most likely tokens of ``float32[S, V]``, :data:`SCORED_TOKENS` if
    there are so many. What is left of the vocabulary behind its last full block is not searched.
    """
    rows, vocab_size = logits.shape
    if vocab_size < SCORED_BLOCK * SCORED_BLOCKS:
        return logits.topk(min(SCORED_TOKENS, vocab_size), dim=1, sorted=False).indices
    usable = vocab_size - vocab_size % SCORED_BLOCK
    blocks = logits[:, :usable].view(rows, -1, SCORED_BLOCK)
    best = blocks.amax(dim=2).topk(SCORED_BLOCKS, dim=1, sorted=False).indices
    inside = blocks.gather(1, best.unsqueeze(2).expand(-1, -1, SCORED_BLOCK)).flatten(1)
    found = inside.topk(SCORED_TOKENS, dim=1, sorted=False).indices
    block = best.gather(1, found // SCORED_BLOCK)
    return block * SCORED_BLOCK + found % SCORED_BLOCK
