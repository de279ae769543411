"""*Golden*: the same request alone, on a fresh node with plenty of everything.

Nothing shares its pages, nothing takes them away, and no prefix is reused. What it then says is
what it has to say in any company (design.md §9).
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from engine.sim.node import NodeSettings, SimNode
from engine.sim.world import World
from transport.messages import Finish, SamplingParams, Submit


@dataclass(frozen=True, slots=True)
class Alone:
    """What a request says when it runs alone."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish


class GoldenRuns:
    """Runs requests alone, each once."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings: Final = settings
        self._known: dict[bytes, Alone] = {}

    def run(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stops: tuple[bytes, ...],
        member: int | None = None,
        weights: str = "",
    ) -> Alone:
        """The whole answer to ``prompt``; ``member`` is its number in a group, or None;
        ``weights`` are others than the cluster's at its start.

        A request that fits its node's pool only in part ends there by ``length`` (B121), and so it
        does here.
        """
        weights = weights or self._settings.weights
        key = msgspec.msgpack.encode((prompt, sampling, stops, member, weights))
        if key not in self._known:
            self._known[key] = self._alone(prompt, sampling, stops, member, weights)
        return self._known[key]

    def under(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stops: tuple[bytes, ...],
        member: int | None,
        weights: list[str],
    ) -> Alone:
        """What the request says when its output token I is computed under ``weights[I]``: after a
        change, everything that was said before is part of the prompt. The last weights stay."""
        said: list[int] = []
        logprobs: list[float] = []
        while True:
            here = weights[len(said)] if len(said) < len(weights) else (weights or [""])[-1]
            rest = weights[len(said) :]
            count = next((i for i, each in enumerate(rest) if each != here), None)
            done = len(said)
            alone = self.run(
                prompt + said,
                msgspec.structs.replace(
                    sampling,
                    max_new_tokens=sampling.max_new_tokens - done,
                    min_new_tokens=max(0, sampling.min_new_tokens - done),
                    eos_at=sampling.eos_at - done if sampling.eos_at >= done else -1,
                ),
                stops,
                member,
                here,
            )
            said += alone.tokens[:count]
            logprobs += alone.logprobs[:count]
            if count is None or len(alone.tokens) < count:
                return Alone(tuple(said), tuple(logprobs), _whole(alone.finish, done))

    def _alone(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stops: tuple[bytes, ...],
        member: int | None,
        weights: str,
    ) -> Alone:
        here = self._settings
        size = here.config.page_size
        room = here.kv_pages * size - len(prompt)
        most = min(sampling.max_new_tokens, room)
        sampling = msgspec.structs.replace(sampling, max_new_tokens=most)
        if sampling.min_new_tokens > most:  # it ends before anything may stop it
            stops = ()
            sampling = msgspec.structs.replace(
                sampling, min_new_tokens=0, stop_token_ids=(), ignore_eos=True
            )
        members = 1 if member is None else member + 1
        config = here.config.model_copy(
            update={
                "prefix_cache": False,
                "depth": 1,
                "max_running_requests": members,
                "waiting_timeout_s": None,
                "running_timeout_s": None,
                "kv_store": "",
            }
        )
        pages = members * (-(-(len(prompt) + sampling.max_new_tokens) // size) + 1)
        world = World()
        node = SimNode(world, NodeSettings(config, pages, here.costs, weights))
        node.clients.submit("golden", Submit("golden", prompt, sampling, n=members), stops)
        while not node.idle and world.next_us is not None:
            world.step()
        view = node.clients.submissions["golden"].views[-1]
        if view.finish is None or view.finish.type in ("abort", "error"):
            raise RuntimeError(f"a request alone does not end well: {view.finish}")
        return Alone(
            tuple(view.tokens), tuple(view.member.logprobs[: len(view.tokens)]), view.finish
        )


def _whole(finish: Finish, done: int) -> Finish:
    """The end of the last part, as the end of the whole: a length counts from the beginning."""
    if finish.length is None:
        return finish
    return msgspec.structs.replace(finish, length=finish.length + done)
