"""Answers that are chosen from several generations, from a real server: what a client gets, and what it leaves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.process.client import Exchange, begin, fetch
from tests.process.conftest import CONFIG
from tests.process.expected import expected_body, merged, normalised
from tests.process.server import Server, until
from tests.process.test_disconnects import nothing_open, opened
from tests.process.test_streams import USAGE, chat

#: Of the prompt "hard", generations 0 and 2 are the same, and 1 is another.
VOTE, BEST = {"method": "majority_vote", "n": 3}, {"method": "best_of_n", "n": 2}
COMMENT = re.compile(rb"^: scaffolding (.*)\n\n", re.M)


@pytest.fixture(params=[0, 2], ids=["no workers", "two workers"])
def server(request: pytest.FixtureRequest, replay_server: Callable[[int], Server]) -> Server:
    return replay_server(request.param)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, scaffolding: dict[str, Any], text: str = "hard", **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(
        model="replay", messages=messages, extra_body={"scaffolding": scaffolding}, **fields
    )


@pytest.mark.parametrize("scaffolding", [VOTE, BEST])
def test_the_python_client_gets_an_ordinary_answer_and_the_usage_of_all(
    server: Server, client: openai.OpenAI, tokenizer: Path, scaffolding: dict[str, Any]
) -> None:
    name = f"tailrace_scaffolding_requests_total{{method={scaffolding['method']}}}"
    before = server.metrics()[name]
    ordinary = client.chat.completions.create(model="replay", messages=[{"role": "user", "content": "hard"}])
    whole = ask(client, scaffolding)
    assert [choice.message.content for choice in whole.choices] == [ordinary.choices[0].message.content]
    assert whole.choices[0].finish_reason == ordinary.choices[0].finish_reason
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4 * scaffolding["n"], 16 * scaffolding["n"])
    chunks = list(ask(client, scaffolding, stream=True, stream_options=USAGE))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content and chunks[-1].usage == whole.usage
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert server.metrics()[name] == before + 2


def test_a_stream_tells_how_far_it_is(server: Server, tokenizer: Path) -> None:
    path, body = chat("hard", stream=True, stream_options=USAGE, scaffolding=VOTE)
    response = asyncio.run(fetch(server.url, path, body, x_timings="1"))
    events, _, timings = response.body.partition(b": timings ")
    told = [comment.decode() for comment in COMMENT.findall(events)]
    assert told[0].startswith("0 of 3 generations, ")
    assert told[-1] == "3 of 3 generations, 48 tokens; chose generation 0: 2 votes"
    assert [comment[0] for comment in told] == sorted(comment[0] for comment in told)
    expected = COMMENT.sub(b"", expected_body(CONFIG, tokenizer, path, body))
    assert normalised(COMMENT.sub(b"", events)) == expected and merged(expected)["usage"]["completion_tokens"] == 48
    assert b'"tokens":48' in timings


@pytest.mark.parametrize(
    ("scaffolding", "fields", "param", "says"),
    [
        ({"method": "tree_search", "n": 4}, {}, "scaffolding.method", "tree_search"),
        ({"method": "majority_vote", "n": 1}, {}, "scaffolding.n", "2"),
        ({"method": "majority_vote", "n": 129}, {}, "scaffolding.n", "at most 128"),
        ({"method": "majority_vote", "n": 2, "depth": 1}, {}, "scaffolding.depth", "not a known field"),
        (VOTE, {"n": 2}, "n", "scaffolding"),
    ],
)
def test_what_cannot_be_is_a_400_that_names_the_field(
    replay_server: Callable[[int], Server], scaffolding: dict[str, Any], fields: Any, param: str, says: str
) -> None:
    url = f"{replay_server(0).url}/v1"
    with openai.OpenAI(base_url=url, api_key="-") as client, pytest.raises(openai.BadRequestError) as caught:
        ask(client, scaffolding, **fields)
    assert caught.value.param == param and says in caught.value.message


def test_a_generation_that_fails_fails_the_request(server: Server, client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="the engine has had enough"):
        ask(client, VOTE, "broken")
    with pytest.raises(openai.APIError, match="the engine has had enough"):
        list(ask(client, VOTE, "broken", stream=True))
    nothing_open(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_all_generations_of_its_one_request(server: Server, stream: bool) -> None:
    nothing_open(server)
    path, body = chat("endless", stream=stream, scaffolding={"method": "majority_vote", "n": 6})

    async def play() -> None:
        exchange: Exchange = await begin(server.url, path, body)
        await asyncio.to_thread(
            until, lambda: opened(server).get("tailrace_executor_running_outputs", 0) == 6, "all at work"
        )
        assert opened(server)["tailrace_open_requests"] == 1 == server.health()["open_requests"]
        exchange.reset()

    asyncio.run(play())
    nothing_open(server)
