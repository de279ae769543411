"""What must hold after every step of a decode life and one of its legs."""

from fsm.chart import Chart
from fsm.explore_pd import ABSENT, BUSY, DEAD, LAST, Core, Design, Leg, World


def broken(design: Design, world: World, core: Core, leg: Leg, current: bool) -> str:
    """The first property that does not hold; empty if all do."""
    return _leg(design, core, leg, current) or _core(design, world, core)


def _core(design: Design, world: World, core: Core) -> str:
    if core.state in (ABSENT, DEAD):
        return ""
    if world.decode_pause in ("abort", "retract") and core.state in ("decoding", "retracted"):
        return f"KV is kept in {core.state} by a pause of decode that drops it"
    holds = design.decode.holds[core.state]
    if core.launched and not {"pages", "rows"} <= holds:
        return f"a launched step touches pages that decode released in {core.state}"
    if core.copying and not {"pages", "host_pages"} <= holds:
        return f"a copy touches pages or host pages that decode released in {core.state}"
    return _answers("decode", design.decode, core.state, core.answers)


def _leg(design: Design, core: Core, leg: Leg, current: bool) -> str:
    if leg.wire in (BUSY, LAST):
        if not {"pages", "senders"} <= design.prefill.holds.get(leg.state, frozenset()):
            return f"the wire reads pages that prefill released in {leg.state}"
        theirs = design.decode.holds.get(core.state, frozenset())
        if core.state != DEAD and not (current and {"pages", "receivers"} <= theirs):
            return f"the wire writes into pages that decode released in {core.state}"
    if leg.state in (ABSENT, DEAD):
        return ""
    if leg.launched and not {"pages", "rows"} <= design.prefill.holds[leg.state]:
        return f"a launched step touches pages that prefill released in {leg.state}"
    return _answers("prefill", design.prefill, leg.state, leg.answers)


def _answers(role: str, chart: Chart, state: str, answers: int) -> str:
    if answers > 1:
        return f"{role} answers its client twice"
    owes = "frontend_records" in chart.holds[state]
    if owes and answers:
        return f"{role} still owes an answer in {state} that it has given"
    if not owes and not answers:
        return f"{role} has not answered its client in {state}"
    return ""
