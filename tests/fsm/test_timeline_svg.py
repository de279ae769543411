"""The picture of a timeline: everything that is said in it is inside it, and large enough."""

import re
import xml.etree.ElementTree as ET

from fsm.timeline import Timeline, View
from fsm.timeline_svg import WIDTH, draw
from fsm.trace import Header, MoveLine, SubmitLine

SVG = "{http://www.w3.org/2000/svg}"
LIFE = "cmpl-0507314382404f1bbd6a79c34c0d91838"
WIDER = {"m": 0.33, "…": 0.5} | dict.fromkeys("0123456789", 0.06)
"""By how much a letter is wider than half of its height."""
STATES = (
    ("enqueue", "arrived", "meeting", 1),
    ("met", "meeting", "waiting", 2),
    ("grant", "waiting", "receiving", 3),
    ("landed", "receiving", "decoding", 4),
    ("retract", "decoding", "retracting", 5),
    ("quiesce", "retracting", "retracted", 6),
    ("hold", "retracted", "held", 7),
    ("finish", "held", "done", 8),
)


def header(node: str) -> Header:
    return Header(1, node, "boot", (), {}, {"pages": 8}, 0.0, 16)


def lives(reason: str, tokens: int) -> Timeline:
    """A life on decode that sees nearly every phase, and one on prefill with another end."""
    timeline = Timeline([header("decode-0"), header("prefill-0")], View())
    timeline.feed(0, SubmitLine(0.0, "decode-0", 1, "d:1", LIFE, (), (), 10, 10))
    for event, source, target, time in STATES:
        answer = "stop" if event == "finish" else ""
        made = MoveLine(
            time, "decode-0", 1, "d:1", 0, LIFE, event, "peer", source, target, reason=answer
        )
        timeline.feed(0, made)
    timeline.feed(1, SubmitLine(0.0, "prefill-0", 1, "p:1", LIFE, (), (), 10, 10))
    moves = (("prefilled", "prefilling", "sending", ""), ("abort", "sending", "draining", reason))
    for time, (event, source, target, answer) in enumerate(moves, 5):
        timeline.feed(
            1,
            MoveLine(
                time,
                "prefill-0",
                1,
                "p:1",
                0,
                LIFE,
                event,
                "peer",
                source,
                target,
                tokens=tokens,
                reason=answer,
            ),
        )
    return timeline


def test_nothing_is_said_outside_of_the_picture() -> None:
    root = ET.fromstring(draw(lives("abort", 12), "decode-0.jsonl, prefill-0.jsonl"))
    height = float(root.attrib["height"])
    bold = 1.2
    for parent in root.iter():
        moved = re.findall(r"[\d.]+", parent.get("transform", "translate(0 0)"))
        for text in parent.findall(f"{SVG}text"):
            x, y = (float(text.attrib[name]) for name in ("x", "y"))
            x, y = x + float(moved[0]), y + float(moved[1])
            size = float(text.get("font-size", 12)) * (bold if "font-weight" in text.attrib else 1)
            said = "".join(part.text or "" for part in text if part.tag != f"{SVG}title")
            said += (text.text or "") + "".join(part.tail or "" for part in text)
            width = size * sum(0.5 + WIDER.get(letter, 0) for letter in said)
            shift = {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "start")]
            assert 0 <= x - shift * width <= WIDTH - width, said
            assert 0 < y < height, said


def test_letters_keep_ten_pixels_in_a_page_of_documentation() -> None:
    """GitHub shows a README 838 pixels wide, and makes a picture that is wider smaller."""
    root = ET.fromstring(draw(lives("abort", 12), "t"))
    assert float(root.attrib["font-size"]) * 838 / WIDTH >= 10


def test_one_token_is_not_plural() -> None:
    assert ">length, 1 token<" in draw(lives("length", 1), "t")
    assert ">length, 2 tokens<" in draw(lives("length", 2), "t")


def test_lives_on_several_nodes_are_not_called_requests() -> None:
    assert ">2 lives<" in draw(lives("stop", 3), "t")
