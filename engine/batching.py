"""Turns planned spans into one ragged :class:`~engine.batch.Batch`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from engine.batch import FEED, Batch, BatchItem, RowInit
from engine.request import Request


class Span(NamedTuple):
    """One request's share of a step: positions ``start … start+length-1``, on ``row``, in
    ``table``."""

    request: Request
    row: int
    table: array[int]
    start: int
    length: int
    sample: bool


def build_batch(
    step: int, page_size: int, spans: Iterable[Span], rows: tuple[RowInit, ...]
) -> Batch:
    """The step as a value. A position past a request's known tokens is fed by the step before
    it."""
    tokens, indices, last = array("q"), array("q"), array("q")
    qo, kv = array("q", [0]), array("q", [0])
    items = []
    for request, row, table, start, length, sample in spans:
        tokens.extend(request.tokens[start : start + length] or [FEED])
        qo.append(len(tokens))
        used = -(-(start + length) // page_size)
        indices.extend(table[:used])
        kv.append(len(indices))
        last.append(start + length - (used - 1) * page_size)
        items.append(BatchItem(request.life, request.attempt, row, start, length, sample))
    return Batch(step, page_size, tuple(items), tokens, qo, kv, indices, last, rows)
