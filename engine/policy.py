"""Who computes, who waits and who gives way: pure choices over small values.

The scheduler gathers the values, asks here, and applies the answer by firing events. Exploration
treats these choices as free: no choice made here may break an invariant, only progress and
fairness are at stake.

**Order.** Requests are ranked by (higher priority, earlier arrival). The best-ranked request on
the device is never retracted for another, so it always advances, ends, and gives its pages back:
the node makes progress as long as any single request fits into the pool, which intake guarantees.

**Retraction.** When a request needs a page and none is available, the worst-ranked request on the
device gives way, and itself if it is the worst. One victim at a time; pages that earlier victims
are about to give back are waited for before another one is chosen."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Need(NamedTuple):
    """A request on the device and the pages that its next span lacks (often none)."""

    life: str
    pages: int
    frees: int
    """Pages that become available if it is retracted."""


@dataclass(frozen=True, slots=True)
class Allotment:
    """``run`` may compute now, ``stall`` has to wait for pages that are coming, ``victims`` give
    way."""

    run: tuple[str, ...]
    stall: tuple[str, ...]
    victims: tuple[str, ...]


def allot(needs: Sequence[Need], available: int, coming: int) -> Allotment:
    """Share ``available`` pages among ``needs``, best ranked first; ``coming`` pages are on their
    way.

    Victims come from the worst-ranked end, and only as many as the best-ranked request in need
    requires. Whoever needs no page always runs. While somebody better ranked waits for pages,
    nobody after it takes any."""
    run: list[str] = []
    stall: list[str] = []
    victims: list[str] = []
    end = len(needs)
    short = False
    for index, need in enumerate(needs):
        if index >= end:
            break
        if need.pages == 0:
            run.append(need.life)
        elif short:
            stall.append(need.life)
        elif need.pages <= available:
            run.append(need.life)
            available -= need.pages
        else:
            short = True
            missing = need.pages - available - coming
            while missing > 0 and end > index + 1:
                end -= 1
                victims.append(needs[end].life)
                missing -= needs[end].frees
            if missing > 0 and index > 0:
                end = index
                victims.append(need.life)
            else:
                stall.append(need.life)
    gone = set(victims)
    return Allotment(tuple(life for life in run if life not in gone), tuple(stall), tuple(victims))


class Candidate(NamedTuple):
    """A request in the queue, as admission sees it."""

    life: str
    pages: int
    """Pages that stop being available if it is admitted."""
    tokens: int
    """Tokens it has to compute."""
    overtaken: int
    ready: bool
    """False while its prefetch is under way: it keeps its place and blocks nobody."""
    ahead: int = 0
    """Prompt tokens of better-ranked requests on the device that are still to be computed."""


class Prompt(NamedTuple):
    """A request on the device whose prompt is being computed."""

    rank: tuple[int, int]
    left: int
    """Tokens that no step was launched for."""


def tokens_ahead(rank: tuple[int, int], prompts: Iterable[Prompt]) -> int:
    """The :attr:`Candidate.ahead` of a request of this rank."""
    return sum(prompt.left for prompt in prompts if prompt.rank < rank)


@dataclass(frozen=True, slots=True)
class Admission:
    """``admit`` in this order; ``passed`` names whoever did not fit, once for each overtake."""

    admit: tuple[str, ...]
    passed: tuple[str, ...]


def admit(
    queue: Iterable[Candidate],
    rows: int,
    pages: int,
    budget: int,
    headroom: int,
    max_overtakes: int,
    growth: int = 1,
) -> Admission:
    """Whom to admit, best ranked first, while this step's prompt ``budget`` lasts. Prompts that are
    being computed use it up only for those ranked after them: a better one does not wait for them.

    ``headroom`` pages stay free for those who decode; every admitted request adds
    ``growth``.
    A candidate that does not fit may be overtaken ``max_overtakes`` times; then it blocks the queue
    until it fits, so that small requests cannot starve a large one.
    """
    admitted: list[str] = []
    passed: list[str] = []
    blocked: list[str] = []
    patience: int | None = None  # overtakes that everybody who was passed over still allows
    for candidate in queue:
        if rows <= 0 or budget <= candidate.ahead or patience == 0:
            break
        if not candidate.ready:
            continue
        if candidate.pages + headroom <= pages:
            admitted.append(candidate.life)
            pages -= candidate.pages
            rows -= 1
            budget -= candidate.tokens
            headroom += growth
            passed.extend(blocked)
            patience = None if patience is None else patience - 1
        else:
            left = max(0, max_overtakes - candidate.overtaken)
            patience = left if patience is None else min(patience, left)
            blocked.append(candidate.life)
    return Admission(tuple(admitted), tuple(passed))


class Holder(NamedTuple):
    """A request on the device that a better one might displace."""

    life: str
    priority: int
    frees: int
    """Pages that become available if it leaves, with the one kept free for its next token."""


def displace(
    priority: int, missing_pages: int, missing_rows: int, holders: Sequence[Holder]
) -> tuple[str, ...]:
    """Whom a waiting request of ``priority`` may push out: strictly lower priority, worst ranked
    first.

    ``holders`` are best ranked first. Empty when even all of them would not make enough room, so
    that nobody is pushed out in vain."""
    victims: list[str] = []
    for holder in reversed(holders):
        if missing_pages <= 0 and missing_rows <= 0:
            break
        if holder.priority >= priority:
            break
        victims.append(holder.life)
        missing_pages -= holder.frees
        missing_rows -= 1
    return tuple(victims) if missing_pages <= 0 and missing_rows <= 0 else ()
