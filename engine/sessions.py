"""Streaming sessions: a history of tokens that turns are appended to, with one turn in flight.

A turn's prompt is the session's history followed by the turn's own text; the prefix cache makes
that cheap. The
*turn* is a lease: the request holds it from the moment it is queued until its client is answered.
A turn that ends by stop or length extends the history when its lease is released; any other end
leaves the history exactly as it was (B111, B112), and in both cases the next turn may start at
once."""

from dataclasses import dataclass, field
from typing import Final

from engine.request import Request
from fsm.ledger import CountPool, Exhausted, Lease
from fsm.resources import Disposition


class SessionError(ValueError):
    """The session does not exist, exists already, is full or is busy: the caller's fault (400)."""


@dataclass(slots=True)
class Session:
    """``history`` holds every token of the finished turns, prompts and outputs."""

    name: str
    capacity: int
    timeout_s: float | None
    last_used: float
    history: list[int] = field(default_factory=list)
    turns: int = 0
    turn: Request | None = None
    last_life: str = ""
    before: int = 0
    """Length of the history before the last turn."""


class TurnLease(Lease):
    """The one turn in flight of a session."""

    __slots__ = ("_book", "request", "session")

    def __init__(self, book: "SessionBook", session: Session, request: Request) -> None:
        super().__init__("session_turns", request.life)
        self._book = book
        self.session: Final = session
        self.request: Final = request

    def _give_back(self, disposition: Disposition | None) -> None:
        self._book.end_turn(self.session, self.request)


class SessionBook:
    """Every open session of a node."""

    def __init__(self, limit: int) -> None:
        self.pool: Final = CountPool("session_turns", limit)
        self._sessions: dict[str, Session] = {}
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, name: str) -> bool:
        return name in self._sessions

    def open(self, name: str, capacity: int, timeout_s: float | None) -> None:
        if name in self._sessions:
            raise SessionError(f"session {name!r} exists already")
        if len(self._sessions) >= self.pool.total:
            raise SessionError(f"{self.pool.total} sessions are open, which is the limit")
        self._sessions[name] = Session(name, capacity, timeout_s, self.now)

    def close(self, name: str) -> Request | None:
        """Forget a session; returns its turn in flight, which the caller has to end."""
        if name not in self._sessions:
            raise SessionError(f"session {name!r} does not exist")
        return self._sessions.pop(name).turn

    def history(self, name: str) -> list[int]:
        """The tokens that a turn's own prompt is appended to."""
        if name not in self._sessions:
            raise SessionError(f"session {name!r} does not exist")
        return self._sessions[name].history

    def check_turn(self, name: str, prompt_len: int, max_new: int, fill: bool) -> int:
        """How many tokens a turn with history and prompt of ``prompt_len`` tokens may generate:
        ``max_new``, or with ``fill`` (the client did not ask for a number) no more than the session
        holds.

        Raises :class:`SessionError` when another turn is in flight or the session would overflow.
        """
        session = self._sessions[name]
        if session.turn is not None:
            raise SessionError(
                f"session {name!r} has a turn in flight ({session.turn.rid}); one at a time"
            )
        length = prompt_len + (1 if fill else max_new)
        if length > session.capacity:
            raise SessionError(
                f"session {name!r} holds {len(session.history)} tokens, "
                f"this turn makes it {length}; "
                f"its capacity is {session.capacity}"
            )
        return min(max_new, session.capacity - prompt_len) if fill else max_new

    def reserve(self, request: Request) -> TurnLease:
        """Raises :class:`Exhausted` while another turn is in flight."""
        session = self._sessions[request.session or ""]
        if session.turn is not None:
            raise Exhausted(f"session {session.name!r} has a turn in flight")
        self.pool.take(request.life)
        session.turn = request
        return TurnLease(self, session, request)

    def end_turn(self, session: Session, request: Request) -> None:
        session.turn = None
        session.last_used = self.now
        self.pool.give_back(request.life, 1)
        if request.finish is not None and request.finish.type in ("stop", "length"):
            session.before = len(session.history)
            session.history = list(request.tokens)
            session.turns += 1
            session.last_life = request.life

    def trim_last_turn(self, request: Request, tokens: int) -> None:
        """A stop string was found in a turn that had already ended: keep ``tokens`` of its output.

        The client was shown no more than that, so the next turn must not build on more.
        """
        session = self._sessions.get(request.session or "")
        if session is not None and session.last_life == request.life:
            del session.history[request.prompt_len + tokens :]

    def drop_last_turn(self, request: Request) -> None:
        """The client of a turn that had already ended went away before it was shown the end: the
        turn never was (B111). Too late where another turn builds on it already."""
        session = self._sessions.get(request.session or "")
        if session is not None and session.last_life == request.life and session.turn is None:
            del session.history[session.before :]
            session.turns -= 1
            session.last_life = ""

    def expired(self, now: float) -> list[str]:
        """Idle sessions whose time-out has passed."""
        return [
            session.name
            for session in self._sessions.values()
            if session.timeout_s is not None
            and session.turn is None
            and now >= session.last_used + session.timeout_s
        ]

    @property
    def next_expiry(self) -> float | None:
        """When the next idle session times out."""
        return min(
            (
                session.last_used + session.timeout_s
                for session in self._sessions.values()
                if session.timeout_s is not None and session.turn is None
            ),
            default=None,
        )

    def as_dict(self) -> dict[str, dict[str, object]]:
        return {
            session.name: {
                "tokens": len(session.history),
                "turns": session.turns,
                "in_flight": session.turn.rid if session.turn is not None else None,
            }
            for session in self._sessions.values()
        }
