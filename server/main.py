"""``interlock``: the command line, and the composition of a unified server.

Every option is a field of a settings class (:class:`~engine.config.EngineConfig`,
:class:`~server.settings.ServerSettings`, :class:`CommandSettings`): its name, its default, its
limits and its help all come from there, so that none of them can drift. Each has an environment
variable, which the command line overrules.

The order of a start is: read the options, take the port, find the model (fetching it if needed),
and only then start the engine. What is wrong with the command is said within a second, not after
minutes of loading.
"""

import argparse
import ast
import asyncio
import errno
import importlib.metadata
import inspect
import ipaddress
import json
import logging
import os
import shutil
import signal
import socket
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar, get_args, get_origin

import aiohttp
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from engine.config import EngineConfig
from server.app import EXIT_FAILED, EXIT_SIGNAL, serve
from server.chat_template import ChatTemplate, ChatTemplateError
from server.model_store import (
    ModelFetchError,
    ModelNotFoundError,
    ResolvedModel,
    console_progress,
    default_cache_dir,
    resolve,
)
from server.places import file_fault, folder_fault
from server.service import TextModel
from server.settings import ServerSettings
from server.tokenizer import TokenizerError
from server.tokenizer_loader import load_tokenizer
from transport.messages import Hello

STARTED: Final = time.monotonic()

EXIT_USAGE: Final = 2
EXIT_MODEL: Final = 3

QUESTION: Final = "What is the capital of France?"
ANSWER_TIMEOUT_S: Final = 120.0

EPILOG: Final = """\
Every option can also be given by the environment variable in brackets; the
command line wins.

examples:
  interlock serve                             the default model, on port 8000
  interlock serve --model hash --port 8001    a toy that needs no PyTorch
  interlock serve --model org/name --api-key KEY --host 0.0.0.0
  interlock serve --trace trace.jsonl         for fsm-replay

exit codes:
  0    drained after Ctrl-C or SIGTERM
  1    the engine died, or the server failed
  2    a wrong option, an unknown model, or a port or a place on the disk that
       cannot be had
  3    the model could not be fetched or loaded
  130  a second Ctrl-C, which does not wait for the requests in flight
  143  a second SIGTERM, likewise
"""


class CommandSettings(BaseModel):
    """What concerns the command itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cache: str = ""
    """Folder for fetched models; by default ``interlock`` in the user's cache folder."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What is written to standard error."""
    first_answer: bool = False
    """Ask the model one question when it is ready; print the answer and the seconds it took."""


class NoAnswerError(Exception):
    """The server is ready and does not answer; the message says what it said instead."""


class UsageError(Exception):
    """The command cannot work as given; the message says which option to change."""


@dataclass(frozen=True, slots=True)
class Options:
    """A command line and an environment, read and validated."""

    command: CommandSettings
    engine: EngineConfig
    server: ServerSettings


# --- options --------------------------------------------------------------------------------------

GROUPS: Final[tuple[tuple[str, type[BaseModel]], ...]] = (
    ("command", CommandSettings),
    ("server", ServerSettings),
    ("engine", EngineConfig),
)
INTERNAL: Final = frozenset({"model_path"})
"""Fields that this command fills in itself."""

Settings = TypeVar("Settings", bound=BaseModel)


def flag(field: str) -> str:
    """``drain_grace_s`` → ``--drain-grace``: the unit is in the help, not in the name."""
    return "--" + field.removesuffix("_s").removesuffix("_bytes").replace("_", "-")


def variable(field: str) -> str:
    """``drain_grace_s`` → ``INTERLOCK_DRAIN_GRACE``."""
    return "INTERLOCK_" + flag(field)[2:].replace("-", "_").upper()


def option_fields() -> dict[str, tuple[str, type[BaseModel], FieldInfo]]:
    """Field name → (group, settings class, field), for every option once."""
    found: dict[str, tuple[str, type[BaseModel], FieldInfo]] = {}
    for group, settings in GROUPS:
        for name, field in settings.model_fields.items():
            if name not in INTERNAL:
                found.setdefault(name, (group, settings, field))
    return found


def docstrings(settings: type[BaseModel]) -> dict[str, str]:
    """Field name → the text below the field in the source of its class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(settings))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found[name] = " ".join(doc.split()).replace("``", "")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="interlock",
        description="An LLM serving engine in which every request is an explicit state machine.",
    )
    version = importlib.metadata.version("interlock")
    parser.add_argument("--version", action="version", version=f"interlock {version}")
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="interlock serve [OPTION …]",
        description="Serve a model over HTTP. Without options: a small default model on\n"
        "http://127.0.0.1:8000. Times are in seconds.",
        epilog=EPILOG,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    groups = {name: serve.add_argument_group(f"{name} options") for name, _ in GROUPS}
    texts = {settings: docstrings(settings) for _, settings in GROUPS}
    for name, (group, settings, field) in option_fields().items():
        text = f"{texts[settings].get(name, '')}{_default(field)} [{variable(name)}]".lstrip()
        text = text.replace("%", "%%")  # argparse formats help
        if field.annotation is bool:
            groups[group].add_argument(
                flag(name), dest=name, help=text, action=argparse.BooleanOptionalAction
            )
        else:
            groups[group].add_argument(
                flag(name), dest=name, help=text, metavar=_metavar(name, field)
            )
    return parser


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Long option names get a column of their own; the epilog keeps its lines."""

    def __init__(self, prog: str) -> None:
        columns = min(100, shutil.get_terminal_size().columns)
        super().__init__(prog, max_help_position=30, width=columns - 2)


def _default(field: FieldInfo) -> str:
    match field.default:
        case "":
            return ""  # the text says what empty means
        case None | False:
            return " [default off]"
        case True:
            return " [default on]"
        case value:
            return f" [default {value:g}]" if isinstance(value, float) else f" [default {value}]"


PATHS: Final = {"cache": "FOLDER", "kv_store": "FOLDER", "trace": "FILE"}
"""Options that name a place on the disk, and what is there."""


def _metavar(name: str, field: FieldInfo) -> str:
    if name in PATHS:
        return PATHS[name]
    if get_origin(field.annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(field.annotation)) + "}"
    if name.endswith("_s"):
        return "SECONDS"
    if name.endswith("_bytes"):
        return "BYTES"
    return "N" if field.annotation in (int, float) else "TEXT"


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read options; the command line goes before the environment, and both before the defaults.

    Raises :class:`UsageError` for a value that is not allowed, and for a place on the disk that
    cannot be what it is for. Exits (argparse's way) for a wrong
    option name, for ``--help`` and for ``--version``.
    """
    given = vars(build_parser().parse_args(arguments))
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    for name, (_, _, field) in option_fields().items():
        if given[name] is not None:
            value, origin[name] = given[name], flag(name)
        elif environment.get(variable(name)):  # an empty variable is as good as none
            value, origin[name] = environment[variable(name)], variable(name)
        else:
            continue
        values[name] = _converted(value, field)
    options = Options(
        _validated(CommandSettings, values, origin),
        _validated(EngineConfig, values, origin),
        _validated(ServerSettings, values, origin),
    )
    if options.server.debug and not _is_loopback(options.server.host):
        raise UsageError(
            f"--debug serves fault hooks to whoever connects, so it needs a loopback --host,"
            f" not {options.server.host!r}"
        )
    for name, place, fault in (
        ("trace", options.engine.trace, file_fault),
        ("kv_store", options.engine.kv_store, folder_fault),
    ):
        if place and (why := fault(Path(place))):
            raise UsageError(f"{origin[name]} {place!r}: {why}")
    return options


def _converted(value: object, field: FieldInfo) -> object:
    """What pydantic does not read from text: numbers among choices, and ``off`` for None."""
    choices = get_args(field.annotation)
    if get_origin(field.annotation) is Literal:
        return {str(choice): choice for choice in choices}.get(str(value), value)
    if type(None) in choices and value == "off":
        return None
    return value


def _validated(
    settings: type[Settings], values: Mapping[str, object], origin: Mapping[str, str]
) -> Settings:
    mine = {name: value for name, value in values.items() if name in settings.model_fields}
    try:
        return settings(**mine)
    except ValidationError as error:
        faults = [
            f"{origin[str(fault['loc'][0])]} {fault['input']!r}: {fault['msg']}"
            for fault in error.errors()
        ]
        raise UsageError("\n".join(faults)) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# --- serving --------------------------------------------------------------------------------------


def take_port(host: str, port: int) -> socket.socket:
    """A socket bound to ``host`` and ``port`` (0: any free one), which does not listen yet, so that
    nobody connects before the server can answer. Raises :class:`UsageError` if it cannot be had."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"--host {host!r} is not an address of this machine: {error}") from None
    taken = socket.socket(family, kind)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a restart waits for a minute
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        raise _port_error(error, host, port) from None
    return taken


def _port_error(error: OSError, host: str, port: int) -> UsageError:
    choose = (
        f"choose another port with --port or {variable('port')} (0 takes any free one;"
        f" for make serve: PORT=8001)"
    )
    if error.errno == errno.EADDRINUSE:
        return UsageError(f"port {port} on {host} is in use by another program: {choose}")
    if error.errno == errno.EACCES:
        return UsageError(f"port {port} on {host} may not be used by this user: {choose}")
    return UsageError(f"cannot listen on {host}, port {port}: {error.strerror}")


def url_of(taken: socket.socket) -> str:
    """The URL at which this machine reaches the socket."""
    address = ipaddress.ip_address(taken.getsockname()[0])
    if address.is_unspecified:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{taken.getsockname()[1]}"


def load_text(model: ResolvedModel) -> TextModel:
    """What the server needs of a model. Raises TokenizerError, ChatTemplateError or OSError."""
    tokenizer = load_tokenizer(model)
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
    return TextModel(tokenizer=tokenizer, chat_template=template)


async def first_answer(url: str, api_key: str) -> str:
    """The model's answer to :data:`QUESTION`, over HTTP as any client would get it.

    Raises :class:`NoAnswerError`.
    """
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 32,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.post(f"{url}/v1/chat/completions", json=body) as response,
        ):
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoAnswerError(f"the server is ready and does not answer: {error!r}") from None
    if response.status != 200:
        raise NoAnswerError(f"the server is ready and answers {response.status}: {text}")
    return str(json.loads(text)["choices"][0]["message"]["content"]).strip()


async def _serve(options: Options, model: ResolvedModel, listener: socket.socket) -> int:
    url = url_of(listener)
    name = options.server.served_model_name or model.display_name

    async def on_ready(_: Hello) -> None:
        print(f"Interlock serves {name} at {url} (Ctrl-C to stop)", flush=True)
        if options.command.first_answer:
            answer = await first_answer(url, options.server.api_key)
            seconds = time.monotonic() - STARTED
            print(f"{QUESTION} {answer} ({seconds:.1f} s after the start)", flush=True)

    path = "" if model.path is None else str(model.path)
    return await serve(
        listener,
        options.engine.model_copy(update={"model": model.name, "model_path": path}),
        options.server,
        lambda: load_text(model),
        model_name=name,
        model_path=path,
        on_ready=on_ready,
    )


def run(options: Options) -> int:
    """From options to the end of the server; its exit code."""
    logging.basicConfig(
        level=options.command.log_level.upper(),
        format="%(asctime)s %(levelname)s server %(message)s",
    )
    server = options.server
    with take_port(server.host, server.port) as listener:
        cache = options.command.cache
        with console_progress() as progress:
            model = resolve(
                options.engine.model,
                Path(cache).expanduser() if cache else default_cache_dir(),
                progress,
            )
        try:
            return asyncio.run(_serve(options, model, listener))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # two servers took the port at once; one listens
                raise _port_error(error, server.host, server.port) from None
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the ``interlock`` command; returns its exit code."""
    # Until the server drains by itself, SIGTERM ends it as an exception that cleans up.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return run(parse(sys.argv[1:] if arguments is None else arguments, os.environ))
    except (UsageError, ModelNotFoundError) as error:
        return _fail(error, EXIT_USAGE)
    except (ModelFetchError, TokenizerError, ChatTemplateError) as error:
        return _fail(error, EXIT_MODEL)
    except (NoAnswerError, OSError) as error:
        return _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT


def _terminate(number: int, _: object) -> None:
    sys.exit(EXIT_SIGNAL + number)


def _fail(error: Exception, code: int) -> int:
    for line in str(error).splitlines():
        print(f"interlock: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
