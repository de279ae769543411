"""A router in virtual time: the production routing core, and calls to the front ends of workers.

Its clients are the cluster's. What a worker's front end shows is copied to them as the core allows;
stop strings are the worker's business. While requests are open, every worker is probed twice
a second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.routing import Action, Drop, Forward, Kind, Relay, Reply, Router, Send
from engine.sim.client import Clients, Submission, View
from engine.sim.network import Network
from engine.sim.node import SimNode
from engine.sim.paired_node import PrefillNode
from engine.sim.world import US_PER_S, World
from fsm.ledger import PoolCounts
from transport.messages import Abort, Finish, Output, Outputs, StopMatched, Submit, ToEngine
from transport.messages import Reply as Answer

PROBE_US: Final = US_PER_S // 2


@dataclass(slots=True)
class Call:
    """One call to a worker."""

    node: SimNode
    """The process that was called: another one of the same name knows nothing of it."""
    submission: Submission
    attempt: int


class RouterNode:
    """``router-0``."""

    def __init__(
        self,
        world: World,
        name: str,
        workers: Callable[[], Mapping[str, SimNode]],
        network: Network,
        mint_room: Callable[[], str],
        retries: int,
        clients: Clients | None = None,
    ) -> None:
        self.name: Final = name
        self.dead = False
        self.frozen = False
        self.clients: Final = clients or Clients(world, 0, matches=False)
        self.clients.attach(self.post)
        self.core: Final = Router([(name, _kind(name)) for name in workers()], mint_room, retries)
        self._world = world
        self._workers = workers
        self._network = network
        self._names: dict[str, str] = {}
        """Submission by rid, of open requests."""
        self._calls: dict[tuple[str, str, int], Call] = {}
        self._sent: dict[str, dict[str, int]] = {}
        """Tokens that the client was sent, by rid and member."""
        self._probing = False
        self._deferred: list[Callable[[], None]] = []
        """What a partition, or a freeze, keeps from happening."""

    # --- what a scenario does ---

    def post(self, message: ToEngine, submission: str = "") -> None:
        """A client's message: it arrives at once, unless the router is frozen."""
        if self.frozen:
            self._deferred.append(lambda: self.post(message, submission))
            return
        match message:
            case Submit():
                self._submit(message, submission)
            case Abort():
                self._abort(message)
            case StopMatched():
                pass  # the worker's front end finds stop strings
            case _:
                raise TypeError(f"a router does not take {type(message).__name__}")

    def kill(self) -> None:
        """The process ends: its calls are closed, and so are its clients' connections."""
        self.dead = True
        for (node, _, _), call in list(self._calls.items()):
            self._hang_up(node, call)
        self._calls.clear()
        self.clients.connection_lost()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        self.catch_up()

    def catch_up(self) -> None:
        """Connections work again: what they kept back happens now."""
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    def lost(self, node: str) -> None:
        """A worker's process has ended."""
        if not self.dead:
            self._perform(self.core.lost(node))

    @property
    def idle(self) -> bool:
        return self.dead or not self.unrest()

    def ledger(self) -> dict[str, PoolCounts]:
        """Its records: as many as there are open requests."""
        count = len(self.core.records)
        return {"router_records": PoolCounts(count, 0, 0, count, 0)}

    def records_of(self, name: str) -> int:
        """How many records a submission has here: one, or none."""
        return sum(submission == name for submission in self._names.values())

    def unrest(self) -> list[str]:
        """Why this router is not back at its start; empty when it is."""
        if self.dead:
            return []
        faults = [f"router_records: {sorted(self.core.records)}"] if self.core.records else []
        faults += [
            f"{name} is charged for {sorted(worker.calls.owners())}"
            for name, worker in self.core.workers.items()
            if worker.load
        ]
        if len(self.clients.table):
            faults.append(f"frontend_records: {[record.rid for record in self.clients.table]}")
        faults += [f"{each.name} has no answer" for each in self.clients.open]
        if self._calls:
            faults.append(f"calls are open: {sorted(self._calls)}")
        return faults

    def faults(self) -> list[str]:
        """What is wrong at this instant."""
        return [*self.clients.check(), *self.core.audit()]

    # --- clients ---

    def _submit(self, message: Submit, submission: str) -> None:
        self._names[message.rid] = submission
        self._sent[message.rid] = {}
        if not self._probing:
            self._probing = True
            for name in self._workers():
                self.core.heard(name, self._world.clock())
            self._world.after(PROBE_US, self._probe)
        self._perform(self.core.submit(message.rid, message.n))

    def _abort(self, message: Abort) -> None:
        rids = tuple(self.core.records) if message.all else message.rids
        if message.cause == "disconnect":
            for rid in rids:
                self._perform(self.core.disconnect(rid))
                self._say(rid, None, Finish("abort", message="the client went away"))
            return
        actions, outcome = self.core.abort(rids)
        self._perform(actions)
        if message.query:
            self.clients.receive(Answer(message.query, outcome))

    # --- workers ---

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Drop():
                    call = self._calls.pop((action.node, action.rid, action.attempt), None)
                    if call is not None:
                        self._hang_up(action.node, call)
                case Relay():
                    self._relay(self._calls[action.node, action.rid, action.attempt], action.rid)
                case Forward():
                    self._workers()[action.node].post(Abort(rids=(action.rid,)))
                case Reply():
                    call = self._calls.pop((action.node, action.rid, action.attempt), None)
                    self._say(action.rid, call, action.finish)

    def _send(self, action: Send) -> None:
        worker = self._workers()[action.node]
        if self._network.cut(self.name, action.node):
            # Nobody answers. Either a probe will tell, or the call gets through later.
            self._deferred.append(lambda: self._send(action))
            return
        if worker.dead:
            self._perform(self.core.lost(action.node))
            return
        record = self.core.records.get(action.rid)
        if record is None or record.attempt != action.attempt or action.node not in record.open:
            return  # the other call has failed already
        name = self._names[action.rid]
        own = self.clients.submissions[name]
        message = msgspec.structs.replace(own.message, room=action.room, prefill=action.prefill)
        key = (action.node, action.rid, action.attempt)
        submission = worker.clients.submit(
            f"{name}~{action.attempt}", message, own.stops, lambda _: self._changed(key)
        )
        self._calls[key] = Call(worker, submission, action.attempt)
        if submission.answered:
            self._changed(key)

    def _changed(self, key: tuple[str, str, int]) -> None:
        """A worker's front end has something to show."""
        node, rid, attempt = key
        if self.frozen or self._network.cut(self.name, node):
            self._deferred.append(lambda: self._changed(key))
            return
        call = self._calls.get(key)
        if call is None or self.dead:
            return
        submission = call.submission
        if submission.answered:
            self._perform(self.core.answered(node, rid, attempt, _finish(submission)))
            self._calls.pop(key, None)  # it has ended, whatever came of it
        elif any(view.member.visible for view in submission.views):
            views = submission.views
            ended = frozenset(view.member.rid for view in views if view.finish is not None)
            self._perform(self.core.spoke(node, rid, attempt, ended))

    def _hang_up(self, node: str, call: Call) -> None:
        call.submission.watch = None
        if self.frozen or self._network.cut(self.name, node):
            self._deferred.append(lambda: self._hang_up(node, call))
        elif not call.node.dead:
            call.node.clients.disconnect(call.submission.name)

    def _probe(self) -> None:
        if self.dead or (self.core.at_rest and not self._calls):
            self._probing = False
            return
        now = self._world.clock()
        if not self.frozen:
            for name, worker in self._workers().items():
                if not worker.dead and not worker.frozen and not self._network.cut(self.name, name):
                    self.core.heard(name, now)
            self._perform(self.core.tick(now))
        self._world.after(PROBE_US, self._probe)

    # --- what clients are shown ---

    def _relay(self, call: Call, rid: str) -> None:
        for own, view in zip(self._own(rid), call.submission.views, strict=True):
            self._copy(own, view, None)

    def _say(self, rid: str, call: Call | None, finish: Finish) -> None:
        """The terminal answer, each member's own where the worker gave one. What prefill said of a
        member that did not fail there only acknowledges its token."""
        owns = call is not None and not isinstance(call.node, PrefillNode)
        views = call.submission.views if call is not None and owns else []
        for index, own in enumerate(self._own(rid)):
            if index < len(views):
                self._copy(own, views[index], views[index].finish or finish)
            else:
                member = own.member.rid
                self._emit(Output(member, self._told(own).get(member, 0), finish=finish))
        self._names.pop(rid, None)

    def _copy(self, own: View, view: View, finish: Finish | None) -> None:
        told, rid = self._told(own), own.member.rid
        start = told.get(rid, 0)
        member = view.member
        end = member.visible
        told[rid] = max(start, end)
        self._emit(
            Output(
                rid,
                start,
                member.tokens[start:end],
                member.logprobs[start:end] or None,
                member.top_logprobs[start:end] or None,
                member.chosen_logprobs[start:end] or None,
                finish,
                member.prompt_tokens,
                member.cached_tokens,
                member.retractions,
            ),
            view.weights[start:end],
            view.times[start:end],
        )

    def _told(self, own: View) -> dict[str, int]:
        return self._sent[own.member.record.rid]

    def _own(self, rid: str) -> list[View]:
        name = self._names.get(rid)
        return self.clients.submissions[name].views if name is not None else []

    def _emit(
        self, output: Output, weights: list[str] | None = None, times: list[int] | None = None
    ) -> None:
        self.clients.receive(Outputs([output]), weights or [], times or [])


def _finish(submission: Submission) -> Finish:
    """What a call came to: the first error among its members, if there is one."""
    if submission.refused is not None:
        return submission.refused
    ends = [view.finish for view in submission.views if view.finish is not None]
    return next((end for end in ends if end.status is not None), ends[0])


def _kind(name: str) -> Kind:
    kinds: dict[str, Kind] = {"unified": "unified", "prefill": "prefill", "decode": "decode"}
    return kinds[name.partition("-")[0]]
