"""Step semantics, on the least that a handle is and on the real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from executor.result import AbortedError, GenerationResult, ResultError
from serve.scaffolding.streaming import (
    StepOutput,
    StreamGenerationTask,
    stream_generation_handler,
    streaming_generate_helper,
)
from serve.scaffolding.task import TaskStatus
from tests.serve.scaffolding.doubles import FakeHandle, FakeWorker, delta, result, run, turn


def drained(queue: asyncio.Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def test_it_steps_until_the_handle_is_finished_and_queues_every_step_but_the_last() -> None:
    async def main() -> None:
        handle, queue = FakeHandle(5), asyncio.Queue[Any]()
        assert await streaming_generate_helper(handle, None, queue) == 5
        assert handle.finished
        assert drained(queue) == [1, 2, 3, 4]

    run(main())


@pytest.mark.parametrize("budget", range(7))
def test_it_stops_at_its_budget_and_can_be_continued(budget: int) -> None:
    async def main() -> None:
        handle, queue = FakeHandle(5), asyncio.Queue[Any]()
        assert await streaming_generate_helper(handle, budget, queue) == min(budget, 5)
        assert handle.finished == (budget >= 5)
        assert drained(queue) == [1, 2, 3, 4][:budget]
        assert await streaming_generate_helper(handle, None, queue) == max(0, 5 - budget)
        assert drained(queue) == [1, 2, 3, 4][budget:]

    run(main())


def test_a_finished_handle_is_not_stepped() -> None:
    async def main() -> None:
        handle = FakeHandle(0, error=ResultError("it must not be asked"))
        assert await streaming_generate_helper(handle, None, asyncio.Queue()) == 0

    run(main())


def test_a_real_handle_queues_what_each_step_added() -> None:
    async def main() -> None:
        queue = asyncio.Queue[Any]()
        handle = result("ab", "c", "d")
        await streaming_generate_helper(handle, None, queue)
        assert drained(queue) == [StepOutput("ab", [97, 98]), StepOutput("c", [99])]
        assert handle.outputs[0].text == "abcd"

    run(main())


def test_a_terminal_error_is_raised_now_and_at_every_later_anext() -> None:
    async def main() -> None:
        for handle in (FakeHandle(3, error=ResultError("broken")), result("a", "b", finish=None)):
            if isinstance(handle, GenerationResult):
                handle.deliver(ResultError("broken"))
            queue = asyncio.Queue[Any]()
            with pytest.raises(ResultError, match="broken"):
                await streaming_generate_helper(handle, None, queue)
            assert queue.qsize() == 2
            for _ in range(2):
                with pytest.raises(ResultError, match="broken"):
                    await anext(handle)

    run(main())


@pytest.mark.parametrize("turns", [0, 1, 3])
@pytest.mark.parametrize("cut", range(14))
def test_cancelled_at_any_point_it_goes_on_without_a_gap(turns: int, cut: int) -> None:
    async def main() -> None:
        handle, queue = FakeHandle(4, turns), asyncio.Queue[Any]()
        stepping = asyncio.create_task(streaming_generate_helper(handle, None, queue))
        for _ in range(cut):
            await turn()
        stepping.cancel()
        await asyncio.wait((stepping,))
        await streaming_generate_helper(handle, None, queue)
        assert drained(queue) == [1, 2, 3]

    run(main())


# ------------------------------------------------------------------------------------------------------ the handler


@pytest.mark.parametrize("step", [1, 2, 3, 7, None])
def test_the_end_flag_is_set_exactly_when_the_handle_finishes(step: int | None) -> None:
    async def main() -> None:
        for handle in (FakeHandle(6), result(*"abcdef")):
            worker, task = FakeWorker(handle), StreamGenerationTask(prompt="p", streaming_step=step)
            rounds = 0
            while not task.end_flag:
                assert not handle.finished
                await stream_generation_handler(worker, task)
                rounds += 1
                assert task.end_flag == handle.finished
            assert rounds == (1 if step is None else -(-6 // step))
            assert worker.submitted == [task]

    run(main())


def test_no_step_starts_the_generation_and_nothing_more() -> None:
    async def main() -> None:
        handle = FakeHandle(3, error=ResultError("it must not be asked"))
        worker, task = FakeWorker(handle), StreamGenerationTask(prompt="p", streaming_step=0)
        assert await worker.run_task(task) is TaskStatus.RUNNING
        assert task.request_handle is handle and not task.end_flag and task.output_str is None

    run(main())


def test_partial_output_is_there_after_each_round() -> None:
    async def main() -> None:
        worker, task = FakeWorker(result("ab", "c", "d")), StreamGenerationTask(prompt="p", streaming_step=2)
        assert await worker.run_task(task) is TaskStatus.RUNNING
        assert (task.output_str, list(task.output_tokens), task.finish_reason) == ("abc", [97, 98, 99], None)
        assert await worker.run_task(task) is TaskStatus.DONE
        assert (task.output_str, task.finish_reason) == ("abcd", "stop")
        assert (task.prompt_tokens, task.completion_tokens) == (3, 4)

    run(main())


def test_a_failed_generation_is_a_failed_task_with_its_reason() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        handle.deliver(ResultError("out of memory"))
        for broken in (handle, FakeHandle(1, error=ResultError("out of memory"))):
            worker, task = FakeWorker(broken), StreamGenerationTask(prompt="p", streaming_step=5)
            assert await worker.run_task(task) is TaskStatus.FAILED
            assert (task.reason, task.output_str, task.end_flag) == ("out of memory", None, True)

    run(main())


def test_what_is_aborted_from_elsewhere_says_so() -> None:
    async def main() -> None:
        handle = GenerationResult(1)
        handle.deliver(delta("a"))
        handle.deliver(AbortedError("the generation was aborted"))
        worker, task = FakeWorker(handle), StreamGenerationTask(prompt="p", streaming_step=None)
        assert await worker.run_task(task) is TaskStatus.CANCELLED
        assert (task.reason, task.output_str) == ("the generation was aborted", "a")

    run(main())


def test_the_cancel_flag_aborts_and_keeps_what_had_arrived() -> None:
    async def main() -> None:
        handle = result("a", "b", finish=None)
        worker, task = FakeWorker(handle), StreamGenerationTask(prompt="p", streaming_step=1)
        await worker.run_task(task)
        task.cancel_flag = True
        assert await worker.run_task(task) is TaskStatus.CANCELLED
        assert worker.aborted == [handle] and task.end_flag
        assert task.output_str == "ab"  # the second step had arrived before the abort was confirmed

    run(main())


def test_a_task_that_has_ended_is_not_run_again() -> None:
    async def main() -> None:
        worker, task = FakeWorker(result("a")), StreamGenerationTask(prompt="p", streaming_step=None)
        await worker.run_task(task)
        assert await worker.run_task(task) is TaskStatus.DONE
        assert len(worker.submitted) == 1

    run(main())


def test_a_task_that_cannot_be_started_ends_for_whoever_waits_for_its_end_flag() -> None:
    class Refusing(FakeWorker):
        async def submit(self, task: Any) -> Any:
            raise ResultError("the executor does not take requests")

    async def main() -> None:
        failed, cancelled = StreamGenerationTask(prompt="p"), StreamGenerationTask(prompt="p", cancel_flag=True)
        assert await Refusing().run_task(failed) is TaskStatus.FAILED
        assert await Refusing().run_task(cancelled) is TaskStatus.CANCELLED
        assert failed.end_flag and cancelled.end_flag and cancelled.finish_reason == "abort"
        assert failed.reason == "the executor does not take requests" and failed.output_str is None

    run(main())
