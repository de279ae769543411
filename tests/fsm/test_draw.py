"""What is drawn: the committed pages are current, complete, stable and well formed."""

import os
import re
import shutil
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from fsm import draw_joint
from fsm.draw import main, texts, to_svg, write
from fsm.draw_base import DRAWINGS, Drawing, DrawingError, Usage
from fsm.draw_dot import to_dot
from fsm.draw_page import KIND_MEANING, to_page
from fsm.joint import shown
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


def line_of(dot: str, start: str) -> str:
    return next(line for line in dot.splitlines() if line.strip().startswith(start))


@each
def test_every_state_and_holding_is_in_the_picture(drawing: Drawing) -> None:
    dot = to_dot(drawing)
    for state in drawing.chart.states:
        node = line_of(dot, f'"{state.name}" [')
        for resource in state.holds:
            assert (resource if resource in drawing.kit else f"{resource}?") in node
        assert state.holds or "nothing" in node


@each
def test_every_edge_is_an_arrow_or_in_the_foot_of_its_state_with_who_causes_it(
    drawing: Drawing,
) -> None:
    dot, chart = to_dot(drawing), drawing.chart
    for edge in chart.edges:
        ends = chart.is_live(edge.source) and not chart.is_live(edge.target)
        if ends and edge not in drawing.spine():
            line = line_of(dot, f'"{edge.source}" [')
            assert f">{edge.event} <" in line or f"· {edge.event} <" in line
            assert f"→ {edge.target}" in line
        else:
            line = line_of(dot, f'"{edge.source}" -> "{edge.target}" [')
            assert re.search(rf"[>;]{edge.event}[ <&]", line)
        assert ", ".join(edge.by) in line


@each
def test_edges_between_the_same_two_states_are_one_arrow(drawing: Drawing) -> None:
    lines = to_dot(drawing).splitlines()
    arrows = [line for line in lines if '" -> "' in line and "style=invis" not in line]
    pairs = {(e.source, e.target) for e in drawing.chart.edges if not drawing.early(e)}
    assert len(arrows) == len(pairs) + 1  # and the one that points at the initial state


@each
def test_every_state_has_its_place(drawing: Drawing) -> None:
    placed = [state for row in drawing.rows for state in row]
    assert sorted(placed) == sorted(drawing.chart.by_name)


@each
def test_a_box_for_each_phase_that_has_states_in_the_order_of_the_phases(drawing: Drawing) -> None:
    boxes = re.findall(r'subgraph "cluster_(\w+)"', to_dot(drawing))
    used = {state.phase for state in drawing.chart.states}
    assert boxes == [phase for phase in PHASES if phase in used]


def test_the_usual_life_is_the_spine() -> None:
    bold = [line for line in to_dot(UNIFIED).splitlines() if 'penwidth="2.4"' in line]
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


def sections(page: str) -> dict[str, dict[str, list[list[str]]]]:
    """Heading of the second level → the tables below it."""
    return {part.partition("\n")[0]: tables(part) for part in page.split("\n## ")[1:]}


@each
def test_the_page_lists_what_every_state_holds(drawing: Drawing) -> None:
    rows = sections(to_page(DRAWINGS))[drawing.title]["State"]
    assert [row[0] for row in rows] == [f"`{s.name}`" for s in drawing.chart.states]
    for state, row in zip(drawing.chart.states, rows, strict=True):
        held = set() if row[3] == "nothing" else {word.strip("*? ") for word in row[3].split(",")}
        assert held == set(state.holds)


@each
def test_the_page_lists_every_edge_with_its_cause(drawing: Drawing) -> None:
    said, source = set(), ""
    for name, target, events, _ in sections(to_page(DRAWINGS))[drawing.title]["From"]:
        source = name.strip("`") or source
        for event, by, why in re.findall(r"\*\*(\w+)\*\* \((.+?)\): (.+?)(?:<br>|$)", events):
            said.add((event, source, target.strip("`"), by, why))
    assert said == {
        (e.event, e.source, e.target, ", ".join(e.by), e.why) for e in drawing.chart.edges
    }


def test_what_an_edge_takes_and_drops_is_on_the_page() -> None:
    page = sections(to_page(DRAWINGS))[UNIFIED.title]
    changes = {row[2].partition("**")[2].partition("**")[0]: row[3] for row in page["From"]}
    assert changes["admit"] == "**+** prefix_locks, pages, rows"
    assert changes["quiesce"] == "**−** prefix_locks, pages, rows<br>pages go to *cache*"
    assert changes["loaded"] == "**−** *prefetches?*"
    assert changes["hold"] == "nothing"


@each
def test_the_list_of_events_is_the_chart(drawing: Drawing) -> None:
    found = dict[tuple[str, str], str]()
    for event, leads in sections(to_page(DRAWINGS))[drawing.title]["Event"]:
        for part in leads.split("; "):
            sources, _, target = part.replace("`", "").partition(" → ")
            found |= {(source, event.strip("*")): target for source in sources.split(", ")}
    assert found == {key: edge.target for key, edge in drawing.chart.table.items()}


def test_the_contents_lead_to_the_headings() -> None:
    page = to_page(DRAWINGS)
    headings = re.findall(r"^## (.+)$", page, flags=re.M)
    anchors = [(text, text.lower().replace(" ", "-")) for text in headings]
    assert re.findall(r"\[([^]]+)\]\(#([^)]+)\)", page) == anchors


def test_the_glossary_has_every_word() -> None:
    page = sections(texts()["README.md"])["The words"]
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

SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]


def curve(path: str) -> list[Point]:
    """Points along the path of an arrow, which is a chain of cubic Bézier curves."""
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path)]
    points, found = list(zip(numbers[::2], numbers[1::2], strict=True)), list[Point]()
    for start in range(0, len(points) - 1, 3):
        (ax, ay), (bx, by), (cx, cy), (dx, dy) = points[start : start + 4]
        for step in range(41):
            t, u = step / 40, 1 - step / 40
            weights = (u**3, 3 * u * u * t, 3 * u * t * t, t**3)
            x = sum(w * v for w, v in zip(weights, (ax, bx, cx, dx), strict=True))
            y = sum(w * v for w, v in zip(weights, (ay, by, cy, dy), strict=True))
            found.append((x, y))
    return found


def box(text: ET.Element) -> tuple[float, float, float, float]:
    """About where the text is drawn: a character is half as wide as it is high."""
    size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
    width = 0.45 * size * len((text.text or "").strip())
    left = x - {"start": 0, "middle": 0.5, "end": 1}[text.attrib["text-anchor"]] * width
    return left, left + width, y - 0.65 * size, y


@each
def test_no_arrow_of_a_committed_picture_crosses_a_text(drawing: Drawing) -> None:
    root = ET.parse(COMMITTED / f"{drawing.chart.name}.svg").getroot()
    texts = [(text.text, box(text)) for text in root.iter(f"{SVG}text")]
    assert len(texts) > len(drawing.chart.edges)
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "edge":
            arrow = group.findtext(f"{SVG}title")
            for path in group.iter(f"{SVG}path"):
                for x, y in curve(path.attrib["d"]):
                    for text, (left, right, top, bottom) in texts:
                        assert not (left < x < right and top < y < bottom), (arrow, text)


@each
def test_a_committed_picture_is_readable_in_a_page_of_documentation(drawing: Drawing) -> None:
    """GitHub shows a README 838 pixels wide, and makes a picture that is wider smaller."""
    root = ET.parse(COMMITTED / f"{drawing.chart.name}.svg").getroot()
    width = float(root.attrib["viewBox"].split()[2])
    smallest = min(float(text.attrib["font-size"]) for text in root.iter(f"{SVG}text"))
    assert smallest * min(4 / 3, 838 / width) >= 10


def test_the_picture_of_the_pair_has_every_pair() -> None:
    root = ET.fromstring(draw_joint.to_svg())
    said = [text.text for text in root.iter(f"{SVG}text")]
    for phase in set(shown().values()):
        assert said.count(phase) >= list(shown().values()).count(phase)
    cells = len(draw_joint.PREFILLS) * len(draw_joint.DECODES)
    assert said.count("·") == cells - len(shown())


def test_what_nobody_did_is_grey_and_what_they_did_is_counted() -> None:
    usage = Usage(
        "unified-0: 3 requests",
        {"arrived": "3 ×", "waiting": "3 ×"},
        {("arrived", "enqueue"): 3, ("waiting", "abort"): 2},
    )
    dot = to_dot(UNIFIED, usage)
    assert "unified-0: 3 requests" in dot
    assert "<b>3</b>&#160;enqueue" in line_of(dot, '"arrived" -> "waiting"')
    assert "<b>2</b>&#160;abort" in line_of(dot, '"waiting" [')
    assert "never" in line_of(dot, '"decoding" [')
    assert "dashed" in line_of(dot, '"waiting" -> "prefilling"')


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
    assert {"other.dot", "other.svg", "unified.dot", "unified.svg", "README.md"} <= names
    assert "![Another](other.svg)" in (tmp_path / "README.md").read_text(encoding="utf-8")
