"""Groups: members of one submission, ended together, and forgotten with the last one (B07)."""

import pytest

from engine.groups import GroupBook
from fsm.ledger import Exhausted, LeaseError
from tests.support.node import Node, Shape
from tests.support.requests import request


def test_a_group_disappears_with_its_last_member() -> None:
    book = GroupBook(8)
    members = [request(f"m{i}", rid=f"g#{i}", group="g") for i in range(3)]
    leases = [book.reserve(member) for member in members]
    for lease in leases:
        lease.adopt()
    assert book.members("g") == members
    for left, lease in enumerate(reversed(leases), 1):
        assert "g" in book
        lease.release()
        assert book.pool.counts().held == 3 - left
    assert ("g" in book, len(book), book.members("g")) == (False, 0, [])


def test_membership_is_given_back_once_and_bounded() -> None:
    book = GroupBook(1)
    lease = book.reserve(request("a", group="g"))
    lease.adopt()
    with pytest.raises(Exhausted):
        book.reserve(request("b", group="g"))
    lease.release()
    with pytest.raises(LeaseError):
        lease.release()
    assert book.pool.counts().at_rest


def test_a_reservation_that_fails_makes_no_group() -> None:
    book = GroupBook(0)
    with pytest.raises(Exhausted):
        book.reserve(request("a", group="g"))
    assert "g" not in book


@pytest.mark.parametrize("after", [0, 5])
def test_b07_an_abort_of_the_group_ends_every_member_by_the_next_step(after: int) -> None:
    node = Node()
    first = node.ask("g", [1, 2, 3], 40, n=3)
    node.until_tokens(first, after)
    node.abort("g", cause="disconnect")
    node.flush()
    assert [client.reason for client in node.clients] == ["abort"] * 3
    assert len(node.scheduler.groups) == 0
    assert node.launch() == []
    node.settle()


def test_members_end_one_by_one_and_the_rest_is_still_a_group() -> None:
    node = Node()
    clients = [node.ask("g", [1, 2, 3], 12, n=3), *node.clients[1:3]]
    node.until_tokens(clients[0], 2)
    node.abort("g#1")
    node.flush()
    assert [client.reason for client in clients] == ["", "abort", ""]
    assert "g" in node.scheduler.groups
    assert node.ask("g", [1]).refused, "the group's id is taken while any member lives"
    assert node.ask("g#2", [1]).refused
    node.settle()
    assert node.abort_reply("g") == {"aborted": [], "finished": ["g"], "unknown": []}
    assert not node.ask("g", [1]).refused
    node.settle()


def test_members_of_a_group_share_their_prompts_pages() -> None:
    """Pages of the first member's prompt are shared by those admitted after it committed."""
    node = Node(Shape(rows=1, page_size=4))
    node.ask("g", range(17), 4, n=3)
    node.settle()
    assert [client.cached for client in node.clients] == [0, 16, 16]
