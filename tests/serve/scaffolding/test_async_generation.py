"""Generation in the background: whoever is cancelled, and whenever, no output is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from executor.result import GenerationResult, ResultError
from serve.scaffolding.async_generation import AsyncGeneration, AsyncGenerationTask
from serve.scaffolding.streaming import streaming_generate_helper
from serve.scaffolding.task import TaskStatus
from tests.serve.scaffolding.doubles import FakeHandle, FakeWorker, delta, result, run, turn

TEXTS = ["a", "b", "cd", "e"]


async def deliver(handle: GenerationResult) -> None:
    """The real handle's steps, one every other turn."""
    for number, text in enumerate(TEXTS):
        await turn()
        await turn()
        handle.deliver(delta(text, "stop" if number == len(TEXTS) - 1 else None))


def fake() -> tuple[Any, Callable[[Any], Any]]:
    return FakeHandle(4, turns=2), lambda step: step


def real() -> tuple[Any, Callable[[Any], Any]]:
    return GenerationResult(1), lambda step: step.outputs[0].text_diff


#: What an undisturbed run gives.
EXPECTED = {fake: [1, 2, 3, 4], real: TEXTS}


async def disturbed(make: Callable[[], Any], cut: int, cancel_waiter: bool) -> list[Any]:
    """All that was taken, by one waiter until turn ``cut``, when it or the step on its way is cancelled, and by another
    one after that."""
    handle, news = make()
    feeding = asyncio.create_task(deliver(handle)) if make is real else None
    generation, taken = AsyncGeneration(handle), []

    async def take() -> None:
        async for step in generation:
            taken.append(news(step))

    waiter = asyncio.create_task(take())
    for _ in range(cut):
        await turn()
    if cancel_waiter:
        waiter.cancel()
    elif not generation.finished:
        step = generation.start()
        assert step is not None
        step.cancel()
    await asyncio.wait((waiter,), timeout=None if not cancel_waiter or waiter.done() else 5)
    await take()
    assert generation.finished and handle.finished
    if feeding is not None:
        await feeding
    return taken


@pytest.mark.parametrize("cancel_waiter", [True, False], ids=["waiter", "step"])
@pytest.mark.parametrize("make", [fake, real])
def test_cancelled_at_every_point_nothing_is_lost(make: Callable[[], Any], cancel_waiter: bool) -> None:
    for cut in range(24):
        assert run(disturbed(make, cut, cancel_waiter)) == EXPECTED[make], cut


def test_the_step_on_its_way_is_a_task_that_cancel_ends() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        generation = AsyncGeneration(handle)
        step = generation.start()
        assert isinstance(step, asyncio.Task) and generation.start() is step
        await turn()
        generation.cancel()
        await asyncio.wait((step,))
        assert step.cancelled()
        handle.deliver(delta("a", "stop"))
        assert (await anext(generation)).outputs[0].text == "a"
        with pytest.raises(StopAsyncIteration):
            await anext(generation)
        assert generation.start() is None

    run(main())


def test_who_waits_is_not_the_step_on_its_way() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        generation = AsyncGeneration(handle)
        step = generation.start()
        assert step is not None
        first, second = (asyncio.create_task(anext(generation)) for _ in range(2))
        await turn()
        first.cancel()
        await asyncio.wait((first,))
        assert first.cancelled() and generation.start() is step and not step.done()
        second.cancel()
        waiter = asyncio.create_task(anext(generation))
        await turn()
        step.cancel()
        handle.deliver(delta("a", "stop"))
        assert (await waiter).outputs[0].text == "a"

    run(main())


def test_it_is_not_finished_while_its_last_step_is_not_taken() -> None:
    async def main() -> None:
        handle = FakeHandle(1)
        generation = AsyncGeneration(handle)
        generation.start()
        await turn()
        assert handle.finished and not generation.finished
        assert await anext(generation) == 1
        assert generation.finished

    run(main())


def test_ready_tells_without_waiting() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        generation = AsyncGeneration(handle)
        assert not await generation.ready()
        handle.deliver(delta("a"))
        assert await generation.ready()
        await anext(generation)
        assert not await generation.ready()
        handle.deliver(delta("b", "stop"))
        assert await generation.ready()
        await anext(generation)
        assert not await generation.ready()

    run(main())


def test_a_terminal_error_comes_once_its_step_is_taken_and_stays() -> None:
    async def main() -> None:
        for handle in (FakeHandle(2, error=ResultError("broken")), result("a", finish=None)):
            if isinstance(handle, GenerationResult):
                handle.deliver(ResultError("broken"))
            generation = AsyncGeneration(handle)
            await anext(generation)
            for _ in range(3):
                with pytest.raises(ResultError, match="broken"):
                    await anext(generation)

    run(main())


# ------------------------------------------------------------------------------------------------------ as a task


def test_a_controller_starts_it_looks_waits_and_goes_on() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        worker, task = FakeWorker(handle), AsyncGenerationTask(prompt="p")
        assert await worker.run_task(task) is TaskStatus.RUNNING
        assert task.output_str is None
        handle.deliver(delta("a"))
        handle.deliver(delta("b"))
        await worker.run_task(task)
        assert task.output_str == "ab"
        task.streaming_step = 1
        waiting = asyncio.create_task(worker.run_task(task))
        await turn()
        assert not waiting.done()
        handle.deliver(delta("c", "stop"))
        assert await waiting is TaskStatus.DONE
        assert task.output_str == "abc" and task.end_flag

    run(main())


def test_the_double_drives_a_task_to_its_end() -> None:
    async def main() -> None:
        handle, queue = FakeHandle(5, turns=1), asyncio.Queue[Any]()
        worker = FakeWorker(handle)
        task = AsyncGenerationTask(prompt="p", streaming_step=2, streaming_output_queue=queue)
        while not task.end_flag:
            assert not handle.finished or task.generation is not None
            await worker.run_task(task)
        assert task.status is TaskStatus.DONE and handle.finished
        assert [queue.get_nowait() for _ in range(queue.qsize())] == [1, 2, 3, 4]

    run(main())


def test_a_look_ends_though_steps_come_as_fast_as_they_are_taken() -> None:
    async def main() -> None:
        worker, task = FakeWorker(FakeHandle(10_000)), AsyncGenerationTask(prompt="p")
        assert await worker.run_task(task) is TaskStatus.RUNNING
        assert not task.end_flag

    run(main())


def test_cancelled_it_ends_with_what_had_arrived() -> None:
    async def main() -> None:
        handle = result("a", "b", finish=None)
        worker, task = FakeWorker(handle), AsyncGenerationTask(prompt="p")
        await worker.run_task(task)
        task.cancel_flag = True
        assert await worker.run_task(task) is TaskStatus.CANCELLED
        assert task.output_str == "ab" and task.end_flag and worker.aborted == [handle]

    run(main())


def test_the_helper_steps_a_generation_in_the_background_too() -> None:
    async def main() -> None:
        generation = AsyncGeneration(FakeHandle(4))
        assert await streaming_generate_helper(generation, 2) == 2
        assert await streaming_generate_helper(generation, None) == 2

    run(main())
