"""Charts as pictures and tables: dot text, Markdown, and SVG where the system has Graphviz.

``python -m fsm.draw docs/statecharts`` (``make charts``) writes what is committed there. Everything
is drawn from the frozen tables, never from a running machine. Dot text, the page and the picture of
the joint table depend on the charts alone, so a test compares them byte for byte; the SVG of a
chart also varies with the version of Graphviz, so it only has to carry its chart's fingerprint.

A new chart is a new line in :data:`fsm.draw_base.DRAWINGS`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fsm import draw_joint
from fsm.draw_base import DRAWINGS, Drawing, DrawingError
from fsm.draw_dot import to_dot
from fsm.draw_page import to_page


def to_svg(dot: str) -> str:
    """Render dot text. :class:`DrawingError` if the system has no Graphviz, or if it fails."""
    import graphviz  # only drawing needs it

    try:
        return str(graphviz.Source(dot).pipe(format="svg", encoding="utf-8"))
    except graphviz.ExecutableNotFound as error:
        raise DrawingError(
            "drawing needs the program `dot`: install your system's Graphviz"
            " (Debian, Ubuntu: apt-get install graphviz; macOS: brew install graphviz)"
        ) from error
    except graphviz.CalledProcessError as error:
        raise DrawingError(f"`dot` failed: {error.stderr}") from error


def texts(drawings: Sequence[Drawing] = DRAWINGS) -> dict[str, str]:
    """What depends on the charts alone: file name → text, for all but the SVG of each chart."""
    files = {"README.md": to_page(drawings), draw_joint.PICTURE: draw_joint.to_svg()}
    for drawing in drawings:
        files[f"{drawing.chart.name}.dot"] = to_dot(drawing)
    return files


def write(folder: Path, drawings: Sequence[Drawing] = DRAWINGS) -> list[Path]:
    """Write page, dot text and pictures; nothing at all if a picture cannot be made."""
    files = texts(drawings)
    for drawing in drawings:
        files[f"{drawing.chart.name}.svg"] = to_svg(files[f"{drawing.chart.name}.dot"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in sorted(files.items()):
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in sorted(files)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fsm.draw",
        description="Write the page about the charts, and every chart as .dot and .svg.",
    )
    parser.add_argument("folder", type=Path, help="where to write; created if it does not exist")
    try:
        written = write(parser.parse_args(arguments).folder)
    except (DrawingError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
