"""A decode life and one of its legs in the middle of a step: see :mod:`fsm.explore_pd`."""

from collections.abc import Sequence
from typing import Final

from fsm import protocol
from fsm.chart import Chart
from fsm.explore_base import MIXED, Moved
from fsm.explore_pd import (
    ABSENT,
    BUSY,
    DEAD,
    DECODE_POOLS,
    FAILED,
    HANDED_OVER,
    IDLE,
    LAST,
    NO_ROOM,
    OVER,
    PREFILL_POOLS,
    WRITTEN,
    Core,
    Design,
    Frame,
    Leg,
    World,
)
from fsm.protocol import Address, FrameKind
from fsm.resources import Resource
from fsm.rules import Decision, Facts, Message


class Broken(Exception):  # noqa: N818 - the model has found what it looks for
    """A property does not hold in the step being taken."""


class Draft:
    """What a step changes. ``current``: the leg is the one decode is in now."""

    def __init__(
        self, design: Design, world: World, core: Core, leg: Leg, current: bool = True
    ) -> None:
        self.design: Final = design
        self.prefill_pause, self.decode_pause = world.prefill_pause, world.decode_pause
        self.prefill_weights, self.decode_weights = world.prefill_weights, world.decode_weights
        self.dirty = world.slot_dirty
        self.place = core.state
        """Where the decode life is: a state of its chart, or absent, or gone."""
        self.launched, self.copying, self.emitted = core.launched, core.copying, core.emitted
        self.answers, self.weights, self.knocked = core.answers, core.weights, core.knocked
        self.leg = leg
        self.current = current
        self.opened = False
        """A rebuild has opened a new leg in this step."""
        self.moves: list[Moved] = []
        self.says: list[Frame] = []
        """For the current leg, where that is not the one at hand."""

    # --- frames ---

    def tell_prefill(self, kinds: Sequence[FrameKind]) -> None:
        """Decode says something on its current leg."""
        for kind in kinds:
            frame = (kind, self.decode_weights if kind == "hello" else 0)
            if not self.current:
                self.says.append(frame)
            elif self.leg.state != DEAD:
                self.leg = self.leg._replace(to_prefill=(*self.leg.to_prefill, frame))

    def tell_decode(self, kinds: Sequence[FrameKind]) -> None:
        """The prefill life at hand says something."""
        if self.place == DEAD:
            return
        for kind in kinds:
            carries = 0
            if kind == "hello":
                carries = self.prefill_weights
            elif kind == "done":
                carries = self.leg.weights
            elif kind == "abort" and self.leg.failed:
                carries = FAILED
            self.leg = self.leg._replace(to_decode=(*self.leg.to_decode, (kind, carries)))

    # --- decode ---

    @property
    def decode_drops(self) -> bool:
        return self.design.drops_kv(self.decode_pause)

    def decode(self, message: Message, weights: int = 0) -> Decision:
        """A message for the decode life, from its own node or on the leg at hand."""
        design = self.design
        while True:
            facts = Facts(
                launched=self.launched > 0 or self.copying,
                outdated=message == "peer_done"
                and design.is_outdated(
                    design.names(weights), self.decode_weights, self.decode_drops
                ),
            )
            decision = design.decode_table[self.place, message, facts]
            if decision.effect != "fire":
                break
            assert decision.event is not None
            if decision.event == "landed":
                self._land(weights)
            self.move_decode(decision.event, message, decision.by)
            if not design.is_proof(message):
                return decision
        if decision.effect == "refuse":
            raise Broken(f"decode: {message} makes no sense in {self.place}")
        if self.current and message.startswith(("peer_", "wire_")):
            self.tell_prefill(design.on_reply("decode", self.place, message, decision.effect))
        return decision

    def move_decode(self, event: str, cause: Message | None = None, by: str = "") -> None:
        """Fire ``event`` on the decode life, and say what the protocol says."""
        chart = self.design.decode
        edge = chart.table[self.place, event]
        before, after = chart.holds[edge.source], chart.holds[edge.target]
        _no_memory_for_a_message(cause, after - before, DECODE_POOLS)
        if "metadata_slots" in after - before and self.dirty:
            raise Broken("a metadata slot is handed out that still names a room")
        if self.design.clears_slot(chart, edge):
            self.dirty = False
        self.answers += "frontend_records" in before - after
        self.moves.append(Moved("decode", True, event, by or edge.by[0], cause or "policy"))
        self.place = edge.target
        if event == "rebuild":
            if self.decode_pause is not None:
                raise Broken("a held life is rebuilt before generation goes on")
            self.current, self.opened, self.knocked = False, True, False
        met = edge.source in ("waiting", "receiving")
        self.tell_prefill(self.design.on_moved("decode", edge, cause, met))

    def _land(self, weights: int) -> None:
        """Prefill's KV is used, with the token that came with it."""
        if not self.dirty:
            raise Broken("the slot does not name the room that has landed")
        if self.emitted and not self.design.replays_first_token(1):
            raise Broken("the last token that the client has is sampled again")
        if weights == MIXED and self.decode_weights:
            raise Broken("KV is used that was begun under other weights")
        self.emitted, self.weights = True, weights

    def computes(self) -> None:
        """A step of decode reads its KV."""
        if self.decode_pause is not None:
            raise Broken("a step of decode is launched while it is paused")
        if self.weights not in (MIXED, self.decode_weights):
            raise Broken("KV is used that was computed under other weights")

    def dies(self) -> None:
        """Decode's process, and all that it held, is gone."""
        if self.place != ABSENT:
            self.place, self.launched, self.copying = DEAD, 0, False
            self.emitted, self.weights, self.knocked = False, 0, False

    def slot_written(self) -> None:
        """The metadata slot of decode names a room now."""
        if self.place != DEAD:
            self.dirty = True

    # --- prefill ---

    def prefill(self, message: Message) -> Decision:
        """A message for the prefill life at hand."""
        design = self.design
        while True:
            leg = self.leg
            facts = Facts(launched=leg.launched > 0)
            decision = design.prefill_table[leg.state, message, facts]
            if decision.effect != "fire":
                break
            assert decision.event is not None
            self.move_prefill(decision.event, message, decision.by)
            if not design.is_proof(message):
                return decision
        if decision.effect == "refuse":
            raise Broken(f"prefill: {message} makes no sense in {leg.state}")
        if message.startswith("peer_"):
            refused = leg.note == REFUSED
            self.tell_decode(
                design.on_reply("prefill", leg.state, message, decision.effect, refused)
            )
        return decision

    def move_prefill(self, event: str, cause: Message | None = None, by: str = "") -> None:
        chart, leg = self.design.prefill, self.leg
        edge = chart.table[leg.state, event]
        kept = edge.pages == "cache" and self.design.may_cache(leg.weights, self.prefill_weights)
        if kept and leg.weights != self.prefill_weights:
            raise Broken("pages go to the prefix cache that were computed under other weights")
        before, after = chart.holds[edge.source], chart.holds[edge.target]
        _no_memory_for_a_message(cause, after - before, PREFILL_POOLS)
        self.moves.append(
            Moved("prefill", self.current, event, by or edge.by[0], cause or "policy")
        )
        answers = "frontend_records" in before - after
        failed = leg.failed or cause in ("step_failed", "wire_failed")
        self.leg = leg._replace(state=edge.target, answers=leg.answers + answers, failed=failed)
        if edge.target == "done":
            self.leg = self.leg._replace(note=REFUSED if event == "reject" else None)
        self.tell_decode(self.design.on_moved("prefill", edge, cause, leg.met))

    def prefills(self) -> None:
        """A step of prefill reads and writes KV."""
        if self.prefill_pause == "in_place":
            raise Broken("a step of prefill is launched while it is paused in place")
        if self.leg.weights not in (MIXED, self.prefill_weights):
            raise Broken("a prompt is computed under two weights")

    # --- arrival of frames ---

    def at_prefill(self, kind: FrameKind, weights: int) -> None:
        """A frame reaches the prefill node."""
        leg = self.leg
        if leg.state in NO_ROOM:
            outcome = self.design.knock(kind, None, None, "prefill")
            if outcome.keep:
                self.leg = leg._replace(note=(kind, weights))
            self.tell_decode(outcome.reply)
            return
        if kind == "hello" and protocol.compares_terms(leg.state):
            self.leg = leg._replace(note=(kind, weights))
            if weights != self.prefill_weights:
                self.tell_decode(("reject",))
                self.prefill("peer_reject")
                return
        self.prefill(protocol.READS["prefill"][kind])

    def at_decode(self, kind: FrameKind, weights: int) -> None:
        """A frame reaches the decode node. A life that has left its room is found by nobody."""
        if self.place in (ABSENT, DEAD):
            return
        if "rooms" not in self.design.decode.holds[self.place] or not self.accepted():
            reply = self.design.knock(kind, "decode", None, "decode").reply
            frames = tuple((said, 0) for said in reply)
            self.leg = self.leg._replace(to_prefill=self.leg.to_prefill + frames)
            return
        if not self.current:
            raise Broken("decode takes the word of a prefill life that it is not paired with")
        message = protocol.READS["decode"][kind]
        if kind == "abort" and weights == FAILED:
            message = protocol.READS_FAILURE["decode"]
        compares = message == "peer_hello" and protocol.compares_terms(self.place)
        if compares and weights != self.decode_weights:
            self.tell_prefill(("reject",))
            message = "peer_reject"
        self.decode(message, weights)

    def accepted(self) -> bool:
        """Whether decode takes what the prefill life at hand says for the life that it is in."""
        design = self.design
        name = "prefill" if self.current else "earlier prefill"
        address = Address(design.room_of(self.current), name, "decode")
        peer = None if self.place == "meeting" else "prefill"
        return design.accepts(address, design.room_of(True), "decode", peer)

    # --- the end of a turn ---

    def settle(self) -> None:
        """Deliver what is due on both nodes, until nothing is."""
        due = self.design.due
        while self.leg.state not in (ABSENT, DEAD):
            leg = self.leg
            message = due(
                "prefill",
                leg.state,
                launched=leg.launched > 0,
                writing=leg.wire in (BUSY, LAST),
            )
            if message is None or self.prefill(message).effect != "fire":
                break
        while self.place not in (ABSENT, DEAD):
            message = due(
                "decode",
                self.place,
                launched=self.launched > 0 or self.copying,
                paused=self.decode_drops,
                stopped=self.decode_pause is not None,
            )
            if message is None or self.decode(message).effect != "fire":
                break

    def must_be_over(self, chart: Chart, state: str) -> None:
        """After an abort, or when the peer is gone: the life is answered (which is looked at for
        every state), and only what may still be touched is held."""
        if chart.is_live(state):
            raise Broken(f"{chart.name} is still {state}, though it was aborted or left alone")

    # --- canonical form ---

    def frozen(self) -> tuple[World, Core, Leg]:
        world = World(
            self.prefill_pause,
            self.decode_pause,
            self.prefill_weights,
            self.decode_weights,
            self.dirty,
        )
        leg = self.leg
        if leg.state in OVER:
            refused = leg.note if leg.note == REFUSED else None
            wire = IDLE if leg.wire == WRITTEN else leg.wire
            to_decode, to_prefill = leg.to_decode, leg.to_prefill
            if self.place in OVER:
                to_decode, to_prefill = (), ()  # whoever hears it is over
            elif not self.current:
                to_prefill = ()
            failed = leg.failed and self.place == "receiving"  # it may still be told
            what = (leg.state, leg.launched, wire, refused, leg.answers)
            leg = Leg(*what, 0, failed, to_decode, to_prefill)
        elif leg.note is not None and leg.state not in (*NO_ROOM, "meeting"):
            leg = leg._replace(note=None)
        if not self.current and leg.to_decode and not self.accepted():
            heard = () if leg.state in OVER else ("hello",)  # the only one that is answered
            kept = tuple(frame for frame in leg.to_decode if frame[0] in heard)
            leg = leg._replace(to_decode=kept)
        core = Core(
            self.place,
            self.launched,
            self.copying,
            self.emitted and self.place not in ANSWERED,
            self.answers,
            self.weights if self.place in HANDED_OVER and self.place != "held" else 0,
            self.knocked and self.place == "meeting",
        )
        return world, core, leg


ANSWERED: Final = ("stopping", "cancelling", "draining", *OVER)
"""Whether it has emitted anything cannot matter any more."""


def _no_memory_for_a_message(
    cause: Message | None, takes: frozenset[Resource], pools: tuple[Resource, ...]
) -> None:
    """Reserving memory may fail, and a message cannot be refused: only policy may take any."""
    taken = sorted(takes & set(pools))
    if cause is not None and taken:
        raise Broken(f"{cause} takes {', '.join(taken)}, which may not be there")


REFUSED: Final[Frame] = ("reject", 0)
"""The note of a prefill life that was refused at the door: it answers a later hello with it."""
