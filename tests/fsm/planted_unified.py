"""Bugs planted in chart, rules and pauses of a unified node, which exploration must find by a
counterexample of minimal length: see :mod:`tests.fsm.planted`."""

from dataclasses import dataclass
from typing import Any

from fsm import pauses
from fsm.explore_unified_draft import UnifiedDesign
from fsm.rules import Decision
from fsm.unified import UNIFIED
from tests.fsm.planting import flush_unless, leading, ruled


@dataclass(frozen=True)
class PlantedUnified:
    """A bug, what the run must say, and the length of the shortest counterexample."""

    name: str
    design: UnifiedDesign
    says: str
    length: int


def _chart(source: str, event: str, **changes: Any) -> UnifiedDesign:
    return UnifiedDesign(chart=leading(UNIFIED, source, event, **changes))


def _rule(state: str, message: Any, decision: Decision) -> UnifiedDesign:
    return UnifiedDesign(table=ruled("unified", state, message, decision))


PLANTED_UNIFIED = (
    PlantedUnified(
        "an abort releases under a launched step",
        _chart("decoding", "abort", target="done", pages="cache"),
        "touches pages that were released in done",
        7,
    ),
    PlantedUnified(
        "a victim loses its pages at once",
        _chart("prefilling", "retract", target="retracted", pages="cache"),
        "touches pages that were released in retracted",
        5,
    ),
    PlantedUnified(
        "an abort is lost while retracted",
        _rule("retracted", "abort", Decision("keep")),
        "aborted, but still retracted",
        5,
    ),
    PlantedUnified(
        "quiet is dropped",
        _rule("stopping", "quiet", Decision("drop")),
        "never come to rest",
        4,
    ),
    PlantedUnified(
        "an abort is lost while held",
        _rule("held", "abort", Decision("keep")),
        "aborted, but still held",
        5,
    ),
    PlantedUnified(
        "held at once, under a launched step",
        _chart("decoding", "hold", target="held", pages="discard"),
        "touches pages that were released in held",
        7,
    ),
    PlantedUnified(
        "held for ever",
        _rule("held", "continued", Decision("keep")),
        "never come to rest",
        5,
    ),
    PlantedUnified(
        "weights change under a victim",
        UnifiedDesign(may_flush=flush_unless("retracting", "holding", "stopping")),
        "weights change under the pages of a life that is retracting",
        6,
    ),
    PlantedUnified(
        "a late load admits",
        _chart("prefetching", "loaded", target="prefilling"),
        "prefetch_loaded takes memory, which may not be there",
        3,
    ),
    PlantedUnified(
        "a step is launched while paused in place",
        UnifiedDesign(
            is_frozen=lambda role, mode: pauses.is_frozen(role, mode) and mode != "in_place"
        ),
        "a step is launched while generation is paused",
        5,
    ),
    PlantedUnified(
        "a request is admitted while paused",
        UnifiedDesign(admits=lambda mode: mode != "retract"),
        "admit takes pages, rows while generation is paused",
        4,
    ),
    PlantedUnified(
        "a pause that drops KV passes over who prefills",
        _rule("prefilling", "paused", Decision("keep")),
        "KV is kept in prefilling by a pause that drops it",
        4,
    ),
    PlantedUnified(
        "a pause that aborts passes over who decodes",
        _rule("decoding", "abort", Decision("keep")),
        "aborted, but still decoding",
        6,
    ),
    PlantedUnified(
        "weights change under KV that a pause keeps in place",
        UnifiedDesign(may_flush=flush_unless("prefilling", "decoding")),
        "weights change under the pages of a life that is prefilling",
        4,
    ),
    PlantedUnified(
        "KV that was kept in place goes to the prefix cache",
        UnifiedDesign(may_cache=lambda kv, node: True),
        "pages go to the prefix cache that were computed under other weights",
        5,
    ),
)
