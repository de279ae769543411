"""A joint state of a prefill/decode pair as one line."""

from collections.abc import Sequence

from fsm.explore_pd import Leg, Life, World

_WIRE = ("", "wire busy", "wire writes the slot", "all written")


def describe(world: World, requests: Sequence[Life]) -> str:
    parts = [_request(request) for request in requests]
    shared = []
    if world.prefill_pause is not None:
        shared.append(f"prefill paused ({world.prefill_pause})")
    if world.decode_pause is not None:
        shared.append(f"decode paused ({world.decode_pause})")
    if world.prefill_weights or world.decode_weights:
        shared.append(f"weights W{world.prefill_weights} W{world.decode_weights}")
    if world.slot_dirty:
        shared.append("slot names a room")
    return " ‖ ".join(parts) + (f"   [{', '.join(shared)}]" if shared else "")


def _request(life: Life) -> str:
    legs = " + ".join([*(_leg(leg) + " (earlier)" for leg in life.earlier), _leg(life.leg)])
    notes, core = [], life.core
    if core.launched:
        notes.append("step launched" if core.launched == 1 else f"{core.launched} steps launched")
    if core.copying:
        notes.append("copying")
    return f"{legs} | {core.state}" + (f" ({', '.join(notes)})" if notes else "")


def _leg(leg: Leg) -> str:
    notes = []
    if leg.launched:
        notes.append("chunk launched" if leg.launched == 1 else f"{leg.launched} chunks launched")
    if leg.wire:
        notes.append(_WIRE[leg.wire])
    if leg.note is not None:
        notes.append(f"has had {leg.note[0]}" if leg.state != "done" else "refused")
    text = leg.state + (f" ({', '.join(notes)})" if notes else "")
    if leg.to_decode:
        text += " →" + ",".join(kind for kind, _ in leg.to_decode)
    if leg.to_prefill:
        text += " ←" + ",".join(kind for kind, _ in leg.to_prefill)
    return text
