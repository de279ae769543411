"""A counterexample can be replayed and drawn: every planted bug, of a pair as traces of two nodes,
of a unified node as one.

Method: the traces go through the reader and the replay that production's traces go through. What a
bug of rules or protocol makes lives do is legal move by move, so nothing but the missing end may be
said; a chart that was changed is named; and where pages are numbered, a wrong balance is."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from fsm.explore import Explorer
from fsm.explore_base import Budget, Traced, Violation
from fsm.explore_pd import PRODUCTION
from fsm.explore_trace import to_traces
from fsm.explore_unified import UnifiedModel
from fsm.unified import UNIFIED
from server.replay import main
from tests.fsm.planted import PLANTED, Planted
from tests.fsm.planted_shared import PLANTED_SHARED, PlantedShared
from tests.fsm.planted_unified import PLANTED_UNIFIED, PlantedUnified

BY_RULES = [
    bug
    for bug in PLANTED
    if bug.design.prefill is PRODUCTION.prefill and bug.design.decode is PRODUCTION.decode
]


def traced(violation: Violation | None, nodes: Mapping[str, Traced], folder: Path) -> list[str]:
    assert violation is not None
    encoder, paths = msgspec.json.Encoder(), []
    for node, lines in to_traces(violation, nodes).items():
        path = folder / f"{node}.jsonl"
        path.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in lines))
        paths.append(str(path))
    return paths


def write(bug: Planted, folder: Path) -> list[str]:
    return traced(bug.violation, bug.model.nodes, folder)


def write_unified(bug: PlantedUnified, requests: int, folder: Path) -> list[str]:
    model = UnifiedModel(bug.design)
    violation = Explorer(model, requests, Budget(1, 1, 1, 1)).run().violation
    return traced(violation, model.nodes, folder)


def write_shared(bug: PlantedShared, folder: Path) -> list[str]:
    return traced(bug.violation, bug.model.nodes, folder)


def named(bug: Planted | PlantedUnified | PlantedShared) -> str:
    return bug.name.replace(" ", "_")


@pytest.mark.parametrize("bug", BY_RULES, ids=named)
def test_a_counterexample_replays(
    bug: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(write(bug, tmp_path))
    assert code == 0, capsys.readouterr().out


def test_a_counterexample_of_a_changed_chart_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = next(bug for bug in PLANTED if bug.design.decode is not PRODUCTION.decode)
    assert main(write(bug, tmp_path)) == 1
    assert bug.design.decode.fingerprint in capsys.readouterr().out


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("bug", PLANTED_UNIFIED, ids=named)
def test_a_counterexample_of_a_unified_node_replays(
    bug: PlantedUnified, requests: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(write_unified(bug, requests, tmp_path))
    out = capsys.readouterr().out
    if bug.design.chart is UNIFIED:
        assert code == 0, out
    else:
        assert code == 1
        assert bug.design.chart.fingerprint in out


@pytest.mark.parametrize("bug", PLANTED_SHARED, ids=named)
def test_a_counterexample_with_pages_replays(
    bug: PlantedShared, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(write_shared(bug, tmp_path))
    out = capsys.readouterr().out
    assert (code == 1) == bool(bug.replay), out
    assert bug.replay in out


def test_counterexamples_can_be_drawn(tmp_path: Path) -> None:
    pair = next(bug for bug in BY_RULES if bug.budget == Budget(aborts=1, rebuilds=1))
    picture = tmp_path / "out.svg"
    for paths in (
        write(pair, tmp_path),
        write_unified(PLANTED_UNIFIED[0], 2, tmp_path),
        write_shared(PLANTED_SHARED[0], tmp_path),
    ):
        assert main(["timeline", *paths, "-o", str(picture)]) == 0
        assert "</svg>" in picture.read_text(encoding="utf-8")
