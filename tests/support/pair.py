"""A prefill and a decode node in one process: production schedulers, hash models, a lossy
channel, a slow wire.

Turns are driven by a seed, so a run is its seed. Control frames keep their order per direction;
each may be lost. A wire write copies when it completes, not when it starts: a source page that
was freed meanwhile shows in the tokens."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from dataclasses import dataclass, field
from random import Random

import msgspec

from engine.basics import Parts
from engine.batch import Batch, PageExport, PageImport, PagesDone
from engine.config import EngineConfig
from engine.core import ModelFacts, SchedulerCore
from engine.decode_scheduler import DecodeScheduler
from engine.hash_model import HashModel
from engine.prefill_scheduler import PrefillScheduler
from engine.slots import LocalSlots
from fsm.trace import Line
from transport.control import ControlFrame
from transport.messages import Abort, Finish, Outputs, Submit
from transport.wire import Process, WireDone

PREFILL, DECODE = "prefill-0", "decode-0"
TURN_S = 0.001


@dataclass
class Device:
    """Work in launch order; computed when it ends."""

    model: HashModel
    queue: deque[Batch | PageExport | PageImport] = field(default_factory=deque)

    def launch(self, work: Batch | PageExport | PageImport) -> None:
        self.queue.append(work)

    def finish_one(self, scheduler: SchedulerCore) -> None:
        work = self.queue.popleft()
        if isinstance(work, Batch):
            scheduler.commit(self.model.execute(work))
        elif isinstance(work, PageExport):
            scheduler.pages_done(PagesDone(work.ticket, self.model.export_pages(work.pages)))
        else:
            self.model.import_pages(work.pages, work.blobs)
            scheduler.pages_done(PagesDone(work.ticket))


class SlowWire:
    """Writes complete in order, when :meth:`finish_one` says so."""

    def __init__(self, source: HashModel, target: HashModel, slots: LocalSlots) -> None:
        self._source, self._target, self._slots = source, target, slots
        self.queue: deque[tuple[int, array[int] | int, array[int] | bytes]] = deque()
        self._done: list[WireDone] = []

    def write(self, ticket: int, peer: Process, source: array[int], target: array[int]) -> None:
        self.queue.append((ticket, source, target))

    def write_slot(self, ticket: int, peer: Process, slot: int, record: bytes) -> None:
        self.queue.append((ticket, slot, record))

    def poll(self) -> list[WireDone]:
        done, self._done = self._done, []
        return done

    def finish_one(self) -> None:
        ticket, what, where = self.queue.popleft()
        if isinstance(what, int):
            assert isinstance(where, bytes)
            self._slots.write(what, where)
        else:
            assert not isinstance(where, bytes)
            self._target.import_pages(where, self._source.export_pages(what))
        self._done.append(WireDone(ticket))


@dataclass
class Answer:
    """What decode's client of one request got."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Pair:
    """Two nodes; ``loss`` is the chance that a control frame is lost, ``traced`` who writes a
    trace."""

    def __init__(
        self,
        seed: int,
        loss: float = 0.0,
        pages: int = 64,
        page_size: int = 4,
        traced: tuple[str, ...] = (PREFILL, DECODE),
    ) -> None:
        self.rng = Random(seed)
        self.loss = loss
        self.now = 0.0
        config = EngineConfig(
            model="hash",
            page_size=page_size,
            chunked_prefill_size=8,
            max_running_requests=8,
            checks=True,
        )
        models = HashModel(pages, page_size), HashModel(pages, page_size)
        facts = [
            ModelFacts(m.vocab_size, m.context_length, m.eos_token_ids, m.weights_digest)
            for m in models
        ]
        self.devices = {PREFILL: Device(models[0]), DECODE: Device(models[1])}
        self.slots = LocalSlots(16)
        self.wire = SlowWire(*models, self.slots)
        self.traces: dict[str, list[Line]] = {PREFILL: [], DECODE: []}
        rooms = itertools.count()

        def clock() -> float:
            return self.now

        self.prefill = PrefillScheduler(
            Parts(
                config,
                facts[0],
                pages,
                clock,
                self.devices[PREFILL],
                boot_id="P",
                node=PREFILL,
                trace=self.traces[PREFILL].append if PREFILL in traced else None,
            ),
            self.wire,
        )
        self.decode = DecodeScheduler(
            Parts(
                config,
                facts[1],
                pages,
                clock,
                self.devices[DECODE],
                boot_id="D",
                node=DECODE,
                trace=self.traces[DECODE].append if DECODE in traced else None,
            ),
            self.slots,
            host_pages=pages,
            mint=lambda: f"rebuilt-{next(rooms)}",
        )
        self.channels: dict[str, deque[ControlFrame]] = {PREFILL: deque(), DECODE: deque()}
        self.answers: dict[str, Answer] = {}

    def submit(self, message: Submit, prefill_first: bool) -> None:
        """The same body to both nodes, in either order, some turns apart."""
        body = msgspec.structs.replace(message, room=f"room-{message.rid}", prefill=PREFILL)
        self.answers[message.rid] = Answer()
        first, second = self.prefill, self.decode
        if not prefill_first:
            first, second = second, first
        first.submit(body)
        self.turn(self.rng.randrange(4))
        second.submit(body)

    def abort(self, node: str) -> None:
        """End a random live request of a node, by name."""
        scheduler: SchedulerCore = self.prefill if node == PREFILL else self.decode
        if scheduler.roster.live:
            rid = self.rng.choice(sorted(scheduler.roster.live))
            scheduler.abort(Abort(rids=(rid,)))

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += TURN_S
            self._turn_of(PREFILL, self.prefill, DECODE)
            self._turn_of(DECODE, self.decode, PREFILL)
            if self.wire.queue and self.rng.random() < 0.7:
                self.wire.finish_one()

    def _turn_of(self, name: str, scheduler: PrefillScheduler | DecodeScheduler, peer: str) -> None:
        arrived = self.channels[name]
        while arrived and self.rng.random() < 0.6:
            frame = arrived.popleft()
            if self.rng.random() >= self.loss:
                scheduler.receive(peer, frame)
        scheduler.tick()
        if isinstance(scheduler, PrefillScheduler):
            scheduler.poll_wire()
        device = self.devices[name]
        if device.queue and self.rng.random() < 0.7:
            device.finish_one(scheduler)
        while scheduler.launch() is not None:
            pass
        for node, frame in scheduler.mail():
            self.channels[node].append(frame)
        for message in scheduler.flush():
            if isinstance(message, Outputs) and name == DECODE:
                for output in message.outputs:
                    answer = self.answers[output.rid]
                    assert answer.finish is None, f"{output.rid}: output after its end"
                    assert output.index == len(answer.tokens)
                    answer.tokens += output.tokens
                    answer.finish = output.finish

    @property
    def at_rest(self) -> bool:
        return self.decode.at_rest and self.prefill.at_rest and not self.wire.queue

    def settle(self, turns: int = 100_000) -> None:
        """Run to rest."""
        for _ in range(turns):
            if self.at_rest:
                return
            self.turn()
        states = [
            (r.rid, r.state) for s in (self.prefill, self.decode) for r in s.roster.lives.values()
        ]
        raise AssertionError(f"no rest after {turns} turns: {states}")
