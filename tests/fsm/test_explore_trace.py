"""A counterexample can be replayed: every planted bug, as traces of two nodes.

Method: the traces go through the reader and the replay that production's traces go through. What a
bug of rules or protocol makes lives do is legal move by move, so nothing but the missing end may be
said; a chart that was changed is named."""

from pathlib import Path

import msgspec
import pytest

from fsm.explore import Explorer
from fsm.explore_base import Budget
from fsm.explore_pd import PRODUCTION
from fsm.explore_trace import to_traces
from server.replay import main
from tests.fsm.planted import PLANTED, Planted

BY_RULES = [
    bug
    for bug in PLANTED
    if bug.design.prefill is PRODUCTION.prefill and bug.design.decode is PRODUCTION.decode
]


def write(bug: Planted, folder: Path) -> list[str]:
    violation = Explorer(bug.model, bug.requests, bug.budget).run().violation
    assert violation is not None
    encoder, paths = msgspec.json.Encoder(), []
    for node, lines in to_traces(violation, bug.design).items():
        path = folder / f"{node}.jsonl"
        path.write_bytes(b"".join(encoder.encode(line) + b"\n" for line in lines))
        paths.append(str(path))
    return paths


@pytest.mark.parametrize("bug", BY_RULES, ids=lambda bug: bug.name.replace(" ", "_"))
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


def test_a_counterexample_can_be_drawn(tmp_path: Path) -> None:
    bug = next(bug for bug in BY_RULES if bug.budget == Budget(aborts=1, rebuilds=1))
    picture = tmp_path / "out.svg"
    assert main(["timeline", *write(bug, tmp_path), "-o", str(picture)]) == 0
    assert "</svg>" in picture.read_text(encoding="utf-8")
