"""Rooms without a life: what is kept for a request that may still come, and what is said of ends.

Method: frames as decode sends them, to a prefill's door; which of them are kept at all is asked in
``tests/fsm/test_protocol.py``."""

from engine.doorkeeper import UNKNOWN_ROOM, Doorkeeper
from transport.control import PeerAbort, PeerFrame, PeerGrant, PeerHello

HELLO = PeerHello(
    room="room",
    sender="new:1",
    node="decode-0",
    role="decode",
    terms=("", 16, "", "", ""),
    max_prompt_tokens=100,
)
LATE = PeerAbort(room="room", sender="old:1", receiver="prefill:1")


def reasons(replies: list[PeerFrame]) -> list[str]:
    return [reply.message for reply in replies if isinstance(reply, PeerAbort)]


def test_a_frame_for_a_life_that_is_over_does_not_displace_a_hello_that_waits() -> None:
    door = Doorkeeper("prefill")
    door.knock("decode-0", HELLO)
    door.knock("decode-0", LATE)
    early = door.arrived("room")
    assert early is not None
    assert (early.node, early.kind, early.frame) == ("decode-0", "hello", HELLO)


def test_a_room_that_is_used_again_has_not_ended_as_it_did_before() -> None:
    door = Doorkeeper("prefill")
    door.ended("room", "abort", "its client gave up", None, None)
    assert door.has_ended("room")
    grant = PeerGrant(room="room", sender="old:1", receiver="prefill:1", pages=[1], slot=0)
    assert reasons(door.knock("decode-0", grant)) == ["its client gave up"]
    door.arrived("room")
    assert not door.has_ended("room")
    assert reasons(door.knock("decode-0", grant)) == [UNKNOWN_ROOM]


def test_what_a_process_had_said_goes_with_it_and_its_successor_is_still_heard() -> None:
    door = Doorkeeper("prefill")
    door.knock("decode-0", HELLO)
    door.forget("decode-0", "new")
    door.forget("decode-1", "")
    assert door.counts()["early_frames"] == 1
    door.forget("decode-0", "newer")
    assert door.arrived("room") is None
