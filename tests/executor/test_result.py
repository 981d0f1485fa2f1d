"""Results: one meaning of `finished`, what a handle does at each step, and what a step costs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.result import (
    AbortedError,
    CompletionOutput,
    DetokenizedGenerationResultBase,
    GenerationResult,
    GenerationResultBase,
    Logprob,
    OutputDelta,
    ResultError,
)

T = TypeVar("T")
CLASSES = (GenerationResultBase, DetokenizedGenerationResultBase, GenerationResult)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """On an event loop, with a deadline that only a hang reaches."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


async def let_others_run() -> None:
    """One turn of the loop; no time passes."""
    await asyncio.sleep(0)


def step(text: str, finish: str | None = None, index: int = 0) -> OutputDelta:
    return OutputDelta(index, [ord(char) for char in text], text, (), finish)


# ------------------------------------------------------------------------------------------------------ finished


@pytest.mark.parametrize("kind", CLASSES)
def test_finished_is_read_only(kind: type[GenerationResultBase]) -> None:
    result = kind(1)
    for value in (True, False):
        with pytest.raises(AttributeError):
            result.finished = value  # type: ignore[misc]
    assert not result.finished
    result.finish_output(0, "stop")
    with pytest.raises(AttributeError):
        result.finished = False  # type: ignore[misc]
    assert result.finished


@pytest.mark.parametrize("kind", CLASSES)
def test_there_is_no_second_flag(kind: type[GenerationResultBase]) -> None:
    result = kind(1)
    with pytest.raises(AttributeError):
        result.done = True  # type: ignore[attr-defined]
    assert not hasattr(result, "__dict__")
    names = {name for cls in kind.__mro__ for name in getattr(cls, "__slots__", ())}
    assert {name for name in names if "done" in name or "finished" in name} == {"_done"}
    assert isinstance(vars(GenerationResultBase)["finished"], property)
    assert "finished" not in {
        name for cls in kind.__mro__[: kind.__mro__.index(GenerationResultBase)] for name in vars(cls)
    }


@given(n=st.integers(1, 5), order=st.permutations(range(5)))
def test_the_last_output_completes_the_result(n: int, order: list[int]) -> None:
    result = GenerationResultBase(1, n)
    indexes = [i for i in order if i < n]
    for count, index in enumerate(indexes, 1):
        assert not result.finished
        result.finish_output(index, "stop", "x")
        result.finish_output(index, "length")
        assert result.finished == (count == n)
    assert [(o.finish_reason, o.stop_reason, o.finished) for o in result.outputs] == [("stop", "x", True)] * n


def test_failing_ends_what_is_open() -> None:
    result = GenerationResultBase(1, 3)
    result.finish_output(1, "length")
    result.fail()
    assert result.finished
    assert [output.finish_reason for output in result.outputs] == ["error", "length", "error"]
    result.fail()
    assert [output.finish_reason for output in result.outputs] == ["error", "length", "error"]


def test_a_result_has_outputs() -> None:
    with pytest.raises(ValueError, match="num_outputs"):
        GenerationResultBase(1, 0)


# ------------------------------------------------------------------------------------------------------ steps


def test_diffs_are_those_of_the_last_step() -> None:
    result = GenerationResultBase(1, 2, prompt_tokens=7)
    entry = Logprob(5, -0.5)
    result.advance(0, [5], "a", [entry])
    first = result.outputs[0]
    assert (list(first.token_ids_diff), first.text_diff, list(first.logprobs_diff)) == ([5], "a", [entry])
    result.advance(0, [6, 7], "b")
    assert (list(first.token_ids_diff), first.text_diff, list(first.logprobs_diff)) == ([6, 7], "b", [])
    result.advance(1, [8], "c")
    assert (list(first.token_ids_diff), first.text_diff, list(first.logprobs_diff)) == ([], "", [])
    assert result.updated is result.outputs[1]
    assert first.token_ids == array("i", [5, 6, 7]) and result.completion_tokens == 4
    with pytest.raises(IndexError):
        result.advance(2, [1], "")


def test_text_is_kept_only_where_asked_for() -> None:
    kept, streamed = CompletionOutput(0, keep_text=True), CompletionOutput(0)
    assert kept.text == ""
    with pytest.raises(RuntimeError, match="text_diff"):
        assert streamed.text
    result = GenerationResultBase(1, keep_text=True)
    for text in ("a", "", "bc", "d"):
        result.advance(0, [1], text)
        assert result.outputs[0].text == result.outputs[0].text
    assert result.outputs[0].text == "abcd"


@given(st.lists(st.tuples(st.integers(0, 2), st.text("ab", max_size=3)), max_size=12))
def test_outputs_grow_apart(steps: list[tuple[int, str]]) -> None:
    result = GenerationResultBase(1, 3, keep_text=True)
    for index, text in steps:
        result.advance(index, [ord(char) for char in text], text)
        others = [output for output in result.outputs if output.index != index]
        assert all(output.text_diff == "" and not output.token_ids_diff for output in others)
    for output in result.outputs:
        assert output.text == "".join(text for index, text in steps if index == output.index)
        assert output.token_ids == array("i", map(ord, output.text))


# ------------------------------------------------------------------------------------------------------ the handle


def test_a_handle_steps_and_ends() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        handle.deliver(step("a"))
        handle.deliver(step("b", "stop"))
        assert not handle.finished  # what has arrived is not what was stepped
        assert await anext(handle) is handle
        assert handle.outputs[0].text_diff == "a" and not handle.finished
        assert await anext(handle) is handle
        assert handle.finished and handle.outputs[0].text == "ab" and handle.outputs[0].finish_reason == "stop"
        for _ in range(3):
            with pytest.raises(StopAsyncIteration):
                await anext(handle)

    run(main())


def test_a_handle_waits_for_all_outputs() -> None:
    async def main() -> None:
        handle = GenerationResult(1, 2)
        for delta in (step("a", "stop", 1), step("b"), step("c", "length")):
            handle.deliver(delta)
        seen = []
        async for result in handle:
            seen.append((result.updated.index, result.updated.text_diff, result.finished))
        assert seen == [(1, "a", False), (0, "b", False), (0, "c", True)]

    run(main())


@pytest.mark.parametrize("error", [ResultError("broken"), AbortedError("aborted")])
def test_a_terminal_error_is_raised_at_every_step_and_comes_with_done(error: ResultError) -> None:
    async def main() -> None:
        handle = GenerationResult(1, 2)
        handle.deliver(step("a", "stop", 1))
        handle.deliver(error)
        handle.deliver(step("late"))
        await anext(handle)
        assert not handle.finished
        for _ in range(3):
            with pytest.raises(ResultError) as raised:
                await anext(handle)
            assert raised.value is error and handle.finished
        assert [output.finish_reason for output in handle.outputs] == ["error", "stop"]
        with pytest.raises(ResultError):
            await handle.aresult()

    run(main())


def test_aresult_steps_to_the_end() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        task = asyncio.ensure_future(handle.aresult())
        await let_others_run()
        handle.deliver(step("a"))
        await let_others_run()
        handle.deliver(step("b", "length"))
        assert (await task).outputs[0].text == "ab"
        assert await handle.aresult() is handle

    run(main())


@given(st.lists(st.booleans(), max_size=8))
def test_cancelling_a_pending_step_loses_nothing(early: list[bool]) -> None:
    """early: whether the caller is cancelled before or just after the step arrives."""

    async def main() -> None:
        handle, text = GenerationResult(1), "abcdefgh"[: len(early)]
        for before, char in zip(early, text):
            pending = asyncio.ensure_future(anext(handle))
            await let_others_run()
            if not before:
                handle.deliver(step(char))
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            if before:
                handle.deliver(step(char))
        handle.deliver(step("", "stop"))
        assert (await handle.aresult()).outputs[0].text == text

    run(main())


def test_a_timeout_around_a_step_loses_nothing() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(handle), 0)
        handle.deliver(step("a", "stop"))
        assert (await handle.aresult()).outputs[0].text == "a"

    run(main())


def test_two_waiting_callers_both_come_back() -> None:
    """The one that finds the result finished by the other must not wait for ever."""

    async def main() -> None:
        handle = GenerationResult(1)
        both = [asyncio.ensure_future(anext(handle)) for _ in range(2)]
        await let_others_run()
        handle.deliver(step("a", "stop"))
        done, pending = await asyncio.wait(both, timeout=5)
        assert not pending
        assert sorted(type(task.exception()).__name__ for task in done) == ["NoneType", "StopAsyncIteration"]

    run(main())


def test_aborting_asks_once_it_can_matter() -> None:
    asked: list[int] = []
    handle = GenerationResult(9, abort=asked.append)
    handle.abort()
    assert asked == [9] and not handle.finished

    async def main() -> None:
        handle.deliver(step("a", "stop"))
        await handle.aresult()

    run(main())
    handle.abort()
    assert asked == [9]
    GenerationResult(9).abort()
