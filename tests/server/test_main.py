"""The command line: options and their sources, and what is said when they are wrong."""

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from server.main import (
    Options,
    UsageError,
    build_parser,
    flag,
    option_fields,
    parse,
    take_port,
    url_of,
    variable,
)
from server.settings import ServerSettings


def serve(*arguments: str, **environment: str) -> Options:
    return parse(["serve", *arguments], environment)


def serve_help() -> str:
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            return str(action.choices["serve"].format_help())
    raise AssertionError("no serve command")


# --- options --------------------------------------------------------------------------------------


def test_without_options_every_setting_has_its_default() -> None:
    options = serve()
    assert options.engine == EngineConfig()
    assert options.server == ServerSettings()


def test_every_setting_is_an_option_with_a_variable_and_both_are_in_the_help() -> None:
    text = serve_help()
    for settings in (EngineConfig, ServerSettings):
        for name in set(settings.model_fields) - {"model_path"}:
            assert f"{flag(name)} " in text or f"{flag(name)}," in text
            assert f"[{variable(name)}]" in text
    assert "--model-path" not in text, "it is filled in, not given"


def test_names_leave_units_out() -> None:
    assert flag("drain_grace_s") == "--drain-grace"
    assert flag("max_body_bytes") == "--max-body"
    assert flag("max_running_requests") == "--max-running-requests"
    assert variable("drain_grace_s") == "INTERLOCK_DRAIN_GRACE"


def test_no_two_settings_have_the_same_option() -> None:
    flags = [flag(name) for name in option_fields()]
    assert len(flags) == len(set(flags))


def test_the_command_line_goes_before_the_environment_and_that_before_the_default() -> None:
    assert serve().server.port == 8000
    assert serve(INTERLOCK_PORT="8001").server.port == 8001
    assert serve("--port", "8002", INTERLOCK_PORT="8001").server.port == 8002
    assert serve(INTERLOCK_PORT="").server.port == 8000


def test_every_kind_of_value_is_read_from_both_sources() -> None:
    line = serve(
        *("--depth", "1", "--dtype", "float32", "--waiting-timeout", "2.5", "--no-prefix-cache")
    ).engine
    environment = serve(
        INTERLOCK_DEPTH="1",
        INTERLOCK_DTYPE="float32",
        INTERLOCK_WAITING_TIMEOUT="2.5",
        INTERLOCK_PREFIX_CACHE="off",
    ).engine
    assert line == environment
    assert (line.depth, line.dtype, line.waiting_timeout_s, line.prefix_cache) == (
        1,
        "float32",
        2.5,
        False,
    )


def test_a_deadline_can_be_switched_off_again() -> None:
    options = serve("--waiting-timeout", "off", INTERLOCK_WAITING_TIMEOUT="3")
    assert options.engine.waiting_timeout_s is None


def test_debug_concerns_server_and_engine_alike() -> None:
    options = serve("--debug")
    assert options.engine.debug
    assert options.server.debug


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--page-size", "0"], {}, "--page-size '0': Input should be greater than or equal to 1"),
        (["--page-size", "many"], {}, "--page-size 'many': Input should be a valid integer"),
        (["--depth", "3"], {}, "--depth '3': Input should be 1 or 2"),
        (
            ["--dtype", "f64"],
            {},
            "--dtype 'f64': Input should be 'auto', 'float32', 'bfloat16' or 'int4'",
        ),
        (["--port", "70000"], {}, "--port '70000': Input should be less than or equal to 65535"),
        ([], {"INTERLOCK_PAGE_SIZE": "x"}, "INTERLOCK_PAGE_SIZE 'x': Input should be a valid int"),
        ([], {"INTERLOCK_CHECKS": "perhaps"}, "INTERLOCK_CHECKS 'perhaps': Input should be a val"),
        (["--waiting-timeout", "nan"], {}, "--waiting-timeout 'nan': Input should be greater"),
        (["--debug", "--host", "0.0.0.0"], {}, "--debug serves fault hooks"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_where_it_came_from(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        serve(*arguments, **environment)
    assert str(caught.value).startswith(message)


def test_a_place_on_the_disk_that_cannot_be_used_is_named_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder, file, absent = (str(tmp_path / name) for name in ("", "file", "absent/trace.jsonl"))
    for arguments, environment, message in (
        (["--trace", folder], {}, f"--trace {folder!r}: is a folder; it must name a file"),
        (["--trace", absent], {}, f"--trace {absent!r}: there is no folder '{tmp_path}/absent'"),
        (["--kv-store", file], {}, f"--kv-store {file!r}: is a file; it must be a folder"),
        ([], {"INTERLOCK_TRACE": folder}, f"INTERLOCK_TRACE {folder!r}: is a folder"),
    ):
        with pytest.raises(UsageError) as caught:
            serve(*arguments, **environment)
        assert str(caught.value).startswith(message)
    assert serve("--trace", file, "--kv-store", folder).engine.trace == file


@pytest.mark.parametrize("option", ["--pagesize", "--model-path", "--page"])
def test_an_option_that_does_not_exist_is_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        serve(option, "1")
    assert caught.value.code == 2
    assert option in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--version"], {})
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("interlock 0.")


# --- the port -------------------------------------------------------------------------------------


def test_a_busy_port_is_named_with_the_way_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError) as caught:
            take_port("127.0.0.1", port)
    assert f"port {port} on 127.0.0.1 is in use" in str(caught.value)
    assert "--port" in str(caught.value)
    assert "INTERLOCK_PORT" in str(caught.value)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(UsageError, match="host"):
        take_port("no such host", 0)
    with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1"):
        take_port("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")],
)
def test_the_url_is_one_that_this_machine_can_use(host: str, expected: str) -> None:
    with take_port(host, 0) as taken:
        assert url_of(taken) == f"{expected}{taken.getsockname()[1]}"
        assert taken.getsockname()[1] != 0


def test_a_taken_port_does_not_answer_before_the_server_does() -> None:
    with take_port("127.0.0.1", 0) as taken, pytest.raises(ConnectionRefusedError):
        socket.create_connection(taken.getsockname(), timeout=5)


# --- the process ----------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "server.main", "serve", "--port", "0")


def outcome(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that ends by itself."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_first_answer_is_printed_with_its_seconds_and_ctrl_c_drains() -> None:
    with started("--model", "hash", "--first-answer") as process:
        assert process.stdout is not None
        first, second = process.stdout.readline(), process.stdout.readline()
        assert re.match(r"Interlock serves hash at http://127\.0\.0\.1:\d+ ", first)
        assert second.startswith("What is the capital of France? ")
        assert re.search(r"\(\d+\.\d s after the start\)$", second)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_first_answer_passes_the_key() -> None:
    with started("--model", "hash", "--first-answer", "--api-key", "secret") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline().startswith("What is the capital of France? ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", "no-such-model"], 2, "unknown model 'no-such-model'"),
        (["--model", "./absent.gguf"], 2, "there is no model at"),
        (["--page-size", "0"], 2, "interlock: --page-size '0': Input should be greater"),
        (["--trace", "/"], 2, "interlock: --trace '/': is a folder; it must name a file"),
        (["--kv-store", "/dev/null"], 2, "interlock: --kv-store '/dev/null': is a file; it must"),
        (["--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
    ],
)
def test_a_wrong_command_says_what_is_wrong_and_exits(
    arguments: list[str], code: int, message: str
) -> None:
    status, out, err = outcome(*arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_a_busy_port_is_known_before_the_model_is_looked_at() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, _, err = outcome("--port", port, "--model", "no-such-model")
    assert status == 2
    assert err.startswith(f"interlock: port {port} on 127.0.0.1 is in use")
    assert "model" not in err


def test_a_broken_model_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    status, out, err = outcome("--model", str(path))
    assert (status, out) == (3, "")
    assert str(path) in err
    assert "Traceback" not in err


def test_a_model_that_cannot_be_fetched_leaves_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, out, err = outcome(INTERLOCK_CACHE=str(tmp_path / "file"))
    assert (status, out) == (3, "")
    assert "cannot keep smollm2-135m" in err
    assert "Traceback" not in err
