"""The rules that keep the layers apart and the core deterministic, read off the source.

Each rule is a function from one file to the lines that break it, and each is proven by small
offending sources planted below: a rule that stops biting fails a test. Exceptions are lists of
files beside the rule, so that an exception is a reviewed change of this file.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("fsm", "engine", "transport", "server")

TORCH_FILES = (
    "engine/model/*",
    "engine/attention.py",
    "engine/kv.py",
    "engine/sampler.py",
    "engine/torch_executor.py",
)


@dataclass(frozen=True)
class Source:
    """One file of the checkout, by its path from the root."""

    path: str
    text: str

    @property
    def layer(self) -> str:
        return self.path.split("/")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with its dotted name; a call of anything but a plain name has an empty one."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    @property
    def imports(self) -> Iterator[tuple[int, str]]:
        """Every imported module with its line, also one imported by a constant name."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name
            elif isinstance(node, ast.ImportFrom):
                package = self.layer if node.level else ""
                module = ".".join(filter(None, (package, node.module)))
                for alias in node.names:
                    yield node.lineno, f"{module}.{alias.name}"
        for call, name in self.calls:
            if name in {"__import__", "importlib.import_module", "import_module"}:
                argument = call.args[0] if call.args else None
                if isinstance(argument, ast.Constant):
                    yield call.lineno, str(argument.value)

    def is_one_of(self, *patterns: str) -> bool:
        return any(PurePosixPath(self.path).match(pattern) for pattern in patterns)


Faults = Iterator[tuple[int, str]]
Rule = Callable[[Source], Faults]


def dotted(node: ast.expr) -> str:
    """``a.b.c`` for such an expression, and an empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


# --- rules over Python files ----------------------------------------------------------------------


def layers(source: Source) -> Faults:
    """Dependencies point one way: server → engine → fsm, transport."""
    own = {
        "fsm": {"fsm"},
        "transport": {"transport"},
        "engine": {"engine", "fsm", "transport"},
        "server": set(OURS),
    }[source.layer]
    others: dict[str, set[str]] = {
        "fsm": {"transitions", "msgspec"},
        "engine": {"msgspec", "numpy", "gguf", "safetensors", "torch", "flashinfer"},
    }
    allowed = own | set(others.get(source.layer, set()))
    if source.path == "fsm/draw.py":
        allowed.add("graphviz")
    if source.path in {"engine/config.py", "engine/worker.py"}:  # the worker reads a configuration
        allowed.add("pydantic")
    anything = source.layer in {"transport", "server"}
    for line, module in source.imports:
        top = module.split(".")[0]
        ours = top in OURS or top in {"tests", "benchmarks"}
        if top in allowed or top in sys.stdlib_module_names or (anything and not ours):
            continue
        yield line, f"{source.layer} may not import {top}"


def drawing_is_optional(source: Source) -> Faults:
    """Only a function may import graphviz: whoever serves does not need it."""
    for node in source.tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if "graphviz" in names:
            yield node.lineno, "graphviz is imported outside the function that draws"


def torch_stays_in_the_model(source: Source) -> Faults:
    """Scheduling, the hash model and the server work without torch."""
    if source.is_one_of(*TORCH_FILES):
        return
    for line, module in source.imports:
        if module.split(".")[0] in {"torch", "flashinfer"}:
            yield line, f"{module.split('.')[0]} outside the model's own files"


def nothing_unpickles(source: Source) -> Faults:
    """No code is ever loaded from a socket or a file."""
    modules = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    for line, module in source.imports:
        top = module.split(".")[0]
        if top in modules or top in {"yaml", "multiprocessing"}:
            yield line, f"{top} can run code from data"
    for call, name in source.calls:
        last = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in {"torch.load", "torch.save", "yaml.load", "np.load", "numpy.load"}:
            yield call.lineno, f"{name} reads or writes pickles"
        elif last in {"recv_pyobj", "send_pyobj", "recv_serialized"}:
            yield call.lineno, f"{last} pickles"
        elif any(keyword.arg == "allow_pickle" for keyword in call.keywords):
            yield call.lineno, "allow_pickle"


def no_probing(source: Source) -> Faults:
    """Attributes exist and are typed; nobody asks whether they do."""
    for call, name in source.calls:
        constant = len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
        if constant and name in {"getattr", "hasattr", "setattr", "delattr"}:
            yield call.lineno, f"{name} with a constant name"
        elif constant and name == "object.__setattr__":
            yield call.lineno, "object.__setattr__ writes past a frozen class"


STATE_WRITERS = ("fsm/driver.py",)


def only_the_driver_writes_a_state(source: Source) -> Faults:
    """A state changes by an event, never by assignment."""
    if source.path in STATE_WRITERS:
        return
    for node in source.nodes:
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
            targets = [node.target]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets = [node.optional_vars]
        else:
            continue
        for target in targets:
            for part in ast.walk(target):
                match part:
                    case ast.Attribute(attr="state", ctx=ast.Store()):
                        yield part.lineno, "a state is assigned"


FIRING = ("engine/lifecycle.py", "engine/*scheduler.py", "fsm/driver.py")


def only_the_scheduler_fires(source: Source) -> Faults:
    """Everyone else posts to the inbox."""
    if source.is_one_of(*FIRING):
        return
    for call, _ in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"fire", "trigger"}:
            yield call.lineno, f".{call.func.attr}( outside the scheduler"


WALL_CLOCK = (
    "server/chat_template.py",  # a template may ask for today's date
    "server/openai_api.py",  # "created"
    "server/info_api.py",  # "timestamp"
)
"""Where a client reads the time of day."""

SLEEPING = ("engine/runner.py",)
"""The hash model's steps take time."""


def time_is_handed_in(source: Source) -> Faults:
    """The core sees a clock that a simulator can turn, nobody sleeps, and wall-clock
    time orders nothing."""
    wall = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
    banned = set() if source.is_one_of(*WALL_CLOCK) else set(wall)
    if not source.is_one_of(*SLEEPING):
        banned.add("time.sleep")
    for call, name in source.calls:
        if name in banned:
            yield call.lineno, f"{name}()"
    for line, module in source.imports:
        if module in banned:
            yield line, f"{module} imported by name"


def randomness_is_seeded(source: Source) -> Faults:
    """A run is reproduced from its seed."""
    for call, name in source.calls:
        first, _, rest = name.partition(".")
        unseeded = not call.args and not call.keywords
        if name == "random.Random" or name.endswith("random.default_rng"):
            if unseeded:
                yield call.lineno, f"{name}() without a seed"
        elif (first == "random" and rest) or name.startswith(("np.random.", "numpy.random.")):
            yield call.lineno, f"{name}: a generator that everybody shares"
    for line, module in source.imports:
        if module.startswith("random.") and module != "random.Random":
            yield line, f"{module} imported by name"


PRINTING = ("server/main.py", "server/replay.py", "benchmarks/*")


def only_commands_print(source: Source) -> Faults:
    """A library logs; a command prints."""
    if source.is_one_of(*PRINTING):
        return
    for call, name in source.calls:
        if name == "print":
            yield call.lineno, "print("


# --- rules over any text --------------------------------------------------------------------------


def lines_are_short(source: Source) -> Faults:
    """Two files fit side by side."""
    if source.path.endswith(".py"):
        for number, line in enumerate(source.text.splitlines(), 1):
            if len(line) > 100:
                yield number, f"{len(line)} columns"


LEFTOVER = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")
MACHINE = re.compile(
    r"(?<![\w.~*$}<-])/(?:work|tmp|home|root|Users|opt|private|mnt)/[\w.-]"
    r"|/(?:site|dist)-packages/|python[h]osted\.org|pypi[.]org|npmjs[.]org|deb[.]debian"
)


def nothing_is_left_over(source: Source) -> Faults:
    """What is missing is an issue, not a comment."""
    yield from matches(LEFTOVER, source, "a leftover")


def no_machine_is_named(source: Source) -> Faults:
    """A committed file means the same on every machine."""
    yield from matches(MACHINE, source, "a path or host of some machine")


def matches(pattern: re.Pattern[str], source: Source, what: str) -> Faults:
    for number, line in enumerate(source.text.splitlines(), 1):
        if found := pattern.search(line):
            yield number, f"{what}: {found[0]}"


PYTHON_RULES: tuple[Rule, ...] = (
    layers,
    drawing_is_optional,
    torch_stays_in_the_model,
    nothing_unpickles,
    no_probing,
    only_the_driver_writes_a_state,
    only_the_scheduler_fires,
    time_is_handed_in,
    randomness_is_seeded,
    only_commands_print,
)
TEXT_RULES: tuple[Rule, ...] = (lines_are_short, nothing_is_left_over, no_machine_is_named)


# --- the checkout ---------------------------------------------------------------------------------


def checkout() -> Iterator[Source]:
    """Every text file that is, or is about to be, committed."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in sorted(filter(None, listing.split("\0"))):
        path = ROOT / name
        try:
            yield Source(name, path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, FileNotFoundError):  # a picture; a file deleted, uncommitted
            continue


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    return list(checkout())


def report(rule: Rule, source: Source) -> list[str]:
    return [f"{source.path}:{line}: {rule.__name__}: {fault}" for line, fault in rule(source)]


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_our_code_keeps(rule: Rule, sources: list[Source]) -> None:
    code = [s for s in sources if s.path.endswith(".py") and s.layer in OURS]
    assert len(code) > 10, "no code is found, so this test proves nothing"
    faults = [fault for source in code for fault in report(rule, source)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("rule", TEXT_RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps(rule: Rule, sources: list[Source]) -> None:
    faults = [fault for source in sources for fault in report(rule, source)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "module", ["fsm.draw", "engine.scheduler", "engine.hash_model", "server.app"]
)
def test_torch_is_not_loaded_by(module: str) -> None:
    """At run time too: an import deep inside a dependency counts as much as one of ours."""
    if not (ROOT / f"{module.replace('.', '/')}.py").exists():
        pytest.fail(f"{module} does not exist: it moved, and this list did not")
    script = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr or f"import {module} loads torch"


# --- the rules bite -------------------------------------------------------------------------------

OFFENDERS: tuple[tuple[Rule, str, str], ...] = (
    (layers, "fsm/planted.py", "import engine.scheduler"),
    (layers, "fsm/planted.py", "from transport import messages"),
    (layers, "fsm/planted.py", "import numpy"),
    (layers, "fsm/chart.py", "import graphviz"),
    (layers, "fsm/planted.py", "def f():\n    import aiohttp"),
    (layers, "fsm/planted.py", "import importlib\nimportlib.import_module('engine.pages')"),
    (layers, "transport/planted.py", "from fsm.chart import Chart"),
    (layers, "transport/planted.py", "from engine import batch"),
    (layers, "engine/planted.py", "import server.app"),
    (layers, "engine/planted.py", "from pydantic import BaseModel"),
    (layers, "engine/planted.py", "import aiohttp"),
    (layers, "server/planted.py", "from tests.support import fakes"),
    (drawing_is_optional, "fsm/draw.py", "import graphviz"),
    (drawing_is_optional, "fsm/draw.py", "from graphviz import Source"),
    (torch_stays_in_the_model, "engine/scheduler.py", "import torch"),
    (torch_stays_in_the_model, "engine/hash_model.py", "def f():\n    from torch import nn"),
    (torch_stays_in_the_model, "server/app.py", "import torch.nn.functional as F"),
    (torch_stays_in_the_model, "engine/pages.py", "import flashinfer"),
    (nothing_unpickles, "engine/store.py", "import pickle"),
    (nothing_unpickles, "engine/store.py", "from marshal import loads"),
    (nothing_unpickles, "engine/model/loader.py", "import torch\ntorch.load('x')"),
    (nothing_unpickles, "server/planted.py", "import yaml"),
    (nothing_unpickles, "server/planted.py", "from multiprocessing import Queue"),
    (nothing_unpickles, "transport/channel.py", "socket.recv_pyobj()"),
    (nothing_unpickles, "engine/planted.py", "load(file, allow_pickle=True)"),
    (no_probing, "engine/planted.py", "x = getattr(request, 'state')"),
    (no_probing, "engine/planted.py", "x = hasattr(request, 'sender')"),
    (no_probing, "server/planted.py", "setattr(request, 'state', 'done')"),
    (no_probing, "fsm/planted.py", "object.__setattr__(chart, 'name', 'x')"),
    (only_the_driver_writes_a_state, "engine/scheduler.py", "request.state = 'done'"),
    (only_the_driver_writes_a_state, "engine/scheduler.py", "a, request.state = 1, 'done'"),
    (only_the_driver_writes_a_state, "engine/request.py", "self.state: str = 'arrived'"),
    (only_the_driver_writes_a_state, "fsm/ledger.py", "for r.state in states: pass"),
    (only_the_scheduler_fires, "engine/intake.py", "driver.fire(request, 'reject')"),
    (only_the_scheduler_fires, "server/app.py", "machine.events['abort'].trigger(request)"),
    (time_is_handed_in, "engine/scheduler.py", "import time\nnow = time.time()"),
    (time_is_handed_in, "server/app.py", "import time\ntime.sleep(1)"),
    (time_is_handed_in, "engine/scheduler.py", "from time import sleep"),
    (time_is_handed_in, "engine/runner.py", "import time\ntime.time()"),
    (time_is_handed_in, "fsm/journal.py", "import datetime\ndatetime.datetime.now()"),
    (randomness_is_seeded, "engine/policy.py", "import random\nrandom.random()"),
    (randomness_is_seeded, "engine/policy.py", "import random\nrandom.Random()"),
    (randomness_is_seeded, "engine/policy.py", "from random import shuffle"),
    (randomness_is_seeded, "engine/model/x.py", "import numpy as np\nnp.random.rand(3)"),
    (randomness_is_seeded, "engine/model/x.py", "import numpy as np\nnp.random.default_rng()"),
    (only_commands_print, "engine/scheduler.py", "print('here')"),
    (lines_are_short, "engine/planted.py", "x = '" + "x" * 100 + "'"),
    (nothing_is_left_over, "engine/planted.py", "# TO" + "DO: later"),
    (nothing_is_left_over, "docs/planted.md", "FIX" + "ME"),
    (no_machine_is_named, "docs/planted.md", "see `/ho" + "me/someone/models`"),
    (no_machine_is_named, "README.md", "cd /wo" + "rk/main"),
    (no_machine_is_named, "engine/planted.py", "PATH = '/tm" + "p/x'"),
    (no_machine_is_named, "Makefile", "pip install -i https://py" + "pi.org/simple"),
)

INNOCENT: tuple[tuple[Rule, str, str], ...] = (
    (layers, "fsm/draw.py", "def f():\n    import graphviz"),
    (layers, "fsm/driver.py", "import json, transitions, msgspec\nfrom fsm.chart import Chart"),
    (layers, "engine/config.py", "from pydantic import BaseModel"),
    (layers, "engine/scheduler.py", "from fsm import chart\nfrom transport import messages"),
    (layers, "server/app.py", "import aiohttp, engine.config, transport.channel, fsm.chart"),
    (drawing_is_optional, "fsm/draw.py", "def f():\n    import graphviz"),
    (torch_stays_in_the_model, "engine/model/llama.py", "import torch"),
    (no_probing, "engine/planted.py", "x = getattr(request, name)"),
    (only_the_driver_writes_a_state, "fsm/driver.py", "subject.state = 'done'"),
    (only_the_driver_writes_a_state, "engine/policy.py", "queue[request.state] = 1"),
    (only_the_scheduler_fires, "engine/scheduler.py", "driver.fire(request, 'admit')"),
    (time_is_handed_in, "engine/runner.py", "import time\nbegan = time.perf_counter()"),
    (time_is_handed_in, "server/chat_template.py", "import datetime\ndatetime.datetime.now()"),
    (randomness_is_seeded, "engine/policy.py", "import random\nrandom.Random(7).shuffle([])"),
    (only_commands_print, "server/main.py", "print('http://127.0.0.1:8000')"),
    (only_commands_print, "server/model_store.py", "console.print('fetching')"),
    (nothing_is_left_over, "docs/planted.md", "the todo list of a client"),
    (no_machine_is_named, "docs/planted.md", "`~/.cache/interlock`, /dev/shm, GET /home, a/tmp/b"),
)


def named(case: tuple[Rule, str, str]) -> str:
    rule, path, text = case
    return f"{rule.__name__}-{path}-{text.splitlines()[-1][:30].strip()}"


@pytest.mark.parametrize("case", OFFENDERS, ids=named)
def test_an_offender_is_caught_with_its_file_line_and_rule(case: tuple[Rule, str, str]) -> None:
    rule, path, text = case
    faults = report(rule, Source(path, text))
    assert len(faults) == 1
    assert faults[0].startswith(f"{path}:{len(text.splitlines())}: {rule.__name__}: ")


@pytest.mark.parametrize("case", INNOCENT, ids=named)
def test_what_is_allowed_passes(case: tuple[Rule, str, str]) -> None:
    rule, path, text = case
    assert report(rule, Source(path, text)) == []


def test_every_rule_is_proven() -> None:
    assert {rule for rule, _, _ in OFFENDERS} == {*PYTHON_RULES, *TEXT_RULES}
