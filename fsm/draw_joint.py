"""The joint table: a picture of all pairs of states, and in words what each group of pairs is."""

from collections.abc import Iterable, Iterator
from typing import Final

from fsm.colours import FAINT, INK, PHASE_COLOURS, QUIET, tint
from fsm.decode import DECODE
from fsm.draw_base import grid
from fsm.joint import ABSENT, EARLIER, GONE, JOINT, shown
from fsm.prefill import PREFILL
from fsm.resources import Phase

TITLE: Final = "A request on a pair of nodes"
PICTURE: Final = "joint.svg"

TEXT: Final = f"""\
With prefill and decode on separate nodes, a request is in a state on both. A cell is the phase
that its client is shown then. A dot is a pair that cannot be, and would be a bug of ours:
exploration proves that the pairs that can be reached are exactly those with a phase.

![What a client is shown for every pair of states]({PICTURE})

`{ABSENT}`: the request has not arrived on that node. `{GONE}`: the node's process died, and the
life with it."""

EARLIER_TEXT: Final = """\
A rebuild opens a fresh room, and the table is about the lives that share a room now. The prefill
life of the room before may still wait to hear that its hand-over is complete. Nothing that it says
counts for decode any more; these pairs are seen then."""

PREFILLS: Final = (ABSENT, *PREFILL.by_name, GONE)
DECODES: Final = (ABSENT, *DECODE.by_name, GONE)

LEFT: Final = 96
"""Room for the states of decode."""
TOP: Final = 74
COLUMN: Final = 73
ROW: Final = 24
WIDTH: Final = LEFT + COLUMN * len(PREFILLS) + 6


def to_markdown() -> Iterator[str]:
    """The section of the page, in paragraphs."""
    yield f"## {TITLE}"
    yield f"Charts `prefill` ({PREFILL.fingerprint}) and `decode` ({DECODE.fingerprint})."
    yield TEXT
    yield "### What the pairs are"
    rows = [(_names(row.prefill), _names(row.decode), row.shown, row.why) for row in JOINT]
    yield grid(("Prefill", "Decode", "Client is shown", "What is going on"), rows)
    yield "### Lives of earlier rooms"
    yield EARLIER_TEXT
    earlier = [
        (f"`{p}`", _names(d for d in DECODES if (p, d) in EARLIER))
        for p in PREFILLS
        if any(pair[0] == p for pair in EARLIER)
    ]
    yield grid(("Prefill life of an earlier room", "Decode"), earlier)


def to_svg() -> str:
    """The picture: decode's states down, prefill's across, in each cell the phase in its colour."""
    height = TOP + ROW * len(DECODES) + 6
    fingerprints = f"charts prefill · {PREFILL.fingerprint}, decode · {DECODE.fingerprint}"
    frame = f'width="{WIDTH}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="11"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame} viewBox="0 0 {WIDTH} {height}" {font}>',
        f'<rect {frame} fill="white"/>',
        _text("What a client is shown", 8, 22, 'font-size="15" font-weight="bold"'),
        _text(fingerprints, WIDTH - 6, 22, f'text-anchor="end" fill="{QUIET}"'),
        _text("prefill →", LEFT + COLUMN / 2, 44, f'text-anchor="middle" fill="{QUIET}"'),
        _text("decode ↓", LEFT - 10, TOP - 10, f'text-anchor="end" fill="{QUIET}"'),
    ]
    for number, prefill in enumerate(PREFILLS):
        lines.append(_name(prefill, LEFT + COLUMN * (number + 0.5), TOP - 10, "middle"))
    for below, decode in enumerate(DECODES):
        y = TOP + ROW * below
        lines.append(_name(decode, LEFT - 10, y + 16, "end"))
        for across, prefill in enumerate(PREFILLS):
            lines.append(_cell(LEFT + COLUMN * across, y, shown().get((prefill, decode))))
    return "\n".join([*lines, "</svg>", ""])


def _name(state: str, x: float, y: float, anchor: str) -> str:
    """A state; what is not on a chart is set in italics."""
    style = 'font-style="italic"' if state in (ABSENT, GONE) else 'font-weight="bold"'
    return _text(state, x, y, f'text-anchor="{anchor}" fill="{INK}" {style}')


def _cell(x: int, y: int, phase: Phase | None) -> str:
    fill = "white" if phase is None else tint(PHASE_COLOURS[phase], 0.45)
    place = f'x="{x}" y="{y}" width="{COLUMN}" height="{ROW}"'
    said = _text(phase or "·", x + COLUMN / 2, y + 16, f'text-anchor="middle" fill="{INK}"')
    return f'<rect {place} fill="{fill}" stroke="{FAINT}"/>{said}'


def _text(text: str, x: float, y: float, look: str) -> str:
    return f'<text x="{x}" y="{y}" {look}>{text}</text>'


def _names(states: Iterable[str]) -> str:
    return ", ".join(f"`{state}`" for state in states)
