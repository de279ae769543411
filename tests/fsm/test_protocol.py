"""What schedulers do around the tables: total, addressed by life, bounded.

Method: the functions are pure, so every state, edge and message is asked; what they come to when
two nodes use them is explored in ``test_explore.py``."""

from itertools import product

import pytest

from fsm import protocol
from fsm.chart import Edge
from fsm.decide import BOOKS, decide
from fsm.protocol import CHARTS, READS, Address, Doors, FrameKind, Role, Terms
from fsm.rules import Effect, Facts, Message

ROLES: tuple[Role, ...] = ("prefill", "decode")
KINDS: tuple[FrameKind, ...] = ("hello", "grant", "done", "landed", "reject", "abort", "quiet")
EDGES = [(role, edge) for role in ROLES for edge in CHARTS[role].edges]
HELLO = Address("room 1", "decode:1", None)


def test_every_frame_that_is_said_is_read_by_the_other_role() -> None:
    other: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}
    said = {role: set[FrameKind]() for role in ROLES}
    causes: tuple[Message | None, ...] = (None, "peer_abort")
    effects: tuple[Effect, ...] = ("keep", "finished")
    for (role, edge), met, cause in product(EDGES, (False, True), causes):
        said[role] |= set(protocol.on_moved(role, edge, cause, met))
    for role, (met, written) in product(ROLES, product((False, True), repeat=2)):
        for state in CHARTS[role].by_name:
            said[role] |= set(protocol.standing(role, state, met, written))
            said[role] |= set(protocol.on_new_weights(role, state))
            for message, effect in product(BOOKS[role].messages, effects):
                said[role] |= set(protocol.on_reply(role, state, message, effect))
    said["prefill"] |= set(protocol.on_written("sending"))
    said["prefill"] |= set(protocol.on_refused("hello", "reject"))
    for role in ROLES:
        assert said[role] == set(READS[other[role]]), role
        assert set(READS[role].values()) <= set(BOOKS[role].messages)


def test_a_peer_that_failed_ends_whoever_depends_on_it() -> None:
    """Invariant 6: within one control message, wherever the life is."""
    for role, message in protocol.READS_FAILURE.items():
        for state, holds in CHARTS[role].holds.items():
            if CHARTS[role].is_live(state) and "rooms" in holds:
                decision = decide(CHARTS[role], state, message, Facts())
                assert decision.effect == "fire", (role, state)
                assert decision.event in protocol.ENDS


def test_what_is_due_fires_in_every_state_in_which_it_is_due() -> None:
    """Otherwise a scheduler would deliver it for ever."""
    for role in ROLES:
        for state, bits in product(CHARTS[role].by_name, product((False, True), repeat=3)):
            launched, writing, paused = bits
            message = protocol.due(role, state, launched=launched, writing=writing, paused=paused)
            if message is not None:
                decision = decide(CHARTS[role], state, message, Facts(launched=launched))
                assert decision.effect == "fire", (role, state, message)


def test_nothing_is_due_while_something_touches_pages() -> None:
    for role in ROLES:
        for state in CHARTS[role].by_name:
            assert protocol.due(role, state, launched=True) != "quiet"
            assert protocol.due(role, state, writing=True) != "wire_quiet" or role == "decode"


@pytest.mark.parametrize(("role", "edge"), EDGES)
def test_the_peer_is_told_of_every_end_before_the_hand_over_unless_it_said_so(
    role: Role, edge: Edge
) -> None:
    chart = CHARTS[role]
    ends = chart.is_live(edge.source) and not chart.is_live(edge.target)
    before = edge.source in ("meeting", "waiting", "receiving", "prefilling", "sending")
    if not ends or not before or edge.event == "landed":
        return
    assert "abort" in protocol.on_moved(role, edge, "abort", True)
    assert "abort" not in protocol.on_moved(role, edge, "peer_abort", True)
    assert "abort" not in protocol.on_moved(role, edge, "peer_reject", True)


@pytest.mark.parametrize("edge", CHARTS["prefill"].edges)
def test_prefill_swears_that_it_is_quiet_exactly_when_it_ends_without_a_hand_over(
    edge: Edge,
) -> None:
    frames = protocol.on_moved("prefill", edge, "abort", True)
    ends = edge.target == "done" and edge.source != "arrived" and edge.event != "landed"
    assert ("quiet" in frames) == ends
    assert protocol.on_moved("prefill", edge, "abort", False) == ()


def test_a_frame_is_for_a_life_and_not_for_a_room() -> None:
    said = Address("room 1", "prefill:7", "decode:3")
    assert protocol.accepts(said, "room 1", "decode:3", "prefill:7")
    assert protocol.accepts(said, "room 1", "decode:3", None)
    assert not protocol.accepts(said, "room 2", "decode:3", "prefill:7"), "rebuilt since"
    assert not protocol.accepts(said, "room 1", "decode:4", "prefill:7"), "another life's"
    assert not protocol.accepts(said, "room 1", "decode:3", "prefill:8"), "of another peer"
    assert protocol.accepts(said._replace(receiver=None), "room 1", "decode:3", None)


@pytest.mark.parametrize("field", Terms._fields)
def test_a_mismatch_names_both_values(field: str) -> None:
    terms = Terms("page-major", 16, "bf16", "W1", "abc")
    other = terms._replace(**{field: "another"})
    assert protocol.mismatch(terms, terms) is None
    why = protocol.mismatch(terms, other)
    assert why == f"{field} differs: {terms._asdict()[field]} here, another at the peer"


def test_only_what_proves_that_the_writer_is_done_is_decided_again() -> None:
    """A message that ends ``receiving`` and is a proof must then lead out of ``draining``."""
    for message in BOOKS["decode"].messages:
        if protocol.is_proof(message):
            assert decide(CHARTS["decode"], "receiving", message).event == "lost"
            assert decide(CHARTS["decode"], "draining", message).event == "silence"
    assert not protocol.is_proof("peer_missed")
    assert decide(CHARTS["decode"], "draining", "peer_missed").effect == "keep"


def test_pages_that_somebody_touches_forbid_a_flush() -> None:
    for role in ROLES:
        chart = CHARTS[role]
        for state in chart.by_name:
            touched = bool({"pages", "host_pages"} & chart.holds[state])
            assert protocol.may_flush(chart, [state], False) != touched
    decode = CHARTS["decode"]
    assert protocol.may_flush(decode, ["receiving", "held"], True), "what lands is not used"
    assert not protocol.may_flush(decode, ["receiving", "draining"], True)


def test_a_slot_is_cleared_when_it_is_given_back() -> None:
    clearing = {
        (edge.source, edge.event)
        for edge in CHARTS["decode"].edges
        if protocol.clears_slot(CHARTS["decode"], edge)
    }
    assert clearing == {
        ("receiving", "landed"),
        ("receiving", "outdated"),
        ("draining", "silence"),
    }


# --- doors ----------------------------------------------------------------------------------------


def test_the_last_thing_said_before_a_request_arrives_counts_when_it_does() -> None:
    doors = Doors[str, str](4)
    assert doors.knock("hello", HELLO, "first") == ()
    assert doors.arrived("room 1") == ("hello", HELLO, "first")
    assert doors.arrived("room 1") is None, "once"
    doors.knock("hello", HELLO, "first")
    doors.knock("abort", HELLO, "second")
    assert doors.arrived("room 1") == ("abort", HELLO, "second")


@pytest.mark.parametrize("how", ["reject", "abort"])
def test_a_tombstone_answers_a_late_hello(how: FrameKind) -> None:
    doors = Doors[str, str](4)
    doors.ended("room 1", how, "why")
    assert doors.words("room 1") == "why"
    assert doors.knock("hello", HELLO, "first") == (how,)
    assert doors.knock("abort", HELLO, "second") == ()
    assert doors.counts() == {"early_frames": 0, "ended_rooms": 1}
    assert doors.arrived("room 1") is None
    assert doors.words("room 1") is None, "its end is that of another life"
    assert doors.knock("hello", HELLO, "first") == (), "a new request waits for its peer"


def test_a_life_that_is_over_answers_what_somebody_waits_for() -> None:
    doors = Doors[str, str](4)
    late = HELLO._replace(receiver="prefill:9")
    assert {kind: doors.knock(kind, late, "") for kind in KINDS} == {
        "hello": ("abort",),
        "grant": ("abort", "quiet"),
        "abort": ("quiet",),
        "done": (),
        "landed": (),
        "reject": (),
        "quiet": (),
    }
    assert doors.counts() == {"early_frames": 0, "ended_rooms": 0}


def test_decode_keeps_nothing_and_tells_only_who_says_hello_that_the_life_is_over() -> None:
    doors = Doors[str, str](4, "decode")
    late = Address("room 1", "prefill:1", "decode:9")
    for kind in KINDS:
        assert doors.knock(kind, late, "") == (("abort",) if kind == "hello" else ())
    assert doors.counts() == {"early_frames": 0, "ended_rooms": 0}
    assert set(READS["prefill"]) >= {"abort"}


def test_terms_are_compared_once() -> None:
    """A repeated hello may name weights that have changed since."""
    for role in ROLES:
        compared = {s for s in CHARTS[role].by_name if protocol.compares_terms(s)}
        assert compared == {"meeting"}


def test_a_request_that_ends_at_the_door_answers_who_had_knocked() -> None:
    assert protocol.on_refused("hello", "reject") == ("reject",)
    assert protocol.on_refused("hello", "abort") == ("abort",)
    assert protocol.on_refused("abort", "reject") == ()
    assert protocol.on_refused(None, "reject") == ()


def test_doors_are_bounded_and_forget_the_oldest() -> None:
    doors = Doors[str, str](2)
    for n in range(5):
        doors.knock("hello", HELLO._replace(room=f"early {n}"), "")
        doors.ended(f"ended {n}", "abort", "")
    assert doors.counts() == {"early_frames": 2, "ended_rooms": 2}
    assert doors.arrived("early 2") is None
    assert doors.arrived("early 3") is not None


def test_what_a_process_said_is_forgotten_with_it() -> None:
    doors = Doors[str, str](4)
    doors.knock("hello", HELLO, "first")
    doors.knock("hello", Address("room 2", "other:1", None), "")
    doors.forget(lambda address, said: address.sender.startswith("decode:"))
    assert doors.arrived("room 1") is None
    assert doors.arrived("room 2") is not None
