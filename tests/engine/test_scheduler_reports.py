"""Faults that users of other engines reported, replayed on the scheduler (B-numbers as in the
collection of scenarios).

Method: a node is stopped between launch and commit where the report says so; "BASE" is
``Node.settle``, which compares ledger, answers, trace and output with what they must be."""

from random import Random

import pytest

from engine.batch import StepResult
from engine.pages import Pages, PrefixLock
from engine.scheduler import LifecycleBug
from tests.support import checkers
from tests.support.cases import complete
from tests.support.node import Client, Node, Shape
from tests.support.oracle import golden
from transport.messages import Drain, SamplingParams, StopMatched, Submit


def complete_all(node: Node, *clients: Client) -> None:
    node.settle()
    for client in clients:
        complete(node, client)
    checkers.check_empty(node)


def pages_of(node: Node, rid: str) -> list[int]:
    lease = node.request(rid).leases["pages"]
    assert isinstance(lease, Pages)
    return list(lease.table)


# --- abort between launch and commit --------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_b13_abort_between_launch_and_commit_of_the_last_chunk_shows_no_token(depth: int) -> None:
    """Prompt of four chunks; chunk 4 is launched and samples; then the abort is read."""
    node = Node(Shape(chunk=4, depth=1 if depth == 1 else 2))
    client = node.ask("r1", range(16), 8)
    node.until("chunk 4 is launched", lambda: node.batches and node.batches[-1].items[0].sample)
    pages, steps = pages_of(node, "r1"), len(node.batches)
    in_flight = node.scheduler.steps_in_flight
    node.abort("r1")
    node.flush()
    assert (client.reason, client.tokens) == ("abort", [])
    assert node.launch() == [], "r1 is in no later batch"
    pool = node.scheduler.kv.pool
    for left in range(in_flight, 0, -1):
        assert all(pool.class_of(page) == "held" for page in pages), f"{left} steps touch them"
        node.commit()
        node.flush()
    assert node.scheduler.at_rest
    assert len(node.batches) == steps
    node.settle()
    assert client.tokens == []


@pytest.mark.parametrize("depth", [1, 2])
def test_b24_abort_before_the_result_of_the_last_token_is_one_terminal_and_one_free(
    depth: int,
) -> None:
    """The abort is read first, so it is the answer; the next request gets a clean row."""
    node = Node(Shape(rows=1, depth=1 if depth == 1 else 2))
    client = node.ask("r1", [1, 2, 3], 6, logprobs=True)
    node.until_tokens(client, 5 - depth)
    node.until(
        "its last token is launched",
        lambda: node.request("r1").output_len + node.request("r1").feeds == 6,
    )
    node.abort("r1")
    node.flush()
    assert client.reason == "abort"
    told = list(client.tokens)
    assert node.scheduler.rows.free == 0, "a launched step still writes its row"
    after = node.ask("r2", [4, 5], 6, logprobs=True)
    complete_all(node, after)
    assert client.tokens == told == node.golden(client).tokens[: len(told)]
    assert node.scheduler.rows.free == 1


@pytest.mark.parametrize("order", ["result first", "abort first"])
def test_b24_whichever_is_read_first_is_the_answer(order: str) -> None:
    node = Node(Shape(depth=1))
    client = node.ask("r1", [1], 1)
    node.launch()
    if order == "result first":
        node.commit()
    reply = node.abort_reply("r1")
    expected = ("length", "finished") if order == "result first" else ("abort", "aborted")
    assert (client.reason, reply[expected[1]]) == (expected[0], ["r1"])
    node.settle()


def test_b03_aborts_of_those_who_just_ended_and_of_nobody_are_answered_distinctly() -> None:
    """Fifty short requests, each aborted in the very turn in which it ends."""
    node = Node(Shape(rows=50, pages=200))
    clients = [node.ask(f"r{number}", [number], 1 + number % 3) for number in range(50)]
    seen: dict[str, str] = {}
    while len(seen) < 50:
        node.turn()
        for client in clients:
            if client.finish is not None and client.rid not in seen:
                reply = node.abort_reply(client.rid, "never seen")
                assert reply == {"aborted": [], "finished": [client.rid], "unknown": ["never seen"]}
                seen[client.rid] = client.reason
    assert set(seen.values()) == {"length"}
    complete_all(node, *clients)


# --- chunks and pages -----------------------------------------------------------------------------


def test_b17_every_chunk_of_a_prompt_starts_without_a_prefix_cache() -> None:
    node = Node(Shape(chunk=4, cache=False))
    client = node.ask("r1", range(12), 5)
    complete_all(node, client)
    assert [batch.items[0].count for batch in node.batches[:3]] == [4, 4, 4]


def test_b19_a_prompt_waits_for_pages_that_decodes_hold() -> None:
    """Three decodes hold 58 of 64 pages; r4 of four chunks waits, and all four are golden."""
    node = Node(Shape(pages=64, page_size=1, chunk=3, rows=8))
    clients = [node.ask(f"r{number}", [number] * 16, 14, logprobs=True) for number in range(3)]
    node.until("58 pages are held", lambda: node.scheduler.kv.pool.counts().held >= 58)
    clients.append(node.ask("r4", range(12), 5, logprobs=True))
    node.turn()
    assert node.state("r4") == "waiting"
    complete_all(node, *clients)


@pytest.mark.parametrize("depth", [1, 2])
def test_b20_the_last_slot_is_freed_once(depth: int) -> None:
    """Page size 1, chunk 4, one short prompt, 200 tokens, then idle: exact equality."""
    shape = Shape(pages=256, page_size=1, chunk=4, depth=1 if depth == 1 else 2)
    node = Node(shape)
    client = node.ask("r1", range(6), 200)
    node.settle()
    complete(node, client)
    counts = node.scheduler.kv.pool.counts()
    assert (counts.free, counts.cached) == (256 - 205, 205), "the last token has no KV"
    assert counts.free + counts.cached == counts.total
    checkers.check_empty(node)


def test_b21_a_request_that_ends_in_the_step_in_which_it_would_be_displaced() -> None:
    """r_low ends as r_high arrives and needs its pages: it ends by its length, once."""
    node = Node(Shape(pages=8, page_size=4, rows=4, depth=2))
    low = node.ask("low", range(20), 4, priority=0)
    node.until(
        "its last token is launched",
        lambda: node.request("low").output_len + node.request("low").feeds == 4,
    )
    node.commit()
    high = node.ask("high", range(50, 74), 4, priority=5)
    node.launch()
    assert node.state("low") == "retracting"
    complete_all(node, low, high)
    assert (low.reason, low.retractions) == ("length", 0)
    path = node.scheduler.roster.recent["low"].journal.path()
    assert path[-3:] == ["retracting", "stopping", "done"]


def test_b21_a_victim_that_was_chosen_and_ends_gives_its_pages_back_once() -> None:
    """The same by force, at every depth of the race."""
    for tokens in range(4):
        node = Node(Shape(depth=2))
        client = node.ask("r1", range(5), 4)
        node.until_tokens(client, tokens)
        node.scheduler.retract("r1")
        complete_all(node, client)


def page_borders(rnd: Random, bases: list[list[int]]) -> list[int]:
    length = 16 * rnd.randrange(1, 4) + rnd.choice([-1, 0, 1])
    shared = rnd.choice([0, 15, 16, 17, 32, length])
    prompt = rnd.choice(bases)[: min(shared, length)]
    return prompt + [rnd.randrange(256) for _ in range(length - len(prompt))]


@pytest.mark.parametrize("depth", [1, 2])
def test_b23_page_accounting_is_exact_around_page_borders(depth: int) -> None:
    """256 requests with lengths around page borders, shared prefixes, mixed batches, some aborts.

    No page lies in two tables beyond sharing (checked after every turn), and at idle free and
    cached pages are exactly the pool."""
    rnd = Random(23)
    bases = [[rnd.randrange(256) for _ in range(64)] for _ in range(3)]
    shape = Shape(pages=40, page_size=16, chunk=48, rows=12, depth=1 if depth == 1 else 2)
    node = Node(shape, checks=False)  # audits after 2,000 moves would take most of the time
    clients: list[Client] = []
    aborted: set[str] = set()
    for number in range(256):
        clients.append(node.ask(f"r{number}", page_borders(rnd, bases), rnd.randrange(1, 18)))
        node.until("there is room in the queue", lambda: len(node.scheduler.roster.queue) < 40)
        if rnd.random() < 0.15:
            live = rnd.choice(sorted(node.scheduler.roster.live))
            aborted.add(live)
            node.abort(live)
        for _ in range(rnd.randrange(4)):
            node.turn()
    node.settle()
    counts = node.scheduler.kv.pool.counts()
    assert counts.free + counts.cached == counts.total == 40
    assert node.scheduler.kv.cache.evictions > 0
    assert any(len(batch.items) > 2 and batch.items[0].count == 1 for batch in node.batches)
    for client in clients:
        if client.rid not in aborted:
            complete(node, client)
    assert sum(client.reason == "abort" for client in clients) == len(aborted)
    checkers.check_empty(node)


def test_b26_a_matched_prefix_is_never_evicted_while_it_is_used() -> None:
    """r1 uses exactly the cached pages P and decodes slowly; the others force eviction."""
    node = Node(Shape(pages=16, page_size=4, rows=2, chunk=16))
    node.ask("r0", range(16), 1)
    node.settle()
    r1 = node.ask("r1", [*range(16), 99], 24, priority=1)
    node.until_tokens(r1, 1)
    lock = node.request("r1").leases["prefix_locks"]
    assert isinstance(lock, PrefixLock)
    shared = pages_of(node, "r1")[:4]
    assert r1.cached == 16
    others = [node.ask(f"x{number}", range(30 + number, 54 + number), 3) for number in range(8)]
    evictions = node.scheduler.kv.cache.evictions
    while r1.finish is None:
        node.turn()
        if r1.finish is None:
            assert pages_of(node, "r1")[:4] == shared
            assert all("cache" in node.scheduler.kv.pool.owners_of(page) for page in shared)
    assert node.scheduler.kv.cache.evictions > evictions
    complete_all(node, r1, *others)
    assert node.scheduler.kv.locks.free == node.scheduler.kv.locks.total


# --- retraction -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_b29_there_is_one_log_probability_for_each_token_after_a_retraction(
    temperature: int,
) -> None:
    """Retracted after 7 tokens, run to 30; values equal the undisturbed run."""
    node = Node(Shape(depth=2))
    client = node.ask("r1", range(9), 30, logprobs=True, seed=temperature)
    node.until_tokens(client, 7)
    assert node.scheduler.retract("r1")
    complete_all(node, client)
    assert (len(client.tokens), len(client.logprobs), client.retractions) == (30, 30, 1)


def test_b31_preemption_with_steps_in_flight_loses_and_repeats_nothing() -> None:
    """Pages for three of eight requests, two steps in flight, run to the end."""
    node = Node(Shape(pages=12, page_size=4, rows=8, depth=2, chunk=32))
    clients = [node.ask(f"r{n}", range(n, n + 8), 12, logprobs=True, seed=n) for n in range(8)]
    complete_all(node, *clients)
    assert node.scheduler.stats.retracted > 0
    assert sum(client.retractions for client in clients) == node.scheduler.stats.retracted


def test_b32_the_history_at_resume_is_the_prompt_and_all_it_had_said() -> None:
    """Prompt of three chunks, 15 tokens out, preempt, resume."""
    node = Node(Shape(chunk=4, depth=2))
    client = node.ask("r1", range(12), 25, logprobs=True)
    node.until_tokens(client, 15)
    node.scheduler.retract("r1")
    node.until("it is admitted again", lambda: node.request("r1").attempt == 1)
    assert node.state("r1") == "prefilling"
    batch = next(b for b in reversed(node.batches) if b.rows)
    history = batch.rows[0].token_ids
    assert history[:12] == client.prompt
    assert history[12:] == node.golden(client).tokens[: len(history) - 12]
    assert len(history) - 12 >= 15
    assert batch.rows[0].prompt_len == 12
    complete_all(node, client)


@pytest.mark.parametrize("state", ["prefilling", "decoding", "retracting", "retracted"])
def test_a_retracted_request_can_be_aborted_at_every_stage(state: str) -> None:
    node = Node(Shape(chunk=4, rows=1))
    client = node.ask("r1", range(12), 25)
    node.until_state("r1", state if state in ("prefilling", "decoding") else "decoding")
    if state.startswith("retract"):
        node.launch()
        node.scheduler.retract("r1")
        while node.state("r1") != state:
            node.commit()
    node.abort("r1")
    node.flush()
    assert client.reason == "abort"
    node.settle()


# --- priority -------------------------------------------------------------------------------------


def test_b36_priority_displaces_for_pages_where_rows_are_free() -> None:
    node = Node(Shape(pages=16, page_size=4, rows=8))
    low = node.ask("low", range(52), 8, priority=0)
    node.until_tokens(low, 1)
    high = node.ask("high", range(100, 130), 4, priority=1)
    node.turn()
    node.turn()
    node.turn()
    assert node.state("low") in ("retracting", "retracted")
    assert node.state("high") in ("prefilling", "decoding")
    complete_all(node, low, high)
    assert low.retractions == 1


def test_displacement_waits_for_a_row_that_is_coming() -> None:
    """Two low ones, one of which only waits for its last result; one of them is enough."""
    node = Node(Shape(rows=2, depth=2))
    first = node.ask("a", [1], 3)
    second = node.ask("b", [2], 30)
    node.until(
        "a's last token is launched",
        lambda: node.request("a").output_len + node.request("a").feeds == 3,
    )
    node.commit()
    high = node.ask("h", [3], 4, priority=1)
    for _ in range(3):
        assert node.scheduler.launch() is None  # the loop may plan again before anything commits
    assert (node.state("a"), node.state("b")) == ("decoding", "retracting")
    complete_all(node, first, second, high)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_room_that_a_displacement_makes_is_used_at_once(depth: int) -> None:
    """The victim is in no launched step, so nothing would come back and wake the loop."""
    node = Node(Shape(rows=1, depth=1 if depth == 1 else 2))
    low = node.ask("low", [1] * 5, 30)
    node.until_tokens(low, 5)
    while node.commit():
        pass
    high = node.ask("high", [3] * 5, 5, priority=5)
    assert [batch.items[0].life for batch in node.launch()][:1] == [node.request("high").life]
    complete_all(node, low, high)


def test_b06_a_live_rid_again_is_refused_and_free_again_when_it_ended() -> None:
    node = Node()
    first = node.ask("x", [1, 2], 12, logprobs=True)
    node.until_tokens(first, 3)
    second = node.ask("x", [3], 4)
    assert second.finish is not None
    assert second.finish.status == 400
    assert "live request" in second.finish.message
    node.until("the first ends", lambda: first.finish is not None)
    third = node.ask("x", [4], 4, logprobs=True)
    complete_all(node, first, third)


# --- limits and drains ----------------------------------------------------------------------------


def test_b121_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """Pool of 1,000 tokens, model limit beyond: 2,000 refused; small ones golden; one that fits its
    prompt but not all its output ends by its length."""
    node = Node(Shape(pages=250, page_size=4, chunk=256, rows=16))
    never = node.ask("never", [1] * 2000, 4)
    assert never.finish is not None
    assert never.finish.status == 400
    assert "can never fit" in never.finish.message
    small = [node.ask(f"s{number}", [number] * 5, 6) for number in range(10)]
    last = node.ask("last", [7] * 980, 100)
    complete_all(node, *small, last)
    assert (last.reason, len(last.tokens)) == ("length", 20)


def test_b126_a_drain_answers_everybody() -> None:
    """Grace 0 and a grace that some of them use; what arrives meanwhile is refused."""
    for grace in (0.0, 0.01):
        node = Node(Shape(rows=2))
        clients = [node.ask(f"r{number}", [number], 3 + 30 * number) for number in range(5)]
        node.until_tokens(clients[0], 1)
        node.scheduler.drain(Drain(grace))
        late = node.ask("late", [9])
        assert late.finish is not None
        assert late.finish.status == 503
        node.settle()
        statuses = {client.finish.status for client in clients if client.finish is not None}
        assert statuses == {None, 503}, "503 for those who had no token, a partial answer else"
        for client in clients:
            assert client.finish is not None
            assert bool(client.tokens) == (client.finish.status is None)
        assert clients[0].reason == ("length" if grace else "abort")


def test_b12_rounds_of_aborted_streams_leave_room_for_the_next() -> None:
    node = Node(Shape(rows=4, pages=32))
    for number in range(20):
        clients = [node.ask(f"r{number}-{i}", range(i, i + 9), 40) for i in range(4)]
        node.turn()
        assert len(node.scheduler.roster.device) == 4, "all four are admitted at once"
        for _ in range(number % 5):
            node.turn()
        node.abort(*(client.rid for client in clients), cause="disconnect")
        node.settle()
        assert node.scheduler.rows.free == 4


# --- one turn after the other ---------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 1])
def test_a_failed_step_ends_those_it_contained_with_a_clear_error(before: int) -> None:
    """At depth 2 the step behind it was fed by it: dropped; the waiting ones are served."""
    node = Node(Shape(rows=2, depth=2))
    clients = [node.ask(f"r{number}", [number], 6) for number in range(3)]
    for _ in range(before):
        node.turn()
    node.launch()
    node.commit(error="device lost")
    node.flush()
    for client in clients[:2]:
        assert client.finish is not None
        assert (client.reason, client.finish.status) == ("error", 500)
        assert "device lost" in client.finish.message
    complete_all(node, clients[2])


def test_steps_must_come_back_in_order() -> None:
    node = Node(Shape(depth=2))
    node.ask("a", [1], 9)
    node.launch()
    with pytest.raises(LifecycleBug, match="out of order"):
        node.scheduler.commit(StepResult(99))


@pytest.mark.parametrize(
    ("max_new", "eos_at", "min_new", "stops", "ignore", "tokens", "reason"),
    [
        (0, -1, 0, False, False, 0, "length"),
        (1, -1, 0, False, False, 1, "length"),
        (6, 3, 0, False, False, 4, "stop"),
        (6, 3, 5, False, False, 6, "length"),
        (6, 3, 0, False, True, 6, "length"),
        (6, -1, 0, True, False, 1, "stop"),
        (4, 3, 0, False, False, 4, "stop"),
        (0, 0, 0, True, False, 0, "length"),
    ],
)
def test_stop_comes_before_length_and_not_before_the_minimum(
    max_new: int,
    eos_at: int,
    min_new: int,
    stops: bool,
    ignore: bool,
    tokens: int,
    reason: str,
) -> None:
    """Also for a request of no tokens: the one that is sampled and not delivered ends nothing."""
    first = golden([1, 2, 3], SamplingParams(max_new_tokens=1, eos_at=eos_at), 256).tokens[0]
    sampling = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=min_new,
        eos_at=eos_at,
        ignore_eos=ignore,
        stop_token_ids=(first,) if stops else (),
    )
    node = Node()
    client = node.submit(Submit("a", [1, 2, 3], sampling))[0]
    node.settle()
    assert (len(client.tokens), client.reason) == (tokens, reason)


@pytest.mark.parametrize("state", ["prefilling", "decoding", "retracted"])
def test_a_stop_string_ends_a_request_wherever_it_is(state: str) -> None:
    """Tokens past the match never reached the client and are not in its answer."""
    node = Node(Shape(chunk=2, rows=1))
    client = node.ask("a", [1, 2, 3], 20)
    node.until_tokens(client, 4)
    if state != "decoding":
        node.ask("b", [9] * 6, 3, priority=1)
        node.scheduler.retract("a")
        node.until_state("a", "retracted")
        if state == "prefilling":
            node.until_state("a", "prefilling")
    node.stop(client, 2)
    node.flush()
    assert client.finish is not None
    assert (client.finish.type, client.finish.matched) == ("stop", "a stop")
    node.settle()
    assert node.scheduler.roster.recent["a"].output_len == 2


def test_a_stop_string_of_nobody_or_in_tokens_never_sent_is_ignored() -> None:
    node = Node(Shape(rows=1))
    client = node.ask("a", [1, 2, 3], 6, logprobs=True)
    queued = node.ask("q", [4], 6, logprobs=True)
    node.until_tokens(client, 2)
    for rid, tokens in (("nobody", 1), ("a", 99), ("a", 0), ("a", -3), ("q", 0), ("q", 1)):
        node.scheduler.stop_matched(StopMatched(rid, tokens, "x"))
    complete_all(node, client, queued)


def test_the_cache_is_flushed_only_when_nobody_is_served() -> None:
    node = Node()
    node.ask("a", range(9), 4)
    assert node.scheduler.flush_cache() == (True, "Cache flushed: 0 pages.")  # queued: no KV yet
    node.turn()
    refused = (False, "Cache not flushed: 1 requests have KV in use.")
    assert node.scheduler.flush_cache() == refused
    node.settle()
    assert node.scheduler.flush_cache() == (True, "Cache flushed: 3 pages.")
    assert node.scheduler.kv.pool.free == 64


def test_load_counts_what_runs_waits_and_was_done() -> None:
    node = Node(Shape(rows=1))
    clients = [node.ask(f"r{number}", range(8), 4) for number in range(2)]
    node.turn()
    load = node.scheduler.load()
    assert (load.running, load.waiting, load.at_rest) == (1, 1, False)
    assert (load.tokens_total, load.tokens_used) == (256, 12)
    node.settle()
    load = node.scheduler.load()
    assert (load.generated_tokens, load.prompt_tokens, load.cached_tokens) == (8, 16, 4)
    assert (load.running, load.waiting, load.at_rest) == (0, 0, True)
    assert clients[1].cached == 4


def test_checks_find_a_fault_at_the_transition_after_it() -> None:
    """With checks on, whoever breaks the books does not get past the next move."""
    node = Node()
    node.ask("a", range(9), 4)
    node.scheduler.kv.pool._count["free"] -= 1
    with pytest.raises(LifecycleBug, match="pages"):
        node.launch()
