"""Running one scenario file on a simulated cluster."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from engine.sim import commands, expectations
from engine.sim.book import Life
from engine.sim.client import Clients, Submission, View
from engine.sim.cluster import build
from engine.sim.deployment import Cluster, ClusterSettings
from engine.sim.drive import Drive, Fault, summary
from engine.sim.golden import GoldenRuns
from engine.sim.language import Command, ScenarioError, parse, suggestion
from engine.sim.node import NodeSettings, SimNode
from engine.sim.phases import Phases
from engine.sim.render import Detail, render
from engine.sim.router_node import RouterNode
from engine.sim.world import World

FEATURES: Final[dict[str, str]] = {
    **dict.fromkeys(("unified", "pd", "router", "pause", "weights", "retraction", "priority"), ""),
    **dict.fromkeys(("groups", "sessions", "logprobs", "deadlines", "drain"), ""),
    **dict.fromkeys(("prefix_cache", "host_backup", "store", "prefetch"), ""),
    "grammar": "grammars do not exist yet",
    "prompt_logprobs": "prompt logprobs do not exist yet",
    "adapters": "adapters do not exist yet",
    "drafts": "there is no speculative decoding",
    "sleep": "memory is not given to others while the engine runs",
}
"""What a file may require, and why it is skipped here; empty where it is not."""

TAIL: Final = 14
"""Trace lines that a failing expectation shows."""


@dataclass(slots=True)
class Outcome:
    """What became of one file."""

    file: str
    trace: str = ""
    faults: list[str] = field(default_factory=list)
    skipped: str = ""
    commands: int = 0
    time_us: int = 0
    """Virtual time at the end."""
    events: int = 0
    requests: int = 0


class Run:
    """The state of a scenario while it runs; commands and expectations work on it."""

    def __init__(self, cluster: Command, commands: Sequence[Command] = ()) -> None:
        """``commands`` are those that will follow."""
        self.world: Final = World()
        settings, detail = build(cluster)
        self.detail: Final[Detail] = detail
        self.cluster: Final = Cluster(self.world, settings)
        self.drive: Final = Drive(self.world, self.cluster)
        self.phases: Final = Phases(self.cluster)
        self.golden: Final = GoldenRuns(_alone(settings))
        self.transcript: Final[list[str]] = []
        self._submits: Final = {each.words[0]: each for each in commands if each.verb == "submit"}
        self._shown = 0

    def execute(self, command: Command) -> None:
        """Run one command; raises :class:`Fault` or :class:`ScenarioError`."""
        if command.verb == "expect":
            expectations.expect(self, command)
        else:
            self.transcript.append(f"> {command.text}")
            commands.COMMANDS[command.verb](self, command)
            self.drive.settle()
        if self.cluster.lines[self._shown :] and command.verb == "expect":
            self.transcript.append(f"> {command.text}")
        self.show()

    def show(self) -> None:
        """Move the trace lines since the last call to the transcript."""
        lines = self.cluster.lines[self._shown :]
        self._shown += len(lines)
        self.transcript.extend(render(lines, self.detail, not self.cluster.single))

    # --- names ---

    def check_node(self, command: Command, name: str = "") -> SimNode:
        """A worker by name; the only one, where no name is given."""
        nodes = self.cluster.nodes
        if not name and self.only_worker is not None:
            return self.only_worker
        if not name:
            raise command.error(f"which node? There are {', '.join(nodes)}")
        if name not in nodes:
            raise command.unknown("node", name, nodes)
        return nodes[name]

    @property
    def only_worker(self) -> SimNode | None:
        """The worker of a cluster that has one; None where there are several."""
        workers = list(self.cluster.nodes.values())
        return workers[0] if len(workers) == 1 else None

    def check_any(self, command: Command, name: str) -> SimNode | RouterNode:
        """A worker or a router by name."""
        if name in self.cluster.routers:
            return self.cluster.routers[name]
        if name not in self.cluster.nodes:
            raise command.unknown("node", name, self.cluster.names)
        return self.cluster.nodes[name]

    def entrance(self) -> Clients:
        """The front end of the router, or of the only node."""
        return self.cluster.clients_of(self.cluster.entrance)

    def clients_of(self, submission: Submission) -> Clients:
        """The front end that a request was sent to."""
        return self.cluster.clients_of(self.cluster.submissions()[submission.name][0])

    def submissions(self, command: Command, pattern: str) -> list[Submission]:
        """Those whose name is ``pattern``, or fits it where it has ``*`` or ``?`` in it."""
        known = {name: each for name, (_, each) in self.cluster.submissions().items()}
        found = [each for name, each in known.items() if fnmatchcase(name, pattern)]
        if not found:
            raise command.unknown("request", pattern, known)
        return found

    def views(self, command: Command, pattern: str) -> list[tuple[Submission, View | None]]:
        """Completions by submission or member name; None for one that the front end refused."""
        if "#" in pattern:
            base, _, _ = pattern.partition("#")
            pairs = [
                (each, view) for each in self.submissions(command, base) for view in each.views
            ]
            found = [(each, view) for each, view in pairs if view.name == pattern]
            if not found:
                raise command.unknown("request", pattern, [view.name for _, view in pairs])
            return list(found)
        out: list[tuple[Submission, View | None]] = []
        for each in self.submissions(command, pattern):
            out += [(each, view) for view in each.views] or [(each, None)]
        return out

    def rids(self, command: Command, pattern: str) -> list[str]:
        """The rids of those that the file submits, in whatever line, and that ``pattern`` names:
        for what is set up before a request comes."""
        base, mark, index = pattern.partition("#")
        found = [
            submit.string("rid", name) + mark + index
            for name, submit in self._submits.items()
            if fnmatchcase(name, base) and (not mark or _has_member(submit, index))
        ]
        if not found:
            raise command.unknown("request", pattern, self._submits)
        return list(dict.fromkeys(found))

    def lives(self, command: Command, pattern: str, on: str = "", word: str = "") -> list[Life]:
        """The lives of each submission or member that ``pattern`` names, on node ``on``, or on the
        side that owns the outcome: decode's, where there is one (and where its chart has
        ``word``, a state or an event)."""
        base = pattern.partition("#")[0]
        names = [each.name for each in self.submissions(command, base)]
        if "#" in pattern:
            names = [pattern]
        return [life for name in names for life in self.lives_of(name, on, word)]

    def lives_of(self, name: str, on: str = "", word: str = "") -> list[Life]:
        """The lives of one submission, of every process that a node has been, the newest last."""
        found: dict[bool, list[Life]] = {True: [], False: []}
        for node in self.cluster.processes():
            chart = node.chart
            if on in ("", node.name) and (not word or word in (*chart.by_name, *chart.events)):
                found[chart.name == "prefill"] += node.book.of(name)
        return sorted(found[False] or found[True], key=lambda life: life.began)

    def around(self) -> str:
        """The newest part of the trace, for the message of a fault."""
        lines = self.cluster.lines[-4 * TAIL :]
        return "\n".join(render(lines, nodes=not self.cluster.single)[-TAIL:])


def run_file(path: Path) -> Outcome:
    """Run one file. Raises :class:`ScenarioError` or OSError where it cannot be used."""
    return run_text(path.read_text(encoding="utf-8"), path.name, str(path))


def run_text(text: str, file: str, where: str = "") -> Outcome:
    """Run the scenario ``text``; the first fault ends it. Messages say ``where``, or ``file``."""
    return play(text, file, where)[0]


def play(text: str, file: str, where: str = "") -> tuple[Outcome, Run | None]:
    """As :func:`run_text`, with the run itself, to look at afterwards; None if it was skipped."""
    where = where or file
    parsed = parse(text, where)
    outcome = Outcome(file, commands=len(parsed))
    for required in (command for command in parsed if command.verb == "requires"):
        outcome.skipped = outcome.skipped or _missing(required)
    if outcome.skipped:
        return outcome, None
    cluster, *commanded = (command for command in parsed if command.verb != "requires")
    run = Run(cluster, commanded)
    run.transcript.append(f"> {cluster.text}")
    for command in commanded:
        try:
            run.execute(command)
        except ScenarioError:
            raise
        except Fault as fault:
            outcome.faults.append(_fault(run, command, str(fault)))
            break
        except Exception as error:  # the engine failed in the command's own call: a finding too
            outcome.faults.append(_fault(run, command, f"the engine failed: {summary(error)}"))
            break
    outcome.trace = "\n".join(run.transcript) + "\n"
    outcome.time_us, outcome.events = run.world.now_us, run.world.events
    outcome.requests = len(run.cluster.submissions())
    if not outcome.faults:
        run.cluster.end()
    return outcome, run


def _has_member(submit: Command, index: str) -> bool:
    count = submit.integer("n", 1)
    return index.isdecimal() and int(index) < count and count > 1


def _alone(settings: ClusterSettings) -> NodeSettings:
    """The node that has to hold what a request says: decode, where it is split."""
    decodes = [each for name, each in settings.nodes.items() if name.startswith("decode")]
    return (decodes or list(settings.nodes.values()))[0]


def _fault(run: Run, command: Command, message: str) -> str:
    """Where and what, with the newest part of the trace."""
    run.show()
    head = f"{command.file}:{command.line}: {command.text}\n  {message}"
    return f"{head}\n  the trace up to here:\n{run.around()}"


def _missing(command: Command) -> str:
    for feature in command.words:
        reason = FEATURES.get(feature, f"no feature of this engine{suggestion(feature, FEATURES)}")
        if reason:
            return f"requires {feature}: {reason}"
    return ""


__all__ = ["FEATURES", "Outcome", "Run", "ScenarioError", "play", "run_file", "run_text"]
