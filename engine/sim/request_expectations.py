"""Expectations of one request: where it is, and what its client was shown.

expect RID phase=P state=S [on=NODE] finished=F status=N tokens=N message="PART" matched=X
expect RID golden
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.sim.book import Life
from engine.sim.client import Submission, View
from engine.sim.conditions import check_finishes, check_on, check_phase, check_state, ended_as
from engine.sim.drive import Fault
from engine.sim.language import Command
from transport.messages import Finish

if TYPE_CHECKING:
    from engine.sim.scenario import Run


def request(run: "Run", command: Command, name: str, limit: int | None) -> None:
    """``expect RID phase= state= finished= status= tokens= message= matched=``."""
    wanted = {k: str(v) for k, v in command.options.items() if k != "on"}
    on = check_on(run, command)
    if on and not {"state", "phase"} & wanted.keys():
        raise command.error("on= says where a state or a phase is looked at")
    for key in wanted:
        if key not in _READERS:
            raise command.unknown("property of a request", key, _READERS)
    if "phase" in wanted:
        check_phase(command, wanted["phase"])
    if "state" in wanted:
        check_state(run, command, wanted["state"], on)
    check_finishes(command, wanted.get("finished", "stop").split("|"))
    pairs = run.views(command, name)
    if limit is not None:
        run.drive.until(lambda: not any(_differences(run, pairs, wanted, on)), limit)
    differences = list(_differences(run, pairs, wanted, on))
    if differences:
        raise Fault("\n  ".join(differences))


def _differences(
    run: "Run", pairs: list[tuple[Submission, View | None]], wanted: dict[str, str], on: str
) -> Iterator[str]:
    for submission, view in pairs:
        name = submission.name if view is None else view.name
        seen = Seen(run, submission, view, on, wanted.get("state", ""))
        for key, value in wanted.items():
            actual = _READERS[key](seen)
            if not _fits(seen, key, value, actual):
                yield f"{name}: expected {key}={value}, got {actual or 'nothing yet'}"


def _fits(seen: "Seen", key: str, value: str, actual: str | None) -> bool:
    if actual is None:
        return False
    if key == "message":
        return value in actual
    allowed = value.split("|")
    if key == "finished" and seen.finish is not None:
        return ended_as(seen.finish, allowed)
    return actual in allowed or (key == "status" and f"{actual[0]}xx" in allowed)


class Seen(NamedTuple):
    """One completion to look at; ``view`` is None where the front end refused the submission."""

    run: "Run"
    submission: Submission
    view: View | None
    on: str = ""
    """The node whose life is looked at; empty: the one that owns the outcome."""
    state: str = ""
    """The state that is looked for: on the side whose chart has it."""

    @property
    def finish(self) -> Finish | None:
        return self.submission.refused if self.view is None else self.view.finish

    @property
    def life(self) -> Life | None:
        """Its newest life; a group that is refused has one life for all."""
        run, name = self.run, self.submission.name
        where = self.on, self.state
        lives = run.lives_of(self.view.name, *where) if self.view is not None else []
        lives = lives or run.lives_of(name, *where)
        return lives[-1] if lives else None


def _finished(seen: Seen) -> str | None:
    return seen.finish.type if seen.finish is not None else None


def _status(seen: Seen) -> str | None:
    return str(seen.finish.status or 200) if seen.finish is not None else None


def _message(seen: Seen) -> str | None:
    return seen.finish.message if seen.finish is not None else None


def _matched(seen: Seen) -> str | None:
    return str(seen.finish.matched) if seen.finish is not None else None


def _tokens(seen: Seen) -> str | None:
    return str(len(seen.view.tokens) if seen.view is not None else 0)


def _state(seen: Seen) -> str | None:
    return seen.life.where if seen.life is not None else None


def _phase(seen: Seen) -> str | None:
    if seen.on:
        chart = seen.run.cluster.nodes[seen.on].chart
        return chart.phase(seen.life.where) if seen.life is not None else None
    name = seen.submission.name if seen.view is None else seen.view.name
    return seen.run.phases.now(name) or seen.run.phases.now(seen.submission.name)


_READERS: Final[dict[str, Callable[[Seen], str | None]]] = {
    "phase": _phase,
    "state": _state,
    "tokens": _tokens,
    "finished": _finished,
    "status": _status,
    "message": _message,
    "matched": _matched,
}


def golden(run: "Run", command: Command, name: str, limit: int | None) -> None:
    """What the client was shown is what the request says alone: all of it if it ended by stop or
    length, else the beginning; the log-probabilities too, where they were asked for. With a
    ``limit`` it has its answer by then."""
    if limit is not None:
        pairs = run.views(command, name)
        if not run.drive.until(lambda: all(each.answered for each, _ in pairs), limit):
            late = ", ".join(each.name for each, _ in pairs if not each.answered)
            raise Fault(f"still without an answer: {late}")
    for submission, view in run.views(command, name):
        if view is None:
            if name != submission.name:
                continue
            raise Fault(f"{submission.name} was refused by the front end and said nothing")
        message = submission.message
        ended = view.finish is not None and view.finish.type in ("stop", "length")
        if not ended and not view.tokens:
            continue  # nothing was said; it may even be one that cannot run
        member = int(view.name.partition("#")[2]) if message.n > 1 else None
        alone = run.golden.under(
            submission.history + message.prompt,
            message.sampling,
            submission.stops,
            member,
            view.weights[: len(view.tokens)],
        )
        expected = list(alone.tokens)
        if not ended:
            expected = expected[: len(view.tokens)]
        if view.tokens != expected:
            raise Fault(f"{view.name}: {_first_difference(view.tokens, expected)}")
        if ended and view.finish != alone.finish:
            raise Fault(f"{view.name}: expected to end as {alone.finish}, ended as {view.finish}")
        if message.sampling.logprobs:
            logprobs = view.member.logprobs[: len(view.tokens)]
            if logprobs != list(alone.logprobs[: len(expected)]):
                raise Fault(f"{view.name}: the log-probabilities differ from those alone")


def _first_difference(actual: list[int], expected: list[int]) -> str:
    for index, (a, b) in enumerate(zip(actual, expected, strict=False), 1):
        if a != b:
            return f"expected golden, but output token {index} is {a}, not {b}"
    return f"expected golden, but {len(actual)} output tokens were shown, not {len(expected)}"
