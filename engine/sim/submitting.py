"""The ``submit`` command: a request whose prompt is random, but the same on every run."""

import random
import re
from typing import TYPE_CHECKING

import msgspec

from engine.hash_model import BYTES
from engine.sim.language import Command
from engine.sim.node import SimNode
from engine.sim.node_expectations import RESERVED
from engine.sim.paired_node import PairedNode
from engine.sim.router_node import RouterNode
from engine.sim.values import Golden, Prefix, Span
from engine.sim.world import US_PER_S
from transport.messages import OpenSession, SamplingParams, Submit

if TYPE_CHECKING:
    from engine.sim.scenario import Run

DEFAULT_PROMPT = Span(16, 16)
DEFAULT_MAX_TOKENS = Span(16, 16)


def submit(run: "Run", command: Command) -> None:
    """Send one request from a client of its own."""
    name = command.words[0]
    if not re.fullmatch(r"[A-Za-z][\w.-]*", name) or name in RESERVED:
        raise command.error(f"{name!r} is no name for a request")
    if "to" not in command.options and not run.cluster.routers and len(run.cluster.nodes) > 1:
        raise command.error("to= says which node; there is no router")
    where = command.string("to", run.cluster.entrance)
    target = run.check_any(command, where)
    _check_name(run, command, name, target)
    prompt = make_prompt(command, name)
    sampling = _sampling(command, name)
    stops, sampling = _stops(run, command, prompt, sampling)
    deadline = command.optional("deadline")
    session = command.options.get("session")
    message = Submit(
        command.string("rid", name),
        prompt,
        sampling,
        n=command.integer("n", 1),
        priority=command.integer("priority", 0),
        session=None if session is None else str(session),
        deadline_s=None if deadline is None else deadline / US_PER_S,
        room=command.string("room", f"room of {name}" if isinstance(target, PairedNode) else ""),
        prefill=_prefill(run, name, where),
    )
    if message.session is not None:
        worker = target if isinstance(target, SimNode) else run.only_worker
        if worker is not None:
            _open_session(worker, message.session)
    target.clients.submit(name, message, stops)


def _check_name(run: "Run", command: Command, name: str, target: SimNode | RouterNode) -> None:
    """A name is given once; the two halves of a request that is split by hand share it."""
    submitted = [
        run.check_any(command, where)
        for where in run.cluster.names
        if name in run.cluster.clients_of(where).submissions
    ]
    halves = [each for each in (*submitted, target) if isinstance(each, PairedNode)]
    roles = {half.chart.name for half in halves}
    if submitted and not len(submitted) + 1 == len(halves) == len(roles):
        raise command.error(f"{name!r} is submitted already; 'rid={name}' repeats a rid")


def _open_session(node: SimNode, session: str) -> None:
    """A session that nobody has opened or closed yet begins with its first turn."""
    if not node.clients.knows_session(session):
        node.clients.open_session(session)
        node.post(OpenSession(0, session))


def _prefill(run: "Run", name: str, where: str) -> str:
    """Who computes the prompt of a request that is sent to decode by hand: the prefill that its
    other half was sent to, or that of the same number, or else the first."""
    if not where.startswith("decode"):
        return ""
    prefills = [node for node in run.cluster.nodes if node.startswith("prefill")]
    sent = [node for node in prefills if name in run.cluster.nodes[node].clients.submissions]
    same = [node for node in prefills if node == where.replace("decode", "prefill")]
    return (sent or same or prefills or [""])[0]


def make_prompt(command: Command, name: str) -> list[int]:
    """``prompt`` tokens drawn from the submission's name; the first ``prefix`` ones from
    the prefix's name."""
    length = draw(command.options.get("prompt", DEFAULT_PROMPT), f"prompt length of {name}")
    prefix = command.options.get("prefix")
    shared: list[int] = []
    if isinstance(prefix, Prefix):
        wanted = draw(prefix.length, f"prefix length of {name}")
        if "prompt" not in command.options:
            length = wanted + 1
        shared = tokens(f"prefix {prefix.name}", min(wanted, length))
    return shared + tokens(f"prompt {name}", length - len(shared))


def tokens(seed: str, count: int) -> list[int]:
    stream = random.Random(seed)
    return [stream.randrange(BYTES) for _ in range(count)]


def draw(value: object, seed: str) -> int:
    assert isinstance(value, Span)
    return random.Random(seed).randint(value.low, value.high)


def _sampling(command: Command, name: str) -> SamplingParams:
    maximum = draw(command.options.get("max_tokens", DEFAULT_MAX_TOKENS), f"max tokens of {name}")
    top = command.integer("top_logprobs", 0)
    return SamplingParams(
        max_new_tokens=maximum,
        min_new_tokens=command.integer("min_tokens", 0),
        temperature=_number(command, "temperature", 0.0),
        top_p=_number(command, "top_p", 1.0),
        seed=command.integer("seed", 0),
        ignore_eos="ignore_eos" in command.flags,
        logprobs="logprobs" in command.flags or top > 0,
        top_logprobs=top,
        eos_at=command.integer("eos", -1),
    )


def _number(command: Command, option: str, default: float) -> float:
    value = command.options.get(option, default)
    assert isinstance(value, float)
    return value


def _stops(
    run: "Run", command: Command, prompt: list[int], sampling: SamplingParams
) -> tuple[tuple[bytes, ...], SamplingParams]:
    """Stop strings and stop token ids; ``@I`` in them is what the request says when nothing
    stops it."""

    def said(which: Golden) -> list[int]:
        alone = run.golden.run(prompt, sampling, ())
        if which.last > len(alone.tokens):
            raise command.error(
                f"@{which.last}: the request says only {len(alone.tokens)} tokens when it runs"
                " alone"
            )
        return list(alone.tokens[which.first - 1 : which.last])

    stop = command.options.get("stop")
    stops: tuple[bytes, ...] = ()
    if isinstance(stop, str):
        stops = (stop.encode(),)
    elif isinstance(stop, Golden):
        stops = (bytes(said(stop)),)
    ids: list[int] = []
    wanted = command.options.get("stop_token_ids", ())
    assert isinstance(wanted, tuple)
    for each in wanted:
        ids += said(each) if isinstance(each, Golden) else [int(each)]
    return stops, msgspec.structs.replace(sampling, stop_token_ids=tuple(ids))
