"""A counterexample as traces, one for each node, that ``fsm-replay`` replays and draws.

Every edge that a life took becomes a move, with what it takes and drops; a step takes a
millisecond. In models that number no pages each life has one, and the pool has one for every life;
in the others lease lines and balances are those of the model. There is no footer: the run stops
where something is wrong."""

from collections.abc import Iterator, Mapping
from typing import Final

from fsm.explore_base import Event, Leased, Moved, Traced, Violation
from fsm.trace import Balance, Line, Tracer

STEP_S: Final = 0.001
BOOT: Final = "explored"
PAGE_SIZE: Final = 64
"""Tokens in a page: more than a counterexample has steps, so that a prompt of one token and what
follows it fit."""
PROMPT: Final = 1
"""Tokens of a prompt in its last page."""
ENDINGS: Final[dict[str, tuple[str, int | None]]] = {
    "finish": ("stop", None),
    "prefilled": ("length", None),
    "fail": ("error", 500),
    "reject": ("abort", 400),
    "expire": ("abort", 503),
    "lost": ("abort", 503),
    "abort": ("abort", None),
}
"""(reason, status) of an answer, by the event that gives it. Of *prefilled*, on a prefill node."""


class _Life:
    def __init__(self, name: str, rid: str, initial: str) -> None:
        self.name, self.rid, self.at = name, rid, initial
        self.attempt = self.tokens = 0


class _Node:
    """One node's trace, and the lives on it."""

    def __init__(self, role: str, facts: Traced, lives: int) -> None:
        self.facts, self.chart = facts, facts.chart
        pages = lives if facts.pages is None else facts.pages
        self.balance, self.now = Balance(pages, 0, 0), 0.0
        self.lines: list[Line] = []
        self.lives: list[_Life] = []
        self.tracer = Tracer(f"{role}-0", lambda: self.now, self.lines.append)
        pools = dict.fromkeys(map(str, sorted(self.chart.resources)), lives) | {"pages": pages}
        self.tracer.watch(lambda: self.balance)
        charts = {self.chart.name: self.chart.fingerprint}
        self.tracer.header(BOOT, (role,), charts, pools, PAGE_SIZE)
        self.prompt: Final = (facts.prompt_pages - 1) * PAGE_SIZE + PROMPT

    def begin(self, rid: str) -> _Life:
        life = _Life(f"{BOOT}:{len(self.lives) + 1}", rid, self.chart.initial)
        self.lives.append(life)
        kit = self.facts.kit
        taken = tuple(r for r in self.chart.state(life.at).holds if r in kit)
        most = 1 if self.chart.name == "decode" else 2 * PAGE_SIZE - PROMPT
        self.tracer.submit(life.name, rid, tuple(sorted(kit)), taken, self.prompt, most)
        self.tracer.cause = self.tracer.last  # of its first move
        return life

    def move(self, life: _Life, moved: Moved) -> None:
        move = self.chart.move(life.at, moved.event, self.facts.kit)
        if move is None:
            raise ValueError(f"{self.chart.name}: no {moved.event!r} in {life.at!r}")
        edge = move.edge
        if self.facts.pages is None:
            self._one_page("pages" in move.takes, "pages" in move.drops, life)
        elif moved.pool is not None:
            self.balance = moved.pool
        answers = "frontend_records" in move.drops
        reason, status = ENDINGS.get(edge.event, ("abort", 503)) if answers else ("", None)
        life.tokens = self._tokens(life, moved)
        self.tracer.move(
            life.name,
            life.attempt,
            life.rid,
            edge.event,
            moved.by,
            edge.source,
            edge.target,
            move.takes,
            move.drops,
            moved.why,
            tokens=life.tokens,
            units=moved.units if "pages" in move.takes else 0,
            reason=reason,
            status=status,
        )
        self.tracer.cause = None
        life.at = edge.target
        life.attempt += edge.target in ("retracted", "held")
        if answers:
            self.tracer.answer(life.name, life.rid, reason, life.tokens, status, moved.why)

    def _one_page(self, takes: bool, drops: bool, life: _Life) -> None:
        free = self.balance.free
        if drops:
            self.balance = Balance(free + 1, 0, 0)
            self.tracer.lease("release", life.name, 1)
        elif takes:
            self.balance = Balance(free - 1, 0, 0)

    def _tokens(self, life: _Life, moved: Moved) -> int:
        """What its client has had after the move: the fewest that explain it."""
        samples = self.chart.phase(life.at) == "prefilling" and moved.by == "runner"
        if samples and moved.event in ("prefilled", "finish"):
            return life.tokens + 1
        if moved.event == "landed":
            return 1
        if moved.event == "finish" and not life.tokens:
            return 1
        grown = (moved.size - 1) * PAGE_SIZE + 1 - self.prompt
        return max(life.tokens, grown)

    def lease(self, leased: Leased, owner: str) -> None:
        self.balance = leased.pool
        self.tracer.lease(leased.what, owner, leased.units)


def to_traces(violation: Violation, facts: Mapping[str, Traced]) -> dict[str, list[Line]]:
    """Node → the lines of its trace; ``facts`` are the model's, by role. A life whose process dies
    just ends."""
    events = list(_events(violation))
    nodes = {role: _Node(role, of, 1 + len(events)) for role, of in facts.items()}
    lives: dict[tuple[str, int], _Life] = {}
    earlier: dict[int, list[_Life]] = {}
    for number, event in events:
        node = nodes[event.role]
        node.now = number * STEP_S
        if isinstance(event, Leased):
            owner = event.owner
            node.lease(event, owner if isinstance(owner, str) else lives[event.role, owner].name)
            continue
        key = (event.role, event.who)
        life = lives.get(key)
        if not event.current:
            legal = [one for one in earlier[event.who] if (one.at, event.event) in node.chart.table]
            life = legal[-1]
        elif life is None:
            life = lives[key] = node.begin(f"r{event.who + 1}")
        node.move(life, event)
        if event.event == "rebuild" and ("prefill", event.who) in lives:
            earlier.setdefault(event.who, []).append(lives.pop(("prefill", event.who)))
    return {f"{role}-0": node.lines for role, node in nodes.items()}


def _events(violation: Violation) -> Iterator[tuple[int, Event]]:
    """(number of the step, what a trace says of it)"""
    for number, step in enumerate(violation.steps, 1):
        for event in step.moves:
            yield number, event
