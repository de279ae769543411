"""The ``expect`` command, in all its forms.

An expectation looks; only ``within=`` and ``base`` let time pass. What it looks at is what clients
were shown, the trace, and the ledger.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.sim import node_expectations as node
from engine.sim.conditions import check_on, check_phase, check_state
from engine.sim.drive import Fault
from engine.sim.language import Command
from engine.sim.request_expectations import golden, request
from fsm.resources import RESOURCES
from fsm.trace import MoveLine

if TYPE_CHECKING:
    from engine.sim.scenario import Run


def expect(run: "Run", command: Command) -> None:
    """Judge what is expected. With ``within=`` it may come true later; what must not happen, must
    not happen until then."""
    first, *words = command.words
    limit: int | None = None
    if "within" in command.options:
        limit = run.world.now_us + command.integer("within", 0)
        options = {key: value for key, value in command.options.items() if key != "within"}
        command = replace(command, options=options)
    form = FORMS.get(first)
    if form is not None:
        for key in command.options:
            if key not in form.options:
                raise command.unknown(f"option of 'expect {first}'", key, form.options)
        _judge(run, limit, first, lambda: form.judge(run, command, tuple(words)))
    elif words in (["golden"], []) and (words or command.options or limit is not None):
        if command.options:
            request(run, command, first, limit)
        if words:
            golden(run, command, first, limit)
        elif not command.options:
            raise command.error("what is expected? See docs/scenarios.md")
    else:
        known = [*FORMS, *run.cluster.submissions()]
        if first not in known and "*" not in first:
            raise command.unknown("expectation or request", first, known)
        raise command.error("what is expected? See docs/scenarios.md")


def _judge(run: "Run", limit: int | None, first: str, judge: Callable[[], None]) -> None:
    def holds() -> bool:
        try:
            judge()
        except Fault:
            return False
        return True

    if limit is not None:
        if first in ("no", "never"):
            run.drive.until_time(limit)
        else:
            run.drive.until(holds, limit)
    judge()


def _never(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect never RID phase=P|state=S``."""
    if len(words) != 1 or len({"phase", "state"} & command.options.keys()) != 1:
        raise command.error("write 'expect never RID phase=P' or '… state=S [on=NODE]'")
    name = words[0]
    if "phase" in command.options:
        phase = check_phase(command, command.string("phase"))
        for each, view in run.views(command, name):
            who = each.name if view is None else view.name
            when = run.phases.since(who, phase)
            if when is not None:
                raise Fault(f"{who} was {phase} at {when * 1000:.3f} ms")
        return
    on = check_on(run, command)
    banned = check_state(run, command, command.string("state"), on)
    for life in run.lives(command, name, on, banned):
        for move in life.moves:
            if move.target == banned:
                raise Fault(f"{life.name} was {move.target} at {move.time * 1000:.3f} ms")


def _no(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect no answer RID``."""
    if len(words) != 2 or words[0] != "answer":
        raise command.error("write 'expect no answer RID'")
    for submission, view in run.views(command, words[1]):
        finish = submission.refused if view is None else view.finish
        if finish is not None:
            raise Fault(f"{submission.name} has its answer: {finish.type} {finish.message}")


def _order(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect order EVENT RID RID…``: when this event first happened to each of them."""
    if len(words) < 3:
        raise command.error("write 'expect order EVENT RID RID…'")
    event, *names = words
    on = check_on(run, command)
    nodes = [run.cluster.nodes[on]] if on else run.cluster.nodes.values()
    known = {known for node in nodes for known in node.chart.events}
    if event not in known:
        raise command.unknown("event", event, known)
    first: dict[str, int] = {}
    for place, (_, line) in enumerate(run.cluster.lines):
        if isinstance(line, MoveLine) and line.event == event:
            first.setdefault(line.life, place)
    seen: list[tuple[int, str]] = []
    for name in names:
        lives = run.lives(command, name, on, event)
        places = [first[life.life] for life in lives if life.life in first]
        if not places:
            raise Fault(f"{event} never happened to {name}")
        seen.append((min(places), name))
    actual = [name for _, name in sorted(seen)]
    if actual != names:
        raise Fault(f"expected {event} of {' '.join(names)}, got {' '.join(actual)}")


def _same(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect same RID RID…`` and ``expect differ RID RID…``: what their clients were shown."""
    if len(words) < 2:
        raise command.error("write 'expect same RID RID…' or 'expect differ RID RID…'")
    shown = [
        (view.name, view.tokens)
        for name in words
        for _, view in run.views(command, name)
        if view is not None
    ]
    for index, (name, tokens) in enumerate(shown):
        for other, others in shown[:index]:
            if (tokens == others) != (command.words[0] == "same"):
                verdict = "the same" if tokens == others else "different"
                raise Fault(f"{other} and {name} were shown {verdict} tokens")


def _count(run: "Run", command: Command, words: tuple[str, ...]) -> None:
    """``expect logprobs|retractions|cached RID OP N``."""
    what, *rest = words
    if not rest:
        raise command.error(f"write 'expect {what} RID = N'")
    name, *tail = rest
    _, test, right = node.comparison(command, (what, *tail))
    for submission, view in run.views(command, name):
        if view is None:
            raise Fault(f"{submission.name} was refused by the front end")
        figures = {
            "logprobs": len(view.member.logprobs),
            "retractions": sum(
                move.target in ("retracted", "held")
                for life in run.lives_of(view.name)
                for move in life.moves
            ),
            "cached": view.member.cached_tokens,
        }
        node.compare(f"{what} {view.name}", figures[what], test, right)


Judge = Callable[["Run", Command, tuple[str, ...]], None]
"""Raises :class:`Fault` where the expectation does not hold."""


def _counting(what: str) -> Judge:
    return lambda run, command, words: _count(run, command, (what, *words))


class Form(NamedTuple):
    """An expectation that begins with a word of its own, and the options it takes."""

    judge: Judge
    options: frozenset[str] = frozenset()


FORMS: Final[dict[str, Form]] = {
    "never": Form(_never, frozenset({"phase", "state", "on"})),
    "no": Form(_no),
    "order": Form(_order, frozenset({"on"})),
    "same": Form(_same),
    "differ": Form(_same),
    "base": Form(node.base),
    "held": Form(node.held, frozenset({"on", *RESOURCES})),
    "forwards": Form(node.forwards),
    "ledger": Form(node.ledger),
    "load": Form(node.load),
    "logprobs": Form(_counting("logprobs")),
    "retractions": Form(_counting("retractions")),
    "cached": Form(_counting("cached")),
    "reply": Form(node.reply, node.REPLIES | {"on"}),
    "lost": Form(node.lost, frozenset({"message"})),
}
