"""One decision maker: ranks apply the same plan in the same step, whatever their clocks say (B128).

Method: every piece of work of a node under pressure (retractions, deadlines, aborts, a tiny pool)
is serialised and applied by two follower ranks. A rank that dropped another set of requests would
compute other tokens."""

from array import array
from random import Random

import msgspec
import pytest

from engine.batch import Batch, PageExport, PageImport, StepResult
from engine.hash_model import HashModel
from engine.plan import (
    Plan,
    PlanError,
    WeightLoad,
    WireLand,
    WireSend,
    decode,
    encode,
    seal,
    unseal,
)
from tests.support.node import Node, Shape
from tests.support.stores import MemoryStore


class Rank:
    """A follower: it sees bytes, and never a clock."""

    def __init__(self, shape: Shape) -> None:
        self.model = HashModel(shape.pages, shape.page_size)
        self.tokens: list[tuple[int, str, int | None]] = []

    def apply(self, raw: bytes) -> None:
        work = decode(raw)
        if isinstance(work, Batch):
            result = self.model.execute(work)
            pairs = zip(work.items, result.sampled, strict=True)
            self.tokens += [(work.step, item.life, sampled.token) for item, sampled in pairs]
        elif isinstance(work, PageImport):
            self.model.import_pages(work.pages, work.blobs)
        else:
            assert isinstance(work, PageExport)


@pytest.mark.parametrize("seed", range(4))
def test_two_ranks_compute_what_the_leader_decided(seed: int) -> None:
    rng = Random(seed)
    shape = Shape(
        pages=24, page_size=4, chunk=8, rows=6, waiting_timeout_s=0.05, running_timeout_s=0.2
    )
    store = MemoryStore()
    node = Node(shape, store)
    ranks = [Rank(shape), Rank(shape)]
    launch = node.runner.launch
    sent: list[bytes] = []

    def tee(work: Batch | PageExport | PageImport) -> None:
        sent.append(encode(work))
        launch(work)

    execute = node.model.execute
    computed: list[tuple[int, str, int | None]] = []

    def noted(batch: Batch) -> StepResult:
        result = execute(batch)
        pairs = zip(batch.items, result.sampled, strict=True)
        computed.extend((batch.step, item.life, sampled.token) for item, sampled in pairs)
        return result

    node.runner.launch = tee  # type: ignore[method-assign]
    node.model.execute = noted  # type: ignore[method-assign]
    for number in range(20):
        node.ask(f"r{number}", [rng.randrange(4) for _ in range(rng.randrange(1, 30))], 12)
        for _ in range(rng.randrange(6)):
            node.turn()
        live = sorted(node.scheduler.roster.live)
        if live and rng.random() < 0.3:
            node.abort(rng.choice(live))
        elif live:
            node.scheduler.retract(rng.choice(live))
    for _ in range(3000):
        if node.scheduler.at_rest and not node.runner.work:
            break
        node.turn()
        store.finish()
    for rank in ranks:  # followers may be late; the order is all they need
        for raw in sent:
            rank.apply(raw)
        assert rank.tokens == computed
    assert node.scheduler.stats.retracted > 0
    assert node.scheduler.stats.aborted > 0


def test_a_plan_survives_the_way_there_and_back() -> None:
    node = Node(Shape(pages=32, page_size=4, chunk=8))
    node.ask("a", range(20), 4, logprobs=True, stop_token_ids=(7,), seed=-5)
    node.turn()
    node.turn()
    assert node.batches
    for batch in node.batches:
        assert decode(encode(batch)) == batch


@pytest.mark.parametrize(
    "plan",
    [
        PageExport(3, array("q", [1, 2])),
        PageImport(4, array("q", [7]), [b"a page"]),
        WeightLoad("W2"),
        WireSend(5, array("q", [0, 9])),
        WireLand("prefill-0.1", 5, array("q", [4, 3])),
    ],
    ids=lambda plan: type(plan).__name__,
)
def test_whatever_changes_a_device_is_a_plan(plan: Plan) -> None:
    number, raw = unseal(seal(12, encode(plan)))
    assert (number, decode(raw)) == (12, plan)


def test_every_damaged_byte_of_a_sealed_plan_is_noticed() -> None:
    whole = seal(300, encode(WireLand("prefill-0.1", 5, array("q", [4, 3]))))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        with pytest.raises(PlanError, match="damaged plan"):
            unseal(bytes(damaged))
    with pytest.raises(PlanError, match="damaged plan"):
        unseal(whole[:-1])


@pytest.mark.parametrize("raw", [b"", b"\x80", b"nonsense", b"\x81\xa4type\xa4step"])
def test_what_is_no_plan_is_refused(raw: bytes) -> None:
    with pytest.raises(PlanError, match="no plan"):
        decode(raw)


def test_a_plan_of_another_version_is_refused() -> None:
    raw = msgspec.msgpack.encode({"type": "export", "version": 9, "ticket": 1, "pages": b""})
    with pytest.raises(PlanError, match="version 9"):
        decode(raw)
