"""Driving a world: events one by one, with every check after each of them."""

from collections.abc import Callable
from typing import Final

from engine.sim.checks import cluster_faults
from engine.sim.deployment import Cluster
from engine.sim.world import US_PER_S, World

EVENT_LIMIT: Final = 2_000_000
"""Events of one scenario: more is a loop that does not advance."""

RUN_LIMIT_US: Final = 3_600 * US_PER_S
"""Virtual time that one ``run until`` may take."""


class Fault(Exception):  # noqa: N818 - what a scenario finds
    """The engine did not do what it has to: an expectation or an invariant failed."""


class Drive:
    """Advances a cluster's world."""

    def __init__(self, world: World, cluster: Cluster, event_limit: float = EVENT_LIMIT) -> None:
        self.world: Final = world
        self.cluster: Final = cluster
        self._event_limit = event_limit

    def settle(self) -> None:
        """Run everything that is due now."""
        while self.world.next_us is not None and self.world.next_us <= self.world.now_us:
            self._event()

    def until_time(self, when_us: int) -> None:
        """Run everything up to ``when_us``, and leave the clock there."""
        while self.world.next_us is not None and self.world.next_us <= when_us:
            self._event()
        self.world.advance(when_us)

    def until(self, test: Callable[[], bool], limit_us: int) -> bool:
        """Run until ``test`` holds; False if it does not by ``limit_us``, or nothing happens
        any more."""
        while not test():
            due = self.world.next_us
            if due is None or due > limit_us:
                return False
            self._event()
        return True

    def _event(self) -> None:
        if self.world.events >= self._event_limit:
            raise Fault(f"{self._event_limit} events, and no end: something spins")
        try:
            self.world.step()
        except Exception as error:  # a crash of the engine is a finding, not the end of the run
            raise Fault(f"the engine failed: {summary(error)}") from error
        faults = cluster_faults(self.cluster)
        if faults:
            raise Fault("an invariant is broken:\n  " + "\n  ".join(faults))


def summary(error: Exception) -> str:
    """The error, and the line of our code that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" (in {code.co_qualname}, line {trace.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"
