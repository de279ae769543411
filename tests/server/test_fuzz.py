"""Whatever JSON comes, the answer is an answer or a 4xx: never a 500, and nothing stays behind."""

import random
from typing import Any

from server.control_api import DetokenizeBody, OpenSessionBody, TokenizeBody
from server.native_schemas import GenerateBody, NativeSampling
from server.openai_schemas import ChatBody, CompletionBody
from server.schemas import Body
from tests.support.harness import serving

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        20,
        128,
        2**31,
        2**63,
        -(2**63) - 1,
        10**30,
        0.5,
        -0.5,
        1e300,
    ),
    *(
        "",
        "x",
        "5",
        "\x00",
        "\U0010ffff",
        "x" * 600,
        [],
        [1],
        [257],
        ["x"],
        [""],
        [None],
        [[1]],
        [[]],
    ),
    *({}, {"id": "s"}, {"type": "text"}, {"5": 1}, {"eos_at": 2**40}, {"n": 2}, {"x": None}, [{}]),
    *([{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text"}]}]),
]
FIELDS: dict[str, type[Body]] = {
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/open_session": OpenSessionBody,
}
BASES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
}


async def test_no_body_is_a_500() -> None:
    dice = random.Random(20261129)
    statuses: dict[int, int] = {}
    async with serving(context_length=64, step_s=0.0001) as server:
        for _ in range(600):
            path = dice.choice(list(FIELDS))
            schema = FIELDS[path]
            names = [*schema.model_fields, *schema.refused]
            body = dict(BASES.get(path, {}))
            for name in dice.sample(names, dice.randint(0, 3)):
                body[name] = dice.choice(VALUES)
            if path == "/generate" and dice.random() < 0.5:
                chosen = dice.sample(list(NativeSampling.model_fields), 2)
                body["sampling_params"] = {"max_new_tokens": 2} | {
                    name: dice.choice(VALUES) for name in chosen
                }
            status, answer = await server.post(path, body)
            statuses[status] = statuses.get(status, 0) + 1
            assert status in (200, 400, 404), (path, body, answer)
        await server.at_rest()
    assert statuses[200] > 50, statuses
    assert statuses[400] > 50, statuses
