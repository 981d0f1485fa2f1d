"""The openai-agents package: an agent that calls a tool and answers, over both of its models, streamed and at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
)  # fmt: skip

from tests.clients.scenario import QUESTION, WEATHER
from tests.process.server import Server

MODELS: dict[str, Callable[[openai.AsyncOpenAI], Model]] = {
    "chat": lambda client: OpenAIChatCompletionsModel("replay", client),
    "responses": lambda client: OpenAIResponsesModel("replay", client),
}
CONFIG = RunConfig(tracing_disabled=True)


class Assistant:
    """An agent with a tool that knows the weather. calls: what it was asked."""

    def __init__(self, model: Model, **settings: Any) -> None:
        self.calls: list[dict[str, Any]] = []

        @function_tool
        def get_weather(city: str, days: int) -> str:
            """Weather of a city."""
            self.calls.append({"city": city, "days": days})
            return WEATHER[city]

        self.agent = Agent(
            name="assistant", instructions="Be brief.", model=model, tools=[get_weather],
            model_settings=ModelSettings(**settings),
        )  # fmt: skip

    async def run(self, question: Any, **more: Any) -> RunResult:
        return await Runner.run(self.agent, question, run_config=CONFIG, **more)

    async def stream(self, question: Any, **more: Any) -> tuple[list[Any], RunResultStreaming]:
        """The events of a streamed run, and its result."""
        result = Runner.run_streamed(self.agent, question, run_config=CONFIG, **more)
        return [event async for event in result.stream_events()], result


def run(server: Server, model: str, use: Callable[[Assistant], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            await use(Assistant(MODELS[model](client), **settings))

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("model", MODELS)
def test_x(server: Server, model: str) -> None:
    async def use(assistant: Assistant) -> None:
        r = await assistant.run(QUESTION)
        for i in r.new_items: print(i.type, i.to_input_item())
        print(r.final_output, assistant.calls)
        ev, r = await assistant.stream(QUESTION)
        for e in ev:
            print(e.type, getattr(e,'name',''), getattr(getattr(e, 'data',None),'type',''))
        for i in r.new_items: print(i.type, i.to_input_item())
        print(r.final_output, assistant.calls)
        print(r.context_wrapper.usage)
    run(server, model, use)
    assert 0
