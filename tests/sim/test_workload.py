"""Goal: workloads are what they say: shared blocks are shared, times and lengths are those of the
file, whatever cannot be read is named by its line and field, and everybody is served.

Method: small files of both forms, made-up workloads, and clusters of every shape.
"""

from pathlib import Path

import pytest

from engine.sim.feeding import Feeder, Leave, Sizes, build, leaving
from engine.sim.figures import Spread, figures
from engine.sim.workload import BLOCK, Arrival, WorkloadError, check_fit, load

MOONCAKE = (
    '{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [4, 5]}\n'
    "\n"
    '{"timestamp": 9, "input_length": 1030, "output_length": 2, "hash_ids": [4, 6]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,480,10\n"
    "2023-11-16 18:17:04.0319600,318,8\n"
)
SMALL = Sizes(page_size=16, pages=256, chunk=256, rows=8)


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE, encoding="utf-8")
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, encoding="utf-8")
    return path


def test_equal_hash_ids_are_equal_blocks(mooncake: Path) -> None:
    first, second = load(str(mooncake))
    one, two = first.prompt(), second.prompt()
    assert (len(one), len(two)) == (700, 1030)
    assert one[:BLOCK] == two[:BLOCK]
    assert one[BLOCK:] != two[BLOCK:700]
    assert (second.time_us, second.output) == (9_000, 2)


def test_what_the_blocks_do_not_cover_is_nobody_elses(mooncake: Path) -> None:
    one, two = (Arrival(0, 600, 1, (4,), seed=seed).prompt() for seed in (1, 2))
    assert one[:BLOCK] == two[:BLOCK]
    assert one[BLOCK:] != two[BLOCK:]
    assert load(str(mooncake))[0].prompt() == load(str(mooncake), seed=5)[0].prompt()


def test_the_azure_form_is_read(azure: Path) -> None:
    first, second = load(str(azure))
    assert (first.time_us, first.length, first.output) == (0, 480, 10)
    assert (second.time_us, second.length, second.output) == (52_000, 318, 8)
    assert len(second.prompt()) == 318


def test_speed_and_count(mooncake: Path) -> None:
    assert [each.time_us for each in load(str(mooncake), speed=2)] == [0, 4_500]
    assert len(load(str(mooncake), 1)) == 1


def test_made_up_workloads_are_what_they_say() -> None:
    arrivals = load("synthetic:prompt=10-20,output=3,every=500us", 50)
    assert [each.time_us for each in arrivals] == [index * 500 for index in range(50)]
    assert {each.length for each in arrivals} == set(range(10, 21))
    assert {each.output for each in arrivals} == {3}
    assert len(load("synthetic")) == 1_000
    assert arrivals[0].prompt() != load("synthetic:prompt=10-20", 1, seed=1)[0].prompt()


BAD_FILES = {
    "other.jsonl": ('{"arrived": 3}\n', r"other.jsonl:1: .*missing required field `timestamp`"),
    "text.jsonl": (
        MOONCAKE + MOONCAKE.replace("700", '"x"'),
        r"text.jsonl:4: Expected `int`, got `str` - at `\$.input_length`",
    ),
    "none.jsonl": (MOONCAKE.replace("700", "0"), r"none.jsonl:1: prompt of 0 tokens"),
    "back.jsonl": (MOONCAKE + MOONCAKE, r"back.jsonl:4: sent before the line above it"),
    "empty.jsonl": ("", r"empty.jsonl: no requests"),
    "json.jsonl": ("{", r"json.jsonl:1: .*truncated"),
    "columns.csv": ("a,b\n1,2\n", r"columns.csv:1: the columns are \['a', 'b'\], not \['TIME"),
    "count.csv": (AZURE.replace("318", "many"), r"count.csv:3: ContextTokens: 'many' is no"),
    "time.csv": (AZURE.replace("2023-11-16 18:17:04", "noon"), r"time.csv:3: TIMESTAMP: "),
    "short.csv": (AZURE.replace(",8", ""), r"short.csv:3: 2 fields, not 3"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_with_line_and_field(name: str, tmp_path: Path) -> None:
    text, message = BAD_FILES[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=message):
        load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: .*No such file"),
        ("synthetic:prompts=3", "'prompts=3' is none of prompt=, output=, every="),
        ("synthetic:prompt", "'prompt' is none of"),
        ("synthetic:prompt=0", "prompt=0 is no length"),
        ("synthetic:output=9-3", "output=9-3 is no length"),
        ("synthetic:every=2", "every=2 is no time"),
    ],
)
def test_what_is_no_workload_is_an_error(what: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        load(what)


def test_a_request_that_never_fits_is_named(mooncake: Path) -> None:
    arrivals = load(str(mooncake))
    check_fit(arrivals, 1032)
    with pytest.raises(WorkloadError, match=r"trace.jsonl:3: a prompt of 1030 tokens and 2 more"):
        check_fit(arrivals, 1031)


@pytest.mark.parametrize("shape", ["0", "1+", "+1", "2+0", "1+1+1", "two", ""])
def test_an_unknown_shape_is_an_error(shape: str) -> None:
    with pytest.raises(WorkloadError, match="unknown cluster"):
        build(shape, SMALL)


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [
        ("1", ["unified-0"]),
        ("2", ["unified-0", "unified-1"]),
        ("2+1", ["prefill-0", "prefill-1", "decode-0"]),
    ],
)
def test_a_burst_is_served(shape: str, nodes: list[str]) -> None:
    where = build(shape, SMALL)
    assert list(where.nodes) == nodes
    feeder = Feeder(where)
    feeder.feed(load("synthetic:prompt=64,output=8,every=500us", 20))
    assert (feeder.sent, feeder.answered, feeder.faults()) == (20, 20, [])
    found = figures(where)
    assert (found.requests, found.ends, found.output_tokens) == (20, {"length": 20}, 160)
    assert (found.first_token.count, found.token_gap.count) == (20, 140)
    assert found.prompt_tokens == 20 * 64
    assert all(0 < use.peak_pages <= use.pages == 256 for use in found.nodes.values())


def test_shared_prefixes_are_found_in_the_cache(mooncake: Path) -> None:
    where = build("1", SMALL)
    feeder = Feeder(where)
    feeder.feed(load(str(mooncake), speed=0.01))
    assert feeder.faults() == []
    found = figures(where)
    assert (found.prompt_tokens, found.cached_tokens) == (1730, BLOCK)
    assert found.hit_rate == BLOCK / 1730


def test_who_leaves_is_answered_too() -> None:
    arrivals = load("synthetic:prompt=64,output=40,every=500us", 60)
    leaves = leaving(arrivals, 0.2, 0.3, seed=1)
    ways = [leave.how for leave in leaves.values()]
    assert 5 < ways.count("abort") < 20
    assert 10 < ways.count("disconnect") < 30
    where = build("1+1", SMALL)
    feeder = Feeder(where, check=True)
    feeder.feed(arrivals, leaves)
    assert feeder.faults() == []
    ends = figures(where).ends
    assert ends["abort"] + ends["length"] == 60
    assert ends["abort"] > 20


def test_a_cluster_that_is_stuck_is_left_and_named() -> None:
    where = build("1", SMALL)
    where.nodes["unified-0"].gates["step"].hold()
    feeder = Feeder(where)
    feeder.feed([Arrival(0, 20, 5)], {0: Leave("abort", 10**9)})
    assert feeder.answered == 0
    assert "r0 has no answer" in feeder.faults()
    assert figures(where).ends == {"no answer": 1}


def test_quantiles_are_values() -> None:
    assert Spread.of([]).quantiles == {}
    spread = Spread.of(range(1_000, 101_000, 1_000))
    assert (spread.count, spread.quantiles) == (
        100,
        {"p50": 50.0, "p90": 90.0, "p99": 99.0, "max": 100.0},
    )
    assert Spread.of([7_000]).quantiles["p50"] == 7.0
