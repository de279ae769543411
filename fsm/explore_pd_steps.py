"""Everything that may happen next to a decode life and one of its legs: see :mod:`fsm.explore_pd`.

Three sources: what decode's node and prefill's node do of their own accord, and what goes wrong.
An action is taken on a draft; the model then delivers what is due and looks at the outcome."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast

from fsm.explore_base import ABORT, DEADLINE, FAULT, FREE, UNSURE, Cost
from fsm.explore_pd import (
    ABSENT,
    BUSY,
    DEAD,
    GONE,
    HANDED_OVER,
    IDLE,
    LAST,
    OVER,
    WRITTEN,
    Core,
    Design,
    Frame,
    Leg,
    World,
)
from fsm.explore_pd_draft import Draft
from fsm.protocol import FrameKind, Role
from fsm.rules import Facts, Message

Action: TypeAlias = Callable[[Draft], None]
Option: TypeAlias = tuple[str, Cost, int, bool, Action]
"""(label, cost, needs, only a heartbeat brings it about, action)"""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is explored, and how finely."""

    design: Design
    depth: int
    intake_steps: bool
    needs: Callable[[Role, str, str], int]


def options(
    setting: Setting, world: World, core: Core, leg: Leg, current: bool
) -> Iterator[Option]:
    if current:
        yield from _decode_options(setting, world, core)
        yield from _decode_repairs(setting, core, leg)
    yield from _prefill_options(setting, leg)
    yield from _prefill_repairs(setting, core, leg, current)
    if leg.to_prefill:
        yield f"prefill: receives {leg.to_prefill[0][0]}", FREE, 0, False, _prefill_receives
    if leg.to_decode:
        yield f"decode: receives {leg.to_decode[0][0]}", FREE, 0, False, _decode_receives
    yield from _fault_options(setting, core, leg, current)


def _decode_options(setting: Setting, world: World, core: Core) -> Iterator[Option]:
    """Decode's node: arrival, policy, steps, copies, its client and its clock."""
    design, state = setting.design, core.state
    chart = design.decode
    if state == ABSENT:
        if setting.intake_steps:
            yield "decode: arrives", FREE, 0, False, _decode_arrives
        else:
            needs = setting.needs("decode", chart.initial, "enqueue")
            yield "decode: arrives, enqueue", FREE, needs, False, partial(_decode_intake, "enqueue")
            yield "decode: arrives, reject", UNSURE, 0, False, partial(_decode_intake, "reject")
        return
    if core.launched:
        results: tuple[Message, ...] = ("token_committed", "last_token_committed", "step_failed")
        for result in results:
            cost = FAULT if result == "step_failed" else FREE
            yield f"decode: {result}", cost, 0, False, partial(_decode_commits, result)
    if core.copying:
        yield "decode: the copy is made", FREE, 0, False, partial(_decode_copied, False)
        yield "decode: the copy fails", FAULT, 0, False, partial(_decode_copied, True)
    if state in OVER:
        return
    for event in ("enqueue", "reject", "grant"):
        if (state, event) in chart.table:
            needs = setting.needs("decode", state, event)
            cost = UNSURE if event == "reject" else FREE
            yield f"decode: {event}", cost, needs, False, partial(_move_decode, event)
    if state == "decoding":
        if not world.paused and core.launched < setting.depth:
            yield "decode: a step is launched", FREE, 0, False, _decode_launches
        needs = setting.needs("decode", state, "retract")
        yield "decode: retract", UNSURE, needs, False, partial(_decode_copies, "retract")
    if state == "retracted" and not world.paused:
        needs = setting.needs("decode", state, "readmit")
        yield "decode: readmit", FREE, needs, False, partial(_decode_copies, "readmit")
    if state in HANDED_OVER or (core.emitted and chart.is_live(state)):
        yield "decode: stop_matched", UNSURE, 0, False, partial(_to_decode, "stop_matched")
    if chart.is_live(state):
        yield "decode: client aborts", ABORT, 0, False, _decode_client
        if _decode_fires(design, core, "expired"):
            yield "decode: deadline", DEADLINE, 0, False, partial(_to_decode, "expired")


def _decode_repairs(setting: Setting, core: Core, leg: Leg) -> Iterator[Option]:
    """What only time brings about: heartbeats, and the deadline of a meeting that will not be."""
    design, quiet = setting.design, not (leg.to_decode or leg.to_prefill)
    if core.state in (ABSENT, *OVER):
        return
    if core.state == "meeting" and leg.state == DEAD and not leg.to_decode:
        yield "decode: deadline", FREE, 0, True, partial(_to_decode, "expired")
    if design.relies_on_peer("decode", core.state, core.met) and not leg.to_decode:
        known = leg.state == ABSENT or "rooms" in design.prefill.holds.get(leg.state, ())
        if not known:
            label = "decode: prefill does not know the room"
            yield label, FREE, 0, True, _decode_alone
    if quiet and leg.state != DEAD:
        for kind in design.standing("decode", core.state, core.met, False):
            label = f"heartbeat repeats {kind} to prefill"
            yield label, FREE, 0, True, partial(_prefill_hears, kind)


def _prefill_options(setting: Setting, leg: Leg) -> Iterator[Option]:
    """Prefill's node: arrival, admission, steps, the wire, its client and its clock."""
    design, state = setting.design, leg.state
    chart = design.prefill
    if leg.wire in (BUSY, LAST):
        what = "a write completes" if leg.wire == BUSY else "the slot is written"
        yield f"prefill: {what}", FREE, 0, False, _wire_completes
        yield "prefill: a write fails", FAULT, 0, False, _wire_fails
    if state == ABSENT:
        if setting.intake_steps:
            yield "prefill: arrives", FREE, 0, False, _prefill_arrives
        else:
            needs = setting.needs("prefill", chart.initial, "enqueue")
            yield (
                "prefill: arrives, enqueue",
                FREE,
                needs,
                False,
                partial(_prefill_intake, "enqueue"),
            )
            yield "prefill: arrives, reject", UNSURE, 0, False, partial(_prefill_intake, "reject")
        return
    if leg.launched:
        results: list[Message] = ["chunk_committed", "step_failed"]
        if leg.launched == 1:  # the last chunk is the last step
            results.append("token_committed")
        for result in results:
            cost = FAULT if result == "step_failed" else FREE
            yield f"prefill: {result}", cost, 0, False, partial(_prefill_commits, result)
    if state in OVER:
        return
    if state == "arrived":
        needs = setting.needs("prefill", state, "enqueue")
        yield "prefill: enqueue", FREE, needs, False, partial(_prefill_enters, "enqueue")
        yield "prefill: reject", UNSURE, 0, False, partial(_prefill_enters, "reject")
    if (state, "admit") in chart.table:
        needs = setting.needs("prefill", state, "admit")
        yield "prefill: admit", FREE, needs, False, _prefill_admits
    if state == "prefilling" and leg.launched < setting.depth:
        yield "prefill: a chunk is launched", FREE, 0, False, _prefill_launches
    if leg.wire == IDLE and design.may_write(state):
        yield "prefill: a write starts", FREE, 0, False, _wire_starts
    if chart.is_live(state):
        yield "prefill: client aborts", ABORT, 0, False, _prefill_client
        if _prefill_fires(design, leg, "expired"):
            yield "prefill: deadline", DEADLINE, 0, False, partial(_to_prefill, "expired")


def _prefill_repairs(setting: Setting, core: Core, leg: Leg, current: bool) -> Iterator[Option]:
    design, quiet = setting.design, not (leg.to_decode or leg.to_prefill)
    if leg.state in (ABSENT, *OVER):
        return
    unmet = leg.state == "meeting" and not leg.met and not leg.to_prefill
    if unmet and (core.state in OVER or not current):
        yield "prefill: deadline", FREE, 0, True, partial(_to_prefill, "expired")
    if design.relies_on_peer("prefill", leg.state, leg.met) and not leg.to_prefill:
        known = current and "rooms" in design.decode.holds.get(core.state, ())
        if not known:
            label = "prefill: decode does not know the room"
            yield label, FREE, 0, True, _prefill_alone
    if quiet and core.state not in (ABSENT, DEAD):
        for kind in design.standing("prefill", leg.state, leg.met, leg.wire == WRITTEN):
            label = f"heartbeat repeats {kind} to decode"
            yield label, FREE, 0, True, partial(_decode_hears, kind)


def _fault_options(setting: Setting, core: Core, leg: Leg, current: bool) -> Iterator[Option]:
    """What goes wrong between the nodes. Broken wires, steps and copies are with their nodes, and
    processes that die are events of a node."""
    for field, frames in (("to_decode", leg.to_decode), ("to_prefill", leg.to_prefill)):
        if not frames or frames[0] == GONE:
            continue
        ways: dict[str, tuple[Frame, ...]] = {"lost": frames[1:]}
        ways["repeated later"] = (*frames, frames[0])
        if len(frames) > 1:
            ways["late"] = (*frames[1:], frames[0])
        for way, after in ways.items():
            label = f"{frames[0][0]} {field.replace('_', ' ')} is {way}"
            yield label, FAULT, 0, False, partial(_channel, field, after)
    design = setting.design
    if current and leg.state != DEAD and _decode_fires(design, core, "peer_missed"):
        label = "decode: prefill's heartbeats are missed"
        yield label, FAULT, 0, False, partial(_to_decode, "peer_missed")
    if leg.met and _prefill_fires(design, leg, "peer_missed"):
        label = "prefill: decode's heartbeats are missed"
        yield label, FAULT, 0, False, partial(_to_prefill, "peer_missed")


def _decode_fires(design: Design, core: Core, message: Message) -> bool:
    if core.state in (ABSENT, DEAD):
        return False
    facts = Facts(launched=core.launched > 0 or core.copying)
    return design.decode_table[core.state, message, facts].effect == "fire"


def _prefill_fires(design: Design, leg: Leg, message: Message) -> bool:
    if leg.state in (ABSENT, DEAD):
        return False
    facts = Facts(launched=leg.launched > 0)
    return design.prefill_table[leg.state, message, facts].effect == "fire"


# --- actions on decode ----------------------------------------------------------------------------


def _decode_arrives(draft: Draft) -> None:
    draft.place = draft.design.decode.initial


def _decode_intake(event: str, draft: Draft) -> None:
    _decode_arrives(draft)
    draft.move_decode(event)


def _move_decode(event: str, draft: Draft) -> None:
    draft.move_decode(event)


def _decode_launches(draft: Draft) -> None:
    draft.launched += 1
    draft.computes()


def _decode_copies(event: str, draft: Draft) -> None:
    """Policy moves it, and a copy to or from the host is launched with the move."""
    draft.move_decode(event)
    draft.copying = True


def _decode_commits(result: Message, draft: Draft) -> None:
    draft.launched -= 1
    decision = draft.decode(result)
    if result != "step_failed" and decision.effect in ("keep", "fire"):
        draft.emitted = True


def _decode_copied(failed: bool, draft: Draft) -> None:
    draft.copying = False
    if failed:
        draft.decode("step_failed")


def _to_decode(message: Message, draft: Draft) -> None:
    draft.decode(message)


def _decode_alone(draft: Draft) -> None:
    """The peer is gone: a life that relies on it has ended after this turn."""
    relied = draft.design.relies_on_peer("decode", draft.place, draft.place != "meeting")
    draft.decode("peer_gone")
    if relied:
        draft.must_be_over(draft.design.decode, draft.place)


def _decode_client(draft: Draft) -> None:
    draft.decode("abort")
    draft.must_be_over(draft.design.decode, draft.place)


def _decode_receives(draft: Draft) -> None:
    (kind, weights), *rest = draft.leg.to_decode
    draft.leg = draft.leg._replace(to_decode=tuple(rest))
    if kind != GONE[0]:
        draft.at_decode(cast("FrameKind", kind), weights)
    elif draft.current:
        _decode_alone(draft)


def _decode_hears(kind: FrameKind, draft: Draft) -> None:
    """A repeated frame of prefill arrives. (In the meantime nothing happened: if it had, it would
    be a late duplicate, which is a fault.)"""
    draft.tell_decode((kind,))
    _decode_receives(draft)


# --- actions on prefill ---------------------------------------------------------------------------


def _prefill_arrives(draft: Draft) -> None:
    draft.leg = draft.leg._replace(state=draft.design.prefill.initial)


def _prefill_intake(event: str, draft: Draft) -> None:
    _prefill_arrives(draft)
    _prefill_enters(event, draft)


def _prefill_enters(event: str, draft: Draft) -> None:
    """Accepted or refused; whatever was said to the room before counts now."""
    early = draft.leg.note
    draft.leg = draft.leg._replace(note=None)
    draft.move_prefill(event)
    if event == "reject":
        _answer_early(early, "reject", draft)
    elif early is not None:
        draft.at_prefill(cast("FrameKind", early[0]), early[1])


def _answer_early(early: Frame | None, how: FrameKind, draft: Draft) -> None:
    kind = cast("FrameKind | None", early[0] if early else None)
    draft.tell_decode(draft.design.on_refused(kind, how))


def _prefill_admits(draft: Draft) -> None:
    draft.move_prefill("admit")
    draft.leg = draft.leg._replace(weights=draft.prefill_weights)


def _prefill_launches(draft: Draft) -> None:
    draft.leg = draft.leg._replace(launched=draft.leg.launched + 1)
    draft.prefills()


def _prefill_commits(result: Message, draft: Draft) -> None:
    draft.leg = draft.leg._replace(launched=draft.leg.launched - 1)
    draft.prefill(result)


def _to_prefill(message: Message, draft: Draft) -> None:
    draft.prefill(message)


def _prefill_alone(draft: Draft) -> None:
    relied = draft.design.relies_on_peer("prefill", draft.leg.state, draft.leg.met)
    draft.prefill("peer_gone")
    if relied:
        draft.must_be_over(draft.design.prefill, draft.leg.state)


def _prefill_client(draft: Draft) -> None:
    early = draft.leg.note if draft.leg.state == "arrived" else None
    draft.prefill("abort")
    _answer_early(early, "abort", draft)
    draft.must_be_over(draft.design.prefill, draft.leg.state)


def _prefill_receives(draft: Draft) -> None:
    (kind, weights), *rest = draft.leg.to_prefill
    draft.leg = draft.leg._replace(to_prefill=tuple(rest))
    if draft.leg.state == DEAD:
        return
    if kind == GONE[0]:
        _prefill_alone(draft)
    else:
        draft.at_prefill(cast("FrameKind", kind), weights)


def _prefill_hears(kind: FrameKind, draft: Draft) -> None:
    draft.tell_prefill((kind,))
    _prefill_receives(draft)


# --- actions on wire and channel ------------------------------------------------------------------


def _wire_starts(draft: Draft) -> None:
    wire = LAST if draft.leg.state == "sending" else BUSY
    draft.leg = draft.leg._replace(wire=wire)


def _wire_completes(draft: Draft) -> None:
    leg = draft.leg
    if leg.wire == BUSY:
        draft.leg = leg._replace(wire=IDLE)
        return
    draft.leg = leg._replace(wire=WRITTEN)
    draft.slot_written()
    draft.tell_decode(draft.design.on_written(leg.state))


def _wire_fails(draft: Draft) -> None:
    if draft.leg.wire == LAST:
        draft.slot_written()  # it may have been
    draft.leg = draft.leg._replace(wire=IDLE)
    draft.prefill("wire_failed")


def _channel(field: str, frames: tuple[Frame, ...], draft: Draft) -> None:
    draft.leg = draft.leg._replace(**{field: frames})  # type: ignore[arg-type]
