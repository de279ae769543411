"""A step as bytes: what one decision maker sends to every rank (invariant 10).

Only the scheduler looks at the clock, at deadlines, aborts and memory. What it decides is in the
batch, and ranks apply the same batch in the same order; a rank whose clock is skewed cannot drop
another set of requests (B128). The encoding is msgpack with typed records, so a plan from a
foreign or older sender is refused instead of half understood.

Not only steps change what a device holds: so do copies, other weights, and what a wire reads and
writes. Each of them is a plan, and all plans of a node have one order: :func:`seal` gives a plan
its number and a checksum, so that a gap, a repetition or a damaged byte is noticed by whoever opens
it."""

from __future__ import annotations

import sys
import zlib
from array import array
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from engine.batch import Batch, BatchItem, PageExport, PageImport, RowInit
from transport.messages import SamplingParams

PLAN_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class WeightLoad:
    """Compute under the weights of this name from here on."""

    weights: str


@dataclass(frozen=True, slots=True)
class WireSend:
    """Rank I of the writer reads ``pages`` of its own pool, for rank I of the peer."""

    ticket: int
    pages: array[int]


@dataclass(frozen=True, slots=True)
class WireLand:
    """What rank I of the writer has read lies in ``pages`` of rank I here, from here on.

    ``writer`` is the boot id of the writing process, and ``ticket`` its number of the write.
    """

    writer: str
    ticket: int
    pages: array[int]


Plan: TypeAlias = Batch | PageExport | PageImport | WeightLoad | WireSend | WireLand
"""Everything that changes, or reads, what a node's device holds."""


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


class _Weights(msgspec.Struct, frozen=True, tag="weights"):
    version: int
    weights: str


class _Send(msgspec.Struct, frozen=True, tag="send"):
    version: int
    ticket: int
    pages: bytes


class _Land(msgspec.Struct, frozen=True, tag="land"):
    version: int
    writer: str
    ticket: int
    pages: bytes


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    number: int
    check: int
    plan: bytes


class PlanError(ValueError):
    """Bytes that are no plan of this version, or not the plan that is due."""


_Record: TypeAlias = _Step | _Export | _Import | _Weights | _Send | _Land

_DECODER: Final = msgspec.msgpack.Decoder(_Record)
_SEALED: Final = msgspec.msgpack.Decoder(_Sealed)


def encode(work: Plan) -> bytes:
    """``work`` for other ranks; int64 arrays in little-endian order."""
    return msgspec.msgpack.encode(_record(work))


def _record(work: Plan) -> _Record:
    match work:
        case Batch():
            return _step(work)
        case PageExport():
            return _Export(PLAN_VERSION, work.ticket, _pack(work.pages))
        case PageImport():
            return _Import(PLAN_VERSION, work.ticket, _pack(work.pages), work.blobs)
        case WeightLoad():
            return _Weights(PLAN_VERSION, work.weights)
        case WireSend():
            return _Send(PLAN_VERSION, work.ticket, _pack(work.pages))
        case WireLand():
            return _Land(PLAN_VERSION, work.writer, work.ticket, _pack(work.pages))


def _step(work: Batch) -> _Step:
    return _Step(
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


def decode(raw: bytes) -> Plan:
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
        case _Weights():
            return WeightLoad(record.weights)
        case _Send():
            return WireSend(record.ticket, _unpack(record.pages))
        case _Land():
            return WireLand(record.writer, record.ticket, _unpack(record.pages))
        case _Step():
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


def seal(number: int, plan: bytes) -> bytes:
    """The encoded ``plan`` as the ``number``-th of its node; 1 is the first."""
    return msgspec.msgpack.encode(_Sealed(number, _check(number, plan), plan))


def unseal(raw: bytes) -> tuple[int, bytes]:
    """Number and encoded plan. Raises :class:`PlanError` where a byte is not as it was sealed."""
    try:
        sealed = _SEALED.decode(raw)
    except msgspec.MsgspecError as error:
        raise PlanError(f"a damaged plan: {error}") from None
    if sealed.check != _check(sealed.number, sealed.plan):
        raise PlanError("a damaged plan: its checksum differs")
    return sealed.number, sealed.plan


def _check(number: int, plan: bytes) -> int:
    return zlib.crc32(plan, zlib.crc32(str(number).encode()))


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
