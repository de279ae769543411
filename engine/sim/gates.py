"""Gates: places in a node where a scenario can make work wait.

``schedule`` is before a step is planned, ``step`` is between its launch and its end on the device,
``commit`` is between its end and its commit, and ``store`` is before an operation of the page store
is over. ``wire`` is before a write of a prefill node completes.
"""

from typing import Final, Literal, TypeAlias

GateName: TypeAlias = Literal["schedule", "step", "commit", "store", "wire"]
GATES: Final[tuple[GateName, ...]] = ("schedule", "step", "commit", "store", "wire")


class Gate:
    """Open, closed, or closed for all but a few."""

    def __init__(self) -> None:
        self.closed = False
        self.permits = 0
        """How many may pass although it is closed."""
        self.chunk: int | None = None
        """Only for ``step``: it closes when a step with the chunk of this number (1 is the first)
        of any prompt arrives."""

    def hold(self, chunk: int | None = None) -> None:
        self.closed, self.chunk = chunk is None, chunk

    def release(self) -> None:
        self.closed, self.chunk, self.permits = False, None, 0

    @property
    def armed(self) -> bool:
        return self.closed or self.chunk is not None

    def arrive(self, chunks: frozenset[int]) -> None:
        """Work that contains these chunks comes to the gate."""
        if self.chunk in chunks:
            self.closed, self.chunk = True, None

    def passes(self) -> bool:
        """Whether the next one may pass now; uses up a permit if it needs one."""
        if not self.closed:
            return True
        if self.permits:
            self.permits -= 1
            return True
        return False
