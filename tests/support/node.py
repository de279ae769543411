"""One unified node under test: the production scheduler on the hash model, in virtual time.

The node does one turn of the loop at a time; between two turns a test does what clients, clocks,
stores and devices do. Work waits in the runner until a turn commits it, so "between launch and
commit" is an ordinary moment. Every client is a record that refuses a second answer, a token after
the answer and a token out of order; checkers from outside (``tests.support.checkers``) run at every
launch and after every turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec import structs

from engine.basics import Parts
from engine.batch import Batch, PageExport, PageImport, PagesDone, StepResult
from engine.config import EngineConfig
from engine.hash_model import HashModel
from engine.request import Request
from engine.scheduler import ModelFacts, Scheduler
from engine.store import PageStore
from fsm.trace import Line
from tests.support import checkers
from tests.support.checkers import Broken
from tests.support.oracle import Golden, golden
from transport.messages import (
    Abort,
    CloseSession,
    Finish,
    OpenSession,
    Output,
    Outputs,
    Reply,
    SamplingParams,
    StopMatched,
    Submit,
    TopLogprobs,
)

Work = Batch | PageExport | PageImport
TURN_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a node: small, so that everything runs out."""

    pages: int = 64
    page_size: int = 4
    chunk: int = 16
    depth: Literal[1, 2] = 2
    rows: int = 8
    queued: int = 64
    cache: bool = True
    overtakes: int = 64
    prefetches: int = 4
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    prefetch_timeout_s: float = 0.5

    @property
    def pool_tokens(self) -> int:
        return self.pages * self.page_size

    def config(self, checks: bool) -> EngineConfig:
        return EngineConfig(
            model="hash",
            page_size=self.page_size,
            kv_pages=self.pages,
            max_running_requests=self.rows,
            max_queued_requests=self.queued,
            chunked_prefill_size=self.chunk,
            depth=self.depth,
            prefix_cache=self.cache,
            max_overtakes=self.overtakes,
            max_prefetches=self.prefetches,
            waiting_timeout_s=self.waiting_timeout_s,
            running_timeout_s=self.running_timeout_s,
            prefetch_timeout_s=self.prefetch_timeout_s,
            max_sessions=8,
            checks=checks,
        )


class Runner:
    """Takes work in order; it is computed when the node commits it."""

    def __init__(self) -> None:
        self.work: deque[Work] = deque()

    def launch(self, work: Work) -> None:
        self.work.append(work)


@dataclass(slots=True)
class Client:
    """What one client was told, checked as it arrives."""

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    chosen: list[TopLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    retractions: int = 0
    cached: int = 0

    @property
    def reason(self) -> str:
        return self.finish.type if self.finish is not None else ""

    @property
    def refused(self) -> bool:
        return self.finish is not None and self.finish.status in (400, 503)

    def receive(self, output: Output) -> None:
        if self.finish is not None:
            raise Broken("one terminal", f"{self.rid} hears {output} after {self.finish}")
        if output.tokens and output.index != len(self.tokens):
            raise Broken("token order", f"{self.rid}: {output.index} after {len(self.tokens)}")
        if output.index > len(self.tokens):
            raise Broken("token order", f"{self.rid}: ends at {output.index} of {self.tokens}")
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        self.top += output.top_logprobs or []
        self.chosen += output.chosen_logprobs or []
        self.retractions, self.cached = output.retractions, output.cached_tokens
        self.finish = output.finish
        if self.sampling.logprobs and len(self.logprobs) != len(self.tokens):
            raise Broken("token order", f"{self.rid}: {self.logprobs} beside {self.tokens}")


class Node:
    """A node, its clients and its checkers."""

    def __init__(
        self, shape: Shape | None = None, store: PageStore | None = None, checks: bool = True
    ) -> None:
        self.shape: Final = shape or Shape()
        self.now = 0.0
        self.model: Final = HashModel(self.shape.pages, self.shape.page_size)
        self.runner: Final = Runner()
        self.trace: Final[list[Line]] = []
        facts = ModelFacts(
            self.model.vocab_size,
            self.model.context_length,
            self.model.eos_token_ids,
            self.model.weights_digest,
        )
        self.scheduler: Final = Scheduler(
            Parts(
                self.shape.config(checks),
                facts,
                self.shape.pages,
                lambda: self.now,
                self.runner,
                store=store,
                trace=self.trace.append,
            ),
        )
        self.clients: Final[list[Client]] = []
        self.open: Final[dict[str, Client]] = {}
        self.replies: Final[list[object]] = []
        self.batches: Final[list[Batch]] = []
        self.books: Final = checkers.SessionModel()
        self.turns = 0
        self.launching = True
        """Off: nothing new is launched, what was launched commits."""

    # --- what clients do ---

    def submit(self, message: Submit) -> list[Client]:
        """The clients of ``message``: one for each member, or one that was refused on the spot."""
        self.flush()
        refused = self.scheduler.stats.refused
        prompt = self.books.history(message.session) + message.prompt
        self.scheduler.submit(message)
        if self.scheduler.stats.refused > refused:
            client = Client(message.rid, prompt, message.sampling, message.session)
            self.clients.append(client)
            for output in self._outputs():  # of the same rid there may be a live client
                client.receive(output)
            return [client]
        rids = [f"{message.rid}#{i}" for i in range(message.n)] if message.n > 1 else [message.rid]
        out = []
        for number, rid in enumerate(rids):  # members are different samples
            sampling = structs.replace(message.sampling, seed=message.sampling.seed + number)
            out.append(Client(rid, list(prompt), sampling, message.session))
        for client in out:
            self.clients.append(client)
            self.open[client.rid] = client
        return out

    def ask(
        self,
        rid: str,
        prompt: Sequence[int],
        max_new_tokens: int = 8,
        *,
        priority: int = 0,
        session: str | None = None,
        n: int = 1,
        deadline_s: float | None = None,
        seed: int = 0,
        logprobs: bool = False,
        eos_at: int = -1,
        stop_token_ids: tuple[int, ...] = (),
        min_new_tokens: int = 0,
    ) -> Client:
        """Submit one request with the usual parameters; returns its (first) client."""
        sampling = SamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            seed=seed,
            logprobs=logprobs,
            eos_at=eos_at,
            stop_token_ids=stop_token_ids,
        )
        message = Submit(
            rid,
            list(prompt),
            sampling,
            n=n,
            priority=priority,
            session=session,
            deadline_s=deadline_s,
        )
        return self.submit(message)[0]

    def abort(self, *rids: str, cause: Literal["api", "disconnect", "drain"] = "api") -> None:
        self.scheduler.abort(Abort(rids=rids, cause=cause))

    def abort_reply(self, *rids: str) -> dict[str, list[str]]:
        """What the engine answers to an abort of ``rids``."""
        self.scheduler.abort(Abort(rids=rids, query=1))
        self.flush()
        reply = self.replies[-1]
        assert isinstance(reply, dict)
        return reply

    def stop(self, client: Client, tokens: int) -> None:
        """The server finds a stop string that is complete with the first ``tokens`` tokens."""
        self.books.stopped(client, tokens)
        self.scheduler.stop_matched(StopMatched(client.rid, tokens, "a stop"))

    def open_session(
        self, name: str, capacity: int | None = None, timeout_s: float | None = None
    ) -> None:
        self.scheduler.open_session(OpenSession(1, name, capacity, timeout_s))
        self.flush()
        if isinstance(self.replies[-1], dict) and "error" not in self.replies[-1]:
            self.books.open(name)

    def close_session(self, name: str) -> None:
        self.scheduler.close_session(CloseSession(1, name))
        self.books.close(name)
        self.flush()

    # --- the loop ---

    def turn(self) -> None:
        """One turn: the clock, the store, the oldest result, new steps, answers, checks."""
        self.turns += 1
        self.now += TURN_S
        self.scheduler.tick()
        self.scheduler.poll_store()
        self.commit()
        self.launch()
        self.flush()
        checkers.check_turn(self)
        if self.launching:
            checkers.check_awake(self)

    def launch(self) -> list[Batch]:
        """Launch while a step may be launched."""
        out: list[Batch] = []
        while self.launching and (batch := self.scheduler.launch()) is not None:
            checkers.check_batch(self, batch)
            self.batches.append(batch)
            out.append(batch)
        return out

    def commit(self, error: str | None = None) -> bool:
        """Run the oldest launched work and commit it; ``error`` makes it fail."""
        if not self.runner.work:
            return False
        work = self.runner.work.popleft()
        if isinstance(work, Batch):
            result = self.model.execute(work)
            if error is not None:
                result = StepResult(work.step, error=error)
            self.scheduler.commit(result)
        elif error is not None:
            self.scheduler.pages_done(PagesDone(work.ticket, error=error))
        elif isinstance(work, PageExport):
            blobs = self.model.export_pages(work.pages)
            self.scheduler.pages_done(PagesDone(work.ticket, blobs))
        else:
            self.model.import_pages(work.pages, work.blobs)
            self.scheduler.pages_done(PagesDone(work.ticket))
        return True

    def flush(self) -> None:
        """Deliver what clients and askers are to be told."""
        for output in self._outputs():
            client = self.open.get(output.rid)
            if client is None:
                raise Broken("one terminal", f"nobody waits for {output}")
            client.receive(output)
            if client.finish is not None:
                del self.open[client.rid]
                self.books.answered(client)

    def _outputs(self) -> list[Output]:
        out: list[Output] = []
        for message in self.scheduler.flush():
            if isinstance(message, Outputs):
                out += message.outputs
            elif isinstance(message, Reply):
                self.replies.append(message.data)
        return out

    # --- the way to a place ---

    def request(self, rid: str) -> Request:
        """A live request."""
        return self.scheduler.roster.live[rid]

    def state(self, rid: str) -> str:
        return self.request(rid).state

    def until(self, what: str, reached: object, limit: int = 2000) -> None:
        """Turns until ``reached()`` is true."""
        assert callable(reached)
        for _ in range(limit):
            if reached():
                return
            self.turn()
        raise Broken("progress", f"{what}: not after {limit} turns; {self.describe()}")

    def until_state(self, rid: str, state: str) -> None:
        self.until(
            f"{rid} {state}",
            lambda: rid in self.scheduler.roster.live and self.state(rid) == state,
        )

    def until_tokens(self, client: Client, count: int) -> None:
        self.until(f"{client.rid} has {count} tokens", lambda: len(client.tokens) >= count)

    def settle(self, limit: int = 20_000) -> None:
        """Turns until nothing is left to do; then everything is checked once more."""
        self.until("rest", lambda: self.scheduler.at_rest and not self.runner.work, limit)
        self.flush()
        checkers.check_rest(self)

    def golden(self, client: Client) -> Golden:
        return golden(client.prompt, client.sampling, self.shape.pool_tokens)

    def describe(self) -> str:
        """Who is where, for a failure."""
        lives = [
            f"{r.rid} {r.state} {r.output_len}/{r.max_new_tokens} launched={r.launched}"
            for r in self.scheduler.roster.lives.values()
        ]
        pages = self.scheduler.kv.pool.counts().as_dict()
        return f"turn {self.turns}, pages {pages}, lives {lives[:8]}"
