"""Lines of a trace as text for people, and which of them to show."""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from fsm.ledger import QUARANTINE
from fsm.trace import PAGES, AnswerLine, Footer, Header, LeaseLine, MoveLine, SubmitLine
from fsm.trace_read import Malformed, Read

KINDS: Final = ("header", "submit", "move", "lease", "answer", "footer")
BASE_KIT: Final = frozenset({"spans", "frontend_records", "prefix_locks", "pages", "rows"})
"""What every request needs, and what a submission therefore does not mention."""


class Shown(NamedTuple):
    """One line for people. ``time`` is in seconds since the header."""

    time: float
    node: str
    kind: str
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which lines to show. Empty fields let everything pass; rids may hold ``*`` and ``?``."""

    rids: tuple[str, ...] = ()
    lives: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    """Moves into or out of them, and what happens to requests in them."""
    since: float = float("-inf")
    until: float = float("inf")

    def wants(self, kind: str, time: float, life: str, rid: str, states: tuple[str, ...]) -> bool:
        return (
            self.since <= time <= self.until
            and (not self.kinds or kind in self.kinds)
            and (not self.lives or life in self.lives)
            and (not self.rids or any(fnmatchcase(rid, pattern) for pattern in self.rids))
            and (not self.states or any(state in self.states for state in states))
        )


@dataclass(slots=True)
class Teller:
    """Tells the lines of one trace, which is called ``name``, in order. Remembers the requests
    that are live."""

    header: Header
    lines: Filter
    name: str
    _rids: dict[str, str] = field(default_factory=dict)
    _states: dict[str, str] = field(default_factory=dict)

    def tell(self, line: Read) -> Shown | None:
        """The text of ``line``; None where the filter does not want it."""
        match line:
            case Header():
                return self._shown("header", line.time, "", "", _header(line))
            case SubmitLine():
                self._rids[line.life] = line.rid
                return self._shown("submit", line.time, line.life, line.rid, _submit(line))
            case MoveLine():
                return self._move(line)
            case LeaseLine():
                life = line.owner.removeprefix(QUARANTINE)
                rid = self._rids.get(life, life)
                who = line.owner.removesuffix(life) + rid
                return self._shown("lease", line.time, life, rid, _lease(line), who)
            case AnswerLine():
                shown = self._shown("answer", line.time, line.life, line.rid, _answer(line))
                if line.life not in self._states:
                    self._rids.pop(line.life, None)
                return shown
            case Footer():
                text = "the end, at rest" if line.at_rest else "the end, not at rest"
                return self._shown("footer", line.time, "", "", text)
            case Malformed():
                return Shown(0.0, self.name, "malformed", "", line.reason)

    def _move(self, line: MoveLine) -> Shown | None:
        states = (line.source, line.target)
        self._states[line.life] = line.target
        shown = self._shown("move", line.time, line.life, line.rid, _move(line), states=states)
        if line.target == "done":
            del self._states[line.life]
            if not line.reason:
                self._rids.pop(line.life, None)
        return shown

    def _shown(
        self,
        kind: str,
        time: float,
        life: str,
        rid: str,
        text: str,
        who: str = "",
        states: tuple[str, ...] = (),
    ) -> Shown | None:
        time -= self.header.time
        here = states or ((self._states[life],) if life in self._states else ())
        if not self.lines.wants(kind, time, life, rid, here):
            return None
        return Shown(time, self.name, kind, who or rid, text)


def _header(line: Header) -> str:
    charts = " ".join(f"{name}={fingerprint}" for name, fingerprint in line.charts.items())
    pools = " ".join(f"{name}={total}" for name, total in line.pools.items())
    return f"boot {line.boot_id}, charts {charts}, pools {pools}, {line.page_size} tokens a page"


def _submit(line: SubmitLine) -> str:
    extra = [name for name in line.kit if name not in BASE_KIT]
    kit = f" kit {' '.join(extra)}" if extra else ""
    sizes = f"submit {line.life} prompt={line.prompt_tokens} max={line.max_new_tokens}"
    return sizes + kit + _signed("+", line.taken, "")


def _move(line: MoveLine) -> str:
    pages = f"={line.units}" if line.units else ""
    parts = [f"{line.source} -{line.event}-> {line.target} by={line.by}"]
    parts += [f"attempt={line.attempt}"] if line.attempt else []
    parts += [f"tokens={line.tokens}"] if line.tokens else []
    if line.cause is not None and line.cause[0] != line.node:
        parts.append(f"cause={line.cause[0]}:{line.cause[1]}")
    signs = _signed("+", line.taken, pages) + _signed("-", line.dropped, "")
    return " ".join(parts) + signs + (f" ({line.why})" if line.why else "")


def _lease(line: LeaseLine) -> str:
    text = f"{line.resource} {line.what} {line.units}"
    if line.resource == PAGES and line.pool is not None:
        text += f", {line.pool.free} free {line.pool.cached} cached"
    return text


def _answer(line: AnswerLine) -> str:
    status = f" status={line.status}" if line.status is not None else ""
    why = f" ({line.message})" if line.message else ""
    return f"answer {line.reason} tokens={line.tokens}{status}{why}"


def _signed(sign: str, names: tuple[str, ...], pages: str) -> str:
    return "".join(f" {sign}{name}{pages if name == PAGES else ''}" for name in names)
