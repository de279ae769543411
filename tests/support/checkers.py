"""Checkers from outside the engine: what must hold whatever happens.

Each names itself in the failure, so that a test of planted bugs can say who caught one. They share
no code with the scheduler's own audit, which the nodes under test run after every transition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.batch import Batch
from engine.pages import Pages
from fsm.ledger import CACHE
from fsm.trace import AnswerLine, Header, LeaseLine, Line, MoveLine, SubmitLine
from fsm.unified import UNIFIED

if TYPE_CHECKING:
    from tests.support.node import Client, Node


class Broken(AssertionError):  # noqa: N818 - what it says of the engine
    """A promise of the engine is broken; ``checker`` noticed."""

    def __init__(self, checker: str, what: str) -> None:
        super().__init__(f"{checker}: {what}")
        self.checker = checker


class SessionModel:
    """Session histories as clients see them: prompts and answers of turns that ended well."""

    def __init__(self) -> None:
        self._histories: dict[str, list[int]] = {}
        self._stops: dict[int, int] = {}
        self._last: dict[str, int] = {}

    def open(self, name: str) -> None:
        self._histories.setdefault(name, [])

    def close(self, name: str) -> None:
        self._histories.pop(name, None)
        self._last.pop(name, None)

    def history(self, name: str | None) -> list[int]:
        return list(self._histories.get(name or "", []))

    def stopped(self, client: Client, tokens: int) -> None:
        if not 0 < tokens <= len(client.tokens):
            return
        if client.finish is None:
            self._stops[id(client)] = tokens
        elif self._last.get(client.session or "") == id(client):
            del self._histories[client.session or ""][len(client.prompt) + tokens :]

    def answered(self, client: Client) -> None:
        name = client.session or ""
        if name not in self._histories or client.reason not in ("stop", "length"):
            return
        shown = client.tokens
        if client.finish is not None and client.finish.matched == "a stop":
            shown = shown[: self._stops[id(client)]]
        self._histories[name] = client.prompt + shown
        self._last[name] = id(client)


def check_batch(node: Node, batch: Batch) -> None:
    """A step writes only pages that its request alone owns, and no row is computed twice."""
    pool, rows = node.scheduler.kv.pool, node.scheduler.rows
    size = batch.page_size
    seen: set[int] = set()
    for index, item in enumerate(batch.items):
        if item.row in seen:
            raise Broken("rows", f"row {item.row} is in step {batch.step} twice")
        seen.add(item.row)
        if item.row not in rows._owner or rows._owner[item.row] != item.life:
            raise Broken("rows", f"row {item.row} of step {batch.step} is not {item.life}'s")
        pages = batch.pages_of(index)
        for page in pages[item.start // size :]:
            if pool.owners_of(page) != {item.life}:
                owners = sorted(pool.owners_of(page))
                raise Broken("exclusive write", f"step {batch.step} writes page {page} of {owners}")
    budget = sum(item.count for item in batch.items if item.count > 1)
    if budget > node.shape.chunk:
        raise Broken("budget", f"step {batch.step} computes {budget} prompt tokens")


def check_turn(node: Node) -> None:
    """Between two turns of the loop."""
    scheduler = node.scheduler
    faults = scheduler.audit()
    if faults:
        raise Broken("audit", "; ".join(faults[:4]))
    for pool in scheduler.ledger:
        counts = pool.counts()
        if not counts.conserved:
            raise Broken("conservation", f"{pool.name}: {counts.as_dict()}")
    check_tables(node)
    if len(node.open) != len(scheduler.roster.live):
        owed = set(node.open) ^ set(scheduler.roster.live)
        raise Broken("one terminal", f"answers owed differ for {sorted(owed)}")


def check_awake(node: Node) -> None:
    """A loop sleeps until something comes back: whoever is live has work or a load on the way."""
    if node.runner.work or node.scheduler.frozen:
        return
    asleep = [r.rid for r in node.scheduler.roster.live.values() if r.state != "prefetching"]
    if asleep:
        raise Broken("progress", f"nobody would wake the loop for {asleep}: {node.describe()}")


def check_tables(node: Node) -> None:
    """No page lies in two tables unless the cache shares it, and none twice in one."""
    pool = node.scheduler.kv.pool
    places: Counter[int] = Counter()
    for request in node.scheduler.roster.lives.values():
        lease = request.leases.get("pages")
        if isinstance(lease, Pages):
            if len(set(lease.table)) != len(lease.table):
                raise Broken("two owners", f"{request.rid} has a page twice: {list(lease.table)}")
            places.update(lease.table)
    for page, count in places.items():
        if count > 1 and CACHE not in pool.owners_of(page):
            raise Broken("two owners", f"page {page}: {sorted(pool.owners_of(page))}")


def check_rest(node: Node) -> None:
    """Everything is back at its start: nothing live, nothing held, every page free or cached."""
    scheduler = node.scheduler
    if not scheduler.at_rest:
        raise Broken("rest", f"not at rest: {scheduler.ledger.snapshot()}")
    if scheduler.roster.lives or scheduler.roster.live or len(scheduler.groups):
        raise Broken("rest", f"lives {scheduler.roster.lives}, groups {len(scheduler.groups)}")
    if len(scheduler.roster.queue) or len(scheduler.roster.device):
        raise Broken("rest", "an index still names somebody")
    for pool in scheduler.ledger:
        counts = pool.counts()
        if counts.free + counts.cached != counts.total:
            raise Broken("rest", f"{pool.name}: {counts.as_dict()}, owners {pool.owners()}")
    pool = scheduler.kv.pool
    if scheduler.kv.cache.pages != pool.cached:
        raise Broken("rest", f"{scheduler.kv.cache.pages} pages in the tree, {pool.cached} cached")
    if node.open:
        raise Broken("one terminal", f"never answered: {sorted(node.open)}")
    check_clients(node)
    check_trace(node.trace, len(node.clients))


def check_empty(node: Node) -> None:
    """At rest, and the prefix cache can give every page back."""
    node.scheduler.kv.cache.flush()
    for pool in node.scheduler.ledger:
        counts = pool.counts()
        if counts.free != counts.total:
            raise Broken("rest", f"{pool.name} after a flush: {counts.as_dict()}")


def check_clients(node: Node) -> None:
    """Every client heard the truth, or the beginning of it, with the right reason."""
    for client in node.clients:
        if client.finish is None:
            raise Broken("one terminal", f"{client.rid} was never answered")
        if not client.refused:
            check_golden(node, client)


def check_golden(node: Node, client: Client) -> None:
    want = node.golden(client)
    count = len(client.tokens)
    pairs: list[tuple[str, Sequence[object], Sequence[object]]] = [
        ("tokens", client.tokens, want.tokens)
    ]
    if client.sampling.logprobs:
        pairs.append(("logprobs", client.logprobs, want.logprobs))
        if client.sampling.top_logprobs:
            pairs.append(("top", client.top, want.top))
        if client.sampling.token_ids_logprob:
            pairs.append(("chosen", client.chosen, want.chosen))
    for name, got, expected in pairs:
        if list(got) != list(expected[:count]):
            raise Broken("golden", f"{client.rid} {name}: {got}, not {expected[:count]}")
    finish = client.finish
    assert finish is not None
    if finish.type == "length" and (count != len(want.tokens) or want.stopped is not None):
        raise Broken("reason", f"{client.rid}: length after {count} of {len(want.tokens)}")
    wrong = count != len(want.tokens) or finish.matched != want.stopped
    if finish.type == "stop" and finish.matched != "a stop" and wrong:
        raise Broken("reason", f"{client.rid}: {finish} after {count} tokens of {want}")


def check_trace(lines: Sequence[Line], submissions: int) -> None:
    """The trace tells a legal story: moves fit the chart and the kits, every life has one answer,
    nothing follows ``done``, the numbers have no gap."""
    if not lines or not isinstance(lines[0], Header):
        raise Broken("trace", "it has no header")
    states: dict[str, str] = {}
    kits: dict[str, frozenset[str]] = {}
    answers: Counter[str] = Counter()
    for number, line in enumerate(lines[1:], 1):
        if isinstance(line, Header) or line.seq != number:
            raise Broken("trace", f"line {number} is {line}")
        if isinstance(line, SubmitLine):
            if line.life in states:
                raise Broken("trace", f"{line.life} begins twice")
            states[line.life], kits[line.life] = UNIFIED.initial, frozenset(line.kit)
            if set(line.taken) != UNIFIED.holds[UNIFIED.initial] & kits[line.life]:
                raise Broken("trace", f"{line.life} begins with {line.taken}")
        elif isinstance(line, MoveLine):
            _check_move(line, states, kits)
        elif isinstance(line, AnswerLine):
            answers[line.life] += 1
            if UNIFIED.is_live(states[line.life]):
                raise Broken("trace", f"{line.life} is answered in {states[line.life]}")
    loose = [line for line in lines if isinstance(line, LeaseLine) and line.units < 1]
    if loose:
        raise Broken("trace", f"{loose[0]} moves nothing")
    if set(states.values()) - {"done"}:
        raise Broken("trace", f"{states} do not all end")
    if answers != Counter(dict.fromkeys(states, 1)) or len(states) != submissions:
        raise Broken("trace", f"{submissions} submissions, {len(states)} lives, {answers} answers")


def _check_move(line: MoveLine, states: dict[str, str], kits: dict[str, frozenset[str]]) -> None:
    edge = UNIFIED.table.get((line.source, line.event))
    if edge is None or edge.target != line.target or line.by not in edge.by:
        raise Broken("trace", f"{line} is not in the chart")
    if states[line.life] != line.source:
        raise Broken("trace", f"{line} while in {states[line.life]}")
    before, after = (UNIFIED.holds[s] & kits[line.life] for s in (line.source, line.target))
    if set(line.taken) != after - before or set(line.dropped) != before - after:
        raise Broken("trace", f"{line} moves other leases than the chart")
    states[line.life] = line.target
