"""Goal: the simulated world is what it says: exact time, launch order, results at the end of a
step, holds that hold; and its checks find what the engine does not notice itself.

Method: small worlds, and engines that are broken on purpose.
"""

import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from engine.batch import Batch, BatchItem, PageImport, RowInit, StepResult
from engine.batching import Span
from engine.hash_model import HashModel
from engine.pages import Kv, Pages
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sim import checks
from engine.sim.gates import Gate
from engine.sim.matcher import StopSearch
from engine.sim.runner import Costs, Done, SimRunner
from engine.sim.scenario import run_text
from engine.sim.store import VirtualStore
from engine.sim.world import World
from engine.store import StoreDone
from fsm.resources import Disposition
from transport.messages import SamplingParams

SCENARIO = """cluster unified=1 pages=64 page_size=4 rows=8 chunk=64 depth=2
submit r1 prompt=40 max_tokens=20
submit r2 prompt=40 max_tokens=20
run until r2 tokens=5
abort r1
run until idle
expect r2 finished=length golden
expect base
"""


# --- world ---


def test_events_run_in_order_of_time_and_then_of_scheduling() -> None:
    world, seen = World(), list[str]()
    world.after(20, lambda: seen.append("late"))
    world.after(10, lambda: seen.append("first"))
    world.after(10, lambda: world.after(0, lambda: seen.append("third")))
    world.after(10, lambda: seen.append("second"))
    while world.next_us is not None:
        world.step()
    assert seen == ["first", "second", "third", "late"]
    assert world.clock() == 20e-6


@pytest.mark.parametrize("seconds", [0.1, 0.3, 1.1, 2.675, 1e-6 / 3])
def test_a_deadline_is_never_met_too_early(seconds: float) -> None:
    world = World()
    world.at_seconds(seconds, lambda: None)
    world.step()
    assert seconds <= world.clock() < seconds + 2e-6


def test_the_past_is_now_and_time_does_not_jump_over_an_event() -> None:
    world = World()
    world.advance(100)
    world.at(50, lambda: None)
    assert world.next_us == 100
    with pytest.raises(ValueError, match="an event is due"):
        world.advance(200)


# --- device ---


def batch(step: int, start: int, tokens: list[int], init: bool = False) -> Batch:
    """A step of one request on pages 0 and 1, of 4 tokens each."""
    used = -(-(start + len(tokens)) // 4)
    rows = (RowInit(0, [1, 2, 3], 3, SamplingParams(temperature=0.0), ()),) if init else ()
    return Batch(
        step,
        4,
        (BatchItem("a", 0, 0, start, len(tokens), True),),
        array("q", tokens),
        array("q", [0, len(tokens)]),
        array("q", [0, used]),
        array("q", range(used)),
        array("q", [start + len(tokens) - 4 * (used - 1)]),
        rows,
    )


def test_work_runs_in_launch_order_and_takes_its_time() -> None:
    world, done = World(), list[tuple[int, Done]]()
    model = HashModel(4, 4)
    runner = SimRunner(
        world, model, Costs(1000, 10, 100), lambda each: done.append((world.now_us, each))
    )
    runner.launch(batch(1, 0, [1, 2, 3], init=True))
    runner.launch(PageImport(7, array("q", [2, 3]), [bytes(32), bytes(32)]))
    runner.launch(batch(2, 3, [-1]))
    while world.next_us is not None:
        world.step()
    assert [time for time, _ in done] == [1030, 1230, 2240]
    assert isinstance(done[0][1], StepResult)


def test_a_result_is_computed_when_the_step_ends() -> None:
    """Whoever writes into a page of a launched step changes what it computes."""
    tokens = []
    for foreign in (False, True):
        world, done = World(), list[Done]()
        model = HashModel(4, 4)
        runner = SimRunner(world, model, Costs(), done.append)
        runner.launch(batch(1, 0, [1, 2, 3], init=True))
        world.step()
        runner.launch(batch(2, 3, [-1]))
        if foreign:
            model.import_pages(array("q", [0]), [bytes(range(32))])
        world.step()
        result = done[-1]
        assert isinstance(result, StepResult)
        tokens.append(result.sampled[0].token)
    assert tokens[0] != tokens[1]


def test_a_held_step_holds_all_work_behind_it() -> None:
    world, done = World(), list[Done]()
    runner = SimRunner(world, HashModel(4, 4), Costs(), done.append)
    runner.gate.hold()
    runner.launch(batch(1, 0, [1, 2, 3], init=True))
    runner.launch(batch(2, 3, [-1]))
    while world.next_us is not None:
        world.step()
    assert not done
    runner.gate.permits = 1
    runner.look()
    while world.next_us is not None:
        world.step()
    assert len(done) == 1
    runner.gate.release()
    runner.look()
    assert len(done) == 2


def test_a_gate_can_wait_for_a_chunk() -> None:
    gate = Gate()
    gate.hold(chunk=2)
    gate.arrive(frozenset({1}))
    assert gate.armed
    assert gate.passes()
    gate.arrive(frozenset({1, 2}))
    assert not gate.passes()


# --- store and stop strings ---


def test_a_held_store_ends_its_operations_together_and_in_order() -> None:
    world, wakes = World(), list[int]()
    store = VirtualStore(world, 50, lambda: wakes.append(world.now_us))
    store.save(1, ["a"], [b"A"])
    world.step()
    assert store.poll() == [StoreDone(1)]
    assert store.hits(["a", "b"]) == 1
    store.gate.hold()
    store.load(2, ["a", "b"])
    store.load(3, ["a"])
    world.step()
    world.step()
    assert (store.poll(), store.open_operations) == ([], 2)
    store.fail_reads.append("broken")
    store.gate.release()
    store.look()
    assert store.poll() == [StoreDone(2, error="broken"), StoreDone(3, [b"A"])]


def test_the_first_complete_stop_string_is_found_at_its_token() -> None:
    assert StopSearch([b"bc", b"b"], 0).push(list(b"abc")) == (2, "b")
    assert StopSearch([b"bc"], 0).push(list(b"ab")) is None
    assert StopSearch([b"b"], 3).push(list(b"abab")) == (4, "b")
    search = StopSearch([b"bc"], 0)
    assert search.push(list(b"ab")) is None
    assert search.push([257, ord("c")]) == (4, "bc")


# --- the checks find what the engine does not notice ---


def faults(monkeypatch: pytest.MonkeyPatch) -> str:
    """What a run of the scenario finds, with the engine's own audit switched off."""
    monkeypatch.setattr(Scheduler, "audit", lambda self: [])
    return "\n".join(run_text(SCENARIO, "planted.scenario").faults)


def test_nothing_is_found_in_a_sound_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not faults(monkeypatch)


def test_a_page_freed_under_a_launched_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(scheduler: Scheduler, request: Request) -> None:
        if request.state in ("stopping", "retracting"):
            scheduler._fire(request, "quiesce", "runner")

    monkeypatch.setattr(Scheduler, "_settle", settle)
    assert "released by r1" in faults(monkeypatch)


def test_a_page_in_two_tables_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Kv._take

    def twice(kv: Kv, owner: str, count: int) -> list[int]:
        pages = take(kv, owner, count)
        victims = [p for p in range(kv.pool.total) if kv.pool.owners_of(p) == {"boot:1"}]
        if owner == "boot:2" and len(pages) > 1 and victims:
            kv.pool.drop(pages[0], owner)
            kv.pool.share(victims[0], owner)
            pages[0] = victims[0]
        return pages

    monkeypatch.setattr(Kv, "_take", twice)
    assert "has two owners: r1, r2" in faults(monkeypatch)


def test_pages_that_are_never_given_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(kv: Kv, lease: Pages, disposition: Disposition | None) -> None:
        return

    monkeypatch.setattr(Kv, "give_back", forget)
    assert "pages: total=64" in faults(monkeypatch)


def test_an_answer_given_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    retired = Scheduler._retired

    def twice(scheduler: Scheduler, request: Request) -> None:
        retired(scheduler, request)
        scheduler.tracer.answer(request.life, request.rid, "abort", 0, None, "")

    monkeypatch.setattr(Scheduler, "_retired", twice)
    assert "r1 is answered twice" in faults(monkeypatch)


def test_a_step_that_computes_an_answered_request_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = Scheduler._plan

    def stubborn(scheduler: Scheduler, runnable: list[Request]) -> list[Span]:
        spans = plan(scheduler, runnable)
        for request in scheduler.roster.lives.values():
            if request.state == "stopping" and spans:
                first = spans[0]
                table = scheduler._pages(request).table
                spans.append(first._replace(request=request, row=first.row, table=table))
        return spans

    monkeypatch.setattr(Scheduler, "_plan", stubborn)
    assert "computes r1 after its answer" in faults(monkeypatch)


def test_a_crash_is_a_fault_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(scheduler: Scheduler, message: object) -> None:
        raise KeyError("r1")

    monkeypatch.setattr(Scheduler, "abort", broken)
    found = faults(monkeypatch)
    assert "the engine failed: KeyError: 'r1' (in " in found
    assert "planted.scenario:5: abort r1" in found


def test_checks_name_every_pool_that_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.faults_of.__module__ == "engine.sim.checks"
    monkeypatch.setattr("fsm.ledger.PoolCounts.conserved", property(lambda self: False))
    assert "(conservation)" in faults(monkeypatch)


def test_a_trace_does_not_depend_on_the_hash_seed() -> None:
    root = Path(__file__).parents[2]
    script = (
        "import sys; from pathlib import Path; from engine.sim.scenario import run_file\n"
        "print(run_file(Path(sys.argv[1])).trace)"
    )
    path = root / "tests" / "scenarios" / "b31_preempt_in_flight.scenario"
    traces = {
        subprocess.run(
            [sys.executable, "-c", script, str(path)],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(traces) == 1
