"""A request of a unified node in the middle of a step: see :mod:`fsm.explore_unified`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fsm import pauses, protocol
from fsm.chart import Chart
from fsm.decide import TABLES
from fsm.explore_base import MIXED, Moved
from fsm.pauses import PauseMode
from fsm.rules import Facts, Message, Table
from fsm.unified import UNIFIED

ABSENT: Final = "absent"
MEMORY: Final = ("rows", "pages")


class Life(NamedTuple):
    state: str = ABSENT
    launched: int = 0
    loading: bool = False
    """An operation at the store has not come back."""
    answers: int = 0
    weights: int = 0
    """Those that its KV was computed under; ``MIXED`` where they were changed in place."""


class World(NamedTuple):
    """What the whole node is in."""

    pause: PauseMode | None = None
    weights: int = 0


@dataclass(frozen=True)
class UnifiedDesign:
    """What is explored: chart, table, and rules around them. Tests plant bugs by replacing
    parts."""

    chart: Chart = UNIFIED
    table: Table = field(default_factory=lambda: TABLES["unified"])
    may_flush: Callable[..., bool] = protocol.may_flush
    after_pause: Callable[[PauseMode | None, PauseMode], PauseMode] = pauses.after_pause
    is_frozen: Callable[[str, PauseMode | None], bool] = pauses.is_frozen
    admits: Callable[[PauseMode | None], bool] = pauses.admits
    drops_kv: Callable[[PauseMode | None], bool] = pauses.drops_kv
    may_cache: Callable[[int, int], bool] = lambda kv, node: kv == node
    """Whether KV computed under weights ``kv`` goes to the prefix cache of a node that computes
    under ``node`` (:meth:`engine.pages.Kv.give_back`)."""


class Broken(Exception):  # noqa: N818 - the model has found what it looks for
    """A property does not hold in the step being taken."""


class Draft:
    """A request in the middle of a step."""

    def __init__(self, design: UnifiedDesign, world: World, life: Life) -> None:
        self.design: Final = design
        self.chart: Final = design.chart
        self.world: Final = world
        self.place, self.launched, self.loading, self.answers, self.weights = life
        self.moves: list[Moved] = []

    def move(self, event: str, cause: Message | None = None, by: str = "") -> None:
        edge = self.chart.table[self.place, event]
        before, after = self.chart.holds[edge.source], self.chart.holds[edge.target]
        takes = sorted((after - before) & set(MEMORY))
        if takes and cause is not None:
            raise Broken(f"{cause} takes memory, which may not be there")
        if takes and self.world.pause is not None:
            raise Broken(f"{event} takes {', '.join(takes)} while generation is paused")
        kept = edge.pages == "cache" and self.design.may_cache(self.weights, self.world.weights)
        if kept and self.weights != self.world.weights:
            raise Broken("pages go to the prefix cache that were computed under other weights")
        if "pages" in after - before:
            self.weights = self.world.weights
        self.answers += "frontend_records" in before - after
        self.moves.append(Moved("unified", True, event, by or edge.by[0], cause or "policy"))
        self.place = edge.target

    def tell(self, message: Message) -> None:
        facts = Facts(launched=self.launched > 0)
        decision = self.design.table[self.place, message, facts]
        if decision.effect == "refuse":
            raise Broken(f"{message} makes no sense in {self.place}")
        if decision.event is not None:
            self.move(decision.event, message, decision.by)

    def settle(self) -> None:
        """Deliver what is due at the end of a turn, until nothing is."""
        while self.place in self.chart.holds:
            message = self._due()
            if message is None or self.design.table[self.place, message, Facts()].effect != "fire":
                return
            self.tell(message)

    def _due(self) -> Message | None:
        """As :meth:`engine.core.SchedulerCore._settle`."""
        if not self.launched and (self.place, "quiesce") in self.chart.table:
            return "quiet"
        if self.place == "held" and self.world.pause is None:
            return "continued"
        return None

    def must_be_over(self) -> None:
        """After an abort."""
        if self.place in self.chart.holds and self.chart.is_live(self.place):
            raise Broken(f"aborted, but still {self.place}")

    def frozen(self) -> Life:
        weights = self.weights if "pages" in self.chart.holds.get(self.place, ()) else 0
        return Life(self.place, self.launched, self.loading, self.answers, weights)


# --- what a step does -----------------------------------------------------------------------------


def arrives(draft: Draft) -> None:
    draft.place = draft.chart.initial


def policy(event: str, draft: Draft) -> None:
    draft.move(event)
    draft.loading = draft.loading or event == "prefetch"


def loaded(message: Message, draft: Draft) -> None:
    draft.loading = False
    draft.tell(message)


def launches(draft: Draft) -> None:
    draft.launched += 1
    if draft.world.pause is not None:
        raise Broken("a step is launched while generation is paused")
    if draft.weights not in (MIXED, draft.world.weights):
        raise Broken("KV is used that was computed under other weights")


def commits(message: Message, draft: Draft) -> None:
    draft.launched -= 1
    draft.tell(message)


def told(message: Message, draft: Draft) -> None:
    draft.tell(message)


def aborted(draft: Draft) -> None:
    draft.tell("abort")
    draft.must_be_over()


def paused(mode: PauseMode, draft: Draft) -> None:
    """The pause reaches a request that is there."""
    if draft.place == ABSENT:
        return
    if mode == "abort":
        aborted(draft)
    elif mode == "retract":
        draft.tell("paused")


def weights_changed(in_place: bool, draft: Draft) -> None:
    if "pages" not in draft.chart.holds.get(draft.place, ()):
        return
    if not in_place:
        raise Broken(f"weights change under the pages of a life that is {draft.place}")
    draft.weights = MIXED


def nothing(draft: Draft) -> None:
    """Only what is due anyway."""
