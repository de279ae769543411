"""The page of the joint table: a matrix of all pairs of states, and what each group of pairs is."""

from collections.abc import Iterable, Sequence
from typing import Final

from fsm.decode import DECODE
from fsm.joint import ABSENT, EARLIER, GONE, JOINT, shown
from fsm.prefill import PREFILL

TITLE: Final = "A request on a pair of nodes"
PAGE: Final = "joint.md"

HOW_TO_READ: Final = """\
A request that is served by a prefill and a decode node is in a state on both. A cell is the phase
that its client is shown; a dot is a pair that cannot be, and would be a bug of ours. Exploration
proves that the pairs that can be reached are exactly those with a phase.

`absent`: the request has not arrived on that node. `gone`: the node's process died, and the life
with it."""

EARLIER_TEXT: Final = """\
A rebuild opens a fresh room, and the matrix is about the lives that share a room now. The prefill
life of the room before may still be waiting to hear that its hand-over is complete. Nothing that
it says counts for decode any more; these pairs are seen then."""


def to_markdown(generated: str) -> str:
    """The page. ``generated`` is the comment that says who wrote it."""
    prefill = (ABSENT, *PREFILL.by_name, GONE)
    decode = (ABSENT, *DECODE.by_name, GONE)
    matrix = [(f"`{d}`", *(_cell(shown().get((p, d))) for p in prefill)) for d in decode]
    rows = [(_names(row.prefill), _names(row.decode), row.shown, row.why) for row in JOINT]
    earlier = [
        (f"`{p}`", _names([d for d in decode if (p, d) in EARLIER]))
        for p in prefill
        if any(pair[0] == p for pair in EARLIER)
    ]
    return "\n".join(
        [
            f"# {TITLE}",
            "",
            generated,
            "",
            f"Charts `prefill` ({PREFILL.fingerprint}) and `decode` ({DECODE.fingerprint}).",
            "",
            HOW_TO_READ,
            "",
            "## Every pair of states",
            "",
            "Down: decode. Across: prefill.",
            "",
            *_grid(("decode \\ prefill", *(f"`{p}`" for p in prefill)), matrix),
            "",
            "## What the pairs are",
            "",
            *_grid(("Prefill", "Decode", "Client is shown", "What is going on"), rows),
            "",
            "## Lives of earlier rooms",
            "",
            EARLIER_TEXT,
            "",
            *_grid(("Prefill life of an earlier room", "Decode"), earlier),
            "",
        ]
    )


def _cell(phase: str | None) -> str:
    return phase or "·"


def _names(states: Iterable[str]) -> str:
    return ", ".join(f"`{state}`" for state in states)


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
