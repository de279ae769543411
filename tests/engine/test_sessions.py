"""Streaming sessions: one turn in flight, and a history that only good ends extend."""

import pytest

from engine.sessions import SessionBook, SessionError, TurnLease
from fsm.ledger import Exhausted
from tests.support.node import Node, Shape
from tests.support.requests import request
from transport.messages import Finish

GOOD = (Finish(type="stop", matched=3), Finish(type="length", length=2))
BAD = (
    Finish(type="abort", message="Aborted"),
    Finish(type="error", status=500),
    Finish(type="abort", status=503),
    None,
)


def book_with(*names: str, capacity: int = 100) -> SessionBook:
    book = SessionBook(4)
    for name in names:
        book.open(name, capacity, None)
    return book


def turn(book: SessionBook, life: str, tokens: list[int]) -> TurnLease:
    lease = book.reserve(request(life, tokens, session="s"))
    lease.adopt()
    return lease


def history(book: SessionBook) -> list[int]:
    return list(book.history("s"))


@pytest.mark.parametrize("finish", GOOD)
def test_a_turn_that_ends_well_extends_the_history(finish: Finish) -> None:
    book = book_with("s")
    lease = turn(book, "a", [1, 2, 3])
    lease.request.finish = finish
    assert history(book) == []
    lease.release()
    assert history(book) == [1, 2, 3]
    assert book.as_dict()["s"] == {"tokens": 3, "turns": 1, "in_flight": None}


@pytest.mark.parametrize("finish", BAD)
def test_any_other_end_leaves_the_history_as_it_was(finish: Finish | None) -> None:
    """B111, B112: there is nothing to roll back, because nothing was written."""
    book = book_with("s")
    first = turn(book, "a", [1, 2, 3])
    first.request.finish = GOOD[0]
    first.release()
    second = turn(book, "b", [1, 2, 3, 4, 5])
    second.request.finish = finish
    second.release()
    assert history(book) == [1, 2, 3]
    assert book.pool.counts().at_rest
    book.check_turn("s", 10, 0, fill=False)


def test_one_turn_at_a_time() -> None:
    book = book_with("s")
    lease = turn(book, "a", [1])
    assert book.as_dict()["s"]["in_flight"] == "a"
    with pytest.raises(SessionError, match="turn in flight"):
        book.check_turn("s", 1, 0, fill=False)
    with pytest.raises(Exhausted):
        book.reserve(request("b", [1], session="s"))
    lease.release()
    book.check_turn("s", 1, 0, fill=False)


def test_a_turn_beyond_the_capacity_is_refused_and_changes_nothing() -> None:
    """B112."""
    book = book_with("s", capacity=4)
    book.check_turn("s", 4, 0, fill=False)
    with pytest.raises(SessionError, match="capacity is 4"):
        book.check_turn("s", 5, 0, fill=False)
    assert history(book) == []


def test_names_are_unique_and_bounded_in_number() -> None:
    book = book_with("a", "b", "c", "d")
    with pytest.raises(SessionError, match="exists already"):
        book.open("a", 1, None)
    with pytest.raises(SessionError, match="limit"):
        book.open("e", 1, None)
    for action in (book.close, book.history):
        with pytest.raises(SessionError, match="does not exist"):
            action("e")
    book.close("a")
    book.open("e", 1, None)
    assert ("a" in book, "e" in book, len(book)) == (False, True, 4)


def test_closing_hands_over_the_turn_in_flight() -> None:
    book = book_with("s")
    lease = turn(book, "a", [1])
    assert book.close("s") is lease.request
    lease.request.finish = GOOD[0]
    lease.release()
    assert book.pool.counts().at_rest
    assert "s" not in book


def test_a_stop_found_after_the_end_trims_the_last_turn_only() -> None:
    """The client saw no more than that, so the next turn must not build on more."""
    book = book_with("s")
    first = turn(book, "a", [1, 2])
    first.request.tokens += [3, 4, 5]
    first.request.finish = GOOD[1]
    first.release()
    book.trim_last_turn(first.request, 1)
    assert history(book) == [1, 2, 3]
    second = turn(book, "b", [1, 2, 3, 7])
    second.request.finish = GOOD[1]
    second.release()
    book.trim_last_turn(first.request, 0)
    assert history(book) == [1, 2, 3, 7], "it is not the last turn any more"


def test_a_turn_whose_end_its_client_was_not_shown_never_was() -> None:
    """Unless the next one builds on it already."""
    book = book_with("s")
    for life, tokens in (("a", [1, 2]), ("b", [1, 2, 3, 4])):
        lease = turn(book, life, tokens)
        lease.request.finish = GOOD[0]
        lease.release()
    second = lease.request
    book.drop_last_turn(request("a", [1, 2], session="s"))
    assert history(book) == [1, 2, 3, 4]
    third = turn(book, "c", [1, 2, 3, 4, 5])
    book.drop_last_turn(second)
    assert history(book) == [1, 2, 3, 4]
    third.release()
    book.drop_last_turn(second)
    book.drop_last_turn(second)
    assert history(book) == [1, 2]
    assert book.as_dict()["s"]["turns"] == 1


def test_an_idle_session_expires_and_a_busy_one_does_not() -> None:
    book = SessionBook(4)
    book.now = 1.0
    book.open("s", 10, timeout_s=2.0)
    book.open("forever", 10, None)
    assert book.expired(2.9) == []
    lease = turn(book, "a", [1])
    assert book.expired(99.0) == []
    book.now = 5.0
    lease.release()
    assert book.expired(6.9) == []
    assert book.expired(7.0) == ["s"]


# --- with the scheduler ---------------------------------------------------------------------------


def finished_turn(node: Node, rid: str, prompt: list[int]) -> list[int]:
    client = node.ask(rid, prompt, 4, session="s")
    node.settle()
    assert client.reason == "length"
    return client.prompt + client.tokens


def test_b111_a_turn_that_was_left_is_as_if_it_had_never_been() -> None:
    """Turn 0 ends; turn 1 is disconnected after its first token; turn 2 is sent at once."""
    node = Node()
    node.open_session("s")
    history = finished_turn(node, "t0", [1, 2, 3])
    left = node.ask("t1", [4, 5], 9, session="s")
    node.until_tokens(left, 1)
    node.abort("t1", cause="disconnect")
    again = node.ask("t2", [6], 4, session="s")
    assert again.prompt == [*history, 6]
    assert not again.refused, "the session is not stuck in flight"
    node.settle()
    assert (left.reason, again.reason) == ("abort", "length")
    assert again.cached > 0, "the history's pages are shared"
    node.close_session("s")
    assert node.scheduler.ledger.at_rest


def test_b112_an_over_length_turn_is_refused_and_the_next_one_is_golden() -> None:
    node = Node()
    node.open_session("s", capacity=12)
    history = finished_turn(node, "t0", [1, 2, 3])
    refused = node.ask("t1", range(9), 4, session="s")
    assert refused.finish is not None
    assert refused.finish.status == 400
    assert "capacity is 12" in refused.finish.message
    assert node.scheduler.sessions.history("s") == history
    assert finished_turn(node, "t2", [9])[: len(history)] == history


def test_a_second_turn_while_one_is_in_flight_is_refused() -> None:
    node = Node()
    node.open_session("s")
    first = node.ask("t0", [1], 4, session="s")
    second = node.ask("t1", [2], 4, session="s")
    assert second.finish is not None
    assert "turn in flight" in second.finish.message
    node.settle()
    assert first.reason == "length"


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "decoding"])
def test_closing_a_session_ends_its_turn_and_gives_everything_back(moment: str) -> None:
    node = Node(Shape(chunk=4))
    node.open_session("s")
    client = node.ask("t0", range(20), 8, session="s")
    if moment != "waiting":
        node.until_state("t0", moment)
    node.close_session("s")
    assert client.reason == "abort"
    node.settle()
    assert len(node.scheduler.sessions) == 0


def test_a_stop_string_found_late_shortens_what_the_next_turn_builds_on() -> None:
    node = Node()
    node.open_session("s")
    first = node.ask("t0", [1, 2], 6, session="s")
    node.settle()
    node.stop(first, 2)
    node.stop(first, 0)  # a stop after no tokens cannot be, and must not erase the prompt
    second = node.ask("t1", [3], 3, session="s")
    assert second.prompt == [1, 2, *first.tokens[:2], 3]
    node.settle()


def test_a_turn_of_several_samples_and_a_turn_of_no_session_are_refused() -> None:
    node = Node()
    node.open_session("s")
    for client in (node.ask("a", [1], session="s", n=2), node.ask("b", [1], session="zz")):
        assert client.refused
    node.settle()


def test_an_idle_session_is_closed_by_the_clock() -> None:
    node = Node()
    node.open_session("s", timeout_s=0.5)
    finished_turn(node, "t0", [1])
    node.now += 1.0
    node.turn()
    assert "s" not in node.scheduler.sessions


def test_a_turn_without_a_limit_fills_its_session_and_no_more() -> None:
    """Goal: what the server cannot know, how much room a history leaves, the engine fills in."""
    book = SessionBook(4)
    book.open("s", capacity=20, timeout_s=None)
    assert book.check_turn("s", 12, 500, fill=True) == 8
    assert book.check_turn("s", 12, 3, fill=True) == 3  # the pool or the context is smaller
    with pytest.raises(SessionError, match="makes it 21; its capacity is 20"):
        book.check_turn("s", 20, 500, fill=True)
