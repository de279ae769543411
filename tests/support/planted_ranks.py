"""Bugs planted on purpose in what makes several ranks one: each has to be found by the checks.

A plant breaks the leader (something that it uses is not in the plan), a follower (it decides
something), or the way between them.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import pytest

from engine import plan
from engine.batch import Batch, PageImport
from engine.plan import Plan
from engine.sim import follower, ranks
from engine.sim.follower import Blobs, Follower, Report
from engine.sim.ranks import Connection, Ranks
from engine.sim.runner import SimRunner, Work

Patch = Callable[[pytest.MonkeyPatch], None]

NODE: Final = """cluster unified=1 ranks=3 pages=24 page_size=4 rows=3 chunk=16
submit r1 prompt=20 max_tokens=20 prefix=A:16 temperature=1 seed=3
submit r2 prompt=24 max_tokens=12 prefix=A:16
run until r2 tokens=4
retract r2
submit r3 prompt=30 max_tokens=8
run until idle
pause unified-0 mode=retract
weights unified-0 W2
continue unified-0
submit r4 prompt=20 max_tokens=8 prefix=A:16
run until idle
expect r* finished=length golden
expect base
"""

PAIR: Final = """cluster prefill=1 decode=1 router=1 ranks=3 pages=40 page_size=4 rows=3 chunk=16
submit r1 prompt=20 max_tokens=20 prefix=A:16
submit r2 prompt=24 max_tokens=12 prefix=A:16
run until r1 tokens=4
retract r1
run until idle
expect r* finished=length golden
expect base
"""

ONE: Final = """cluster unified=1 ranks=3 pages=24 page_size=4 chunk=16
submit r1 prompt=20 max_tokens=4
run until idle
expect base
"""
LAST: Final = 22
"""Where the last step of that scenario begins: what it samples is the fourth token."""


@dataclass(frozen=True)
class Plant:
    """One bug, what the checks say about it, and the scenario in which they do.

    ``commands`` come after the first four lines: what a way between ranks does wrong."""

    name: str
    apply: Patch
    noticed: str
    scenario: str = NODE
    commands: str = ""

    @property
    def text(self) -> str:
        lines = self.scenario.splitlines(keepends=True)
        return "".join([*lines[:4], self.commands, *lines[4:]])


# --- something that the leader uses is not in the plan ---


def _planning(patch: pytest.MonkeyPatch, change: Callable[[Batch], Batch]) -> None:
    def encode(work: Plan) -> bytes:
        return plan.encode(change(work) if isinstance(work, Batch) else work)

    patch.setattr(ranks, "encode", encode)


def attempt_is_not_in_the_plan(patch: pytest.MonkeyPatch) -> None:
    _planning(
        patch,
        lambda batch: dataclasses.replace(
            batch, items=tuple(dataclasses.replace(item, attempt=0) for item in batch.items)
        ),
    )


def rows_are_not_in_the_plan(patch: pytest.MonkeyPatch) -> None:
    _planning(patch, lambda batch: dataclasses.replace(batch, rows=()))


def fed_tokens_are_not_in_the_plan(patch: pytest.MonkeyPatch) -> None:
    """Followers would have to know which token a row sampled last, and take another one."""
    _planning(
        patch,
        lambda batch: dataclasses.replace(
            batch, tokens=array("q", (max(token, 0) for token in batch.tokens))
        ),
    )


def leader_has_a_seed_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """The leader's device is given something else than the plan says."""
    launch = SimRunner.launch

    def changed(runner: SimRunner, work: Work) -> None:
        if isinstance(work, Batch):
            rows = tuple(
                dataclasses.replace(
                    row, sampling=msgspec.structs.replace(row.sampling, seed=row.sampling.seed + 1)
                )
                for row in work.rows
            )
            work = dataclasses.replace(work, rows=rows)
        launch(runner, work)

    patch.setattr(SimRunner, "launch", changed)


def weights_are_the_leaders_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ranks, "load_weights", lambda self, weights: self.leader.load_weights(weights))


def wire_reaches_the_leader_alone(patch: pytest.MonkeyPatch) -> None:
    def land(self: Ranks, writer: str, ticket: int, pages: array[int], shards: list[Blobs]) -> None:
        self.leader.import_pages(pages, shards[0])

    patch.setattr(Ranks, "land", land)


def _reading(patch: pytest.MonkeyPatch, change: Callable[[Plan], Plan]) -> None:
    """A follower takes a plan for another one."""
    patch.setattr(follower, "decode", lambda raw: change(plan.decode(raw)))


def restored_copy_is_another_one(patch: pytest.MonkeyPatch) -> None:
    """A follower has copies of its own, which the leader knows nothing of."""
    _reading(
        patch,
        lambda work: (
            dataclasses.replace(work, blobs=work.blobs[::-1])
            if isinstance(work, PageImport)
            else work
        ),
    )


# --- a follower decides something ---


def follower_chooses_a_victim(patch: pytest.MonkeyPatch) -> None:
    """Where requests share a step, it drops the last one by itself."""
    _reading(
        patch,
        lambda work: (
            dataclasses.replace(work, items=work.items[:-1])
            if isinstance(work, Batch) and len(work.items) > 1
            else work
        ),
    )


def follower_times_out(patch: pytest.MonkeyPatch) -> None:
    """It computes nothing more for requests that it finds too old."""
    _reading(
        patch,
        lambda work: (
            dataclasses.replace(work, items=())
            if isinstance(work, Batch) and work.step > 8
            else work
        ),
    )


def follower_clears_pages(patch: pytest.MonkeyPatch) -> None:
    """It zeroes pages of a request that has just ended; they are cached, and nobody reads them."""
    apply = Follower.apply

    def clearing(self: Follower, sealed: bytes) -> tuple[Report, Blobs]:
        out = apply(self, sealed)
        work = plan.decode(plan.unseal(sealed)[1])
        if isinstance(work, Batch) and work.items[0].start == LAST:
            self.model.import_pages(work.pages_of(0)[:2], [bytes(32)] * 2)
        return out

    patch.setattr(Follower, "apply", clearing)


# --- the way between them ---


def any_order_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Follower, "_in_order", lambda self, number: None)


def damage_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "_check", lambda number, raw: 0)


def later_plans_overtake(patch: pytest.MonkeyPatch) -> None:
    any_order_is_taken(patch)
    arrivals = Connection.arrivals

    def overtaking(self: Connection, sealed: bytes, now_us: int) -> tuple[int, list[bytes]]:
        when, copies = arrivals(self, sealed, now_us)
        self._newest_us = 0
        return (when + 5_000 if self._rng.random() < 0.2 else when), copies

    patch.setattr(Connection, "arrivals", overtaking)


PLANTS: Final = (
    Plant(
        "attempt_is_not_in_the_plan",
        attempt_is_not_in_the_plan,
        r"step \d+: rank \d has for r2 attempt=0, the leader attempt=1",
    ),
    Plant(
        "rows_are_not_in_the_plan",
        rows_are_not_in_the_plan,
        r"step 1: rank \d has for r1 kv=\d+, the leader kv=\d+",
    ),
    Plant(
        "fed_tokens_are_not_in_the_plan",
        fed_tokens_are_not_in_the_plan,
        r"step \d+: rank \d has for r1 kv=",
    ),
    Plant(
        "leader_has_a_seed_of_its_own",
        leader_has_a_seed_of_its_own,
        r"step \d+: rank \d has for r1 token=\d+, the leader token=\d+",
    ),
    Plant(
        "weights_are_the_leaders_alone",
        weights_are_the_leaders_alone,
        r"step \d+: rank \d has for r4 kv=",
    ),
    Plant(
        "wire_reaches_the_leader_alone",
        wire_reaches_the_leader_alone,
        r"decode-0: step 1: rank \d has for r1 kv=",
        PAIR,
    ),
    Plant(
        "restored_copy_is_another_one",
        restored_copy_is_another_one,
        r"decode-0: (import|write) \d+.*: rank \d finds other KV than the leader",
        PAIR,
    ),
    Plant(
        "follower_chooses_a_victim",
        follower_chooses_a_victim,
        r"step \d+: rank \d does not compute what the leader does: r1 and r1, r2",
    ),
    Plant(
        "follower_times_out",
        follower_times_out,
        r"step 9: rank \d does not compute what the leader does: nothing and ",
    ),
    Plant(
        "follower_clears_pages",
        follower_clears_pages,
        r"rank \d holds other KV than the leader in cached pages \[\d+, \d+\]",
        ONE,
    ),
    Plant(
        "a_missing_plan_is_taken",
        any_order_is_taken,
        r"rank 2 has come to plan \d+ by other plans than the leader",
        commands="drop plan unified-0 2\n",
    ),
    Plant(
        "a_plan_is_applied_twice",
        any_order_is_taken,
        r"rank 1 (has come to plan \d+ by other plans|applies plan \d+ once more)",
        commands="duplicate plan unified-0 1\n",
    ),
    Plant(
        "a_damaged_plan_is_taken",
        damage_is_taken,
        r"rank 1 |in HashModel",
        commands="corrupt plan unified-0 1\n",
    ),
    Plant(
        "later_plans_overtake",
        later_plans_overtake,
        r"rank \d has come to plan \d+ by other plans than the leader",
    ),
)
