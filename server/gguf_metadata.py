"""The key-value section of a GGUF file, and nothing of its tensors.

The server needs the vocabulary, the merges and the chat template. The ``gguf`` package reads them
too, but wraps every string in numpy arrays: 2.5 s for the default model's 98,000 strings against
0.1 s here, and that is time before the first token.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path

Value = int | float | bool | str | list["Value"]

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


class GgufError(ValueError):
    """The file is not a GGUF file that we can read."""


def read_metadata(path: Path) -> dict[str, Value]:
    """All keys and values of a GGUF file. Raises :class:`GgufError`, or OSError from opening it."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise GgufError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Reader(data).metadata()
            except (struct.error, UnicodeDecodeError, KeyError) as error:
                raise GgufError(f"{path} is truncated or damaged: {error!r}") from error
            except GgufError as error:
                raise GgufError(f"{path}: {error}") from None


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4

    def metadata(self) -> dict[str, Value]:
        version = self._int("I")
        if version not in _VERSIONS:
            raise GgufError(f"GGUF version {version} is not supported (little-endian 2 and 3 are)")
        self._int("Q")  # the number of tensors
        return {self._string(): self._value(self._int("I")) for _ in range(self._int("Q"))}

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalars(_SCALARS[kind], 1)[0]
        kind, count = self._int("I"), self._int("Q")
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], count)
        return [self._value(kind) for _ in range(count)]

    def _int(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return int(value)

    def _scalars(self, code: str, count: int) -> list[Value]:
        layout = f"<{count}{code}"
        values = list(struct.unpack_from(layout, self._data, self._at))
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        size = self._int("Q")
        end = self._at + size
        if end > len(self._data):
            raise GgufError(f"a string of {size} bytes reaches beyond the end of the file")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text
