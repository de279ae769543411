"""The routing core: which workers serve a request, what became of each half, and who is told.

Deterministic and without IO, like a scheduler: whoever owns the sockets reports what happened
(a call answered, a worker was heard or lost, a client left) and performs the :data:`Action` values
that come back. Time is handed in as seconds on one clock.

With prefill and decode apart, both workers get the same body at the same moment, with a *room* that
introduces them. Decode's answer is the client's. Prefill's answer only acknowledges its half: what
decode says is shown once it is there, and if prefill answers an error first, decode's call is
dropped and the client gets that error (B93). A retry keeps the rid and has a fresh room. A client
that leaves, and an abort by name, reach both halves (B67, B99); a member of a group has a name of
its own (``rid#i``), and is where its submission is.

What is in flight at a worker is counted by owner, one lease for each call, so that no path can
forget a decrement (B94). The record of a request is a lease too: ``router_records``.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from engine.frontend import MEMBER_SUFFIX
from fsm.ledger import CountPool, Lease
from transport.messages import Finish

Kind: TypeAlias = Literal["unified", "prefill", "decode"]

RETRYABLE: Final = frozenset({408, 429, 500, 502, 503, 504})
"""What may be tried again elsewhere, as long as the client has seen nothing."""

SILENCE_S: Final = 2.0
"""A worker that was not heard for so long is lost: four probes without an answer."""

REMEMBERED: Final = 4096
"""Ended rids, so that a late abort is told "finished" and not "unknown"."""


class Send(NamedTuple):
    """Call a worker. ``room`` and ``prefill`` are empty for a unified one."""

    node: str
    rid: str
    attempt: int
    room: str
    prefill: str


class Drop(NamedTuple):
    """Close the call to a worker: its client is gone, as far as that worker can know."""

    node: str
    rid: str
    attempt: int


class Relay(NamedTuple):
    """What ``node`` says of this request may be shown to the client, from now on."""

    node: str
    rid: str
    attempt: int


class Forward(NamedTuple):
    """Tell a worker to abort a rid."""

    node: str
    rid: str


class Reply(NamedTuple):
    """The client's terminal answer. ``node`` names the call whose own answer it is; it is empty
    where ``finish`` is the router's."""

    rid: str
    node: str
    attempt: int
    finish: Finish


Action: TypeAlias = Send | Drop | Relay | Forward | Reply


# --- policy ---------------------------------------------------------------------------------------


def least_loaded(loads: Mapping[str, int], avoid: frozenset[str]) -> str | None:
    """The worker with the fewest calls in flight, by name where they are equal; one of ``avoid``
    only if there is no other. None: there are no workers."""
    fresh = [name for name in loads if name not in avoid] or list(loads)
    return min(fresh, key=lambda name: (loads[name], name), default=None)


def may_retry(finish: Finish, shown: bool, left: int) -> bool:
    """Whether a failed attempt is made again: nothing was shown, and the failure is not the
    request's own fault."""
    return left > 0 and not shown and finish.status in RETRYABLE


def _names(rid: str, members: int) -> list[str]:
    """What a submission and its members are called; one that is alone has the one name, and what
    has no members is not known."""
    if members <= 1:
        return [rid] * members
    return [rid, *(f"{rid}#{index}" for index in range(members))]


# --- records --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Worker:
    """One worker and the calls to it."""

    name: str
    kind: Kind
    calls: CountPool
    up: bool = True
    heard_at: float = 0.0

    @property
    def load(self) -> int:
        return self.calls.total - self.calls.free


@dataclass(slots=True)
class Record:
    """One open request."""

    rid: str
    members: int
    """How many completions it asks for."""
    lease: Lease
    retries: int
    attempt: int = -1
    open: dict[str, Lease] = field(default_factory=dict)
    """Calls that are not answered, by worker."""
    speaker: str = ""
    """The worker whose answer is the client's."""
    prefill: str = ""
    acknowledged: bool = False
    """Prefill has answered its half (or there is none)."""
    spoken: bool = False
    """The speaker has said something."""
    shown: bool = False
    """The client has seen some of it."""
    ended: frozenset[str] = frozenset()
    """Members that have come to their end, as the speaker says."""
    tried: set[str] = field(default_factory=set)


class Router:
    """All open requests of one router."""

    def __init__(
        self,
        workers: Iterable[tuple[str, Kind]],
        mint_room: Callable[[], str],
        retries: int = 0,
        capacity: int = 65_536,
    ) -> None:
        """``retries`` is how often a failed request is tried again; ``capacity`` is in requests."""
        self.workers: Final[dict[str, Worker]] = {
            name: Worker(name, kind, CountPool("router_records", capacity))
            for name, kind in workers
        }
        self.pool: Final = CountPool("router_records", capacity)
        self.records: Final[dict[str, Record]] = {}
        self.recent: Final[OrderedDict[str, int]] = OrderedDict()
        """Ended rids, with how many members each had."""
        self._mint_room = mint_room
        self._retries = retries

    # --- clients ---

    def submit(self, rid: str, members: int = 1) -> list[Action]:
        """A request for ``members`` completions; ``rid`` must not be open. Answers 503 where no
        worker is left."""
        if rid in self.records:
            raise ValueError(f"{rid} is open")
        lease = self.pool.reserve(rid)
        lease.adopt()
        record = self.records[rid] = Record(rid, members, lease, self._retries)
        return self._attempt(record)

    def disconnect(self, rid: str) -> list[Action]:
        """The client went away: both calls are dropped, and nobody is answered."""
        record = self.records.get(rid)
        if record is None:
            return []
        actions = self._drop_all(record)
        self._end(record)
        return actions

    def abort(self, rids: Iterable[str]) -> tuple[list[Action], dict[str, list[str]]]:
        """End requests, or single members of them, by exact rid, wherever their halves are. The
        answers come from the workers; the dictionary says what became of each rid.

        What is aborted is not run again, so a group that has lost a member is not tried again.
        """
        actions: list[Action] = []
        outcome: dict[str, list[str]] = {"aborted": [], "finished": [], "unknown": []}
        for rid in rids:
            name = MEMBER_SUFFIX.sub("", rid)
            record = self.records.get(name)
            count = self.recent.get(name, 0) if record is None else record.members
            if rid not in _names(name, count):
                outcome["unknown"].append(rid)
                continue
            if record is None or rid in record.ended:
                outcome["finished"].append(rid)
                continue
            record.retries = 0
            outcome["aborted"].append(rid)
            nodes = dict.fromkeys((*record.open, record.prefill, record.speaker))
            actions += [Forward(node, rid) for node in nodes if node]
        return actions, outcome

    # --- calls ---

    def spoke(
        self, node: str, rid: str, attempt: int, ended: frozenset[str] = frozenset()
    ) -> list[Action]:
        """A worker has sent something that is not its end, but may be that of the members
        ``ended``."""
        record = self._current(node, rid, attempt)
        if record is None or node != record.speaker:
            return []
        record.spoken, record.ended = True, ended
        return self._show(record)

    def answered(self, node: str, rid: str, attempt: int, finish: Finish) -> list[Action]:
        """A call has come to its end."""
        record = self._current(node, rid, attempt)
        if record is None:
            return []
        self._close(record, node)
        if finish.status is not None and not record.shown:
            return self._failed(record, node, finish)
        if node != record.speaker:
            record.acknowledged = True
            return self._show(record)
        actions = self._drop_all(record)
        self._end(record)
        return [*actions, Reply(rid, node, attempt, finish)]

    # --- workers ---

    def heard(self, node: str, now: float) -> None:
        """A worker has answered a health probe, or anything else."""
        worker = self.workers[node]
        worker.up, worker.heard_at = True, now

    def lost(self, node: str) -> list[Action]:
        """A worker is gone or silent: every call to it has failed."""
        worker = self.workers[node]
        worker.up = False
        finish = Finish(
            "abort",
            message=f"the worker {node} is gone",
            status=503,
            err_type="ServiceUnavailableError",
        )
        actions: list[Action] = []
        for record in [each for each in self.records.values() if node in each.open]:
            attempt = record.attempt
            actions.append(Drop(node, record.rid, attempt))
            actions += self.answered(node, record.rid, attempt, finish)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Notice who is silent."""
        actions: list[Action] = []
        for worker in self.workers.values():
            if worker.up and now - worker.heard_at >= SILENCE_S:
                actions += self.lost(worker.name)
        return actions

    @property
    def at_rest(self) -> bool:
        return not self.records and all(worker.load == 0 for worker in self.workers.values())

    def audit(self) -> list[str]:
        """What is counted against what is open; empty when they agree."""
        faults = []
        for name, worker in self.workers.items():
            open_calls = {f"{r.rid}~{r.attempt}" for r in self.records.values() if name in r.open}
            if set(worker.calls.owners()) != open_calls:
                faults.append(
                    f"router: {name} is charged for {sorted(worker.calls.owners())}, "
                    f"open are {sorted(open_calls)}"
                )
        if set(self.pool.owners()) != set(self.records):
            faults.append(f"router: records {sorted(self.pool.owners())} are counted")
        return faults

    # --- inside ---

    def _current(self, node: str, rid: str, attempt: int) -> Record | None:
        record = self.records.get(rid)
        if record is None or record.attempt != attempt or node not in record.open:
            return None
        return record

    def _attempt(self, record: Record) -> list[Action]:
        """Choose workers, and call them."""
        chosen = self._choose(frozenset(record.tried))
        if chosen is None:
            finish = Finish(
                "abort",
                message="no worker is available",
                status=503,
                err_type="ServiceUnavailableError",
            )
            self._end(record)
            return [Reply(record.rid, "", record.attempt, finish)]
        record.attempt += 1
        record.prefill, record.speaker = chosen
        record.acknowledged, record.spoken = not record.prefill, False
        record.ended = frozenset()
        room = self._mint_room() if record.prefill else ""
        actions: list[Action] = []
        for node in dict.fromkeys((record.prefill, record.speaker)):
            if node:
                lease = self.workers[node].calls.reserve(f"{record.rid}~{record.attempt}")
                lease.adopt()
                record.open[node] = lease
                record.tried.add(node)
                actions.append(Send(node, record.rid, record.attempt, room, record.prefill))
        return actions

    def _choose(self, avoid: frozenset[str]) -> tuple[str, str] | None:
        """(prefill, decode), or ("", unified)."""
        pools: dict[Kind, dict[str, int]] = {"unified": {}, "prefill": {}, "decode": {}}
        for worker in self.workers.values():
            if worker.up:
                pools[worker.kind][worker.name] = worker.load
        for worker in self.workers.values():  # where none is up, the next call may find one back
            if not worker.up and not any(
                other.up and other.kind == worker.kind for other in self.workers.values()
            ):
                pools[worker.kind][worker.name] = worker.load
        unified = least_loaded(pools["unified"], avoid)
        prefill, decode = (least_loaded(pools[kind], avoid) for kind in ("prefill", "decode"))
        if prefill is not None and decode is not None:
            both = pools["prefill"][prefill] + pools["decode"][decode]
            if unified is None or both <= 2 * pools["unified"][unified]:
                return prefill, decode
        return None if unified is None else ("", unified)

    def _show(self, record: Record) -> list[Action]:
        if not (record.spoken and record.acknowledged):
            return []
        record.shown = True
        return [Relay(record.speaker, record.rid, record.attempt)]

    def _failed(self, record: Record, node: str, finish: Finish) -> list[Action]:
        actions = self._drop_all(record)
        if may_retry(finish, record.shown, record.retries):
            record.retries -= 1
            return [*actions, *self._attempt(record)]
        self._end(record)
        return [*actions, Reply(record.rid, node, record.attempt, finish)]

    def _drop_all(self, record: Record) -> list[Action]:
        actions: list[Action] = []
        for node in list(record.open):
            self._close(record, node)
            actions.append(Drop(node, record.rid, record.attempt))
        return actions

    def _close(self, record: Record, node: str) -> None:
        record.open.pop(node).release()

    def _end(self, record: Record) -> None:
        del self.records[record.rid]
        record.lease.release()
        self.recent[record.rid] = record.members
        self.recent.move_to_end(record.rid)
        while len(self.recent) > REMEMBERED:
            self.recent.popitem(last=False)
