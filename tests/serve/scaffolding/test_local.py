"""With a real executor child on the replay engine, real workers, and sockets between them."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor.child import ChildError
from executor.result import ResultError
from serve.config import Config
from serve.scaffolding import (
    GENERATION,
    AsyncGenerationTask,
    EarlyStopController,
    ExecutorWorker,
    GenerationTask,
    MajorityVoteController,
    NativeGenerationController,
    ScaffoldingLlm,
    StreamGenerationTask,
    TaskError,
    TaskStatus,
    TreeSearchController,
)
from serve.scaffolding.local import LocalExecutor
from tests.process.expected import encoded, script

Configure = Callable[..., Config]


def run(coroutine: Any, timeout: float = 60) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, timeout))


async def until(holds: Callable[[], bool]) -> None:
    """Reports come once a second."""
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come true within 10 s")


async def tokens_of(local: LocalExecutor) -> int:
    """What the executor counts, once it is at rest: in a report that no later one differs from."""
    await local.executor.wait_idle()
    await until(lambda: local.executor.status.get("engine_running") == 0)
    while True:
        report = local.executor.status
        await until(lambda before=report: local.executor.status is not before)  # type: ignore[misc]
        if local.executor.status["tokens"] == report["tokens"] and local.executor.status["open"] == 0:
            return int(report["tokens"])


def quiet(text: str) -> None:
    """Nobody reads it."""


HELLO = script("hello", "Hello", " world", "!")


@pytest.mark.parametrize("workers", [0, 1])
def test_text_ids_and_messages_generate_the_same(config: Configure, workers: int) -> None:
    async def main() -> None:
        async with LocalExecutor(config(workers, rule="prompt", scripts=[HELLO]), quiet) as local:
            llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: local.worker()})
            forms = ["hello", encoded("hello"), [{"role": "user", "content": "hello"}]]
            for task in await llm.generate(forms, options={"max_tokens": 50}, logprobs=0):
                assert (task.output_str, task.finish_reason) == ("Hello world!", "stop")
                assert (list(task.output_tokens), len(task.output_logprobs)) == (HELLO["token_ids"], 3)
                assert task.mean_logprob < 0
            assert llm.progress.usage() == {"prompt_tokens": 15, "completion_tokens": 9, "total_tokens": 24}

    run(main())


def test_stop_strings_and_options_are_honoured_and_others_refused_by_name(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(rule="prompt", scripts=[HELLO]), quiet) as local:
            llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: local.worker()})
            task = await llm.generate_async("hello", options={"stop": ["wor"]})
            assert (task.output_str, task.finish_reason) == ("Hello ", "stop")
            for options, words in [
                ({"max_token": 5}, "options.max_token"), ({"temperature": "hot"}, "temperature must be a number"),
                ({"max_tokens": 1 << 30}, "maximum context length"), ({"n": 2}, "options.n"),
            ]:  # fmt: skip
                with pytest.raises(TaskError, match=words):
                    await llm.generate_async("hello", options=options)
            for prompt in ([], [1, "two"], 5, [{"role": "user"}]):
                with pytest.raises(TaskError, match="prompt|content"):
                    await llm.generate_async(prompt)  # type: ignore[arg-type]
            assert llm.progress.failed == 8 and llm.progress.done == 1

    run(main())


def test_an_error_of_the_engine_is_the_tasks_reason(config: Configure) -> None:
    async def main() -> None:
        broken = script("x", "Hello", finish_reason="error", message="the engine has had enough")
        async with LocalExecutor(config(rule="prompt", scripts=[broken]), quiet) as local:
            task = GenerationTask(prompt="x")
            assert await local.worker().run_task(task) is TaskStatus.FAILED
            assert task.reason is not None and "the engine has had enough" in task.reason
            for _ in range(2):
                with pytest.raises(ResultError, match="had enough"):
                    await anext(task.request_handle)

    run(main())


def test_without_an_executor_that_will_come_nothing_waits_for_one(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(0), quiet) as local:
            local.failure = "the executor cannot be restarted"
            task = GenerationTask(prompt="x")
            assert await local.worker().run_task(task) is TaskStatus.FAILED
            assert task.reason == local.failure

    run(main())


def test_a_tree_grows_from_messages_as_the_chat_template_continues_them(config: Configure) -> None:
    async def main() -> None:
        # Text and messages are continued as text, so each level is a prompt of its own; ids as ids, by the same script.
        scripts = [script("go", " the", "ing"), script("go the", " a", "ing"), script("go the a", "END")]
        async with LocalExecutor(config(rule="prompt", scripts=scripts), quiet) as local:
            controller = TreeSearchController(len, beams=1, width=1, step_tokens=1, depth=4)
            llm = ScaffoldingLlm(controller, {GENERATION: local.worker()})
            grown = await llm.generate(["go", [{"role": "user", "content": "go"}], encoded("go")])
            assert [task.output_str for task in grown] == [" the aEND", " the aEND", " theing"]
            assert [task.finish_reason for task in grown] == ["stop"] * 3

    run(main())


def test_a_stream_in_steps_is_the_stream_at_once(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(step_interval=0.001), quiet) as local:
            worker, options = local.worker(), {"max_tokens": 60}
            whole = GenerationTask(prompt="p", options=options)
            await worker.run_task(whole)
            assert whole.finish_reason == "length" and len(whole.output_tokens) == 60
            for kind, step in [(StreamGenerationTask, 1), (StreamGenerationTask, 7), (AsyncGenerationTask, 3)]:
                task = kind(prompt="p", options=options, streaming_step=step)
                seen = ""
                while not task.end_flag:
                    await worker.run_task(task)
                    assert (task.output_str or "").startswith(seen)
                    seen = task.output_str or ""
                assert (seen, list(task.output_tokens)) == (whole.output_str, list(whole.output_tokens))

    run(main())


async def disturbed(worker: ExecutorWorker, options: dict[str, Any], cut: int) -> str | None:
    """A generation whose steps are cancelled again and again, each time after ``cut`` turns of the loop: both who waits
    and what it waits for."""
    task = AsyncGenerationTask(prompt="p", options=options)
    await worker.run_task(task)
    while not task.end_flag:
        task.streaming_step = None
        running = asyncio.create_task(worker.run_task(task))
        for _ in range(cut):
            await asyncio.sleep(0)
        running.cancel()
        if task.generation is not None and (step := task.generation.start()) is not None:
            step.cancel()
        await asyncio.wait((running,))
        task.streaming_step = 1
        await worker.run_task(task)
    return task.output_str


def test_a_real_generation_cancelled_on_its_way_loses_nothing(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(0, step_interval=0.0005), quiet) as local:
            worker, options = local.worker(), {"max_tokens": 30}
            whole = GenerationTask(prompt="p", options=options)
            await worker.run_task(whole)
            for cut in range(0, 60, 2):
                assert await disturbed(worker, options, cut) == whole.output_str, cut

    run(main())


# ------------------------------------------------------------------------------------------------------ cancelling


def test_early_stop_spares_the_executor_what_it_says(config: Configure) -> None:
    """The claim is made of what had arrived when each abort was confirmed. What the executor made beyond that was in
    flight: a step that came together with the confirmation."""

    async def main() -> None:
        n, limit = 40, 4000
        async with LocalExecutor(config(step_interval=0.002), quiet) as local:
            llm = ScaffoldingLlm(EarlyStopController(lambda text: len(text) > 30), {GENERATION: local.worker()})
            tasks = await llm.generate([f"prompt {number}" for number in range(n)], options={"max_tokens": limit})
            await llm.settled()
            assert all(task.details["stopped"] and task.status is TaskStatus.DONE for task in tasks)
            made = await tokens_of(local)
            assert made < n * limit / 4
            claimed = llm.progress.tokens_spared
            assert 0 <= claimed - (n * limit - made) <= claimed / 50
            assert sum(task.details["tokens_spared"] for task in tasks) == claimed
            assert llm.progress.cancelled == n and llm.progress.completion_tokens == n * limit - claimed

    run(main())


def test_a_request_that_is_cancelled_stops_its_generations(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(step_interval=0.002), quiet) as local:
            llm = ScaffoldingLlm(MajorityVoteController(8), {GENERATION: local.worker()})
            result = llm.generate_async("p", options={"max_tokens": 1_000_000})
            await until(lambda: result.progress.completion_tokens > 20)
            result.cancel()
            with pytest.raises(TaskError, match="cancelled"):
                await result
            await llm.settled()
            assert (result.progress.cancelled, result.progress.running) == (8, 0)
            made = await tokens_of(local)
            assert made / 2 < result.progress.completion_tokens <= made < 100_000
            assert result.progress.tokens_spared == 8_000_000 - result.progress.completion_tokens

    run(main())


def test_who_is_cancelled_while_waiting_cancels_the_request(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(step_interval=0.002), quiet) as local:
            llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: local.worker()})
            result = llm.generate_async("p", options={"max_tokens": 1_000_000})

            async def handler() -> None:
                await result

            waiting = asyncio.create_task(handler())
            await until(lambda: result.progress.completion_tokens > 0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
            await llm.shutdown()
            assert result.done and local.executor.open_requests == 0

    run(main())


# ------------------------------------------------------------------------------------------------------ its life


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's sockets are, and nobody else's. A short path."""
    with tempfile.TemporaryDirectory(prefix="tr-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def test_nothing_is_left_behind(config: Configure, temporary: Path) -> None:
    before = set(psutil.Process().children())

    async def main() -> None:
        async with LocalExecutor(config(), quiet):
            assert len(set(psutil.Process().children()) - before) == 2
            assert len(list(temporary.glob("tailrace-*"))) == 1

    run(main())
    assert set(psutil.Process().children()) <= before and list(temporary.iterdir()) == []


def test_what_still_runs_when_it_ends_fails_with_that_reason(config: Configure) -> None:
    async def main() -> None:
        async with LocalExecutor(config(step_interval=0.01), quiet) as local:
            worker, task = local.worker(), GenerationTask(prompt="p", options={"max_tokens": 100_000})
            running = asyncio.create_task(worker.run_task(task))
            await until(lambda: task.completion_tokens > 0)
        assert await running is TaskStatus.FAILED
        late = GenerationTask(prompt="p")
        assert await worker.run_task(late) is TaskStatus.FAILED
        assert task.reason == "the executor was ended" and late.reason is not None

    run(main())


def test_a_start_that_fails_says_why_and_leaves_nothing(config: Configure, temporary: Path) -> None:
    before = set(psutil.Process().children())

    async def main(bad: Config) -> None:
        async with LocalExecutor(bad, quiet):
            raise AssertionError("it started")

    with pytest.raises(ChildError, match="batch_size"):
        run(main(config(batch_size=0)))
    with pytest.raises(ValueError, match="tokenizer"):
        run(main(Config(engine="replay")))
    assert set(psutil.Process().children()) <= before and list(temporary.iterdir()) == []


def test_a_worker_that_dies_costs_nothing(config: Configure) -> None:
    before = set(psutil.Process().children())

    async def main() -> None:
        async with LocalExecutor(config(2, step_interval=0.005), quiet) as local:
            llm = ScaffoldingLlm(NativeGenerationController(), {GENERATION: local.worker()})
            expected = [task.output_str for task in await llm.generate(["a", "b", "c"], options={"max_tokens": 100})]
            results = [llm.generate_async(prompt, options={"max_tokens": 100}) for prompt in ("a", "b", "c")]
            await until(lambda: all(result.progress.completion_tokens > 10 for result in results))
            workers = set(psutil.Process().children()) - before
            os.kill(next(w.pid for w in workers if "postproc_workers.process" in w.cmdline()), signal.SIGKILL)
            assert [(await result).output_str for result in results] == expected

    run(main())
