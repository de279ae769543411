"""Everything that may happen next to a decode life and one of its legs: see :mod:`fsm.explore_pd`.

Three sources: what decode's node and prefill's node do of their own accord, and what goes wrong.
An action is taken on a draft; the model then delivers what is due and looks at the outcome."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

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
from fsm.explore_pd_actions import (
    channel,
    decode_alone,
    decode_arrives,
    decode_cannot_back_up,
    decode_client,
    decode_commits,
    decode_copied,
    decode_copies,
    decode_hears,
    decode_intake,
    decode_lands_its_last,
    decode_launches,
    decode_receives,
    move_decode,
    prefill_admits,
    prefill_alone,
    prefill_arrives,
    prefill_client,
    prefill_commits,
    prefill_enters,
    prefill_hears,
    prefill_intake,
    prefill_launches,
    prefill_receives,
    to_decode,
    to_prefill,
    wire_completes,
    wire_fails,
    wire_starts,
)
from fsm.explore_pd_draft import Draft
from fsm.protocol import Role
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
    yield from _prefill_options(setting, world, leg)
    yield from _prefill_repairs(setting, core, leg, current)
    if leg.to_prefill:
        yield f"prefill: receives {leg.to_prefill[0][0]}", FREE, 0, False, prefill_receives
    if leg.to_decode:
        yield f"decode: receives {leg.to_decode[0][0]}", FREE, 0, False, decode_receives
        if leg.to_decode[0][0] == "done" and core.state == "receiving" and not core.emitted:
            label = "decode: receives done, with its last token"
            yield label, UNSURE, 0, False, decode_lands_its_last
    yield from _fault_options(setting, core, leg, current)


def _decode_options(setting: Setting, world: World, core: Core) -> Iterator[Option]:
    """Decode's node: arrival, policy, steps, copies, its client and its clock."""
    design, state = setting.design, core.state
    chart = design.decode
    if state == ABSENT:
        if setting.intake_steps:
            yield "decode: arrives", FREE, 0, False, decode_arrives
        else:
            needs = setting.needs("decode", chart.initial, "enqueue")
            yield "decode: arrives, enqueue", FREE, needs, False, partial(decode_intake, "enqueue")
            yield "decode: arrives, reject", UNSURE, 0, False, partial(decode_intake, "reject")
        return
    if core.launched:
        results: tuple[Message, ...] = ("token_committed", "last_token_committed", "step_failed")
        for result in results:
            cost = FAULT if result == "step_failed" else FREE
            yield f"decode: {result}", cost, 0, False, partial(decode_commits, result)
    if core.copying:
        yield "decode: the copy is made", FREE, 0, False, partial(decode_copied, False)
        yield "decode: the copy fails", FAULT, 0, False, partial(decode_copied, True)
    if state in OVER:
        return
    admits = design.admits(world.decode_pause)
    for event in ("enqueue", "reject", "grant"):
        if (state, event) in chart.table and (admits or event != "grant"):
            needs = setting.needs("decode", state, event)
            cost = UNSURE if event == "reject" else FREE
            yield f"decode: {event}", cost, needs, False, partial(move_decode, event)
    if state == "decoding":
        frozen = design.is_frozen("decode", world.decode_pause)
        if not frozen and core.launched < setting.depth:
            yield "decode: a step is launched", FREE, 0, False, decode_launches
        needs = setting.needs("decode", state, "retract")
        yield "decode: retract", UNSURE, needs, False, partial(decode_copies, "retract")
        yield "decode: retract, without host memory", UNSURE, 0, False, decode_cannot_back_up
    if state == "retracted" and admits:
        needs = setting.needs("decode", state, "readmit")
        yield "decode: readmit", FREE, needs, False, partial(decode_copies, "readmit")
    if state in HANDED_OVER or (core.emitted and chart.is_live(state)):
        yield "decode: stop_matched", UNSURE, 0, False, partial(to_decode, "stop_matched")
    if chart.is_live(state):
        yield "decode: client aborts", ABORT, 0, False, decode_client
        if _decode_fires(design, core, "expired"):
            yield "decode: deadline", DEADLINE, 0, False, partial(to_decode, "expired")


def _decode_repairs(setting: Setting, core: Core, leg: Leg) -> Iterator[Option]:
    """What only time brings about: heartbeats, and the deadline of a meeting that will not be."""
    design, quiet = setting.design, not (leg.to_decode or leg.to_prefill)
    if core.state in (ABSENT, *OVER):
        return
    if core.state == "meeting" and leg.state == DEAD and not leg.to_decode:
        yield "decode: deadline", FREE, 0, True, partial(to_decode, "expired")
    if design.relies_on_peer("decode", core.state, core.met) and not leg.to_decode:
        known = leg.state == ABSENT or "rooms" in design.prefill.holds.get(leg.state, ())
        if not known:
            label = "decode: prefill does not know the room"
            yield label, FREE, 0, True, decode_alone
    if quiet and leg.state != DEAD:
        for kind in design.standing("decode", core.state, core.met, False):
            label = f"heartbeat repeats {kind} to prefill"
            yield label, FREE, 0, True, partial(prefill_hears, kind)


def _prefill_options(setting: Setting, world: World, leg: Leg) -> Iterator[Option]:
    """Prefill's node: arrival, admission, steps, the wire, its client and its clock."""
    design, state = setting.design, leg.state
    chart = design.prefill
    if leg.wire in (BUSY, LAST):
        what = "a write completes" if leg.wire == BUSY else "the slot is written"
        yield f"prefill: {what}", FREE, 0, False, wire_completes
        yield "prefill: a write fails", FAULT, 0, False, wire_fails
    if state == ABSENT:
        if setting.intake_steps:
            yield "prefill: arrives", FREE, 0, False, prefill_arrives
        else:
            needs = setting.needs("prefill", chart.initial, "enqueue")
            yield (
                "prefill: arrives, enqueue",
                FREE,
                needs,
                False,
                partial(prefill_intake, "enqueue"),
            )
            yield "prefill: arrives, reject", UNSURE, 0, False, partial(prefill_intake, "reject")
        return
    if leg.launched:
        results: list[Message] = ["chunk_committed", "step_failed"]
        if leg.launched == 1:  # the last chunk is the last step
            results.append("token_committed")
        for result in results:
            cost = FAULT if result == "step_failed" else FREE
            yield f"prefill: {result}", cost, 0, False, partial(prefill_commits, result)
    if state in OVER:
        return
    if state == "arrived":
        needs = setting.needs("prefill", state, "enqueue")
        yield "prefill: enqueue", FREE, needs, False, partial(prefill_enters, "enqueue")
        yield "prefill: reject", UNSURE, 0, False, partial(prefill_enters, "reject")
    if (state, "admit") in chart.table and design.admits(world.prefill_pause):
        needs = setting.needs("prefill", state, "admit")
        yield "prefill: admit", FREE, needs, False, prefill_admits
    frozen = design.is_frozen("prefill", world.prefill_pause)
    if state == "prefilling" and not frozen and leg.launched < setting.depth:
        yield "prefill: a chunk is launched", FREE, 0, False, prefill_launches
    if leg.wire == IDLE and design.may_write(state):
        yield "prefill: a write starts", FREE, 0, False, wire_starts
    if chart.is_live(state):
        yield "prefill: client aborts", ABORT, 0, False, prefill_client
        if _prefill_fires(design, leg, "expired"):
            yield "prefill: deadline", DEADLINE, 0, False, partial(to_prefill, "expired")


def _prefill_repairs(setting: Setting, core: Core, leg: Leg, current: bool) -> Iterator[Option]:
    design, quiet = setting.design, not (leg.to_decode or leg.to_prefill)
    if leg.state in (ABSENT, *OVER):
        return
    unmet = leg.state == "meeting" and not leg.met and not leg.to_prefill
    if unmet and (core.state in OVER or not current):
        yield "prefill: deadline", FREE, 0, True, partial(to_prefill, "expired")
    if design.relies_on_peer("prefill", leg.state, leg.met) and not leg.to_prefill:
        known = current and "rooms" in design.decode.holds.get(core.state, ())
        if not known:
            label = "prefill: decode does not know the room"
            yield label, FREE, 0, True, prefill_alone
    if quiet and core.state not in (ABSENT, DEAD):
        for kind in design.standing("prefill", leg.state, leg.met, leg.wire == WRITTEN):
            label = f"heartbeat repeats {kind} to decode"
            yield label, FREE, 0, True, partial(decode_hears, kind)


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
            yield label, FAULT, 0, False, partial(channel, field, after)
    design = setting.design
    if current and leg.state != DEAD and _decode_fires(design, core, "peer_missed"):
        label = "decode: prefill's heartbeats are missed"
        yield label, FAULT, 0, False, partial(to_decode, "peer_missed")
    if leg.met and _prefill_fires(design, leg, "peer_missed"):
        label = "prefill: decode's heartbeats are missed"
        yield label, FAULT, 0, False, partial(to_prefill, "peer_missed")


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
