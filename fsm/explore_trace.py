"""A counterexample of a pair as traces, one for each node, that ``fsm-replay`` replays and draws.

Every edge that a life took becomes a move, with what it takes and drops; a step takes a
millisecond. Each life has one page, and the pool has one for every life. There is no footer: the
run stops where something is wrong."""

from collections.abc import Iterator
from typing import Final

from fsm import decode, prefill
from fsm.chart import Chart
from fsm.explore_base import Moved, Violation
from fsm.explore_pd import Design
from fsm.trace import Balance, Line, Tracer

STEP_S: Final = 0.001
BOOT: Final = "explored"
PAGE_SIZE: Final = 16
"""Tokens in a page: one holds a prompt of one token and the token that may follow."""
KITS: Final = {"prefill": prefill.BASE_KIT, "decode": decode.BASE_KIT}
ENDINGS: Final[dict[str, tuple[str, int | None]]] = {
    "finish": ("stop", None),
    "prefilled": ("length", None),
    "fail": ("error", 500),
    "reject": ("abort", 400),
    "expire": ("abort", 503),
    "lost": ("abort", 503),
    "abort": ("abort", None),
}
"""(reason, status) of an answer, by the event that gives it."""


class _Life:
    def __init__(self, name: str, rid: str, initial: str) -> None:
        self.name, self.rid, self.at = name, rid, initial
        self.attempt = self.tokens = 0


class _Node:
    """One node's trace, and the lives on it."""

    def __init__(self, role: str, chart: Chart, pages: int) -> None:
        self.chart, self.role, self.pages = chart, role, pages
        self.free, self.now = pages, 0.0
        self.lines: list[Line] = []
        self.lives: list[_Life] = []
        self.tracer = Tracer(f"{role}-0", lambda: self.now, self.lines.append)
        pools: dict[str, int] = {}
        for resource in sorted(chart.resources):
            pools[resource] = pages
        self.tracer.watch(lambda: Balance(self.free, 0, 0))
        self.tracer.header(BOOT, (role,), {chart.name: chart.fingerprint}, pools, PAGE_SIZE)

    def begin(self, rid: str) -> _Life:
        life = _Life(f"{BOOT}:{len(self.lives) + 1}", rid, self.chart.initial)
        self.lives.append(life)
        kit = KITS[self.role]
        taken = tuple(r for r in self.chart.state(life.at).holds if r in kit)
        self.tracer.submit(life.name, rid, tuple(sorted(kit)), taken, 1, 1)
        self.tracer.cause = self.tracer.last  # of its first move
        return life

    def move(self, life: _Life, moved: Moved) -> None:
        move = self.chart.move(life.at, moved.event, KITS[self.role])
        if move is None:
            raise ValueError(f"{self.chart.name}: no {moved.event!r} in {life.at!r}")
        edge = move.edge
        if "pages" in move.drops:
            self.free += 1
            self.tracer.lease("release", life.name, 1)
        self.free -= "pages" in move.takes
        answers = "frontend_records" in move.drops
        reason, status = ENDINGS.get(edge.event, ("abort", 503)) if answers else ("", None)
        if edge.event in ("prefilled", "landed"):
            life.tokens = 1
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
            units=int("pages" in move.takes),
            reason=reason,
            status=status,
        )
        self.tracer.cause = None
        life.at = edge.target
        life.attempt += edge.target in ("retracted", "held")
        if answers:
            self.tracer.answer(life.name, life.rid, reason, life.tokens, status, moved.why)


def to_traces(violation: Violation, design: Design) -> dict[str, list[Line]]:
    """node → the lines of its trace. A life whose process dies just ends."""
    moves = list(_moves(violation))
    nodes = {
        "prefill": _Node("prefill", design.prefill, 1 + len(moves)),
        "decode": _Node("decode", design.decode, 1 + len(moves)),
    }
    lives: dict[tuple[str, int], _Life] = {}
    earlier: dict[int, list[_Life]] = {}
    for number, moved in moves:
        node, key = nodes[moved.role], (moved.role, moved.who)
        node.now = number * STEP_S
        life = lives.get(key)
        if not moved.current:
            legal = [one for one in earlier[moved.who] if (one.at, moved.event) in node.chart.table]
            life = legal[-1]
        elif life is None:
            life = lives[key] = node.begin(f"r{moved.who + 1}")
        node.move(life, moved)
        if moved.event == "rebuild" and ("prefill", moved.who) in lives:
            earlier.setdefault(moved.who, []).append(lives.pop(("prefill", moved.who)))
    return {f"{role}-0": node.lines for role, node in nodes.items()}


def _moves(violation: Violation) -> Iterator[tuple[int, Moved]]:
    """(number of the step, edge taken in it)"""
    for number, step in enumerate(violation.steps, 1):
        for moved in step.moves:
            yield number, moved if step.who < 0 else moved._replace(who=step.who)
