"""Attention of one layer over gathered pages, as functions that TorchScript compiles as well.

``engine.attention`` plans what they compute: see there for why it is grouped as it is.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Group(NamedTuple):
    """What one call computes: ``rows`` rows with ``tile`` queries each."""

    tile: int
    start: int
    stop: int
    """Which of the step's tokens the queries are, if they are consecutive."""
    queries: Tensor | None
    """``int64[rows * tile]``: which they are if they are not. A row that does not fill its tile
    repeats its last query."""
    kept: Tensor | None
    """``int64[n]``: which of the queries are no such fillers; None if all."""
    pages: Tensor
    """``int64[n]``: the page tables, one after another: one for each row, or a single one that all
    rows share."""
    gathered: Tensor
    """Where one layer of ``pages`` is gathered."""
    key: Tensor
    """``[rows, kv_heads, keys, head_dim]``: the keys that each row is offered, in ``gathered``."""
    value: Tensor
    """Likewise."""
    mask: Tensor | None
    """``[rows, 1, query length, keys]``, 0 or minus infinity; None hides nothing."""


def attend(query: Tensor, cache: Tensor, groups: list[Group], order: Tensor | None) -> Tensor:
    """Attend to one layer.

    Args:
        query: ``[tokens, heads, head_dim]``.
        cache: one layer of every page, ``[pages, page_size * 2 * kv_heads * head_dim]``.
        groups: which queries attend to which pages.
        order: ``int64[tokens]``, where the groups' results, one after another, hold each token's;
            None if they stand in order.

    Returns:
        ``[tokens, heads * head_dim]``.
    """
    parts = [attend_group(query, cache, group) for group in groups]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out if order is None else out.index_select(0, order)


def attend_group(query: Tensor, cache: Tensor, group: Group) -> Tensor:
    """``[queries, heads * head_dim]`` of one group; arguments as in :func:`attend`."""
    tile, kept, queries = group.tile, group.kept, group.queries
    ours = query[group.start : group.stop] if queries is None else query.index_select(0, queries)
    torch.index_select(cache, 0, group.pages, out=group.gathered)
    rows, kv_heads = group.key.shape[0], group.key.shape[1]
    heads, head_dim = ours.shape[1], ours.shape[2]
    if tile > 1:
        folded = ours.view(rows, tile, kv_heads, -1, head_dim).transpose(1, 2).flatten(2, 3)
    elif ours.device.type == "cpu":
        folded = ours.unsqueeze(2)
    else:
        folded = ours.view(rows, kv_heads, -1, head_dim)
    if ours.device.type == "cpu":
        # What the public function comes to on a CPU. It allows more query heads than key heads,
        # and choosing a kernel takes as long as a short attention.
        out = torch._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            folded, group.key, group.value, attn_mask=group.mask
        )[0]
    else:
        out = scaled_dot_product_attention(folded, group.key, group.value, attn_mask=group.mask)
    if tile > 1:
        out = out.view(rows, kv_heads, tile, -1, head_dim).transpose(1, 2)
    out = out.reshape(rows * tile, heads * head_dim)
    return out if kept is None else out.index_select(0, kept)
