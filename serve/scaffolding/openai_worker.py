"""A worker over any server with OpenAI's chat completions and completions, by the ``openai`` client.

Every generation is a stream, read in the background into a handle of the same kind as the executor's. What such a
server does not tell is not there: ``output_tokens`` stays empty, and tokens are counted by its chunks until it says how
many there were.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import TYPE_CHECKING, Any

from executor.result import AbortedError, GenerationResult, Logprob, OutputDelta, ResultError
from serve.scaffolding.options import EXTENSIONS, body
from serve.scaffolding.task import GenerationTask
from serve.scaffolding.worker import Worker

if TYPE_CHECKING:
    import openai

INSTALL = "pip install 'tailrace[openai]'"


class OpenAIResult(GenerationResult):
    """A handle of a stream from elsewhere. counted: tokens generated so far, by chunks or by the server's word."""

    __slots__ = ("counted", "reading")

    def __init__(self, rid: int) -> None:
        super().__init__(rid)
        self.counted = 0
        self.reading: asyncio.Task[OutputDelta | ResultError] | None = None

    @property
    def completion_tokens(self) -> int:
        """Its token ids are not known, but perhaps their number."""
        return self.counted


class OpenAIWorker(Worker):
    """base_url: with ``/v1``. model: the served model's name; None asks the server and takes its first.

    ResultError for everything that goes wrong between here and there, so that it is the task's reason. RuntimeError
    when the ``openai`` package is not installed.
    """

    def __init__(self, base_url: str, api_key: str = "none", model: str | None = None, **client: Any) -> None:
        openai_module = _openai()
        self._client = openai_module.AsyncOpenAI(base_url=base_url, api_key=api_key, **client)
        self._error: type[Exception] = openai_module.OpenAIError
        self._model, self._asking = model, asyncio.Lock()
        self._rids = itertools.count()

    async def submit(self, task: GenerationTask) -> OpenAIResult:
        """Start a stream. ApiError for options that there are not; the rest is for the server to refuse."""
        asked = body(task)
        if "model" not in asked:
            asked["model"] = await self._served_model()
        task.max_tokens = asked.get("max_tokens")
        handle = OpenAIResult(next(self._rids))
        handle.reading = asyncio.create_task(self._read(handle, asked))
        handle.reading.add_done_callback(lambda reading: self._finish(handle, reading))
        return handle

    def abort_handle(self, handle: OpenAIResult) -> None:
        """Close the connection, which ends the generation on the server."""
        if handle.reading is not None:
            handle.reading.cancel()

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.close()

    async def _served_model(self) -> str:
        async with self._asking:  # the first asks for all
            if self._model is None:
                self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        try:
            models = await self._client.models.list()
        except self._error as error:
            raise ResultError(f"{self._client.base_url}: {error}") from error
        if not models.data:
            raise ResultError(f"{self._client.base_url}: the server has no model")
        return str(models.data[0].id)

    def _finish(self, handle: OpenAIResult, reading: asyncio.Task[OutputDelta | ResultError]) -> None:
        """The stream is over, so the handle is too, whatever it was: an error of the client, of the HTTP library under
        it, or one that the server's odd chunks have led to."""
        if reading.cancelled():
            handle.deliver(AbortedError("the generation was aborted"))
        elif (error := reading.exception()) is not None:
            words = str(error) if isinstance(error, self._error) else repr(error)
            handle.deliver(ResultError(f"{self._client.base_url}: {words}"))
        else:
            handle.deliver(reading.result())

    async def _read(self, handle: OpenAIResult, asked: dict[str, Any]) -> OutputDelta | ResultError:
        """All steps but the last, which is returned once usage is known: it comes behind the finish."""
        finish: str | None = None
        async with await self._stream(asked) as stream:
            async for chunk in stream:
                if chunk.usage is not None:
                    handle.prompt_tokens = chunk.usage.prompt_tokens
                    handle.counted = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    finish = choice.finish_reason or finish
                    _step(handle, choice)
        if finish is None:
            return ResultError(f"{self._client.base_url}: the stream ended without a finish reason")
        return OutputDelta(0, (), "", (), finish)

    async def _stream(self, asked: dict[str, Any]) -> openai.AsyncStream[Any]:
        standard = {name: value for name, value in asked.items() if name not in EXTENSIONS}
        extra = {name: value for name, value in asked.items() if name in EXTENSIONS}
        resource: Any = self._client.chat.completions if "messages" in asked else self._client.completions
        stream: openai.AsyncStream[Any] = await resource.create(
            **standard, stream=True, stream_options={"include_usage": True}, extra_body=extra
        )
        return stream


def _step(handle: OpenAIResult, choice: Any) -> None:
    """One chunk's news of the choice; one that only says who speaks, or only ends, is no step."""
    delta = getattr(choice, "delta", None)
    text = (choice.text if delta is None else delta.content) or ""
    logprobs = _logprobs(choice.logprobs)
    if text or logprobs:
        handle.counted += max(1, len(logprobs))
        handle.deliver(OutputDelta(0, (), text, logprobs))


def _logprobs(given: Any) -> list[Logprob]:
    """Log-probabilities in the form of chat or of completions; ids are -1, since they are not told."""
    if given is None:
        return []
    if getattr(given, "content", None):
        return [Logprob(-1, entry.logprob, (), entry.token) for entry in given.content]
    texts, values = getattr(given, "tokens", None) or [], getattr(given, "token_logprobs", None) or []
    return [Logprob(-1, value if value is not None else -math.inf, (), text) for text, value in zip(texts, values)]


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise RuntimeError(f"OpenAIWorker needs the openai package: {INSTALL}") from error
    return openai
