"""Goal: the ranks of a simulated node are one (invariant 10, B128): followers get what the leader
decided as bytes, compute it by themselves, and whatever makes one of them differ is found at the
first step in which it does.

Method: scenarios with three ranks, sound and with bugs planted on purpose
(`tests/support/planted_ranks.py`); more are in `tests/scenarios/b128_*`.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from engine import plan
from engine.plan import Plan
from engine.sim import follower, ranks
from engine.sim.campaign import simulate
from engine.sim.draw import scenario
from engine.sim.follower import Blobs, Follower, Report
from engine.sim.scenario import play, run_text
from tests.support.planted_ranks import NODE, PAIR, PLANTS, Plant

SCENARIOS = Path(__file__).parents[1] / "scenarios"


@pytest.mark.parametrize("text", [NODE, PAIR], ids=["node", "pair"])
def test_without_a_bug_nothing_is_found(text: str) -> None:
    outcome, run = play(text, "sound.scenario")
    assert not outcome.faults, outcome.faults[0]
    assert run is not None
    for node in run.cluster.nodes.values():
        assert sorted(node.ranks.followers) == [1, 2]
        assert {each.applied for each in node.ranks.followers.values()} == {node.ranks.numbered}
        assert node.ranks.numbered > 5
        assert not node.ranks.decided, "every report was compared, and none is kept"


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant.apply(monkeypatch)
    faults = run_text(plant.text, "planted.scenario").faults
    assert faults, "not found"
    assert re.search(plant.noticed, faults[0]), faults[0]


def test_a_write_that_does_not_wait_for_the_slowest_rank_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = SCENARIOS / "b128_slow_rank_keeps_a_write.scenario"
    assert not run_text(path.read_text(encoding="utf-8"), path.name).faults
    monkeypatch.setattr(
        ranks.Ranks,
        "read",
        lambda self, ticket, pages, then: then([self.leader.export_pages(pages)] * 3),
    )
    (fault,) = run_text(path.read_text(encoding="utf-8"), path.name).faults
    assert "expect r1 state=receiving" in fault


def test_a_plan_is_encoded_once_and_every_follower_gets_these_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[bytes] = []
    applied: dict[int, list[bytes]] = {}
    apply = Follower.apply

    def encoding(work: Plan) -> bytes:
        encoded.append(plan.encode(work))
        return encoded[-1]

    def applying(self: Follower, sealed: bytes) -> tuple[Report, Blobs]:
        applied.setdefault(id(self), []).append(plan.unseal(sealed)[1])
        return apply(self, sealed)

    monkeypatch.setattr(ranks, "encode", encoding)
    monkeypatch.setattr(Follower, "apply", applying)
    outcome, run = play(NODE, "sound.scenario")
    assert not outcome.faults
    assert run is not None
    assert list(applied.values()) == [applied[next(iter(applied))]] * 2
    (first, _) = applied.values()
    assert sorted(first) == sorted(encoded)


def test_a_follower_has_nothing_to_decide_with() -> None:
    """It may know devices, plans and results; no clock, scheduler, request, pool or world."""
    tree = ast.parse(Path(follower.__file__).read_text(encoding="utf-8"))
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    ours = {name for name in modules if name and name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"engine.batch", "engine.hash_model", "engine.plan"}
    assert "time" not in modules


def test_with_one_rank_nothing_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(work: Plan) -> bytes:
        raise AssertionError("there is nobody to tell")

    monkeypatch.setattr(ranks, "encode", encode)
    assert not run_text(NODE.replace("ranks=3", "ranks=1"), "one.scenario").faults


@pytest.mark.parametrize(
    "name", ["b31_preempt_in_flight", "exhausted_pages", "s3_pause_and_new_weights"]
)
def test_ranks_that_are_never_late_change_nothing(name: str) -> None:
    """The leader decides as if it were alone."""
    text = (SCENARIOS / f"{name}.scenario").read_text(encoding="utf-8")
    several = re.sub(r"^cluster ", "cluster ranks=3 rank_delay=0ms ", text, flags=re.MULTILINE)
    alone, together = run_text(text, name), run_text(several, name)
    assert not together.faults
    assert together.trace.splitlines()[1:] == alone.trace.splitlines()[1:]


def test_late_ranks_change_nothing_of_what_a_node_decides() -> None:
    """Delays of followers show in rest, not in a step."""
    late = NODE.replace("ranks=3", "ranks=3 rank_delay=7ms")
    traces = [run_text(text, "s").trace.split("> run until idle")[0] for text in (NODE, late)]
    assert traces[0].splitlines()[1:] == traces[1].splitlines()[1:]


def test_simulations_draw_ranks_and_nothing_else_of_a_seed_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = [scenario(seed) for seed in range(200)]
    several = [seed for seed, text in enumerate(drawn) if " ranks=3 " in text]
    assert 10 < len(several) < 60
    assert any("kill rank" in text for text in drawn)
    assert any("delay rank" in text for text in drawn)
    monkeypatch.setattr("engine.sim.draw.RANKS", 0.0)
    for seed, text in enumerate(drawn):
        plain = re.sub(r" ranks=3 rank_delay=\d+us", "", text)
        plain = re.sub(r"^delay rank .*\n", "", plain, flags=re.MULTILINE)
        plain = re.sub(r"^kill rank (\S+) \d$", r"kill \1", plain, flags=re.MULTILINE)
        assert plain == scenario(seed)


@pytest.mark.parametrize("shape", ["unified", "1+1", "2+2"])
def test_clusters_of_many_ranks_are_clean(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.sim.draw.RANKS", 1.0)
    for seed in range(4):
        outcome = simulate(seed, shape, 60)
        assert not outcome.faults, f"seed {seed}: {outcome.faults[0]}"
