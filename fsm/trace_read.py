"""Reading traces: plain or gzip, whole or cut short, in pieces of constant size.

A reader yields batches of lines. What cannot be decoded comes as a :class:`Malformed` in its place
and reading goes on with the next line; only a file without a usable header is refused as a
whole."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeAlias

import msgspec

from fsm.trace import TRACE_VERSION, Header, Line

CHUNK: Final = 1 << 18
MAX_LINE: Final = 1 << 20
"""Bytes of the longest line that is read; a longer one is malformed, and skipped."""


class Unusable(Exception):  # noqa: N818 - an answer about a file, not a fault of ours
    """The file is not a trace of this format; the message says why."""


class Malformed(msgspec.Struct, frozen=True):
    """A line that is no line of a trace."""

    reason: str


Read: TypeAlias = Line | Malformed


class _Probe(msgspec.Struct):
    kind: str = ""
    version: int = TRACE_VERSION


class Trace(Protocol):
    """Lines, from a file (:class:`TraceReader`) or from memory
    (:class:`TraceLines`)."""

    @property
    def name(self) -> str: ...

    @property
    def header(self) -> Header: ...

    def __iter__(self) -> Iterator[tuple[int, list[Read]]]:
        """Batches of (number of the first line, lines), without the header."""
        ...


class TraceLines:
    """A trace that is in memory."""

    def __init__(self, name: str, header: Header, lines: Sequence[Read]) -> None:
        self.name: Final = name
        self.header: Final = header
        self._lines: Final = list(lines)

    def __iter__(self) -> Iterator[tuple[int, list[Read]]]:
        yield 2, self._lines


class TraceReader:
    """One trace file. Iterate it once: batches of (number of the first line, lines).

    Raises:
        Unusable: It is empty, unreadable, of another version, or does not begin with a header.
    """

    def __init__(self, path: Path) -> None:
        self.name: Final = str(path)
        self.cut = ""
        """After reading: where and how the file breaks off, if it does."""
        try:
            self._raw: BinaryIO = path.open("rb")
            self.size: Final = path.stat().st_size
        except OSError as error:
            raise Unusable(f"{path}: {error.strerror}") from error
        try:
            magic = self._raw.read(2)
            self._raw.seek(0)
            zipped = magic == b"\x1f\x8b"
            self._stream: BinaryIO | gzip.GzipFile = (
                gzip.GzipFile(fileobj=self._raw) if zipped else self._raw
            )
            self._decoder = msgspec.json.Decoder(Line)
            self._rest = b""
            self._next = 1
            self.header: Final = self._header()
        except Unusable as error:
            self._raw.close()
            raise Unusable(f"{path}: {error}") from None

    @property
    def position(self) -> int:
        """Bytes of the file that were read so far, for progress."""
        return self._raw.tell() if not self._raw.closed else self.size

    def close(self) -> None:
        """For whoever does not read to the end."""
        self._raw.close()

    def __iter__(self) -> Iterator[tuple[int, list[Read]]]:
        try:
            while block := self._block():
                lines = self._decode(block)
                yield self._next, lines
                self._next += len(lines)
        finally:
            self._raw.close()

    def _header(self) -> Header:
        while b"\n" not in self._rest and len(self._rest) <= MAX_LINE:
            chunk = self._read()
            if not chunk:
                break
            self._rest += chunk
        first, _, self._rest = self._rest.partition(b"\n")
        if not first:
            raise Unusable(self.cut or "the file is empty")
        try:
            probe = msgspec.json.decode(first, type=_Probe)
            if probe.kind == "header" and probe.version != TRACE_VERSION:
                raise Unusable(
                    f"trace format version {probe.version}; this program reads {TRACE_VERSION}"
                )
            header = self._decoder.decode(first)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unusable(f"line 1 is no trace header: {error}") from None
        if not isinstance(header, Header):
            raise Unusable(f"line 1 is no trace header but a {probe.kind} line")
        self._next = 2
        return header

    def _block(self) -> bytes:
        """Whole lines; nothing at the end of the file."""
        parts = [self._rest] if self._rest else []
        size = len(self._rest)
        while True:
            cut = self._rest.rfind(b"\n") + 1
            if cut:
                parts[-1] = self._rest[:cut]
                self._rest = self._rest[cut:]
                return b"".join(parts)
            self._rest = self._read()
            if not self._rest:
                return self._last(b"".join(parts))
            parts.append(self._rest)
            size += len(self._rest)
            if size > MAX_LINE and b"\n" not in self._rest:
                parts = [b"".join(parts)[:MAX_LINE], b""]  # too long whatever follows

    def _last(self, rest: bytes) -> bytes:
        """What follows the last line break is a line if it decodes, else the file was cut there."""
        if rest:
            try:
                self._decoder.decode(rest)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.cut = self.cut or "it breaks off in the middle of a line"
                return b""
        return rest

    def _decode(self, block: bytes) -> list[Read]:
        try:
            whole: list[Read] = list(self._decoder.decode_lines(block))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return [self._decode_one(raw) for raw in block.removesuffix(b"\n").split(b"\n")]
        if len(whole) != block.count(b"\n") + (not block.endswith(b"\n")):  # skips empty lines
            return [self._decode_one(raw) for raw in block.removesuffix(b"\n").split(b"\n")]
        return whole

    def _decode_one(self, raw: bytes) -> Read:
        if len(raw) >= MAX_LINE:
            return Malformed(f"longer than {MAX_LINE} bytes")
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Malformed(str(error) if raw.strip() else "an empty line")

    def _read(self) -> bytes:
        if self.cut:
            return b""
        try:
            if isinstance(self._stream, gzip.GzipFile):
                return self._stream.read1(CHUNK)
            return self._stream.read(CHUNK)
        except EOFError:
            self.cut = "its compressed data breaks off"
        except (OSError, zlib.error) as error:
            self.cut = f"it cannot be read on: {error}"
        return b""
