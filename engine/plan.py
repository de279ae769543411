"""A step as bytes: what one decision maker sends to every rank (invariant 10).

Only the scheduler looks at the clock, at deadlines, aborts and memory. What it decides is in the
batch, and ranks apply the same batch in the same order; a rank whose clock is skewed cannot drop
another set of requests (B128). The encoding is msgpack with typed records, so a plan from a
foreign or older sender is refused instead of half understood."""

from __future__ import annotations

import sys
from array import array
from typing import Final

import msgspec

from engine.batch import Batch, BatchItem, PageExport, PageImport, RowInit
from transport.messages import SamplingParams

PLAN_VERSION: Final = 1


class _Item(msgspec.Struct, frozen=True, array_like=True):
    life: str
    attempt: int
    row: int
    start: int
    count: int
    sample: bool


class _Row(msgspec.Struct, frozen=True, array_like=True):
    row: int
    token_ids: bytes
    prompt_len: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]


class _Step(msgspec.Struct, frozen=True, tag="step"):
    version: int
    step: int
    page_size: int
    items: list[_Item]
    rows: list[_Row]
    tokens: bytes
    qo_indptr: bytes
    kv_indptr: bytes
    kv_indices: bytes
    kv_last_page_len: bytes


class _Export(msgspec.Struct, frozen=True, tag="export"):
    version: int
    ticket: int
    pages: bytes


class _Import(msgspec.Struct, frozen=True, tag="import"):
    version: int
    ticket: int
    pages: bytes
    blobs: list[bytes]


class PlanError(ValueError):
    """Bytes that are no plan of this version."""


_DECODER: Final = msgspec.msgpack.Decoder(_Step | _Export | _Import)


def encode(work: Batch | PageExport | PageImport) -> bytes:
    """``work`` for other ranks; int64 arrays in little-endian order."""
    record: _Step | _Export | _Import
    if isinstance(work, Batch):
        record = _Step(
            PLAN_VERSION,
            work.step,
            work.page_size,
            [_Item(i.life, i.attempt, i.row, i.start, i.count, i.sample) for i in work.items],
            [
                _Row(r.row, _pack(array("q", r.token_ids)), r.prompt_len, r.sampling, r.stop_ids)
                for r in work.rows
            ],
            _pack(work.tokens),
            _pack(work.qo_indptr),
            _pack(work.kv_indptr),
            _pack(work.kv_indices),
            _pack(work.kv_last_page_len),
        )
    elif isinstance(work, PageExport):
        record = _Export(PLAN_VERSION, work.ticket, _pack(work.pages))
    else:
        record = _Import(PLAN_VERSION, work.ticket, _pack(work.pages), work.blobs)
    return msgspec.msgpack.encode(record)


def decode(raw: bytes) -> Batch | PageExport | PageImport:
    """The inverse of :func:`encode`. Raises :class:`PlanError`."""
    try:
        record = _DECODER.decode(raw)
    except msgspec.MsgspecError as error:
        raise PlanError(f"no plan: {error}") from None
    if record.version != PLAN_VERSION:
        raise PlanError(f"a plan of version {record.version}, not {PLAN_VERSION}")
    match record:
        case _Export():
            return PageExport(record.ticket, _unpack(record.pages))
        case _Import():
            return PageImport(record.ticket, _unpack(record.pages), record.blobs)
        case _:
            return Batch(
                record.step,
                record.page_size,
                tuple(
                    BatchItem(i.life, i.attempt, i.row, i.start, i.count, i.sample)
                    for i in record.items
                ),
                _unpack(record.tokens),
                _unpack(record.qo_indptr),
                _unpack(record.kv_indptr),
                _unpack(record.kv_indices),
                _unpack(record.kv_last_page_len),
                tuple(
                    RowInit(
                        r.row, _unpack(r.token_ids).tolist(), r.prompt_len, r.sampling, r.stop_ids
                    )
                    for r in record.rows
                ),
            )


def _pack(values: array[int]) -> bytes:
    if sys.byteorder != "little":
        values = array("q", values)
        values.byteswap()
    return values.tobytes()


def _unpack(raw: bytes) -> array[int]:
    values = array("q")
    try:
        values.frombytes(raw)
    except ValueError as error:
        raise PlanError(f"no plan: {error}") from None
    if sys.byteorder != "little":
        values.byteswap()
    return values
