"""Control frames as bytes: what is optional costs nothing, and what is malformed is refused."""

import msgspec
import pytest

from transport.control import MAX_NAME, ControlFrame, Heartbeat, Origin, PeerQuiet

DECODER = msgspec.msgpack.Decoder(ControlFrame)
ENCODER = msgspec.msgpack.Encoder()
ORIGIN = Origin("prefill-0", "boot", 7)
FRAMES: tuple[ControlFrame, ...] = (
    PeerQuiet(room="r", sender="boot:1", receiver="other:1"),
    Heartbeat("prefill-0", "boot", ["r"]),
)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_frame_comes_back_with_and_without_its_origin(frame: ControlFrame) -> None:
    bare = ENCODER.encode(frame)
    assert b"origin" not in bare
    assert DECODER.decode(bare) == frame
    traced = msgspec.structs.replace(frame, origin=ORIGIN)
    raw = ENCODER.encode(traced)
    assert DECODER.decode(raw) == traced
    assert len(raw) - len(bare) < 40


@pytest.mark.parametrize(
    "origin",
    [
        ["prefill-0", "boot", 0],
        ["prefill-0", "boot", -1],
        ["prefill-0", "boot", 2**53 + 1],
        ["prefill-0", "boot", "7"],
        ["prefill-0", "boot"],
        ["n" * (MAX_NAME + 1), "boot", 7],
        ["prefill-0", "b" * (MAX_NAME + 1), 7],
        [None, "boot", 7],
        {"node": "prefill-0"},
        7,
    ],
    ids=str,
)
def test_a_malformed_origin_is_refused_with_its_frame(origin: object) -> None:
    raw = ENCODER.encode({**msgspec.to_builtins(FRAMES[0]), "origin": origin})
    with pytest.raises(msgspec.ValidationError, match=r"origin"):
        DECODER.decode(raw)
