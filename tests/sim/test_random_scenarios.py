"""Goal: whatever clients and shortages do, requests say what they say alone, and the node comes to
rest.

Method: scenarios drawn from a seed, in tiny pools, with every knob and fault of the language. A
failure prints the scenario: save it as a file, shorten it, keep it.
"""

import random
from collections.abc import Callable

import pytest

from engine.sim.scenario import run_text

SEEDS = range(40)


def cluster(draw: random.Random) -> tuple[str, bool]:
    """A node that is short of everything; whether it has a store."""
    page_size = draw.choice([1, 4, 16])
    pages = draw.choice([40, 80, 120]) if page_size == 1 else draw.choice([8, 16, 24, 40])
    options = [
        f"pages={pages} page_size={page_size} rows={draw.choice([1, 2, 3, 6])}",
        f"chunk={draw.choice([1, 3, 16, 64, 256])} depth={draw.choice([1, 2])}",
        f"queue={draw.choice([2, 8, 40])} prefix_cache={draw.choice(['on', 'on', 'off'])}",
        f"overtakes={draw.choice([0, 2, 64])} detok={draw.choice([0, 0, 3])}ms",
    ]
    if draw.random() < 0.2:
        options.append(f"waiting_timeout={draw.choice([5, 30, 100])}ms")
    if draw.random() < 0.2:
        options.append(f"running_timeout={draw.choice([10, 50, 100])}ms")
    store = draw.random() < 0.5
    if store:
        options.append(f"store=on store_latency={draw.choice([0, 2, 30])}ms")
        options.append(
            f"prefetch_timeout={draw.choice([5, 500])}ms prefetches={draw.choice([1, 3])}"
        )
    return " ".join(["cluster unified=1", *options]), store


def submission(draw: random.Random, name: str, names: list[str], sessions: list[str]) -> str:
    parts = [f"submit {name} prompt={draw.randrange(1, 200)} max_tokens={draw.randrange(40)}"]
    choices: list[tuple[float, Callable[[], str]]] = [
        (0.5, lambda: f"prefix={draw.choice('AB')}:{draw.randrange(1, 100)}"),
        (0.3, lambda: f"priority={draw.randrange(3)}"),
        (0.2, lambda: f'stop="{chr(draw.randrange(97, 122))}"'),
        (0.2, lambda: f"eos={draw.randrange(20)}"),
        (0.2, lambda: f"stop_token_ids={draw.randrange(256)},{draw.randrange(256)}"),
        (0.2, lambda: f"min_tokens={draw.randrange(5)}"),
        (0.3, lambda: "logprobs"),
        (0.3, lambda: "temperature=1"),
        (0.1, lambda: f"deadline={draw.randrange(1, 80)}ms"),
        (0.05, lambda: f"rid={draw.choice(names or [name])}"),
    ]
    parts += [make() for chance, make in choices if draw.random() < chance]
    if draw.random() < 0.2:
        parts.append(f"n={draw.randrange(1, 4)}")
    elif sessions and draw.random() < 0.4:
        parts.append(f"session={draw.choice(sessions)}")
    return " ".join(parts)


def scenario(seed: int) -> str:
    draw = random.Random(seed)
    first, store = cluster(draw)
    lines = [first]
    names: list[str] = []
    sessions: list[str] = []
    held: set[str] = set()
    for number in range(draw.randrange(10, 60)):
        kind = draw.random()
        if kind < 0.4 or not names:
            name = f"r{number}"
            lines.append(submission(draw, name, names, sessions))
            names.append(name)
        elif kind < 0.6:
            lines.append(f"run {draw.choice([0, 1000, 2000, 5000, 20000, draw.randrange(3000)])}us")
        elif kind < 0.86:
            if kind < 0.78:
                verb = draw.choice(["abort {}", "abort {}", "disconnect {}", "retract {} maybe"])
                lines.append(verb.format(draw.choice(names)))
                continue
            gate = draw.choice(["step", "commit", "schedule", *(["store"] if store else [])])
            lines.append(f"{'release' if gate in held else 'hold'} {gate} unified-0")
            held ^= {gate}
        elif kind < 0.92:
            lines.append(draw.choice(["fail step unified-0", "flush unified-0"]))
        elif kind < 0.97:
            sessions.append(f"s{number}")
            lines.append(f"open session s{number}")
        elif sessions and kind < 0.98:
            lines.append(f"close session {draw.choice(sessions)}")
        else:
            lines.append(draw.choice(["drain unified-0 grace=20ms", "abort all"]))
    lines += [f"release {gate} unified-0" for gate in sorted(held)]
    return "\n".join([*lines, "run until idle", "expect * golden", "expect base", ""])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_scenario_is_golden_and_ends_at_rest(seed: int) -> None:
    text = scenario(seed)
    outcome = run_text(text, f"seed-{seed}.scenario")
    assert not outcome.faults, f"{outcome.faults[0]}\n\n{text}"
