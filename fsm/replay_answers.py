"""What an answer may be, by the event that ends a life, and how tokens may grow on the way.

The rules are those of :mod:`engine.endings`, told a second time: a replay must not believe the
code whose traces it reads. An event that is not listed may end in any way."""

from dataclasses import dataclass
from typing import Final

from fsm.replay_lives import Life, Step
from fsm.trace import MoveLine


@dataclass(frozen=True, slots=True)
class Ending:
    """Reasons an event may give, and the statuses it may carry without and with tokens."""

    reasons: tuple[str, ...]
    without_tokens: tuple[int | None, ...]
    with_tokens: tuple[int | None, ...]


ENDINGS: Final[dict[str, Ending]] = {
    "reject": Ending(("abort",), (400, 503), ()),
    "abort": Ending(("abort",), (None, 503), (None,)),
    "expire": Ending(("abort",), (503,), (None, 503)),
    "finish": Ending(("stop", "length"), (None,), (None,)),
    "fail": Ending(("error",), (500,), (500,)),
}

SAMPLES: Final = frozenset({"prefilled", "finish"})
"""Events out of a prefill that come with a token; the others leave before one was sampled."""


def check_ending(line: MoveLine, life: Life) -> list[str]:
    """Faults of the answer that a move announces."""
    rule = ENDINGS.get(line.event)
    if not line.reason:
        return ["ends the request and names no reason"]
    if rule is None:
        return []
    faults = []
    if line.reason not in rule.reasons:
        faults.append(f"{line.event} ends with {line.reason!r}, not {' or '.join(rule.reasons)}")
    statuses = rule.with_tokens if line.tokens else rule.without_tokens
    if line.status not in statuses:
        wanted = " or ".join(str(status) for status in statuses) or "no tokens"
        faults.append(
            f"{line.event} with {line.tokens} tokens has status {line.status}, not {wanted}"
        )
    if line.reason == "length" and line.tokens != life.max_new_tokens:
        faults.append(f"ends by length with {line.tokens} of {life.max_new_tokens} tokens")
    if line.reason == "stop" and not line.tokens:
        faults.append("ends by a stop without a token")
    if line.reason == "length" and line.by == "server":
        faults.append("ends by length, which a server cannot know")
    return faults


def check_tokens(line: MoveLine, step: Step, life: Life, page_size: int) -> str:
    """What is wrong with the number of tokens on a move, if anything.

    A token needs a step that computed it, so tokens come only where a row is held, not more than
    asked for, and not more than fit into the pages held. Pages are grown for the next token only,
    so all but the last page are full (design.md §3: ``lease.extend``).
    """
    before, now, most = life.tokens, line.tokens, life.max_new_tokens
    if line.by == "server" and step.retires:  # a stop string cuts off what follows it
        if 1 <= now <= (most if step.computing else before):
            return ""
        return f"{now} tokens up to a stop string; {before} were delivered before"
    if not step.computing:
        return f"{now} tokens; no step ran since {before}" if now != before else ""
    if now > most:
        return f"{now} tokens of at most {most}"
    if step.prefilling:
        sampled = step.event in SAMPLES and most > 0
        if now != before + sampled:
            return f"{now} tokens; a prefill that began with {before} leaves {before + sampled}"
    if now < before:
        return f"{now} tokens after {before}"
    account = life.account
    if account is None:
        return ""
    known = life.prompt_tokens + now
    room = account.units * page_size
    if known > room + 1:
        return f"{now} tokens behind a prompt of {life.prompt_tokens}; its pages hold {room}"
    if account.grown and known < room - page_size:
        return (
            f"{now} tokens behind a prompt of {life.prompt_tokens}, and {account.units} pages of"
            f" {page_size}"
        )
    return ""
