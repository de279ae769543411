"""The contract of a page store, run on the directory and on both fakes; then what only files have.

Method: the same checks through a small handle that knows how to wait for the end of operations and
how to do damage. Nothing sleeps: the directory's thread wakes the test."""

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from engine.sim.store import VirtualStore
from engine.sim.world import World
from engine.store import DirectoryStore, PageStore, Prefetch, PrefetchBook, StoreDone, page_keys
from fsm.ledger import Exhausted, LeaseError
from tests.support.requests import request
from tests.support.stores import MemoryStore

KEYS = page_keys("W1 page=4", list(range(16)), 4, 4)
BLOBS = [bytes([number]) * 32 for number in range(4)]
WAIT_S = 30


class Handle(Protocol):
    """A store, how to wait for it, and what others may do to its pages."""

    store: PageStore

    def over(self, count: int) -> dict[int, StoreDone]:
        """The next ``count`` operations that end, by ticket."""
        ...

    def forget(self, key: str) -> None: ...


class FragileHandle(Handle, Protocol):
    """A store on something that can break."""

    def tear(self, key: str) -> None: ...

    def fill_disk(self) -> None: ...


class MemoryHandle:
    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.store: PageStore = self.memory

    def over(self, count: int) -> dict[int, StoreDone]:
        self.memory.finish(count)
        done = self.memory.poll()
        assert len(done) == count
        return {d.ticket: d for d in done}

    def tear(self, key: str) -> None:
        self.memory.tear(key)

    def forget(self, key: str) -> None:
        self.memory.forget(key)

    def fill_disk(self) -> None:
        self.memory.full = True


class VirtualHandle:
    """The simulator's store: it has no disk that could tear or fill up."""

    def __init__(self) -> None:
        self.world = World()
        self.virtual = VirtualStore(self.world, 50, lambda: None)
        self.store: PageStore = self.virtual

    def over(self, count: int) -> dict[int, StoreDone]:
        while self.world.next_us is not None:
            self.world.step()
        done = self.store.poll()
        assert len(done) == count
        return {d.ticket: d for d in done}

    def forget(self, key: str) -> None:
        del self.virtual.pages[key]


class DirectoryHandle:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._woken = threading.Semaphore(0)
        self._monkeypatch = monkeypatch
        self.store: PageStore = DirectoryStore(folder, self._woken.release)

    def over(self, count: int) -> dict[int, StoreDone]:
        out: dict[int, StoreDone] = {}
        for _ in range(count):
            assert self._woken.acquire(timeout=WAIT_S)
        for done in self.store.poll():
            out[done.ticket] = done
        assert len(out) == count
        return out

    def tear(self, key: str) -> None:
        path = self.folder / key
        path.write_bytes(path.read_bytes()[:-1])

    def forget(self, key: str) -> None:
        (self.folder / key).unlink()

    def fill_disk(self) -> None:
        def write(path: Path, data: bytes) -> int:
            path.touch()  # the file is there, and empty
            raise OSError(errno.ENOSPC, "No space left on device")

        self._monkeypatch.setattr(Path, "write_bytes", write)


@pytest.fixture(params=["memory", "directory"])
def fragile(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FragileHandle]:
    on_disk = request.param == "directory"
    made = DirectoryHandle(tmp_path / "kv", monkeypatch) if on_disk else MemoryHandle()
    yield made
    made.store.close()


@pytest.fixture(params=["memory", "virtual", "directory"])
def handle(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Handle]:
    made: Handle = {
        "memory": MemoryHandle,
        "virtual": VirtualHandle,
        "directory": lambda: DirectoryHandle(tmp_path / "kv", monkeypatch),
    }[request.param]()
    yield made
    made.store.close()


def save(handle: Handle, keys: Sequence[str] = KEYS, blobs: Sequence[bytes] = BLOBS) -> StoreDone:
    handle.store.save(1, keys, blobs)
    return handle.over(1)[1]


def load(handle: Handle, keys: Sequence[str] = KEYS) -> list[bytes] | None:
    handle.store.load(2, keys)
    return handle.over(1)[2].blobs


# --- the contract ---------------------------------------------------------------------------------


def test_what_was_saved_is_found_and_read_back(handle: Handle) -> None:
    assert handle.store.hits(KEYS) == 0
    assert save(handle) == StoreDone(1)
    assert handle.store.hits(KEYS) == 4
    assert load(handle) == BLOBS


def test_hits_are_the_leading_ones(handle: Handle) -> None:
    """A page is of use only behind all pages before it."""
    save(handle, [KEYS[0], KEYS[1], KEYS[3]], [BLOBS[0], BLOBS[1], BLOBS[3]])
    assert handle.store.hits(KEYS) == 2
    assert handle.store.hits(KEYS[2:]) == 0
    assert handle.store.hits(KEYS[3:]) == 1
    assert handle.store.hits([]) == 0
    assert load(handle) == BLOBS[:2]


def test_an_operation_is_reported_once_and_only_when_it_is_over(handle: Handle) -> None:
    save(handle)
    assert handle.store.poll() == []
    for ticket in (5, 6, 7):
        handle.store.load(ticket, KEYS[:1])
    done = handle.over(3)
    assert list(done) == [5, 6, 7]
    assert handle.store.poll() == []


def test_a_torn_page_ends_the_hit_and_is_not_found_again(fragile: FragileHandle) -> None:
    save(fragile)
    fragile.tear(KEYS[1])
    assert load(fragile) == BLOBS[:1]
    assert fragile.store.hits(KEYS) == 1
    assert save(fragile).error == ""
    assert load(fragile) == BLOBS, "and it may be written anew"


def test_a_page_that_somebody_removed_is_a_miss(handle: Handle) -> None:
    save(handle)
    handle.forget(KEYS[0])
    assert load(handle) == []
    assert handle.store.hits(KEYS) == 0


def test_a_full_disk_fails_the_write_and_nothing_else(fragile: FragileHandle) -> None:
    save(fragile, KEYS[:1], BLOBS[:1])
    fragile.fill_disk()
    done = save(fragile, KEYS[1:], BLOBS[1:])
    assert "space" in done.error.lower()
    assert fragile.store.hits(KEYS) == 1
    assert load(fragile) == BLOBS[:1]


def test_a_second_write_of_a_page_changes_nothing(handle: Handle) -> None:
    save(handle)
    save(handle, KEYS[:1], [b"other"])
    assert load(handle) == BLOBS


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_depends_on_weights_layout_and_every_token_before_the_end_of_its_page() -> None:
    """Invariant 9: a page is found only for the text and the weights that computed it."""
    tokens = list(range(16))
    for position in range(16):
        other = [*tokens]
        other[position] += 1
        changed = page_keys("W1 page=4", other, 4, 4)
        first = position // 4
        assert changed[:first] == KEYS[:first]
        assert set(changed[first:]).isdisjoint(KEYS)
    assert set(page_keys("W2 page=4", tokens, 4, 4)).isdisjoint(KEYS)
    assert page_keys("W1 page=4", tokens, 4, 2) == KEYS[:2]


# --- files ----------------------------------------------------------------------------------------


def reopened(folder: Path) -> tuple[DirectoryStore, threading.Semaphore]:
    woken = threading.Semaphore(0)
    return DirectoryStore(folder, woken.release), woken


def read(store: DirectoryStore, woken: threading.Semaphore, keys: Sequence[str]) -> StoreDone:
    store.load(1, keys)
    assert woken.acquire(timeout=WAIT_S)
    (done,) = store.poll()
    store.close()
    return done


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"ILKV1\n",
        b"ILKV1\n" + b"0" * 40,
        b"MZ\x90\x00 somebody else's",
        b"ILKV2\n" + b"1" * 60,
    ],
    ids=["empty", "cut", "wrong digest", "foreign", "another version"],
)
def test_a_file_that_is_not_ours_is_a_miss(tmp_path: Path, content: bytes) -> None:
    (tmp_path / KEYS[0]).write_bytes(content)
    store, woken = reopened(tmp_path)
    assert store.hits(KEYS) == 1, "probably stored, says memory"
    assert read(store, woken, KEYS) == StoreDone(1, [])
    assert store.hits(KEYS) == 0


def test_what_a_process_wrote_the_next_one_finds(tmp_path: Path) -> None:
    store, woken = reopened(tmp_path / "deep" / "er")
    store.save(1, KEYS, BLOBS)
    assert woken.acquire(timeout=WAIT_S)
    store.close()
    again, woken = reopened(tmp_path / "deep" / "er")
    assert again.hits(KEYS) == 4
    assert read(again, woken, KEYS).blobs == BLOBS


def test_a_partial_file_of_a_process_that_died_is_no_page(tmp_path: Path) -> None:
    (tmp_path / f".{KEYS[0]}.4711").write_bytes(b"half")
    store, woken = reopened(tmp_path)
    assert store.hits(KEYS) == 0
    assert read(store, woken, KEYS).blobs == []


def test_a_full_disk_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = DirectoryHandle(tmp_path, monkeypatch)
    handle.fill_disk()
    assert save(handle).error
    assert list(tmp_path.iterdir()) == []
    handle.store.close()


def test_a_read_that_the_system_refuses_is_an_error_not_a_crash(tmp_path: Path) -> None:
    (tmp_path / KEYS[0]).mkdir()
    store, woken = reopened(tmp_path)
    done = read(store, woken, KEYS)
    assert done.blobs is None
    assert done.error


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    woken = threading.Semaphore(0)
    store = DirectoryStore(tmp_path, woken.release, limit=3)
    store.save(1, KEYS, BLOBS)
    assert woken.acquire(timeout=WAIT_S)
    store.close()
    assert store.poll() == [StoreDone(1)]
    assert len(list(tmp_path.iterdir())) == store.hits(KEYS) == 3


# --- reads as leases ------------------------------------------------------------------------------


def book_of(total: int = 2) -> tuple[MemoryStore, PrefetchBook]:
    store = MemoryStore()
    return store, PrefetchBook(store, total, iter(range(1, 99)).__next__)


def begin(book: PrefetchBook, life: str) -> Prefetch:
    lease = book.reserve(request(life), 0, list(KEYS))
    lease.adopt()
    return lease


def test_a_read_starts_when_its_lease_is_adopted_and_not_before() -> None:
    store, book = book_of()
    lease = book.reserve(request("a"), 0, list(KEYS))
    assert (store.reads, book.counts().held) == (0, 1)
    lease.cancel()
    assert (store.reads, book.counts().at_rest) == (0, True)
    begin(book, "a")
    assert store.reads == 1


def test_a_read_that_was_given_up_is_quarantined_until_it_is_really_over() -> None:
    """B104: its buffers may still be written."""
    store, book = book_of(total=1)
    lease = begin(book, "a")
    lease.release()
    assert book.counts().as_dict() == {
        "total": 1,
        "free": 0,
        "cached": 0,
        "held": 0,
        "quarantined": 1,
    }
    assert book.owners() == {"quarantine:a": 1}
    with pytest.raises(Exhausted):
        book.reserve(request("b"), 0, list(KEYS))
    store.finish()
    (done,) = store.poll()
    assert book.is_read(done.ticket)
    assert book.over(done.ticket) is None, "nobody waits for it"
    assert book.counts().at_rest


def test_a_read_that_is_waited_for_names_its_lease_when_it_is_over() -> None:
    store, book = book_of()
    lease = begin(book, "a")
    store.finish()
    assert book.over(store.poll()[0].ticket) is lease
    assert (book.counts().held, book.owners()) == (1, {"a": 1})
    lease.release()
    assert book.counts().at_rest
    assert book.audit() == []
    with pytest.raises(LeaseError):
        lease.release()
