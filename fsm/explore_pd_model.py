"""The model of a prefill/decode pair as :mod:`fsm.explore` wants it: steps of one request, events
of a node, claims and rest. What a step is made of is in :mod:`fsm.explore_pd_steps`."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fsm.explore_base import FAULT, FREE, OPERATOR, REBUILD, Cost, Hit, Step
from fsm.explore_pd import (
    ABSENT,
    DEAD,
    DECODE_POOLS,
    GONE,
    OVER,
    PREFILL_POOLS,
    PRODUCTION,
    Core,
    Design,
    Frame,
    Leg,
    Life,
    World,
)
from fsm.explore_pd_checks import broken
from fsm.explore_pd_draft import Broken, Draft
from fsm.explore_pd_steps import Action, Setting, options
from fsm.explore_pd_text import describe
from fsm.protocol import Role
from fsm.resources import Resource

ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")


class Part(NamedTuple):
    """What one option does to the decode life and one leg."""

    label: str
    cost: Cost
    needs: int
    repair: bool
    violation: str
    world: World
    core: Core
    leg: Leg
    opened: bool
    says: tuple[Frame, ...]


class PairModel:
    """A prefill/decode pair."""

    name = "pd"

    def __init__(
        self,
        design: Design = PRODUCTION,
        depth: int = 1,
        intake_steps: bool = False,
        contended: bool = True,
    ) -> None:
        """``depth``: steps launched at a time, 1 or 2. ``intake_steps``: other things may happen
        between arrival and intake (in production they cannot). ``contended``: there is one unit of
        memory for all requests, otherwise there is enough."""
        self.design: Final = design
        bits = [("prefill", r) for r in PREFILL_POOLS] + [("decode", r) for r in DECODE_POOLS]
        self._bit: Mapping[tuple[str, Resource], int] = {
            pool: 1 << n if contended else 0 for n, pool in enumerate(bits)
        }
        self._setting: Final = Setting(design, depth, intake_steps, self.needs)
        self._parts: dict[tuple[World, Core, Leg, bool], list[Part]] = {}

    def begin(self) -> tuple[World, Life]:
        return World(), Life()

    def steps(self, environment: World, request: Life) -> list[Step]:
        core, leg, earlier = request
        steps = [
            Step(
                part.label,
                part.cost,
                part.needs,
                part.world,
                _with_current(part, earlier),
                part.repair,
                part.violation,
            )
            for part in self._of(environment, core, leg, True)
        ]
        for n, old in enumerate(earlier):
            rest = earlier[:n] + earlier[n + 1 :]
            for part in self._of(environment, core, old, False):
                now = leg
                if part.says and leg.state != DEAD:
                    now = leg._replace(to_prefill=leg.to_prefill + part.says)
                life = Life(part.core, now, _earlier(rest, part.leg))
                label = part.label.replace("prefill:", "earlier prefill:")
                steps.append(
                    Step(
                        label, part.cost, part.needs, part.world, life, part.repair, part.violation
                    )
                )
        for role in ROLES:
            if self._may_flush(environment, request, role):
                fault = self._flushed_under(environment, request, role)
                label = f"{role} flushes"
                steps.append(Step(label, OPERATOR, 0, environment, request, False, fault))
        return steps

    def _of(self, world: World, core: Core, leg: Leg, current: bool) -> list[Part]:
        key = (world, core, leg, current)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = []
            for label, cost, needs, repair, action in options(self._setting, *key):
                draft = Draft(self.design, world, core, leg, current)
                parts.append(self._taken(draft, label, cost, needs, repair, action))
        return parts

    def _taken(
        self,
        draft: Draft,
        label: str,
        cost: Cost = FREE,
        needs: int = 0,
        repair: bool = False,
        action: Action | None = None,
    ) -> Part:
        violation = ""
        try:
            if action is not None:
                action(draft)
            draft.settle()
        except Broken as error:
            violation = str(error)
        world, core, leg = draft.frozen()
        violation = violation or broken(self.design, core, leg, draft.current)
        says = tuple(draft.says)
        return Part(label, cost, needs, repair, violation, world, core, leg, draft.opened, says)

    # --- memory ---

    def needs(self, role: Role, state: str, event: str) -> int:
        """The pools that an edge takes the last unit of."""
        chart = self.design.prefill if role == "prefill" else self.design.decode
        edge = chart.table[state, event]
        return self._bits(role, chart.holds[edge.target] - chart.holds[edge.source])

    def _bits(self, role: Role, resources: frozenset[Resource]) -> int:
        return sum(self._bit.get((role, resource), 0) for resource in resources)

    def claims(self, request: Life) -> int:
        bits = self._bits("decode", self.design.decode.holds.get(request.core.state, frozenset()))
        for leg in (request.leg, *request.earlier):
            bits |= self._bits("prefill", self.design.prefill.holds.get(leg.state, frozenset()))
        return bits

    # --- what hits a whole node ---

    def events(self, environment: World) -> list[tuple[str, Cost, World]]:
        world = environment
        events = [
            ("prefill's process dies", FAULT, world),
            ("decode's process dies", FAULT, world._replace(paused=False, slot_dirty=False)),
        ]
        if not world.paused:
            return [*events, ("decode pauses", REBUILD, world._replace(paused=True))]
        events.append(("decode continues", FREE, world._replace(paused=False)))
        if not world.decode_weights:
            events.append(("decode changes weights", OPERATOR, world._replace(decode_weights=1)))
        if not world.prefill_weights:
            events.append(("prefill changes weights", OPERATOR, world._replace(prefill_weights=1)))
        return events

    def hit(self, label: str, environment: World, request: Life) -> Hit | None:
        if label == "prefill's process dies":
            return Hit(_without_prefill(request))
        if label == "decode's process dies":
            return Hit(_without_decode(request))
        draft = Draft(self.design, environment, request.core, request.leg)
        violation = ""
        if label == "decode pauses":
            draft.paused = True
        elif label == "decode continues":
            draft.paused = False
        else:
            role: Role = "prefill" if label.startswith("prefill") else "decode"
            if not self._may_flush(environment, request, role):
                return None
            violation = self._flushed_under(environment, request, role)
            if label == "decode changes weights":
                draft.decode_weights = 1
                draft.tell_prefill(self.design.on_new_weights("decode", draft.state))
            elif label == "prefill changes weights":
                draft.prefill_weights = 1
        part = self._taken(draft, label)
        return Hit(_with_current(part, request.earlier), violation or part.violation)

    def _states(self, request: Life, role: Role) -> list[str]:
        legs = (request.leg, *request.earlier)
        states = [leg.state for leg in legs] if role == "prefill" else [request.core.state]
        return [state for state in states if state not in (ABSENT, DEAD)]

    def _may_flush(self, world: World, request: Life, role: Role) -> bool:
        chart = self.design.prefill if role == "prefill" else self.design.decode
        paused = world.paused and role == "decode"
        return self.design.may_flush(chart, self._states(request, role), paused)

    def _flushed_under(self, world: World, request: Life, role: Role) -> str:
        chart = self.design.prefill if role == "prefill" else self.design.decode
        for state in self._states(request, role):
            if "pages" in chart.holds[state] and not (world.paused and state == "receiving"):
                return f"{role} is flushed under the pages of a life that is {state}"
        return ""

    # --- rest ---

    def at_rest(self, environment: World, request: Life) -> bool:
        return (
            request.core.state in OVER
            and request.leg.is_over
            and not request.earlier
            and not environment.slot_dirty
            and not environment.paused
        )

    def describe(self, environment: World, requests: Sequence[Life]) -> str:
        return describe(environment, requests)


def _with_current(part: Part, earlier: tuple[Leg, ...]) -> Life:
    """A request after a step of its current leg."""
    if not part.opened:
        return Life(part.core, part.leg, earlier)
    return Life(part.core, Leg(to_prefill=part.says), _earlier(earlier, part.leg))


def _earlier(legs: tuple[Leg, ...], leg: Leg) -> tuple[Leg, ...]:
    return legs if leg.is_over else tuple(sorted((*legs, leg), key=repr))


def _without_prefill(life: Life) -> Life:
    """Prefill's process died: its lives are gone, and so are frames; decode sees a closed
    socket."""
    core, leg, _ = life
    state = ABSENT if leg.state == ABSENT else DEAD
    knows = core.state not in (ABSENT, *OVER)
    return Life(core, Leg(state, answers=leg.answers, to_decode=(GONE,) if knows else ()), ())


def _without_decode(life: Life) -> Life:
    """Decode's process died. A prefill life that has met its peer sees it; one that has not never
    will, and what was said to its door is forgotten."""
    core, legs = life.core, []
    for leg in (life.leg, *life.earlier):
        told = (GONE,) if leg.met and leg.state not in OVER else ()
        note = None if leg.state == ABSENT else leg.note
        legs.append(leg._replace(to_decode=(), to_prefill=told, note=note))
    if core.state != ABSENT:
        core = Core(DEAD, answers=core.answers)
    earlier: tuple[Leg, ...] = ()
    for leg in legs[1:]:
        earlier = _earlier(earlier, leg)
    return Life(core, legs[0], earlier)
