"""The colours of every picture. A phase has the same one in a statechart and in a timeline."""

from typing import Final

from fsm.resources import Phase

INK: Final = "#1f2933"
QUIET: Final = "#616e7c"
"""What is said in passing: who, where, how many. Dark enough to be read in a small size."""
FAINT: Final = "#e4e7eb"

PHASE_COLOURS: Final[dict[Phase, str]] = {
    "intake": "#9aa5b1",
    "bootstrapped": "#cbd2d9",
    "prefilling": "#4a90d9",
    "transferring": "#9b6bd1",
    "decoding": "#3f9d63",
    "retracted": "#e9a23b",
    "held": "#d9c54a",
    "retired": "#f0c6c0",
}


def tint(colour: str, strength: float) -> str:
    """``colour`` (``#rrggbb``) on white: 1 is the colour itself, 0 is white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * strength):02x}" for part in parts)
