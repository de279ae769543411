"""The model of a prefill/decode pair as :mod:`fsm.explore` wants it: steps of one request, events
of a node, claims and rest. What a step is made of is in :mod:`fsm.explore_pd_steps`."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from fsm.decode import BASE_KIT as DECODE_KIT
from fsm.explore_base import FREE, UNSURE, Cost, Event, Hit, Step, Traced
from fsm.explore_pd import (
    DEAD,
    DECODE_POOLS,
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
from fsm.explore_pd_nodes import DROPPING, EVERY_LEG, HITS, ROLES, Pauses, events
from fsm.explore_pd_steps import Action, Setting, options
from fsm.explore_pd_text import describe
from fsm.prefill import BASE_KIT as PREFILL_KIT
from fsm.protocol import Role
from fsm.resources import Resource

Key: TypeAlias = tuple[int, int, tuple[int, ...]]
"""A :class:`Life` by numbers: decode life, current leg, earlier legs in order."""


class Part(NamedTuple):
    """What one option does to the decode life and one leg."""

    label: str
    cost: Cost
    needs: int
    repair: bool
    violation: str
    world: World
    core: int
    leg: int
    is_over: bool
    opened: bool
    says: tuple[Frame, ...]
    moves: tuple[Event, ...]


class PairModel:
    """A prefill/decode pair."""

    name = "pd"

    def __init__(
        self,
        design: Design = PRODUCTION,
        depth: int = 1,
        intake_steps: bool = False,
        contended: bool = True,
        pauses: Pauses = DROPPING,
    ) -> None:
        """``depth``: steps launched at a time, 1 or 2. ``intake_steps``: other things may happen
        between arrival and intake (in production they cannot). ``contended``: there is one unit of
        memory for all requests, otherwise there is enough, and only one metadata slot. ``pauses``:
        those that may hit each node."""
        self.design: Final = design
        self.nodes: Final[Mapping[str, Traced]] = {
            "prefill": Traced(design.prefill, PREFILL_KIT),
            "decode": Traced(design.decode, DECODE_KIT),
        }
        self._pauses: Final = pauses
        bits = [("prefill", r) for r in PREFILL_POOLS] + [("decode", r) for r in DECODE_POOLS]
        self._bit: Mapping[tuple[str, Resource], int] = {
            pool: 1 << n if contended or pool[1] == "metadata_slots" else 0
            for n, pool in enumerate(bits)
        }
        self._claims: Mapping[Role, Mapping[str, int]] = {
            "prefill": {s: self._bits("prefill", h) for s, h in design.prefill.holds.items()},
            "decode": {s: self._bits("decode", h) for s, h in design.decode.holds.items()},
        }
        self._setting: Final = Setting(design, depth, intake_steps, self.needs)
        self._parts: dict[tuple[World, int, int, bool], list[Part]] = {}
        self._flushes: dict[tuple[World, Role, frozenset[str]], tuple[bool, str]] = {}
        self._part_hits: dict[tuple[str, World, int, int, bool], Part] = {}
        # Cores and legs by number, and back.
        self._core_ids: dict[Core, int] = {}
        self._leg_ids: dict[Leg, int] = {}
        self._cores: list[Core] = []
        self._legs: list[Leg] = []

    def begin(self) -> tuple[World, Key]:
        return World(), self.key(Life())

    # --- numbers ---

    def key(self, life: Life) -> Key:
        earlier = sorted(self._leg(leg) for leg in life.earlier if not leg.is_over)
        return self._core(life.core), self._leg(life.leg), tuple(earlier)

    def life(self, key: Key) -> Life:
        core, leg, earlier = key
        return Life(self._cores[core], self._legs[leg], tuple(self._legs[n] for n in earlier))

    def _core(self, core: Core) -> int:
        number = self._core_ids.setdefault(core, len(self._cores))
        if number == len(self._cores):
            self._cores.append(core)
        return number

    def _leg(self, leg: Leg) -> int:
        number = self._leg_ids.setdefault(leg, len(self._legs))
        if number == len(self._legs):
            self._legs.append(leg)
        return number

    # --- steps ---

    def steps(self, environment: World, request: Key) -> list[Step]:
        core, leg, earlier = request
        steps = [
            Step(
                part.label,
                part.cost,
                part.needs,
                part.world,
                self._with_current(part, earlier),
                part.repair,
                part.violation,
                part.moves,
            )
            for part in self._of(environment, core, leg, True)
        ]
        for n, old in enumerate(earlier):
            rest = earlier[:n] + earlier[n + 1 :]
            for part in self._of(environment, core, old, False):
                now = leg
                if part.says and self._legs[leg].state != DEAD:
                    frames = self._legs[leg].to_prefill + part.says
                    now = self._leg(self._legs[leg]._replace(to_prefill=frames))
                life = (part.core, now, rest if part.is_over else _with(rest, part.leg))
                steps.append(
                    Step(
                        part.label,
                        part.cost,
                        part.needs,
                        part.world,
                        life,
                        part.repair,
                        part.violation,
                        part.moves,
                    )
                )
        for role in ROLES:
            allowed, fault = self._flush(environment, request, role)
            if allowed and fault:
                label = f"{role} flushes"
                steps.append(Step(label, UNSURE, 0, environment, request, False, fault))
        return steps

    def _of(self, world: World, core: int, leg: int, current: bool) -> list[Part]:
        key = (world, core, leg, current)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = []
            pair = self._cores[core], self._legs[leg]
            for label, cost, needs, repair, action in options(self._setting, world, *pair, current):
                text = label if current else label.replace("prefill:", "earlier prefill:")
                draft = Draft(self.design, world, *pair, current)
                parts.append(self._taken(draft, text, cost, needs, repair, action))
        return parts

    def _with_current(self, part: Part, earlier: tuple[int, ...]) -> Key:
        """A request after a step of its current leg."""
        if not part.opened:
            return part.core, part.leg, earlier
        fresh = self._leg(Leg(to_prefill=part.says))
        return part.core, fresh, earlier if part.is_over else _with(earlier, part.leg)

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
        violation = violation or broken(self.design, world, core, leg, draft.current)
        return Part(
            label,
            cost,
            needs,
            repair,
            violation,
            world,
            self._core(core),
            self._leg(leg),
            leg.is_over,
            draft.opened,
            tuple(draft.says),
            tuple(draft.moves),
        )

    # --- memory ---

    def needs(self, role: Role, state: str, event: str) -> int:
        """The pools that an edge takes the last unit of."""
        chart = self.design.prefill if role == "prefill" else self.design.decode
        edge = chart.table[state, event]
        return self._bits(role, chart.holds[edge.target] - chart.holds[edge.source])

    def _bits(self, role: Role, resources: frozenset[Resource]) -> int:
        return sum(self._bit.get((role, resource), 0) for resource in resources)

    def claims(self, request: Key) -> int:
        core, leg, earlier = request
        bits = self._claims["decode"].get(self._cores[core].state, 0)
        for n in (leg, *earlier):
            bits |= self._claims["prefill"].get(self._legs[n].state, 0)
        return bits

    # --- what hits a whole node ---

    def events(self, environment: World) -> list[tuple[str, Cost, World]]:
        return events(self.design, self._pauses, environment)

    def hit(self, label: str, environment: World, request: Key) -> Hit | None:
        core, leg, earlier = request
        violation = ""
        if "pauses" in label and self.at_rest(
            environment._replace(prefill_pause=None, decode_pause=None), request
        ):
            return None  # whatever follows is a run of the other request alone
        role: Role = "prefill" if label.startswith("prefill") else "decode"
        if label == "prefill's process dies":
            earlier = ()
        elif label in EVERY_LEG:
            struck = (self._part_hit(label, environment, core, old, False).leg for old in earlier)
            earlier = tuple(sorted(n for n in struck if not self._legs[n].is_over))
        elif label.endswith("changes weights"):
            allowed, violation = self._flush(environment, request, role)
            if not allowed:
                return None
        part = self._part_hit(label, environment, core, leg)
        key = self._with_current(part, earlier)
        return Hit(key, violation or part.violation, part.moves)

    def _part_hit(
        self, label: str, world: World, core: int, leg: int, current: bool = True
    ) -> Part:
        """What an event of a node does to a decode life and one leg."""
        key = (label, world, core, leg, current)
        part = self._part_hits.get(key)
        if part is None:
            draft = Draft(self.design, world, self._cores[core], self._legs[leg], current)
            part = self._part_hits[key] = self._taken(draft, label, action=HITS[label])
        return part

    def _flush(self, world: World, request: Key, role: Role) -> tuple[bool, str]:
        """(whether the protocol allows a flush, what would be wrong with it)"""
        core, leg, earlier = request
        if role == "prefill":
            states = frozenset(self._legs[n].state for n in (leg, *earlier))
        else:
            states = frozenset((self._cores[core].state,))
        key = (world, role, states)
        found = self._flushes.get(key)
        if found is None:
            found = self._flushes[key] = self._judge_flush(world, role, states)
        return found

    def _judge_flush(self, world: World, role: Role, states: frozenset[str]) -> tuple[bool, str]:
        chart = self.design.prefill if role == "prefill" else self.design.decode
        paused = role == "decode" and self.design.drops_kv(world.decode_pause)
        known = sorted(state for state in states if state in chart.holds)
        fault = ""
        for state in known:
            if "pages" in chart.holds[state] and not (paused and state == "receiving"):
                fault = f"{role} is flushed under the pages of a life that is {state}"
        return self.design.may_flush(chart, known, paused), fault

    # --- rest ---

    def at_rest(self, environment: World, request: Key) -> bool:
        core, leg, earlier = request
        return (
            not earlier
            and self._cores[core].state in OVER
            and self._legs[leg].is_over
            and not environment.slot_dirty
            and environment.prefill_pause is None
            and environment.decode_pause is None
        )

    def describe(self, environment: World, requests: Sequence[Key]) -> str:
        return describe(environment, [self.life(request) for request in requests])


def _with(legs: tuple[int, ...], leg: int) -> tuple[int, ...]:
    return tuple(sorted((*legs, leg)))
