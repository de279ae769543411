"""What a pause does to a node, in each of its modes: pure, asked by schedulers and by exploration.

``abort`` ends every request that is there. ``in_place`` keeps everything as it is. ``retract``
gives all KV back and keeps the tokens. What arrives meanwhile is queued, in every mode.
"""

from typing import Final, Literal, TypeAlias

PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]

MODES: Final[tuple[PauseMode, ...]] = ("abort", "in_place", "retract")


def after_pause(now: PauseMode | None, asked: PauseMode) -> PauseMode:
    """The mode of a node that is paused once more: a second pause may go further, and takes
    nothing back."""
    return asked if now in (None, "in_place") else now


def is_frozen(role: str, mode: PauseMode | None) -> bool:
    """Whether nothing is launched. A prefill lets prompts that are being computed run to their
    end, unless the pause is to keep everything in place: nothing there can be computed again
    later."""
    return mode == "in_place" if role == "prefill" else mode is not None


def admits(mode: PauseMode | None) -> bool:
    """Whether queued requests are given memory: admitted, granted, or readmitted."""
    return mode is None


def drops_kv(mode: PauseMode | None) -> bool:
    """Whether all KV is given back."""
    return mode in ("abort", "retract")
