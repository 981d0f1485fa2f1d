"""The openai-agents package: an agent that calls a tool and answers, over both of its models, streamed and at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    AgentsException,
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

from tests.clients.scenario import (
    AFTERTHOUGHT,
    ARGUMENTS,
    BREAK,
    BROKEN,
    FINAL,
    PREAMBLE,
    QUESTION,
    REASONING,
    THANKS,
    WEATHER,
    WELCOME,
    argument_text,
)
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


def items(result: RunResult | RunResultStreaming) -> list[tuple[str, str]]:
    """What a run has added to the conversation: the kind of each item, and what it says."""
    return [(item.type.removesuffix("_item"), _text(item.to_input_item())) for item in result.new_items]


def _text(item: Any) -> str:
    """The text of an item: over chat the package keeps reasoning as a summary, over responses as content."""
    parts = item.get("content") or item.get("summary")
    return "".join(part["text"] for part in parts).strip() if parts else str(item.get("output") or item["arguments"])


RUN = [
    ("reasoning", REASONING),
    ("message_output", PREAMBLE),
    ("tool_call", argument_text(ARGUMENTS)),
    ("tool_call_output", WEATHER["Ålesund"]),
    ("reasoning", AFTERTHOUGHT),
    ("message_output", FINAL),
]

by_model = pytest.mark.parametrize("model", MODELS)


@by_model
def test_a_run(server: Server, model: str) -> None:
    async def use(assistant: Assistant) -> None:
        result = await assistant.run(QUESTION)
        assert items(result) == RUN and result.final_output == FINAL and assistant.calls == [ARGUMENTS]
        usage = result.context_wrapper.usage
        assert usage.requests == 2 and usage.output_tokens > usage.output_tokens_details.reasoning_tokens > 10

    run(server, model, use)


@by_model
def test_a_streamed_run(server: Server, model: str) -> None:
    async def use(assistant: Assistant) -> None:
        events, result = await assistant.stream(QUESTION)
        assert items(result) == RUN and result.final_output == FINAL and assistant.calls == [ARGUMENTS]
        raw = [event.data for event in events if event.type == "raw_response_event"]
        deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
        assert "".join(deltas).replace(PREAMBLE, "", 1).strip() == FINAL
        arguments = [event.delta for event in raw if event.type == "response.function_call_arguments.delta"]
        assert "".join(arguments) == argument_text(ARGUMENTS)
        names = [event.name for event in events if event.type == "run_item_stream_event"]
        assert names.count("tool_called") == names.count("tool_output") == 1
        usage = result.context_wrapper.usage
        assert usage.requests == 2 and usage.total_tokens == usage.input_tokens + usage.output_tokens > 100

    run(server, model, use, include_usage=True)


@by_model
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_call_that_is_asked_for(qwen: Server, model: str, choice: str) -> None:
    """The first turn must call, the second is free again."""

    async def use(assistant: Assistant) -> None:
        result = await assistant.run(QUESTION)
        assert result.final_output == FINAL and assistant.calls == [ARGUMENTS]

    run(qwen, model, use, tool_choice=choice, parallel_tool_calls=False, temperature=0.5, max_tokens=500)


@by_model
def test_a_conversation_goes_on(server: Server, model: str) -> None:
    async def use(assistant: Assistant) -> None:
        _, first = await assistant.stream(QUESTION)
        second = await assistant.run([*first.to_input_list(), {"role": "user", "content": THANKS}])
        assert second.final_output == WELCOME

    run(server, model, use)


def test_a_conversation_that_the_server_keeps(server: Server) -> None:
    async def use(assistant: Assistant) -> None:
        _, first = await assistant.stream(QUESTION, auto_previous_response_id=True)
        assert items(first) == RUN and first.last_response_id is not None
        second = await assistant.run(THANKS, previous_response_id=first.last_response_id)
        assert second.final_output == WELCOME

    run(server, "responses", use)


@by_model
def test_an_engine_that_fails_ends_the_run(server: Server, model: str) -> None:
    async def use(assistant: Assistant) -> None:
        for start in (assistant.run, assistant.stream):
            with pytest.raises((openai.APIError, AgentsException), match=BROKEN):
                await start(BREAK)

    run(server, model, use)
