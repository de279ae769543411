"""Trace spans: open while its request owes an answer, closed with the real reason."""

from engine.spans import RECENT_LIMIT, SpanBook
from tests.support.node import Node


def test_a_span_closes_when_its_lease_is_released() -> None:
    book = SpanBook(4)
    lease = book.open("a", "request a", 1.0)
    lease.adopt()
    assert book.pool.owners() == {"a": 1}
    book.now = 3.5
    lease.release()
    assert (lease.span.start, lease.span.end) == (1.0, 3.5)
    assert list(book.recent) == [lease.span]
    assert book.pool.counts().at_rest


def test_only_the_newest_are_kept() -> None:
    book = SpanBook(1)
    for number in range(RECENT_LIMIT + 10):
        lease = book.open(str(number), f"request {number}", 0.0)
        lease.adopt()
        lease.release()
    assert len(book.recent) == RECENT_LIMIT
    assert book.recent[-1].name == f"request {RECENT_LIMIT + 9}"


def test_a_requests_span_tells_its_way_and_its_end() -> None:
    """S0.3: the reason of a refusal, of an abort, of an ordinary end."""
    node = Node()
    done = node.ask("a", [1, 2, 3], 4)
    node.ask("b", [4], 30)
    node.ask("c", [])
    node.until(
        "a ends", lambda: done.finish is not None and "b" in node.open and node.clients[1].tokens
    )
    node.abort("b")
    node.settle()
    spans = {span.name: span.as_dict() for span in node.scheduler.spans.recent}
    assert spans["request a"]["status"] == "length"
    assert spans["request b"]["status"] == "Aborted"
    assert spans["request c"]["status"] == "prompt: is empty; at least one token is needed"
    attributes = spans["request a"]["attributes"]
    assert isinstance(attributes, dict)
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 4
    for span in spans.values():
        events = span["events"]
        assert isinstance(events, list)
        times = [float(time) for time, _ in events]
        assert [span["start"], *times] == sorted([span["start"], *times])
        assert span["end"] is not None
