"""Who computes, who waits, who gives way: choices over small values, checked by enumeration too."""

from hypothesis import given
from hypothesis import strategies as st

from engine.policy import (
    Admission,
    Allotment,
    Candidate,
    Holder,
    Need,
    Prompt,
    admit,
    allot,
    displace,
    tokens_ahead,
)
from tests.support.examples import examples


def need(life: str, pages: int = 0, frees: int = 2) -> Need:
    return Need(life, pages, frees)


def candidate(
    life: str, pages: int = 1, tokens: int = 4, overtaken: int = 0, ready: bool = True
) -> Candidate:
    return Candidate(life, pages, tokens, overtaken, ready)


# --- pages among those who run --------------------------------------------------------------------


def test_pages_go_to_the_best_ranked_first() -> None:
    needs = [need("a", 1), need("b", 1), need("c", 1)]
    assert allot(needs, available=3, coming=0) == Allotment(("a", "b", "c"), (), ())
    assert allot(needs, available=1, coming=0) == Allotment(("a",), ("b",), ("c",))


def test_whoever_needs_no_page_always_runs() -> None:
    needs = [need("a", 1), need("b", 0), need("c", 0)]
    assert allot(needs, available=0, coming=1) == Allotment(("b", "c"), ("a",), ())


def test_pages_that_are_coming_are_waited_for() -> None:
    """B31: one shortage costs one victim, not one at every turn until its step commits."""
    needs = [need("a", 1), need("b", 0)]
    assert allot(needs, available=0, coming=1).victims == ()
    assert allot(needs, available=0, coming=0).victims == ("b",)


def test_the_worst_ranked_gives_way_and_itself_if_it_is_the_worst() -> None:
    needs = [need("a"), need("b"), need("c", 1)]
    assert allot(needs, available=0, coming=0) == Allotment(("a", "b"), (), ("c",))


def test_the_best_ranked_is_never_a_victim() -> None:
    assert allot([need("a", 3)], available=1, coming=0) == Allotment((), ("a",), ())


def test_nobody_after_one_who_waits_takes_a_page() -> None:
    """Else the better one would wait for ever while worse ones grow."""
    needs = [need("a", 3), need("b", 1)]
    assert allot(needs, available=2, coming=1) == Allotment((), ("a", "b"), ())


def test_no_more_victims_than_the_shortage_asks_for() -> None:
    needs = [need("a", 3), need("b"), need("c"), need("d")]
    assert allot(needs, available=0, coming=0).victims == ("d", "c")
    shared = [need("a", 2), need("b", 0, 2), need("c", 0, 0)]
    assert allot(shared, available=0, coming=0).victims == ("c", "b"), "c frees nothing"


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6),
    st.integers(0, 6),
    st.integers(0, 6),
)
@examples(150)
def test_an_allotment_is_a_partition_that_fits(
    rows: list[tuple[int, int]], available: int, coming: int
) -> None:
    """Everybody is in one class; what runs fits; victims are the worst; progress is possible."""
    needs = [Need(str(index), pages, frees) for index, (pages, frees) in enumerate(rows)]
    out = allot(needs, available, coming)
    lives = [n.life for n in needs]
    assert sorted([*out.run, *out.stall, *out.victims]) == sorted(lives)
    by_life = {n.life: n for n in needs}
    assert sum(by_life[life].pages for life in out.run) <= available
    ranked = [lives.index(life) for life in out.victims]
    assert ranked == sorted(ranked, reverse=True)
    keep = len(needs) - len(ranked)
    assert set(ranked) == set(range(keep, len(needs))), "only from the worst end"
    assert not needs or "0" not in out.victims
    if out.victims:
        lacking = next(n for n in needs if n.pages and n.life not in out.run)
        freed = [by_life[life].frees for life in out.victims if life != lacking.life]
        taken = sum(by_life[life].pages for life in lives if int(life) < int(lacking.life))
        missing = lacking.pages - (available - taken) - coming
        assert sum(freed[:-1]) < missing, "the last victim was needed"


# --- admission ------------------------------------------------------------------------------------


def test_first_come_first_served_while_rows_pages_and_budget_last() -> None:
    queue = [candidate(life) for life in "abcd"]
    assert admit(queue, rows=2, pages=9, budget=99, headroom=0, max_overtakes=9).admit == ("a", "b")
    assert admit(queue, rows=9, pages=9, budget=5, headroom=0, max_overtakes=9).admit == ("a", "b")
    assert admit(queue, rows=9, pages=9, budget=0, headroom=0, max_overtakes=9).admit == ()


def test_prompts_on_the_device_use_up_the_budget_of_those_ranked_after_them() -> None:
    prompts = [Prompt((0, 4), 70), Prompt((0, 8), 30)]
    ranks = {"high": (-1, 9), "back": (0, 5), "late": (0, 10)}
    queue = [
        candidate(life)._replace(ahead=tokens_ahead(rank, prompts)) for life, rank in ranks.items()
    ]
    assert [each.ahead for each in queue] == [0, 70, 100]
    assert admit(queue, 9, 9, 64, 0, 9).admit == ("high",)
    assert admit(queue, 9, 9, 80, 0, 9).admit == ("high", "back")
    assert admit(queue, 9, 9, 999, 0, 9).admit == ("high", "back", "late")


def test_everyone_who_decodes_keeps_a_page_of_headroom() -> None:
    """Without it, who is admitted is pushed out at the next token, for ever."""
    queue = [candidate("a", 3), candidate("b", 3)]
    assert admit(queue, 9, 8, 99, headroom=2, max_overtakes=9).admit == ("a",)
    assert admit(queue, 9, 9, 99, headroom=2, max_overtakes=9).admit == ("a", "b")


def test_one_that_does_not_fit_is_overtaken_a_bounded_number_of_times() -> None:
    queue = [candidate("big", 9), candidate("small")]
    assert admit(queue, 9, 4, 99, 0, 2) == Admission(("small",), ("big",))
    tired = [candidate("big", 9, overtaken=2), candidate("small")]
    assert admit(tired, 9, 4, 99, 0, 2) == Admission((), ())


def test_only_those_in_front_of_an_admitted_one_were_passed() -> None:
    queue = [candidate("big", 9), candidate("a"), candidate("huge", 9)]
    assert admit(queue, 9, 4, 99, 0, 2) == Admission(("a",), ("big",))


def test_a_prefetching_one_keeps_its_place_and_blocks_nobody() -> None:
    queue = [candidate("loading", 9, overtaken=99, ready=False), candidate("a")]
    assert admit(queue, 9, 4, 99, 0, 2) == Admission(("a",), ())


# --- displacement ---------------------------------------------------------------------------------

HOLDERS = [Holder("a", 5, 3), Holder("b", 1, 2), Holder("c", 0, 2)]


def test_only_strictly_lower_priorities_are_pushed_out_worst_first() -> None:
    assert displace(2, 1, 0, HOLDERS) == ("c",)
    assert displace(2, 3, 0, HOLDERS) == ("c", "b")
    assert displace(1, 1, 0, HOLDERS) == ("c",)
    assert displace(0, 1, 0, HOLDERS) == ()


def test_nobody_is_pushed_out_in_vain() -> None:
    assert displace(2, 5, 0, HOLDERS) == ()
    assert displace(2, 0, 3, HOLDERS) == ()


def test_a_row_is_reason_enough() -> None:
    """B36 has the other one: pages are reason enough where rows are free."""
    assert displace(2, 0, 1, HOLDERS) == ("c",)
    assert displace(2, 0, 0, HOLDERS) == ()
