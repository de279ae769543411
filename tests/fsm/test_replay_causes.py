"""Traces of a prefill and a decode node are one story, told by causes: whatever their clocks say,
and whatever is wrong with what they name."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.sim.campaign import traces_of
from engine.sim.scenario import play
from fsm.replay_causes import SAID
from fsm.replay_clocks import Clocks
from fsm.replay_join import join
from fsm.replay_join import replay as replay_traces
from fsm.trace import Footer, Header, Line, MoveLine, SubmitLine
from fsm.trace_read import Read, TraceLines
from server.replay import main
from server.replay_files import FAULTS, FITS
from tests.support.stories import write

Story = dict[str, list[Line]]
"""Boot id of a process → its trace."""

APART = """
cluster prefill=1 decode=1 router=1 pages=64 rows=4 chunk=32 metadata=4
run 200ms
{skew}
submit r1 prompt=60 max_tokens=40
submit r2 prompt=50 max_tokens=6
run until r1 decoding
submit r3 prompt=60 max_tokens=8
pause decode-0 mode=retract
run 20ms
continue decode-0
abort r3
submit r4 prompt=60 max_tokens=8
run until r4 state=receiving on=decode-0
run until idle
expect base
"""
"""Requests that are handed over, rebuilt, and aborted on the way. Decode's clock is behind by more
than a message takes."""

AGAIN = """
cluster prefill=1 decode=1 router=1 pages=64 rows=4 chunk=32 metadata=4
submit r1 prompt=60 max_tokens=4
run until idle
submit r2 prompt=60 max_tokens=4
run until r2 state=sending on=prefill-0
kill prefill-0
restart prefill-0
submit r3 prompt=60 max_tokens=4
run until idle
expect r3 finished=length
"""
"""A prefill node starts again: its second process counts from one, as the first did."""


@cache
def story(text: str, skew: str = "") -> Story:
    outcome, run = play(text.format(skew=skew), "causes.scenario")
    assert outcome.faults == []
    assert run is not None
    return {trace.header.boot_id: _lines(trace) for trace in traces_of(run)}


def _lines(trace: TraceLines) -> list[Line]:
    lines: list[Line] = [trace.header]
    for _, batch in trace:
        for line in batch:
            assert isinstance(line, Line)
            lines.append(line)
    return lines


def skewed() -> Story:
    return story(APART, "skew decode-0 by=-50ms")


def traces(told: Story) -> list[TraceLines]:
    out = []
    for boot, (header, *lines) in told.items():
        assert isinstance(header, Header)
        out.append(TraceLines(boot, header, lines))
    return out


def faults(told: Story, complete: bool = True) -> list[str]:
    found: list[str] = []
    for node in replay_traces(traces(told), lambda fault: found.append(str(fault))):
        node.finish("", complete)
    return found


def links(lines: Sequence[Read]) -> Iterator[tuple[int, MoveLine | SubmitLine]]:
    """Lines that follow from another node, with their places."""
    for index, line in enumerate(lines):
        if isinstance(line, MoveLine | SubmitLine) and line.boot:
            yield index, line


def changed(told: Story, process: str, index: int, **fields: object) -> Story:
    lines = list(told[process])
    lines[index] = replace(lines[index], **fields)
    return {**told, process: lines}


def at(lines: Sequence[Line], boot: str, seq: int) -> Line:
    return next(x for x in lines if not isinstance(x, Header) and x.seq == seq)


PREFILL, DECODE = "prefill-0.1", "decode-0.1"

# --- what the nodes write -------------------------------------------------------------------------


def test_both_nodes_name_what_the_other_did() -> None:
    told = skewed()
    named = {
        (line.event, found.event)
        for boot, other in ((PREFILL, DECODE), (DECODE, PREFILL))
        for _, line in links(told[boot])
        if isinstance(line, MoveLine) and line.cause is not None
        for found in [at(told[other], other, line.cause[1])]
        if isinstance(found, MoveLine)
    }
    assert {
        ("met", "enqueue"),
        ("granted", "grant"),
        ("landed", "prefilled"),
        ("landed", "landed"),
    } <= named


def test_a_prompt_that_is_computed_again_was_asked_for() -> None:
    told = skewed()
    asked = [line for _, line in links(told[PREFILL]) if isinstance(line, SubmitLine)]
    assert {line.rid for line in asked} == {"r1@1", "r2@2"}
    for line in asked:
        assert line.cause is not None
        cause = at(told[DECODE], DECODE, line.cause[1])
        assert isinstance(cause, MoveLine)
        assert (cause.rid, cause.target) == (line.rid.partition("@")[0], "held")


# --- the join -------------------------------------------------------------------------------------


def test_clocks_that_differ_do_not_matter() -> None:
    told = skewed()
    early = 0
    for _, line in links(told[DECODE]):
        assert line.cause is not None
        early += line.time < at(told[PREFILL], PREFILL, line.cause[1]).time
    assert early > 3, "the clocks are not as far apart as this test needs"
    assert faults(told) == []
    seen: set[tuple[str, int]] = set()
    boots = list(told)
    for index, _, line in join(traces(told), pytest.fail):
        assert not isinstance(line, Header)
        if isinstance(line, MoveLine | SubmitLine) and line.boot:
            assert line.cause is not None
            assert (line.boot, line.cause[1]) in seen, f"{line} comes before its cause"
        seen.add((boots[index], line.seq))  # type: ignore[union-attr]


def test_any_order_of_the_traces_and_any_clocks_tell_the_same() -> None:
    told = skewed()
    early = {
        boot: [replace(line, time=line.time - 1000.0 * (boot == PREFILL)) for line in lines]
        for boot, lines in reversed(told.items())
    }
    assert faults(early) == []


def test_a_node_that_starts_again_is_another_process() -> None:
    told = story(AGAIN)
    assert set(told) == {PREFILL, "prefill-0.2", DECODE}
    named = {line.boot for _, line in links(told[DECODE])}
    assert named == {PREFILL, "prefill-0.2"}
    assert faults(told, complete=False) == []


def test_what_is_not_there_is_not_waited_for() -> None:
    told = skewed()
    assert faults({DECODE: told[DECODE]}) == []
    cut = {**told, PREFILL: told[PREFILL][:6]}
    assert faults(cut, complete=False) == []


def test_a_cause_that_is_not_in_a_complete_trace_is_a_fault() -> None:
    told = skewed()
    index, line = next(links(told[DECODE]))
    last = told[PREFILL][-1]
    assert isinstance(last, Footer)
    found = faults(changed(told, DECODE, index, cause=("prefill-0", 999)))
    who = f"{DECODE}:{index + 1}: {line.rid} ({line.life})"
    ends = f"its cause prefill-0:999 is not in that trace, which ends with seq {last.seq}"
    assert f"{who}: {ends}" in found


def test_lines_that_wait_for_each_other_are_a_fault() -> None:
    told = skewed()
    _, line = next(links(told[DECODE]))
    assert line.cause is not None
    boot, place = next(
        (PREFILL, i)
        for i, x in enumerate(told[PREFILL])
        if isinstance(x, MoveLine) and x.seq == line.cause[1]
    )
    ring = changed(told, boot, place, cause=("decode-0", line.seq), boot=DECODE)
    found = [fault for fault in faults(ring) if "follows from it" in fault]
    assert len(found) == 1
    assert re.search(r"(prefill|decode)-0:\d+ waits for (prefill|decode)-0:\d+ waits for", found[0])


# --- a cause that is changed ----------------------------------------------------------------------

OTHERS: dict[str, Callable[[MoveLine | SubmitLine], dict[str, object]]] = {
    "one later": lambda line: {"cause": (_node(line), _seq(line) + 1)},
    "one earlier": lambda line: {"cause": (_node(line), _seq(line) - 1)},
    "the first line": lambda line: {"cause": (_node(line), 1)},
    "no line": lambda line: {"cause": (_node(line), 0)},
    "a line to come": lambda line: {"cause": (_node(line), 9999)},
    "its own node": lambda line: {"cause": (line.node, line.seq - 1), "boot": ""},
    "no process": lambda line: {"boot": ""},
    "no line, and a process": lambda line: {"cause": None},
    "nothing": lambda line: {"cause": None, "boot": ""},
}


def _node(line: MoveLine | SubmitLine) -> str:
    return line.cause[0] if line.cause is not None else ""


def _seq(line: MoveLine | SubmitLine) -> int:
    return line.cause[1] if line.cause is not None else 0


def undetectable(what: str, line: MoveLine | SubmitLine, first: bool) -> str:
    """Why nothing contradicts a change of the cause of ``line``; ``first``: its peer has said
    nothing to it before."""
    if what == "nothing":
        if isinstance(line, SubmitLine):
            return "a submission may come from anywhere"
        if first or line.event not in (*SAID, "abort"):
            return "a peer that writes no trace names none"
        return ""
    said = isinstance(line, SubmitLine) or line.event in SAID
    if not said and what in ("one later", "one earlier", "the first line"):
        return "what else a peer says can follow from any line"
    return ""


@pytest.mark.parametrize("what", OTHERS)
def test_a_changed_cause_is_reported_where_it_can_be(what: str) -> None:
    told = skewed()
    reported, excused = 0, set()
    for boot in told:
        heard: set[tuple[str, int]] = set()
        for index, line in links(told[boot]):
            found = faults(changed(told, boot, index, **OTHERS[what](line)))
            here = (line.life, line.attempt if isinstance(line, MoveLine) else 0)
            why = undetectable(what, line, here not in heard)
            if isinstance(line, MoveLine) and line.event in SAID:
                heard.add(here)
            if not found:
                assert why, f"{what}: {line}"
                excused.add(why)
                continue
            reported += 1
            assert any(re.search(r": its cause", fault) for fault in found), found
    assert reported or what == "nothing"
    assert reported > 3 or excused


def test_what_is_said_to_excuse_is_real() -> None:
    """Each reason for not noticing has an example that nothing contradicts."""
    told, excused = skewed(), set[str]()
    for what, change in OTHERS.items():
        for boot in told:
            for index, line in links(told[boot]):
                if not faults(changed(told, boot, index, **change(line))):
                    excused.add(undetectable(what, line, first=True))
    assert excused == {
        "a submission may come from anywhere",
        "a peer that writes no trace names none",
        "what else a peer says can follow from any line",
    }


# --- clocks, and what is shown --------------------------------------------------------------------


def clocks_of(told: Story) -> Clocks:
    them = traces(told)
    clocks = Clocks([trace.header for trace in them])
    for index, _, line in join(them, pytest.fail):
        clocks.feed(index, line)
    return clocks


def test_clocks_are_moved_until_nothing_precedes_its_cause() -> None:
    told = skewed()
    clocks = clocks_of(told)
    shifts = dict(zip(told, clocks.shifts(), strict=True))
    assert shifts[PREFILL] == 0.0
    assert 0.049 < shifts[DECODE] < 0.05
    assert clocks.drift() == 0.0
    for boot, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
        for _, line in links(told[boot]):
            assert line.cause is not None
            cause = at(told[other], other, line.cause[1])
            assert line.time + shifts[boot] >= cause.time + shifts[other] - 1e-6


def test_clocks_that_fit_are_left_alone() -> None:
    clocks = clocks_of(story(APART))
    assert clocks.shifts() == [0.0, 0.0]
    assert clocks.drift() == 0.0


def test_clocks_that_drift_apart_are_said_to() -> None:
    """One that jumps ahead by itself fits no shift."""
    told = story(APART)
    first = next(i for i, line in enumerate(told[DECODE]) if i > 30 and isinstance(line, MoveLine))
    jump = [
        replace(line, time=line.time - 0.2 * (0 < i < first)) for i, line in enumerate(told[DECODE])
    ]
    lines = [replace(x, time=max(x.time, 0.0)) for x in jump]
    assert 0.0 < clocks_of({**told, DECODE: lines}).drift() < 0.2


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return [str(write(tmp_path / f"{boot}.jsonl", lines)) for boot, lines in skewed().items()]


def test_show_prints_an_effect_after_its_cause(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *files, "--rid", "r4", "--kind", "move"]) == FITS
    rows = capsys.readouterr().out.splitlines()
    events = [(row.split()[1], row.split()[4].strip("->")) for row in rows]
    handed_over = [
        ("prefill-0", "enqueue"),
        ("decode-0", "met"),
        ("decode-0", "grant"),
        ("prefill-0", "granted"),
        ("prefill-0", "prefilled"),
        ("decode-0", "landed"),
        ("prefill-0", "landed"),
    ]
    assert [each for each in events if each in handed_over] == handed_over


def test_check_and_stats_take_them_together(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--complete", *files]) == FITS
    assert main(["stats", *files]) == FITS
    told = skewed()
    index, _ = next(links(told[DECODE]))
    bad = changed(told, DECODE, index, cause=("prefill-0", 999))[DECODE]
    capsys.readouterr()
    assert main([files[0], str(write(tmp_path / "bad", bad))]) == FAULTS
    assert "is not in that trace, which ends with seq" in capsys.readouterr().out


def test_a_timeline_draws_no_hand_over_backwards(files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "pair.svg"
    assert main(["timeline", *files, "-o", str(path), "--rid", "r4"]) == FITS
    text = path.read_text()
    assert re.search(r"clocks moved so that nothing precedes its cause: decode-0 49\.\d+ ms", text)
    starts = {
        state: float(x)
        for x, state in re.findall(
            r'<rect x="([\d.]+)"[^>]*>\s*<title>(waiting|receiving|sending|decoding):', text
        )
    }
    assert starts["receiving"] <= starts["sending"] <= starts["decoding"]


def test_processes_of_one_node_have_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write(tmp_path / boot, lines)) for boot, lines in story(AGAIN).items()]
    assert main(["stats", "--json", *files]) == FITS
    out = capsys.readouterr().out
    assert '"prefill-0@prefill-0.1"' in out
    assert '"prefill-0@prefill-0.2"' in out
    assert '"decode-0"' in out
