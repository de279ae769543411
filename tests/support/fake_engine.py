"""An engine that computes nothing: deterministic, and slow, stubborn or dead on command.

It speaks ``transport.messages`` over a real channel. In a test it runs in a thread
(:class:`FakeEngine`), where the test holds and releases its steps and sees what it received; as
``python -m tests.support.fake_engine ENDPOINT`` it is a process that can be killed.

Below ``min_new_tokens`` the last of a token's ``top_logprobs`` is minus infinity, as that of a
forbidden token, and those of ``token_ids_logprob`` are NaN, which no engine should say.

Output token ``k`` of a request is the ``k``-th byte of the text scripted for its prompt, or else of
"abcdefghijklmnopqrstuvwxyz" repeated. Log-probabilities are ``-(k + 1) / 10``.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from engine.config import EngineConfig
from transport.channel import Channel
from transport.messages import (
    PROTOCOL_VERSION,
    Abort,
    CloseSession,
    DebugHook,
    Drain,
    Finish,
    FromEngine,
    Hello,
    Load,
    OpenSession,
    Output,
    Outputs,
    Query,
    Reply,
    SamplingParams,
    StopMatched,
    Stopped,
    Submit,
    ToEngine,
)

ALPHABET = b"abcdefghijklmnopqrstuvwxyz"
BOS, EOS = 256, 257
VOCAB_SIZE = 258


@dataclass
class Running:
    """One member of a request."""

    rid: str
    group: str
    prompt: list[int]
    sampling: SamplingParams
    session: str | None = None
    tokens: list[int] = field(default_factory=list)
    started: bool = False


class FakeEngine:
    """Runs in a thread from :meth:`start` to :meth:`stop`.

    Args:
        endpoint: The server's channel.
        step_s: How long a step takes; each gives every running request a token.
        max_running: Members that run at once; others wait.
        max_queued: Members that wait; more are refused with 503.
        context_length: In tokens.
        tokens_per_step: Tokens that one step gives a request.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        step_s: float = 0.001,
        max_running: int = 64,
        max_queued: int = 256,
        context_length: int = 4096,
        tokens_per_step: int = 1,
        script: Mapping[str, bytes] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.step_s = step_s
        self.max_running = max_running
        self.max_queued = max_queued
        self.context_length = context_length
        self.tokens_per_step = tokens_per_step
        self.script = {text.encode(): output for text, output in (script or {}).items()}
        self.received: list[ToEngine] = []
        self.members: dict[str, Running] = {}
        self.finished: dict[str, Finish] = {}
        self.sessions: dict[str, list[int]] = {}
        self.steps = 0
        self.hello_delay_s = 0.0
        self.version = PROTOCOL_VERSION
        self.held = threading.Event()
        """While set, no step is taken; messages are still read."""
        self.frozen = threading.Event()
        """While set, nothing at all happens."""
        self.deaf_to_drain = False
        self.echo_stops = True
        """Whether a stop string or abort is answered by a last output, as the real engine does."""
        self._step_once = threading.Semaphore(0)
        self._stopping = threading.Event()
        self._drain_until: float | None = None
        self._outputs: list[Output] = []
        self._thread = threading.Thread(target=self.run, name="fake-engine", daemon=True)

    # --- for tests ----------------------------------------------------------------------------

    def start(self) -> None:
        """Connect, say hello and serve."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join(5)

    def step(self, count: int = 1) -> None:
        """Let a held engine take so many steps."""
        for _ in range(count):
            self._step_once.release()

    @property
    def aborts(self) -> list[Abort]:
        """The aborts received so far."""
        return [message for message in self.received if isinstance(message, Abort)]

    @property
    def submits(self) -> list[Submit]:
        """The submissions received so far."""
        return [message for message in self.received if isinstance(message, Submit)]

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> str:
        """Serve until stopped or drained; why it ended."""
        time.sleep(self.hello_delay_s)
        with Channel[FromEngine, ToEngine](self.endpoint, receives=ToEngine) as self._channel:
            self._channel.send(
                Hello(
                    self.version,
                    "fake",
                    "hash",
                    VOCAB_SIZE,
                    self.context_length,
                    (EOS,),
                    self.context_length - 1,
                    {
                        "max_running_requests": self.max_running,
                        "pid": os.getpid(),
                        "device": "cpu",
                        "model_type": "hash",
                        "architectures": ["FakeEngine"],
                    },
                )
            )
            self._report()
            while not self._stopping.is_set():
                if self.frozen.is_set():
                    time.sleep(0.001)
                    continue
                while (message := self._channel.receive_nowait()) is not None:
                    self.received.append(message)
                    self._handle(message)
                if self._may_step():
                    self._step()
                self._send()
                if self._drained():
                    self._channel.send(Stopped("drained"))
                    return "drained"
                self._channel.poll(self.step_s if self.members else 0.005)
        return "stopped"

    def _may_step(self) -> bool:
        return not self.held.is_set() or self._step_once.acquire(blocking=False)

    def _step(self) -> None:
        self.steps += 1
        for member in list(self.members.values())[: self.max_running]:
            member.started = True
            for _ in range(self.tokens_per_step):
                if member.rid in self.members:
                    self._token(member)

    def _token(self, member: Running) -> None:
        sampling, index = member.sampling, len(member.tokens)
        if sampling.max_new_tokens == 0:
            self._end(member, Finish("length", length=0))
            return
        text = self.script.get(bytes(t for t in member.prompt if t < 256), ALPHABET)
        token = text[index % len(text)] if index != sampling.eos_at else EOS
        member.tokens.append(token)
        output = Output(
            member.rid, index, [token], prompt_tokens=len(member.prompt), cached_tokens=2
        )
        if sampling.logprobs:
            value = -(index + 1) / 10
            row = [((token + k) % VOCAB_SIZE, value - k) for k in range(sampling.top_logprobs)]
            chosen = [(t, -float(t)) for t in sampling.token_ids_logprob]
            if index < sampling.min_new_tokens:
                row[-1:] = [(token, -math.inf) for token, _ in row[-1:]]
                chosen = [(token, math.nan) for token, _ in chosen]
            output = msgspec.structs.replace(
                output, logprobs=[value], top_logprobs=[row], chosen_logprobs=[chosen]
            )
        finish: Finish | None = None
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish = Finish("stop", matched=token)
        elif index + 1 >= sampling.max_new_tokens:
            finish = Finish("length", length=sampling.max_new_tokens)
        self._outputs.append(output)
        if finish is not None:
            self._outputs[-1] = msgspec.structs.replace(output, finish=finish)
            self._forget(member, finish)

    def _forget(self, member: Running, finish: Finish) -> None:
        del self.members[member.rid]
        self.finished[member.rid] = finish
        if member.session is not None and finish.type in ("stop", "length"):
            self.sessions[member.session] = member.prompt + member.tokens

    def _end(self, member: Running, finish: Finish) -> None:
        self._forget(member, finish)
        if self.echo_stops:
            self._outputs.append(
                Output(
                    member.rid,
                    len(member.tokens),
                    finish=finish,
                    prompt_tokens=len(member.prompt),
                )
            )

    def _send(self) -> None:
        if self._outputs:
            self._channel.send(Outputs(self._outputs))
            self._outputs = []
            self._report()

    def _report(self) -> None:
        self._channel.send(self._load())

    def _load(self) -> Load:
        running = min(len(self.members), self.max_running)
        used = sum(len(m.prompt) + len(m.tokens) for m in self.members.values())
        return Load(
            running=running,
            waiting=len(self.members) - running,
            tokens_used=used,
            tokens_total=32768,
            steps=self.steps,
            generated_tokens=self.steps,
            prompt_tokens=10,
            cached_tokens=4,
            retracted=0,
            aborted=len(self.aborts),
            at_rest=not self.members,
        )

    def _drained(self) -> bool:
        if self._drain_until is None or self.deaf_to_drain:
            return False
        if time.monotonic() >= self._drain_until:
            for member in list(self.members.values()):
                self._end(member, Finish("abort", message="draining"))
            self._send()
        return not self.members

    # --- messages -----------------------------------------------------------------------------

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                self._abort(message)
            case StopMatched() if message.rid in self.members:
                finish = Finish("stop", matched=message.matched)
                self._end(self.members[message.rid], finish)
            case OpenSession() if message.session in self.sessions:
                error = {"error": f"session {message.session!r} exists already", "status": 400}
                self._reply(message.query, error)
            case OpenSession():
                self.sessions[message.session] = []
                self._reply(message.query, {"session": message.session})
            case CloseSession():
                closed = self.sessions.pop(message.session, None) is not None
                self._reply(message.query, {"closed": closed})
            case Query():
                self._reply(message.query, self._answer(message))
            case DebugHook():
                self._reply(message.query, {"done": message.hook})
            case Drain():
                self._drain_until = time.monotonic() + message.grace_s

    def _submit(self, submit: Submit) -> None:
        rids = [submit.rid] if submit.n == 1 else [f"{submit.rid}#{i}" for i in range(submit.n)]
        refusal: Finish | None = None
        prompt = submit.prompt
        if any(rid in self.members for rid in rids):
            refusal = Finish("abort", message="duplicate rid", status=400)
        elif len(self.members) + len(rids) > self.max_running + self.max_queued:
            refusal = Finish("abort", message="The request queue is full.", status=503)
        elif submit.session is not None and submit.session not in self.sessions:
            message = f"session_params: session {submit.session!r} does not exist"
            refusal = Finish("abort", message=message, status=400)
        elif submit.session is not None:
            prompt = self.sessions[submit.session] + prompt
        if refusal is not None:
            self._outputs.append(Output(submit.rid, 0, finish=refusal))
            return
        for rid in rids:
            self.members[rid] = Running(rid, submit.rid, prompt, submit.sampling, submit.session)

    def _abort(self, abort: Abort) -> None:
        outcome: dict[str, list[str]] = {"aborted": [], "finished": [], "unknown": []}
        for rid in list(self.members) if abort.all else abort.rids:
            found = [m for m in self.members.values() if rid in (m.rid, m.group)]
            for member in found:
                self._end(member, Finish("abort", message="Aborted"))
            known = rid in self.finished
            outcome["aborted" if found else "finished" if known else "unknown"].append(rid)
        if abort.query:
            self._reply(abort.query, outcome)

    def _answer(self, query: Query) -> object:
        match query.what:
            case "load":
                return msgspec.structs.asdict(self._load())
            case "flush":
                busy = len(self.members)
                return {"flushed": not busy, "message": f"{busy} requests are not done."}
            case "requests":
                return {"requests": [{"rid": rid} for rid in self.members]}
            case "request":
                return {"phase": "decoding"} if query.rid in self.members else None
            case "ledger":
                rows = {"total": 8, "free": 8 - len(self.members), "held": len(self.members)}
                return {"at_rest": not self.members, "pools": {"rows": rows}, "counts": {"live": 0}}
            case "info":
                return {}

    def _reply(self, query: int, data: object) -> None:
        # In order with the outputs that were decided before it, as the real engine promises.
        self._send()
        self._channel.send(Reply(query, data))


def _lines() -> Iterator[str]:
    yield from sys.stdin


def main() -> None:
    """A process of its own: configuration on standard input, whose end ends it."""
    lines = _lines()
    config = EngineConfig.model_validate_json(next(lines))
    if config.model == "hash:broken":
        sys.exit(3)
    engine = FakeEngine(sys.argv[1], step_s=config.hash_step_ms / 1000)
    engine.deaf_to_drain = config.model == "hash:deaf"

    def watch() -> None:
        for _ in lines:
            pass
        engine.stop()

    threading.Thread(target=watch, daemon=True).start()
    engine.start()
    engine._thread.join()


if __name__ == "__main__":
    main()
