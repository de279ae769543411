"""A timeline as an SVG picture that stands alone: no script, no font, no style sheet of others."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from fsm.colours import FAINT, INK, PHASE_COLOURS, QUIET
from fsm.resources import PHASES
from fsm.timeline import PHASE_OF, STOPPING, Lane, Mark, Pool, Timeline

WIDTH: Final = 1000
"""About as wide as a page on GitHub, so that the letters stay readable there."""
LABEL: Final = 150
"""Room for the request's name at the left."""
NAME: Final = 19
"""Characters that fit there; digits are wide."""
END: Final = 126
"""Room for its outcome at the right."""
LEGEND: Final = 20
"""Height of a row of the legend."""
ROW: Final = 22
BAR: Final = 14
TOP: Final = 92
POOL: Final = 84
HELD: Final = "#7aa7d6"
CACHED: Final = "#cbd2d9"
BAD: Final = "#c62f2f"
GOOD: Final = "#14532d"


def draw(timeline: Timeline, title: str) -> str:
    """The picture: lanes, time axis, page pools, and a legend of what occurs."""
    lanes = timeline.lanes()
    pools = [pool for pool in timeline.pools if pool.samples]
    start, end = timeline.start, timeline.end
    if not timeline.view.since and lanes:
        start = min(lane.begin for lane in lanes)
    if timeline.view.until == float("inf") and lanes:
        end = max(timeline.end if lane.end is None else lane.end for lane in lanes)
    axis = _Axis(start, max(end, start + 1e-6))
    legend, rows = _legend(lanes, _clocks(timeline))
    top = TOP + LEGEND * (rows - 1)
    bottom = top + max(1, len(lanes)) * ROW
    height = bottom + 34 + len(pools) * POOL
    several = len(timeline.headers) > 1
    parts = [
        *_frame(height),
        *_heading(timeline, title, lanes),
        *legend,
        *axis.draw(top - 6, bottom),
    ]
    for number, lane in enumerate(lanes):
        parts += _lane(lane, top + number * ROW, axis, several, number)
    for number, pool in enumerate(pools):
        node = timeline.names[timeline.pools.index(pool)]
        parts += _pool(pool, node, bottom + 34 + number * POOL, axis)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Time to the right, with ticks at round times."""

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self._scale = (WIDTH - LABEL - END) / (end - start)
        step = 10.0**-6
        while (end - start) / step > 12:
            step *= 2.5 if f"{step:e}"[0] == "2" else 2
        self.step = step
        self.unit, self.factor = ("s", 1.0) if end - start >= 1 else ("ms", 1e3)

    def x(self, time: float) -> float:
        inside = min(max(time, self.start), self.end)
        return round(LABEL + (inside - self.start) * self._scale, 2)

    def shows(self, time: float) -> bool:
        return self.start <= time <= self.end

    def draw(self, top: int, bottom: int) -> Iterator[str]:
        count = int(self.start / self.step) + (self.start > 0)
        while (time := count * self.step) <= self.end * (1 + 1e-12):
            x, text = self.x(time), f"{time * self.factor:.6g} {self.unit}"
            yield f'<path d="M{x} {top}V{bottom}" stroke="{FAINT}"/>'
            for y in (top - 4, bottom + 14):
                yield f'<text x="{x}" y="{y}" text-anchor="middle" fill="{QUIET}">{text}</text>'
            count += 1


def _frame(height: int) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif"'
        f' font-size="12" fill="{INK}">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'


def _heading(timeline: Timeline, title: str, lanes: Sequence[Lane]) -> Iterator[str]:
    view = timeline.view
    first = view.limit * (view.page - 1) + 1
    lives = "lives" if len(timeline.headers) > 1 else "requests"
    shown = f"{lives} {first:,} to {first + len(lanes) - 1:,} of {timeline.matching:,}"
    if len(lanes) == timeline.matching:
        shown = f"{len(lanes):,} {lives}"
    if not lanes:
        shown = f"none of {timeline.matching:,} {lives} on page {view.page}"
    yield f'<text x="16" y="26" font-size="17" font-weight="bold">{escape(title)}</text>'
    yield f'<text x="{WIDTH - 16}" y="26" text-anchor="end" fill="{QUIET}">{shown}</text>'


def _clocks(timeline: Timeline) -> str:
    """What was done to the clocks; empty where they are shown as they were."""
    moved = [
        f"{name} {_duration(shift)} later"
        for name, shift in zip(timeline.names, timeline.shifts, strict=True)
        if shift
    ]
    if not moved:
        return ""
    text = f"clocks moved so that nothing precedes its cause: {', '.join(moved)}"
    drift = f"; they drift apart by {_duration(timeline.drift)}" if timeline.drift else ""
    return text + drift


def _duration(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


def _legend(lanes: Sequence[Lane], note: str) -> tuple[list[str], int]:
    """The phases and marks that occur, in the order of a life, then ``note``; and the rows that
    they take."""
    states = {span.state for lane in lanes for span in lane.spans if span.end > span.start}
    phases = {PHASE_OF[state] for state in states if state in PHASE_OF}
    marks = {(mark.kind, mark.good) for lane in lanes for mark in lane.marks}
    entries: list[tuple[str, str]] = [
        (
            "retired, not yet done" if phase == "retired" else phase,
            f'<rect y="-7" width="14" height="14" rx="2" fill="{PHASE_COLOURS[phase]}"/>',
        )
        for phase in PHASES
        if phase in phases
    ]
    entries += [
        (name, _sign(kind, good, 7, y, name))
        for kind, good, y, name in (
            ("answer", True, 0, "answer: stop, length"),
            ("answer", False, 0, "answer: abort, error"),
            ("retract", True, 5, "retraction"),
        )
        if (kind, good) in marks
    ]
    parts, x, row = list[str](), 16.0, 0
    for name, symbol in entries:
        width = 19 + 5.8 * len(name)
        if x + width > WIDTH - 10:
            x, row = 16.0, row + 1
        place = f"translate({x:.1f} {49 + row * LEGEND})"
        parts.append(f'<g transform="{place}">{symbol}<text x="19" y="4">{name}</text></g>')
        x += width + 16
    if note:
        row += 1
        place = f'x="16" y="{53 + row * LEGEND}"'
        parts.append(f'<text {place} fill="{QUIET}">{escape(note)}</text>')
    return parts, row + 1


def _lane(lane: Lane, y: int, axis: _Axis, several: bool, number: int) -> Iterator[str]:
    if number % 2:
        yield f'<rect x="0" y="{y}" width="{WIDTH}" height="{ROW}" fill="#000" opacity="0.025"/>'
    name = f"{lane.rid} · {lane.node}" if several else lane.rid
    middle = y + ROW / 2 + 4
    yield (
        f'<text x="{LABEL - 10}" y="{middle}" text-anchor="end">'
        f"<title>{escape(name)} ({escape(lane.life)})</title>{escape(_short(name, NAME))}</text>"
    )
    top = y + (ROW - BAR) / 2
    for span in lane.spans:
        if span.end < axis.start or span.start > axis.end:
            continue
        left, right = axis.x(span.start), axis.x(span.end)
        phase = PHASE_OF.get(span.state, "intake")
        width = max(right - left, 0.6)
        text = f"{span.state}: {(span.end - span.start) * axis.factor:.4g} {axis.unit}"
        yield (
            f'<rect x="{left}" y="{top}" width="{width:.2f}" height="{BAR}"'
            f' fill="{PHASE_COLOURS[phase]}"{_hatch(span.state)}>'
            f"<title>{escape(text)}</title></rect>"
        )
        if width > 7 * len(span.state) + 10 and span.state not in STOPPING:
            ink = INK if phase in ("bootstrapped", "held", "retracted", "intake") else "white"
            yield (
                f'<text x="{left + 5}" y="{middle}" font-size="11" fill="{ink}"'
                f' pointer-events="none">{span.state}</text>'
            )
    for mark in lane.marks:
        if axis.shows(mark.time):
            yield _sign(mark.kind, mark.good, axis.x(mark.time), y + ROW / 2, mark.text)
    answer = next((m for m in lane.marks if m.kind == "answer"), None)
    yield _outcome(lane, answer, middle)


def _outcome(lane: Lane, answer: Mark | None, y: float) -> str:
    if answer is None:
        return (
            f'<text x="{WIDTH - END + 14}" y="{y}" fill="{QUIET}" font-style="italic">open</text>'
        )
    colour = QUIET if answer.good else BAD
    tokens = answer.text.partition(", ")[2].partition(":")[0]
    return (
        f'<text x="{WIDTH - END + 14}" y="{y}" fill="{colour}">'
        f"<title>{escape(answer.text)}</title>{escape(lane.outcome)}, {tokens}</text>"
    )


def _sign(kind: str, good: bool, x: float, y: float, text: str) -> str:
    """A tick or a cross for an answer, a triangle for a retraction, each with its words."""
    title = f"<title>{escape(text)}</title>"
    if kind == "retract":
        return f'<path d="M{x - 5} {y - 10}h10l-5 9z" fill="#8a4b00" stroke="white">{title}</path>'
    if good:
        return f'<circle cx="{x}" cy="{y}" r="5" fill="{GOOD}" stroke="white">{title}</circle>'
    return (
        f'<path d="M{x - 4.5} {y - 4.5}l9 9m0 -9l-9 9" stroke="white" stroke-width="5"/>'
        f'<path d="M{x - 4.5} {y - 4.5}l9 9m0 -9l-9 9" stroke="{BAD}" stroke-width="2.4">'
        f"{title}</path>"
    )


def _hatch(state: str) -> str:
    """What is answered and not done is only outlined."""
    return ' fill-opacity="0.6" stroke="#c9553b" stroke-width="0.6"' if state in STOPPING else ""


def _pool(pool: Pool, node: str, y: int, axis: _Axis) -> Iterator[str]:
    """Held and cached pages over time, stacked."""
    height = POOL - 30
    base = y + height
    width = WIDTH - LABEL - END
    yield f'<rect x="{LABEL}" y="{y}" width="{width}" height="{height}" fill="#f5f7fa"/>'
    for colour, cached in ((CACHED, 1), (HELD, 0)):
        path, level = [f"M{LABEL} {base}"], 0.0
        for time, held, only_cached in pool.samples:
            before, level = level, (held + cached * only_cached) / max(1, pool.total) * height
            if axis.shows(time):
                path.append(f"V{base - before:.1f}H{axis.x(time)}V{base - level:.1f}")
        yield f'<path d="{"".join(path)}H{WIDTH - END}V{base}z" fill="{colour}"/>'
    yield (
        f'<text x="{LABEL - 10}" y="{y + 14}" text-anchor="end">KV pages, {escape(node)}</text>'
        f'<text x="{LABEL - 10}" y="{y + 30}" text-anchor="end" fill="{QUIET}">{pool.total:,}'
        f" in all</text>"
    )
    for offset, colour, name in ((14, HELD, "held"), (32, CACHED, "cached only")):
        yield (
            f'<rect x="{WIDTH - END + 14}" y="{y + offset - 10}" width="11" height="11"'
            f' fill="{colour}"/><text x="{WIDTH - END + 31}" y="{y + offset}">{name}</text>'
        )


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 8]}…{text[-7:]}"
