"""The scheduler: composition, bounds, errors, and that nothing outlives its controller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from executor.result import ResultError
from serve.scaffolding import (
    GENERATION,
    AsyncGenerationTask,
    Controller,
    GenerationTask,
    NativeGenerationController,
    ParallelProcess,
    Process,
    Progress,
    ScaffoldingLlm,
    StreamGenerationTask,
    Task,
    TaskError,
    TaskStatus,
    Worker,
)
from tests.serve.scaffolding.doubles import FakeHandle, FakeWorker, WritingWorker, run, turn


def echo(task: GenerationTask, number: int) -> str:
    return str(task.prompt)


class Made(Controller):
    """A controller from a generator function of the prompt."""

    def __init__(self, make: Any) -> None:
        self._make = make

    def generate(self, prompt: Any, **inputs: Any) -> Process:
        return (yield from self._make(prompt))


async def until(holds: Any) -> None:
    for _ in range(10_000):
        if holds():
            return
        await turn()
    raise AssertionError("it did not come true")


def test_many_prompts_at_once_give_their_results_in_order() -> None:
    async def main() -> None:
        worker = WritingWorker(echo)
        async with ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}) as llm:
            tasks = await llm.generate([f"prompt {n}" for n in range(300)])
        assert [task.output_str for task in tasks] == [f"prompt {n}" for n in range(300)]
        assert worker.peak == 300 and llm.progress.done == 300
        assert llm.progress.usage()["prompt_tokens"] == 600

    run(main())


@pytest.mark.parametrize(("bound", "peak"), [({"max_in_flight": 7}, 7), ({"max_parallel_requests": 5}, 5)])
def test_concurrency_is_bounded(bound: dict[str, int], peak: int) -> None:
    async def main() -> None:
        worker = WritingWorker(echo)
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}, **bound)
        tasks = await llm.generate([f"prompt {n}" for n in range(60)])
        assert len(tasks) == 60 and worker.peak == peak
        (name,) = bound
        with pytest.raises(ValueError, match=name):
            ScaffoldingLlm(NativeGenerationController(), {}, **{name: 0})

    run(main())


def test_streaming_tasks_do_not_wait_for_each_others_places() -> None:
    def process(prompt: str) -> Process:
        streams = [StreamGenerationTask(prompt=prompt, streaming_step=1) for _ in range(6)]
        while not all(stream.ended for stream in streams):
            yield streams
        return [stream.output_str for stream in streams]

    async def main() -> None:
        llm = ScaffoldingLlm(Made(process), {GENERATION: WritingWorker(echo)}, max_in_flight=2)
        assert await llm.generate_async("abc") == ["abc"] * 6

    run(main())


def test_controllers_compose_in_sequence_and_side_by_side() -> None:
    def one(prompt: str) -> Process:
        task = GenerationTask(prompt=prompt)
        yield from NativeGenerationController().process([task])
        return task.output_str

    def process(prompt: str) -> Process:
        first = yield from one(prompt)
        both = ParallelProcess([one(first + "x"), one(first + "y")])
        yield both
        return both.results

    async def main() -> None:
        llm = ScaffoldingLlm(Made(process), {GENERATION: WritingWorker(echo)})
        assert await llm.generate_async("a") == ["ax", "ay"]

    run(main())


def test_one_controller_serves_many_requests_with_options_of_their_own() -> None:
    async def main() -> None:
        worker = WritingWorker(lambda task, n: str(task.options["max_tokens"]))
        llm = ScaffoldingLlm(NativeGenerationController({"max_tokens": 5}), {GENERATION: worker})
        results = [llm.generate_async("p"), llm.generate_async("p", options={"max_tokens": 9})]
        assert [(await result).output_str for result in results] == ["5", "9"]

    run(main())


def test_the_double_alone_drives_the_scheduler() -> None:
    def process(prompt: str) -> Process:
        tasks = [
            GenerationTask(prompt=prompt),
            StreamGenerationTask(prompt=prompt, streaming_step=2),
            AsyncGenerationTask(prompt=prompt, streaming_step=2),
        ]
        while not all(task.end_flag for task in tasks):
            yield tasks
        return tasks

    async def main() -> None:
        handles = [FakeHandle(5, turns=1) for _ in range(3)]
        llm = ScaffoldingLlm(Made(process), {GENERATION: FakeWorker(*handles)})
        tasks = await llm.generate_async("p")
        assert all(task.status is TaskStatus.DONE for task in tasks) and all(handle.finished for handle in handles)
        assert llm.progress.done == 3

    run(main())


# ------------------------------------------------------------------------------------------------------ errors


def test_a_failure_is_raised_with_its_reason_and_ends_its_request_alone() -> None:
    async def main() -> None:
        worker = WritingWorker(lambda task, n: ResultError("no memory") if task.prompt == "bad" else "fine")
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker})
        bad, good = llm.generate_async("bad"), llm.generate_async("good")
        for _ in range(2):
            with pytest.raises(TaskError, match="no memory"):
                await bad
        assert (await good).output_str == "fine"
        assert (llm.progress.failed, llm.progress.done, bad.progress.failed, good.progress.failed) == (1, 1, 1, 0)

    run(main())


def test_an_error_side_by_side_is_raised_where_the_process_was_yielded() -> None:
    def process(prompt: str) -> Process:
        controller = NativeGenerationController()
        tasks = [GenerationTask(prompt=text) for text in ("bad", "x" * 50)]
        try:
            yield ParallelProcess(controller.process([task]) for task in tasks)
        except TaskError as error:
            return str(error), tasks[1].status is TaskStatus.DONE
        return None

    async def main() -> None:
        worker = WritingWorker(lambda task, n: ResultError("no memory") if task.prompt == "bad" else str(task.prompt))
        llm = ScaffoldingLlm(Made(process), {GENERATION: worker})
        assert await llm.generate_async("p") == ("no memory", False)
        await llm.settled()
        assert (worker.aborted, llm.progress.cancelled, llm.progress.running) == (1, 1, 0)

    run(main())


def test_a_fault_of_the_controller_is_raised_and_ends_what_it_has_running() -> None:
    def broken(prompt: str) -> Process:
        yield [GenerationTask(prompt="a")]
        raise KeyError("a bug")

    def process(prompt: str) -> Process:
        yield ParallelProcess([broken(prompt), NativeGenerationController().process([GenerationTask(prompt="x" * 99)])])

    async def main() -> None:
        worker = WritingWorker(echo)
        llm = ScaffoldingLlm(Made(process), {GENERATION: worker})
        with pytest.raises(KeyError, match="a bug"):
            await llm.generate_async("p")
        await llm.settled()
        assert worker.aborted == 1 and worker.running == 0

    run(main())


class Lookup(Task):
    """A task that generates nothing."""

    answer: str = ""


class LookupWorker(Worker):
    """Answers, or has nothing to answer with."""

    async def _look_up(self, task: Lookup) -> None:
        if task.reason == "missing":
            raise TaskError("there is no such entry")
        task.answer = "found"

    task_handlers = {Lookup: _look_up}


def test_workers_of_other_kinds_do_other_tasks() -> None:
    def process(prompt: str) -> Process:
        found, missing = Lookup(worker_tag="lookup"), Lookup(worker_tag="lookup", reason="missing")
        yield [found, missing]
        return found, missing

    async def main() -> None:
        llm = ScaffoldingLlm(Made(process), {"lookup": LookupWorker()})
        found, missing = await llm.generate_async("p")
        assert (found.status, found.answer) == (TaskStatus.DONE, "found")
        assert (missing.status, missing.reason) == (TaskStatus.FAILED, "there is no such entry")
        with pytest.raises(ValueError, match="worker_tag: there is no worker 'generation'; there are lookup"):
            await llm.generate_async("p", controller=NativeGenerationController())
        with pytest.raises(TypeError, match="LookupWorker has no handler for a GenerationTask"):
            await LookupWorker().run_task(GenerationTask(prompt="p"))

    run(main())


# ------------------------------------------------------------------------------------------------------ cancelling


def test_what_is_enough_ends_the_others() -> None:
    def process(prompt: str) -> Process:
        tasks = [GenerationTask(prompt="x" * length) for length in (3, 400, 5, 400)]
        done = lambda: sum(task.status is TaskStatus.DONE for task in tasks) == 2  # noqa: E731
        yield ParallelProcess((NativeGenerationController().process([task]) for task in tasks), enough=done)
        return [task.status for task in tasks]

    async def main() -> None:
        worker = WritingWorker(echo)
        llm = ScaffoldingLlm(Made(process), {GENERATION: worker})
        statuses = await llm.generate_async("p")
        assert statuses.count(TaskStatus.DONE) == 2
        await llm.settled()
        assert (worker.aborted, worker.running) == (2, 0)
        assert (llm.progress.done, llm.progress.cancelled) == (2, 2)

    run(main())


@pytest.mark.parametrize("kind", [StreamGenerationTask, AsyncGenerationTask])
def test_a_controller_that_ends_leaves_nothing_running(kind: type[StreamGenerationTask]) -> None:
    def process(prompt: str) -> Process:
        task = kind(prompt="x" * 500, streaming_step=3)
        yield [task]
        return task

    async def main() -> None:
        worker = WritingWorker(echo)
        llm = ScaffoldingLlm(Made(process), {GENERATION: worker})
        task = await llm.generate_async("p")
        await llm.settled()
        assert worker.aborted == 1
        assert (task.status, task.reason) == (TaskStatus.CANCELLED, "its request needs it no more")
        assert llm.progress.tokens_spared == 100 - task.completion_tokens > 0

    run(main())


def test_a_cancelled_request_closes_its_controller() -> None:
    closed = []

    def process(prompt: str) -> Process:
        try:
            yield [GenerationTask(prompt="x" * 1000), GenerationTask(prompt="y" * 1000)]
        finally:
            closed.append(prompt)

    async def main() -> None:
        worker = WritingWorker(echo)
        async with ScaffoldingLlm(Made(process), {GENERATION: worker}) as llm:
            result = llm.generate_async("p")
            await until(lambda: worker.running == 2)
            result.cancel()
            with pytest.raises(TaskError, match="the request was cancelled"):
                await result
        assert closed == ["p"] and worker.aborted == 2 and worker.running == 0

    run(main())


def test_shutdown_ends_all_requests_and_those_that_wait() -> None:
    async def main() -> None:
        worker = WritingWorker(echo)
        worker.gate.clear()
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}, max_parallel_requests=2)
        results = [llm.generate_async("abc") for _ in range(5)]
        await until(lambda: worker.running == 2)
        await llm.shutdown()
        assert all(result.done for result in results) and worker.running == 0 and len(worker.tasks) == 2
        assert llm.progress.running == 0

    run(main())


def test_the_first_failure_of_generate_ends_the_others() -> None:
    async def main() -> None:
        worker = WritingWorker(lambda task, n: ResultError("no") if task.prompt == "bad" else "x" * 1000)
        async with ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}) as llm:
            with pytest.raises(TaskError, match="no"):
                await llm.generate(["good", "bad", "good"])
        assert worker.aborted == 2

    run(main())


# ------------------------------------------------------------------------------------------------------ progress


def test_progress_counts_what_runs_and_what_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        worker = WritingWorker(echo)
        worker.gate.clear()
        progress = Progress()
        llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}, progress=progress)
        result = llm.generate_async("abcd")
        await until(lambda: progress.running == 1)
        assert progress.line() == "1 generations: 1 running, 0 done; 0 tokens"
        worker.gate.set()
        await until(lambda: progress.completion_tokens >= 2)
        assert progress.running == 1 and result.progress.completion_tokens == progress.completion_tokens
        await result
        assert progress.usage() == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
        assert progress.line() == "1 generations: 0 running, 1 done; 4 tokens"

    run(main())


def test_samples_draw_independently() -> None:
    from serve.scaffolding import samples

    def seeds(tasks: Sequence[GenerationTask]) -> list[Any]:
        return [task.options.get("seed") for task in tasks]

    assert seeds(samples(GenerationTask(prompt="p", options={"seed": 7}), 3)) == [7, 8, 9]
    assert seeds(samples(GenerationTask(prompt="p"), 2)) == [None, None]


def test_who_waits_and_is_cancelled_cancels_its_request() -> None:
    async def main() -> None:
        worker = WritingWorker(echo)
        worker.gate.clear()
        async with ScaffoldingLlm(NativeGenerationController(), {GENERATION: worker}) as llm:
            result = llm.generate_async("abc")

            async def wait() -> None:
                await result

            waiting = asyncio.create_task(wait())
            await until(lambda: worker.running == 1)
            waiting.cancel()
            await asyncio.wait((waiting,))
            await until(lambda: result.done)
            assert waiting.cancelled() and worker.running == 0

    run(main())
