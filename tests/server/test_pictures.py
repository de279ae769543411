"""The pictures of the README are what the scenarios beside them give today.

Method: run the scenarios, replay what they traced, draw it again and compare. Graphviz's layout
varies with its version, so of the chart only the words are compared."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from server.replay import main
from server.replay_files import FITS

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
TIMELINE = ("timeline.unified-0.jsonl",)
PAIR = ("pair.prefill-0.jsonl", "pair.decode-0.jsonl")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every node did in the scenarios, which hold all that they expect."""
    folder = tmp_path_factory.mktemp("traces")
    assert main(["run", "--quiet", "--traces", str(folder), str(PICTURES)]) == FITS
    return folder


def drawn(command: str, traces: Path, names: tuple[str, ...], picture: Path) -> str:
    files = [str(traces / name) for name in names]
    assert main([command, *files, "-o", str(picture)]) == FITS
    return picture.read_text(encoding="utf-8")


def test_every_picture_has_its_source() -> None:
    sources = {path.stem for path in PICTURES.glob("*.scenario")}
    assert sources == {"timeline", "pair"}
    assert {path.stem for path in PICTURES.glob("*.svg")} == sources | {"chart"}


def test_what_is_drawn_replays_without_a_fault(
    traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in traces.iterdir()} == {*TIMELINE, *PAIR}
    assert main(["check", *(str(traces / name) for name in TIMELINE)]) == FITS
    assert main(["check", *(str(traces / name) for name in PAIR)]) == FITS
    assert "open at the end" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "files"), [("timeline", TIMELINE), ("pair", PAIR)])
def test_a_committed_timeline_is_what_its_scenario_gives(
    name: str, files: tuple[str, ...], traces: Path, tmp_path: Path
) -> None:
    """`make charts` writes it."""
    committed = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert drawn("timeline", traces, files, tmp_path / "new.svg") == committed


def test_the_committed_chart_has_the_numbers_that_its_scenario_gives(
    traces: Path, tmp_path: Path
) -> None:
    drawn("chart", traces, TIMELINE, tmp_path / "new.svg")
    assert words(tmp_path / "new.svg") == words(PICTURES / "chart.svg")


def words(picture: Path) -> list[str]:
    texts = ET.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text")
    return sorted(text.text or "" for text in texts)
