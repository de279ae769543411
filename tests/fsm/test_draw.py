"""What is drawn: the committed pages are current, complete, stable and well formed."""

import os
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from fsm.draw import (
    DRAWINGS,
    KIND_MEANING,
    Drawing,
    DrawingError,
    main,
    texts,
    to_dot,
    to_markdown,
    to_svg,
    write,
)
from fsm.resources import DISPOSITION_MEANING, PHASES, RESOURCES

COMMITTED = Path(__file__).parents[2] / "docs" / "statecharts"
UNIFIED = DRAWINGS[0]

needs_dot = pytest.mark.skipif(
    shutil.which("dot") is None and "CI" not in os.environ,
    reason="drawing needs the program `dot` (Debian, Ubuntu: apt-get install graphviz)",
)
"""A laptop may lack Graphviz; in CI, where nobody would see the skip, a missing one fails."""

each = pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.chart.name)


# --- what is committed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", texts())
def test_committed_text_is_current(name: str) -> None:
    path = COMMITTED / name
    assert path.exists(), f"docs/statecharts/{name} is missing: run `make charts`"
    assert path.read_bytes().decode() == texts()[name], (
        f"docs/statecharts/{name} is stale: run `make charts`"
    )


@each
def test_committed_picture_carries_the_fingerprint(drawing: Drawing) -> None:
    picture = (COMMITTED / f"{drawing.chart.name}.svg").read_text(encoding="utf-8")
    assert drawing.chart.fingerprint in picture, (
        f"docs/statecharts/{drawing.chart.name}.svg shows another chart: run `make charts`"
    )


def test_nothing_else_is_committed() -> None:
    pictures = {f"{drawing.chart.name}.svg" for drawing in DRAWINGS}
    assert {path.name for path in COMMITTED.iterdir()} == {*texts(), *pictures}


# --- dot ------------------------------------------------------------------------------------------


@each
def test_every_state_event_and_holding_is_in_the_picture(drawing: Drawing) -> None:
    dot = to_dot(drawing)
    for state in drawing.chart.states:
        node = next(line for line in dot.splitlines() if line.startswith(f'    "{state.name}" ['))
        for resource in state.holds:
            assert (resource if resource in drawing.kit else f"{resource}?") in node
        assert state.holds or "nothing" in node
    for edge in drawing.chart.edges:
        arrow = f'  "{edge.source}" -> "{edge.target}" ['
        line = next(line for line in dot.splitlines() if line.startswith(arrow))
        assert re.search(rf">{edge.event}<|  {edge.event} ", line)
        assert all(actor in line for actor in edge.by)


@each
def test_edges_between_the_same_two_states_are_one_arrow(drawing: Drawing) -> None:
    arrows = [line for line in to_dot(drawing).splitlines() if '" -> "' in line]
    pairs = {(edge.source, edge.target) for edge in drawing.chart.edges}
    assert len(arrows) == len(pairs) + 1  # and the one that points at the initial state


@each
def test_a_box_for_each_phase_that_has_states_in_the_order_of_the_phases(drawing: Drawing) -> None:
    boxes = re.findall(r'subgraph "cluster_(\w+)"', to_dot(drawing))
    used = {state.phase for state in drawing.chart.states}
    assert boxes == [phase for phase in PHASES if phase in used]


def test_the_usual_life_is_the_spine() -> None:
    bold = [line for line in to_dot(UNIFIED).splitlines() if "penwidth" in line]
    ends = [re.findall(r'"(\w+)"', line)[:2] for line in bold]
    assert sorted(ends) == sorted([edge.source, edge.target] for edge in UNIFIED.spine())


def test_a_usual_life_that_the_chart_does_not_have_is_refused() -> None:
    with pytest.raises(DrawingError, match="unified: no 'admit' in 'arrived'"):
        to_dot(replace(UNIFIED, usual=("admit",)))


def test_the_order_of_the_edges_between_other_states_does_not_show() -> None:
    by_target = sorted(UNIFIED.chart.edges, key=lambda edge: edge.target)
    assert to_dot(replace(UNIFIED, chart=replace(UNIFIED.chart, edges=tuple(by_target)))) == to_dot(
        UNIFIED
    )


def test_names_that_mean_something_to_dot_or_markup_stay_text() -> None:
    first, *rest = UNIFIED.chart.states
    named = replace(UNIFIED.chart, states=(replace(first, doc='a "quoted" \\ <b>'), *rest))
    dot = to_dot(replace(UNIFIED, chart=named, title="R & <D>"))
    assert r'tooltip="a \"quoted\" \\ <b>"' in dot
    assert "<b>R &amp; &lt;D&gt;</b>" in dot


# --- Markdown -------------------------------------------------------------------------------------


def tables(page: str) -> dict[str, list[list[str]]]:
    """First head cell → rows of cells, for each table of a page; each row as wide as its head."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", page, flags=re.M):
        head, _, *rows = ([c.strip() for c in x.split("|")[1:-1]] for x in block.splitlines())
        assert all(len(row) == len(head) for row in rows), head
        found[head[0]] = rows
    return found


@each
def test_a_page_lists_every_state_and_every_edge(drawing: Drawing) -> None:
    page = tables(to_markdown(drawing))
    assert [row[0] for row in page["State"]] == [f"`{s.name}`" for s in drawing.chart.states]
    assert len(page["Event"]) == len(drawing.chart.edges)


def test_what_an_edge_takes_and_drops_is_on_the_page() -> None:
    rows = {(row[0], row[1]): row for row in tables(to_markdown(UNIFIED))["Event"]}
    assert rows["**admit**", "`waiting`"][4:7] == ["prefix_locks, pages, rows", "", ""]
    assert rows["**quiesce**", "`stopping`"][4:7] == ["", "prefix_locks, pages, rows", "cache"]
    assert rows["**loaded**", "`prefetching`"][4:7] == ["", "*prefetches?*", ""]


@each
def test_the_matrix_is_the_chart(drawing: Drawing) -> None:
    chart = drawing.chart
    for event, *cells in tables(to_markdown(drawing))[""]:
        for state, cell in zip(chart.states, cells, strict=True):
            edge = chart.table.get((state.name, event.strip("*")))
            assert cell == (f"`{edge.target}`" if edge else "·")


def test_the_glossary_has_every_word() -> None:
    page = tables(texts()["README.md"])
    for head, words in {
        "Phase": PHASES,
        "Class": KIND_MEANING,
        "Resource": RESOURCES,
        "Pages go to": DISPOSITION_MEANING,
    }.items():
        assert [row[0] for row in page[head]] == [f"`{word}`" for word in words]
    actors = {actor for d in DRAWINGS for edge in d.chart.edges for actor in edge.by}
    assert actors <= {row[0].strip("`") for row in page["By"]}


# --- pictures -------------------------------------------------------------------------------------


@needs_dot
@each
def test_a_picture_is_well_formed_and_shows_its_chart(drawing: Drawing) -> None:
    root = ET.fromstring(to_svg(to_dot(drawing)))
    shown = " ".join(text.strip() for text in root.itertext())
    assert drawing.chart.fingerprint in shown
    assert all(state.name in shown for state in drawing.chart.states)


@needs_dot
def test_dot_that_cannot_be_drawn_is_an_error_with_its_reason() -> None:
    with pytest.raises(DrawingError, match="syntax error"):
        to_svg("digraph {")


@needs_dot
def test_the_command_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "folder"
    assert main([str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {path.name for path in COMMITTED.iterdir()}
    assert str(folder / "unified.svg") in capsys.readouterr().out


def test_without_dot_nothing_is_written_and_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([str(tmp_path / "charts")]) == 2
    assert "install your system's Graphviz" in capsys.readouterr().err
    assert not (tmp_path / "charts").exists()


def test_a_folder_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fsm.draw.to_svg", lambda dot: "<svg/>")
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_a_registered_chart_becomes_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsm.draw.to_svg", lambda dot: "<svg/>")
    other = replace(UNIFIED, chart=replace(UNIFIED.chart, name="other"), title="Another")
    names = {path.name for path in write(tmp_path, (UNIFIED, other))}
    assert {"other.dot", "other.svg", "other.md", "unified.md", "README.md"} <= names
    assert "[Another](other.md)" in (tmp_path / "README.md").read_text(encoding="utf-8")
