"""Over a small trace in which everything happens, every single-line mutation is reported, with the
right message and at the right place; what cannot be noticed is listed, with the reason.

The list in ``docs/trace-format.md`` is the same."""

import re
from functools import cache
from itertools import chain
from typing import Final

import pytest

from fsm.trace import Footer, LeaseLine, Line, MoveLine
from tests.support.mutations import Mutation, fields, structural
from tests.support.stories import eventful, judge

# --- what cannot be noticed -----------------------------------------------------------------------


def undetectable(mutation: Mutation) -> str:
    """Why nothing in the trace contradicts ``mutation``; empty where something has to."""
    line, after = mutation.before, mutation.after
    match mutation.what, line:
        case "by", MoveLine(event="missed"):
            assert isinstance(after, MoveLine)
            if after.by in {"store", "clock"}:
                return "the chart lets either cause this edge, with the same effect"
        case "by", MoveLine(event="finish", reason="stop"):
            return "a stop is found by the runner or by the server"
        case "tokens", MoveLine(event="retract"):
            return "how far it had come between two tokens that both fit into its pages"
        case "swapped", MoveLine(event="prefilled") | LeaseLine(what="grow"):
            if mutation.renumbered:
                return "with a step ahead, pages grow before or after the prompt is committed"
    return ""


# --- what has to be said --------------------------------------------------------------------------

SEQ: Final = r"^seq \d+ (where \d+ was due|again)"

SAID: Final[dict[str, str]] = {
    "removed": SEQ + "|truncated: it has no footer",
    "repeated": SEQ,
    "swapped": SEQ,
    "event": r"no edge '\w+'|\w+ leads from|is caused by|ends with|copy|\d tokens; a prefill",
    "source": r"^moves from \w+; it is in \w+",
    "target": r"leads from \w+ to \w+, not to|no edge",
    "taken": r"^(takes|begins with) ",
    "dropped": r"^drops ",
    "life": r"life|no answer",
    "owner": r"has none|evicts pages of|holds none|not in quarantine|takes pages and has",
    "attempt": r"^(a stale attempt|an attempt to come): ",
    "rid": r"rid ",
    "by": r"is caused by|a server cannot know|up to a stop string",
    "cause": r"^its cause",
    "boot": r"^its cause",
    "reason": r"ends (with|by)|answers .* its move says|names no reason|announces the answer",
    "status": r"has status|answers .* its move says|announces the answer",
    "message": r"answers .* its move says",
    "tokens": r"tokens",
    "units": r"units|pages|of \d+ prefetches|prefetches; ",
    "flow": r"moves free by|pages|only cached",
    "pool": r"add up to|says no balance",
    "what": r"pages|prefetches",
    "resource": r"not in quarantine|there is no pool|holds none|are in quarantine",
    "kit": r"begins with|unknown resources|takes|holds|leaves",
    "node": r"^a line of node 'elsewhere'",
    "time": r"^time goes back",
    "seq": SEQ,
}
"""By what was changed: what one of the faults has to say."""

MEANING: Final = (
    r"moves from|no answer|second answer|an answer while|a life that never began|stale life|"
    r"life \d+ where|add up|has none|no release gave back|not cached|double release|quarantine|"
    r"truncated|follows the footer|takes pages and has|leak|caches|its pages hold|and stays|"
    r"no copy has ended|owners hold|rows: |holds none|tokens behind"
)
"""What a fault says where only the meaning of a renumbered trace can tell."""


@cache
def story() -> list[Line]:
    return eventful()


@cache
def mutations() -> dict[str, list[Mutation]]:
    out: dict[str, list[Mutation]] = {}
    for mutation in chain(structural(story()), fields(story())):
        out.setdefault(mutation.what, []).append(mutation)
    return out


def test_every_kind_of_line_and_field_is_mutated() -> None:
    assert set(mutations()) == set(SAID)
    assert sum(map(len, mutations().values())) > 5000


@pytest.mark.parametrize("what", SAID)
def test_every_mutation_is_reported(what: str) -> None:
    missed, wrong = [], []
    for mutation in mutations()[what]:
        faults = judge(mutation.lines)
        expected = MEANING if mutation.renumbered else SAID[what]
        if not faults:
            if not undetectable(mutation):
                missed.append(str(mutation))
        elif not any(re.search(expected, fault.text) for fault in faults):
            wrong.append(f"{mutation}\n    {faults[0]}")
    assert not missed, "\n".join([f"{len(missed)} are not noticed:", *missed[:3]])
    assert not wrong, "\n".join([f"{len(wrong)} say something else:", *wrong[:3]])


@pytest.mark.parametrize("what", sorted({"event", "source", "target", "taken", "dropped", "rid"}))
def test_the_fault_names_the_line_itself(what: str) -> None:
    """Where a line contradicts itself or its request, the first fault is about that line."""
    for mutation in mutations()[what]:
        line = judge(mutation.lines)[0].line
        late = isinstance(mutation.before, Footer) or (what == "rid" and mutation.index)
        assert line == mutation.index + 1 or late, str(mutation)


def test_only_what_is_listed_cannot_be_noticed() -> None:
    """The list is no excuse: each entry has an example that nothing contradicts."""
    listed = [m for m in chain(*mutations().values()) if undetectable(m)]
    unnoticed = {undetectable(m) for m in listed if not judge(m.lines)}
    assert unnoticed == {undetectable(m) for m in listed}
    assert len(unnoticed) == 4
