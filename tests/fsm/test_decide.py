"""One decision for every state, message and fact; the table that has two or none is refused.

Method: the whole product is enumerated; the rules that matter most are asked as questions; and the
compiler is given tables that are broken in one way each."""

from dataclasses import replace
from itertools import product

import pytest

from fsm.chart import Edge, State
from fsm.decide import NO_FACTS, TABLES, decide
from fsm.rules import Decision, Facts, Message, Rule, RuleBook, TableError, compile_table
from fsm.unified import UNIFIED
from fsm.unified_rules import (
    ALL,
    ON_DEVICE,
    PREFETCHES,
    QUEUED,
    UNIFIED_BOOK,
    UNIFIED_MESSAGES,
    UNIFIED_RULES,
)

STATES = tuple(UNIFIED.by_name)
FACTS = tuple(Facts(*bits) for bits in product([False, True], repeat=2))
CASES = tuple(product(STATES, UNIFIED_MESSAGES, FACTS))
RESULTS: tuple[Message, ...] = (
    "chunk_committed",
    "token_committed",
    "last_token_committed",
    "step_failed",
)


def test_the_table_is_total_and_exclusive() -> None:
    """Exactly one decision for each state, message and combination of facts."""
    table = compile_table(UNIFIED_BOOK)
    assert set(table) == set(CASES)
    assert table == TABLES["unified"]
    for state, message, facts in CASES:
        matching = [
            rule
            for rule in UNIFIED_RULES
            if state in rule.states
            and rule.message == message
            and rule.stale in (None, facts.stale)
            and rule.launched in (None, facts.launched)
        ]
        assert len(matching) == 1, f"{state} {message} {facts}: {matching}"
        assert decide(UNIFIED, state, message, facts) == matching[0].decision


def test_the_rules_name_every_state_of_the_chart_and_no_other() -> None:
    assert set(ALL) == set(STATES)
    assert set(QUEUED) | set(ON_DEVICE) < set(ALL)
    assert Facts(stale=False, launched=False) == NO_FACTS


@pytest.mark.parametrize(("state", "message"), list(product(STATES, UNIFIED_MESSAGES)))
def test_a_decision_that_fires_names_an_edge_and_one_of_its_actors(
    state: str, message: Message
) -> None:
    for facts in FACTS:
        decision = decide(UNIFIED, state, message, facts)
        if decision.effect != "fire":
            assert decision.event is None
            continue
        assert decision.event is not None
        assert decision.by in UNIFIED.table[state, decision.event].by


def test_no_decision_frees_pages_while_a_launched_step_contains_the_request() -> None:
    """Invariant 4: an edge that drops pages is chosen only when nothing can touch them."""
    for state, message, facts in CASES:
        decision = decide(UNIFIED, state, message, facts)
        if decision.event is not None and facts.launched:
            edge = UNIFIED.table[state, decision.event]
            assert edge.pages is None, f"{edge} on {message} with {facts}"
            assert not {"rows", "prefix_locks"} & (
                UNIFIED.holds[edge.source] - UNIFIED.holds[edge.target]
            )


def test_the_only_edges_that_drop_memory_are_those_of_quiet() -> None:
    """So whoever fires anything else can never free what the device may touch."""
    dropping = {edge.event for edge in UNIFIED.edges if edge.pages is not None}
    assert dropping == {"quiesce"}
    firing = {m for _, m, _ in CASES for s in STATES if decide(UNIFIED, s, m).event == "quiesce"}
    assert firing == {"quiet"}


def test_every_live_state_accepts_an_abort_and_every_answered_one_says_so() -> None:
    """Invariant 6, whatever is launched and however late."""
    for state, facts in product(STATES, FACTS):
        decision = decide(UNIFIED, state, "abort", facts)
        if UNIFIED.is_live(state):
            assert decision == Decision("fire", "abort", "client")
        else:
            assert decision.effect == "finished"


@pytest.mark.parametrize("message", RESULTS)
def test_a_result_of_an_earlier_attempt_counts_nowhere(message: Message) -> None:
    for state, launched in product(STATES, (False, True)):
        assert decide(UNIFIED, state, message, Facts(True, launched)).effect == "drop"


@pytest.mark.parametrize("message", RESULTS)
def test_a_late_result_of_an_answered_request_is_dropped(message: Message) -> None:
    """No token after the answer (B13, B24)."""
    for state, facts in product(("stopping", "done"), FACTS):
        assert decide(UNIFIED, state, message, facts).effect == "drop"


def test_a_victims_late_token_still_counts() -> None:
    """B31: what was sampled before the retraction is delivered, and may end the request."""
    assert decide(UNIFIED, "retracting", "token_committed").effect == "keep"
    assert decide(UNIFIED, "retracting", "last_token_committed").event == "finish"


def test_late_and_duplicate_news_of_a_prefetch_change_nothing() -> None:
    """B104: cancelled, given up or ended requests do not care."""
    for state, message in product(STATES, PREFETCHES):
        decision = decide(UNIFIED, state, message)
        assert (decision.effect == "fire") == (state == "prefetching")


def test_every_live_queued_or_computing_state_ends_at_its_deadline() -> None:
    """Invariant 5; a timer of an earlier attempt does not count."""
    for state in STATES:
        fires = state in (*QUEUED, *ON_DEVICE)
        assert (decide(UNIFIED, state, "expired").effect == "fire") == fires
        assert decide(UNIFIED, state, "expired", Facts(stale=True)).effect == "drop"


def test_quiet_while_a_step_contains_the_request_is_a_bug() -> None:
    for state in (*ON_DEVICE, "stopping"):
        assert decide(UNIFIED, state, "quiet", Facts(launched=True)).effect == "refuse"


# --- tables that must not compile -----------------------------------------------------------------


def _book(*rules: Rule) -> RuleBook:
    return replace(UNIFIED_BOOK, rules=rules)


def test_a_gap_is_refused() -> None:
    for index, rule in enumerate(UNIFIED_RULES):
        rest = UNIFIED_RULES[:index] + UNIFIED_RULES[index + 1 :]
        with pytest.raises(TableError, match=f"no rule for .* {rule.message}"):
            compile_table(replace(UNIFIED_BOOK, rules=rest))


def test_an_overlap_is_refused() -> None:
    for rule in UNIFIED_RULES:
        with pytest.raises(TableError, match="two rules"):
            compile_table(_book(*UNIFIED_RULES, replace(rule, states=rule.states[:1])))


def test_a_rule_that_ignores_a_fact_overlaps_those_that_look_at_it() -> None:
    quiet = next(r for r in UNIFIED_RULES if r.message == "quiet" and r.launched is False)
    rules = tuple(replace(r, launched=None) if r is quiet else r for r in UNIFIED_RULES)
    with pytest.raises(TableError, match="two rules"):
        compile_table(replace(UNIFIED_BOOK, rules=rules))


def _replaced(message: Message, state: str, decision: Decision) -> tuple[Rule, ...]:
    """The rules with another decision wherever ``state`` meets ``message``."""
    out = []
    for rule in UNIFIED_RULES:
        if rule.message == message and state in rule.states:
            others = tuple(name for name in rule.states if name != state)
            out.append(replace(rule, states=(state,), decision=decision))
            out.append(replace(rule, states=others))
        else:
            out.append(rule)
    return tuple(out)


def test_an_edge_that_the_chart_lacks_is_refused() -> None:
    with pytest.raises(TableError, match="the chart has no 'retract' there"):
        compile_table(_book(*_replaced("abort", "waiting", Decision("fire", "retract"))))


def test_an_actor_who_may_not_cause_the_edge_is_refused() -> None:
    rules = _replaced("abort", "waiting", Decision("fire", "abort", "wire"))
    with pytest.raises(TableError, match="wire may not cause 'abort'"):
        compile_table(replace(UNIFIED_BOOK, rules=rules))


def test_a_new_state_needs_its_rows() -> None:
    """A chart cannot grow a state that some message was not thought about in."""
    chart = replace(
        UNIFIED,
        states=(
            *UNIFIED.states,
            State("planted", "held", "live", ("spans", "frontend_records"), "planted"),
        ),
        edges=(
            *UNIFIED.edges,
            Edge("pause", "waiting", "planted", ("client",), "planted"),
            Edge("abort", "planted", "done", ("client",), "planted"),
        ),
    )
    with pytest.raises(TableError, match="no rule for planted, abort"):
        compile_table(replace(UNIFIED_BOOK, chart=chart))
