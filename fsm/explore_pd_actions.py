"""What the options of :mod:`fsm.explore_pd_steps` do to a decode life and one of its legs."""

from typing import cast

from fsm.explore_pd import (
    BUSY,
    DEAD,
    GONE,
    IDLE,
    LAST,
    WRITTEN,
    Frame,
)
from fsm.explore_pd_draft import Draft
from fsm.protocol import FrameKind
from fsm.rules import Message

# --- actions on decode ----------------------------------------------------------------------------


def decode_arrives(draft: Draft) -> None:
    draft.place = draft.design.decode.initial


def decode_intake(event: str, draft: Draft) -> None:
    decode_arrives(draft)
    draft.move_decode(event)


def move_decode(event: str, draft: Draft) -> None:
    draft.move_decode(event)


def decode_launches(draft: Draft) -> None:
    draft.launched += 1
    draft.computes()


def decode_copies(event: str, draft: Draft) -> None:
    """Policy moves it, and a copy to or from the host is launched with the move."""
    draft.move_decode(event)
    draft.copying = True


def decode_commits(result: Message, draft: Draft) -> None:
    draft.launched -= 1
    decision = draft.decode(result)
    if result != "step_failed" and decision.effect in ("keep", "fire"):
        draft.emitted = True


def decode_copied(failed: bool, draft: Draft) -> None:
    draft.copying = False
    if failed:
        draft.decode("step_failed")


def to_decode(message: Message, draft: Draft) -> None:
    draft.decode(message)


def decode_alone(draft: Draft) -> None:
    """The peer is gone: a life that relies on it has ended after this turn. One that had met
    nobody yet knocks once more, because there may be a successor."""
    if draft.place == "meeting" and not draft.knocked:
        draft.knocked = True
        draft.tell_prefill(draft.design.standing("decode", draft.place, False, False))
        return
    relied = draft.design.relies_on_peer("decode", draft.place, draft.place != "meeting")
    draft.decode("peer_gone")
    if relied:
        draft.must_be_over(draft.design.decode, draft.place)


def decode_client(draft: Draft) -> None:
    draft.decode("abort")
    draft.must_be_over(draft.design.decode, draft.place)


def decode_receives(draft: Draft) -> None:
    (kind, weights), *rest = draft.leg.to_decode
    draft.leg = draft.leg._replace(to_decode=tuple(rest))
    if kind != GONE[0]:
        draft.at_decode(cast("FrameKind", kind), weights)
    elif draft.current:
        decode_alone(draft)


def decode_lands_its_last(draft: Draft) -> None:
    """The token that comes with the KV ends the request: no step is needed."""
    decode_receives(draft)
    if draft.place == "decoding":
        draft.decode("last_token_committed")


def decode_cannot_back_up(draft: Draft) -> None:
    """Host memory is full: the victim ends with an error."""
    draft.move_decode("fail")


def decode_hears(kind: FrameKind, draft: Draft) -> None:
    """A repeated frame of prefill arrives. (In the meantime nothing happened: if it had, it would
    be a late duplicate, which is a fault.)"""
    draft.tell_decode((kind,))
    decode_receives(draft)


# --- actions on prefill ---------------------------------------------------------------------------


def prefill_arrives(draft: Draft) -> None:
    draft.leg = draft.leg._replace(state=draft.design.prefill.initial)


def prefill_intake(event: str, draft: Draft) -> None:
    prefill_arrives(draft)
    prefill_enters(event, draft)


def prefill_enters(event: str, draft: Draft) -> None:
    """Accepted or refused; whatever was said to the room before counts now."""
    early = draft.leg.note
    draft.leg = draft.leg._replace(note=None)
    draft.move_prefill(event)
    if event == "reject":
        answer_early(early, "reject", draft)
    elif early is not None:
        draft.at_prefill(cast("FrameKind", early[0]), early[1])


def answer_early(early: Frame | None, how: FrameKind, draft: Draft) -> None:
    kind = cast("FrameKind | None", early[0] if early else None)
    draft.tell_decode(draft.design.on_refused(kind, how))


def prefill_admits(draft: Draft) -> None:
    draft.move_prefill("admit")
    draft.leg = draft.leg._replace(weights=draft.prefill_weights)


def prefill_launches(draft: Draft) -> None:
    draft.leg = draft.leg._replace(launched=draft.leg.launched + 1)
    draft.prefills()


def prefill_commits(result: Message, draft: Draft) -> None:
    draft.leg = draft.leg._replace(launched=draft.leg.launched - 1)
    draft.prefill(result)


def to_prefill(message: Message, draft: Draft) -> None:
    draft.prefill(message)


def prefill_alone(draft: Draft) -> None:
    relied = draft.design.relies_on_peer("prefill", draft.leg.state, draft.leg.met)
    draft.prefill("peer_gone")
    if relied:
        draft.must_be_over(draft.design.prefill, draft.leg.state)


def prefill_client(draft: Draft) -> None:
    early = draft.leg.note if draft.leg.state == "arrived" else None
    draft.prefill("abort")
    answer_early(early, "abort", draft)
    draft.must_be_over(draft.design.prefill, draft.leg.state)


def prefill_receives(draft: Draft) -> None:
    (kind, weights), *rest = draft.leg.to_prefill
    draft.leg = draft.leg._replace(to_prefill=tuple(rest))
    if draft.leg.state == DEAD:
        return
    if kind == GONE[0]:
        prefill_alone(draft)
    else:
        draft.at_prefill(cast("FrameKind", kind), weights)


def prefill_hears(kind: FrameKind, draft: Draft) -> None:
    draft.tell_prefill((kind,))
    prefill_receives(draft)


# --- actions on wire and channel ------------------------------------------------------------------


def wire_starts(draft: Draft) -> None:
    wire = LAST if draft.leg.state == "sending" else BUSY
    draft.leg = draft.leg._replace(wire=wire)


def wire_completes(draft: Draft) -> None:
    leg = draft.leg
    if leg.wire == BUSY:
        draft.leg = leg._replace(wire=IDLE)
        return
    draft.leg = leg._replace(wire=WRITTEN)
    draft.slot_written()
    draft.tell_decode(draft.design.on_written(leg.state))


def wire_fails(draft: Draft) -> None:
    if draft.leg.wire == LAST:
        draft.slot_written()  # it may have been
    draft.leg = draft.leg._replace(wire=IDLE)
    draft.prefill("wire_failed")


def channel(field: str, frames: tuple[Frame, ...], draft: Draft) -> None:
    draft.leg = draft.leg._replace(**{field: frames})  # type: ignore[arg-type]
