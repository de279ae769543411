"""What pictures and pages of charts have in common: the charts that are drawn, and how."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fsm import decode, prefill, unified
from fsm.chart import Chart, Edge
from fsm.resources import Resource


class DrawingError(RuntimeError):
    """No picture: Graphviz is missing or fails, or a drawing does not fit its chart."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A chart, and what a picture of it needs to know besides."""

    chart: Chart
    title: str
    theory: str
    """Markdown: why the chart is as it is (the docstring of its module)."""
    kit: frozenset[Resource]
    """What every request on this chart needs; whatever else it holds is marked as optional."""
    usual: tuple[str, ...]
    """The events of an uneventful life, from the initial state on: the spine of the picture."""
    rows: tuple[tuple[str, ...], ...]
    """The states from top to bottom, and those of one row from left to right, so that as few
    arrows as possible cross: Graphviz does not find such an order."""

    def spine(self) -> tuple[Edge, ...]:
        """The edges of the usual life; :class:`DrawingError` if the chart lacks one of them."""
        state, edges = self.chart.initial, list[Edge]()
        for event in self.usual:
            edge = self.chart.table.get((state, event))
            if edge is None:
                raise DrawingError(f"{self.chart.name}: no {event!r} in {state!r} for a usual life")
            edges.append(edge)
            state = edge.target
        return tuple(edges)

    def early(self, edge: Edge) -> bool:
        """Whether ``edge`` answers the client in another way than the usual life does."""
        chart = self.chart
        ends = chart.is_live(edge.source) and not chart.is_live(edge.target)
        return ends and edge not in self.spine()


@dataclass(frozen=True, slots=True)
class Usage:
    """What requests did on a chart, to be drawn on it: whatever they did not do turns grey."""

    caption: str
    states: Mapping[str, str]
    """State → what to say about it; a state that was never entered is not there."""
    edges: Mapping[tuple[str, str], int]
    """(state, event) → how often."""


def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row.split()) for row in text.split("/"))


DRAWINGS: Final[tuple[Drawing, ...]] = (
    Drawing(
        unified.UNIFIED,
        "A request on a unified node",
        unified.__doc__ or "",
        unified.BASE_KIT,
        ("enqueue", "admit", "prefilled", "finish", "quiesce"),
        _rows(
            "arrived / prefetching waiting / prefilling / decoding / holding stopping retracting"
            " / done / held retracted"
        ),
    ),
    Drawing(
        prefill.PREFILL,
        "A request on a prefill node",
        prefill.__doc__ or "",
        prefill.BASE_KIT,
        ("enqueue", "granted", "admit", "prefilled", "landed"),
        _rows("arrived / meeting / waiting / prefilling stopping / sending draining / done"),
    ),
    Drawing(
        decode.DECODE,
        "A request on a decode node",
        decode.__doc__ or "",
        decode.BASE_KIT,
        ("enqueue", "met", "grant", "landed", "finish", "quiesce"),
        _rows(
            "arrived / meeting / waiting held / receiving holding / decoding retracting"
            " / restoring retracted / stopping cancelling draining / done"
        ),
    ),
)
"""A new chart is a new line here."""


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
