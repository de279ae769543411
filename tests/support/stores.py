"""A page store in memory whose operations end when the test says so: late, failed or torn."""

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.hash_model import HashModel
from engine.store import PageKey, StoreDone, page_keys
from engine.stored import key_seed


@dataclass(frozen=True, slots=True)
class Operation:
    """A read, or a write with its blobs, that was started and is not over."""

    ticket: int
    keys: tuple[PageKey, ...]
    blobs: tuple[bytes, ...] | None


class MemoryStore:
    """An :class:`engine.store.PageStore`. What is kept carries a digest, as in a directory."""

    def __init__(self) -> None:
        self.kept: dict[PageKey, tuple[bytes, bytes]] = {}
        self.started: deque[Operation] = deque()
        self.full = False
        self.reads = 0
        self._done: list[StoreDone] = []

    def hits(self, keys: Sequence[PageKey]) -> int:
        count = 0
        for key in keys:
            if key not in self.kept:
                break
            count += 1
        return count

    def load(self, ticket: int, keys: Sequence[PageKey]) -> None:
        self.reads += 1
        self.started.append(Operation(ticket, tuple(keys), None))

    def save(self, ticket: int, keys: Sequence[PageKey], blobs: Sequence[bytes]) -> None:
        self.started.append(Operation(ticket, tuple(keys), tuple(blobs)))

    def poll(self) -> list[StoreDone]:
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        self.finish()

    def finish(self, count: int | None = None, error: str = "") -> None:
        """End the ``count`` oldest operations, all of them by default; ``error`` fails them."""
        for _ in range(len(self.started) if count is None else min(count, len(self.started))):
            operation = self.started.popleft()
            self._done.append(self._outcome(operation, error))

    def fill(self, page_size: int, tokens: Sequence[int]) -> None:
        """Keep the full pages of ``tokens``, as a node on the hash model would have saved them."""
        count = len(tokens) // page_size
        model = HashModel(count, page_size)
        pages = array("q", range(count))
        for position, token in enumerate(tokens[: count * page_size]):
            model._write(pages, position, token)
        seed = key_seed(model.weights_digest, page_size, EngineConfig().dtype, "")
        keys = page_keys(seed, tokens, page_size, count)
        for key, blob in zip(keys, model.export_pages(pages), strict=True):
            self.kept[key] = _digest(blob), blob

    def tear(self, key: PageKey) -> None:
        """Cut what is kept under ``key`` short."""
        digest, blob = self.kept[key]
        self.kept[key] = digest, blob[:-1]

    def forget(self, key: PageKey) -> None:
        """Somebody else removed it."""
        del self.kept[key]

    def _outcome(self, operation: Operation, error: str) -> StoreDone:
        if error:
            return StoreDone(operation.ticket, error=error)
        if operation.blobs is None:
            return StoreDone(operation.ticket, self._read(operation.keys))
        if self.full:
            return StoreDone(operation.ticket, error="no space left")
        for key, blob in zip(operation.keys, operation.blobs, strict=True):
            self.kept.setdefault(key, (_digest(blob), blob))
        return StoreDone(operation.ticket)

    def _read(self, keys: Sequence[PageKey]) -> list[bytes]:
        blobs = []
        for key in keys:
            digest, blob = self.kept.get(key, (b"", b""))
            if digest != _digest(blob):
                self.kept.pop(key, None)
                break
            blobs.append(blob)
        return blobs


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=16).digest()
