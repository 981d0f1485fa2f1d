"""The ready-made methods, on a worker that writes what a test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from executor.result import ResultError
from serve.scaffolding import (
    GENERATION,
    BestOfNController,
    Controller,
    EarlyStopController,
    GenerationTask,
    MajorityVoteController,
    NativeGenerationController,
    ScaffoldingLlm,
    SelfRefineController,
    TaskError,
    TaskStatus,
    TreeSearchController,
)
from serve.scaffolding.prompt import PromptError, continued, is_messages, with_feedback
from tests.serve.scaffolding.doubles import FakeHandle, FakeWorker, WritingWorker, run

Write = Callable[[GenerationTask, int], Any]

USER = [{"role": "user", "content": "p"}]


def generate(controller: Controller, write: Write, prompt: Any = "p", **inputs: Any) -> tuple[Any, Any, WritingWorker]:
    """(the result, its progress, the worker)"""

    async def main() -> tuple[Any, Any, WritingWorker]:
        worker = WritingWorker(write)
        async with ScaffoldingLlm(controller, {GENERATION: worker}) as llm:
            task = await llm.generate_async(prompt, **inputs)
        return task, llm.progress, worker

    return run(main())


def texts(*written: str | ResultError) -> Write:
    return lambda task, number: written[number]


# ------------------------------------------------------------------------------------------------------ best of n


def test_best_of_n_takes_the_most_likely() -> None:
    task, progress, _ = generate(BestOfNController(3), texts("zz", "ab", "az"))
    assert (task.output_str, task.status) == ("ab", TaskStatus.DONE)
    assert task.details == {"scores": [-26.0, -1.5, -13.5], "chosen": 1}
    assert progress.usage() == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}


def test_best_of_n_takes_what_a_reward_says_and_asks_for_no_logprobs_then() -> None:
    controller = BestOfNController(3, reward=lambda task: len(task.output_str or ""))
    task, _, worker = generate(controller, texts("a", "abc", "ab"))
    assert (task.output_str, task.details["scores"]) == ("abc", [1, 3, 2])
    assert [sample.logprobs for sample in worker.tasks] == [None] * 3


def test_of_the_best_the_first_and_a_failed_one_is_out() -> None:
    task, progress, _ = generate(BestOfNController(3), texts(ResultError("no"), "ab", "ab"))
    assert (task.output_str, task.details["chosen"], task.details["scores"][0]) == ("ab", 1, None)
    assert progress.failed == 1


@pytest.mark.parametrize("controller", [BestOfNController(2), MajorityVoteController(2)])
def test_when_all_fail_the_reason_is_raised(controller: Controller) -> None:
    with pytest.raises(TaskError, match="none of 2 generations succeeded: no memory"):
        generate(controller, texts(ResultError("no memory"), ResultError("no memory")))


# ------------------------------------------------------------------------------------------------------ majority


def test_the_majority_wins_and_says_how() -> None:
    controller = MajorityVoteController(5, early_stop=False)
    task, progress, _ = generate(controller, texts("4", " 5 ", "5", "4", "5"))
    assert task.output_str == " 5 "
    assert task.details == {"answer": "5", "votes": {"4": 2, "5": 3}, "voters": 5}
    assert progress.done == 5


def test_a_vote_that_is_certain_ends_the_others() -> None:
    controller = MajorityVoteController(5)
    task, progress, worker = generate(controller, texts("7", "7", "7", "8" * 60, "7" * 60))
    assert task.details["answer"] == "7"
    assert (worker.aborted, progress.done, progress.cancelled) == (2, 3, 2)
    assert progress.tokens_spared > 0


def test_who_has_no_answer_has_no_vote() -> None:
    def extract(text: str) -> str | None:
        return text if text.isdigit() else None

    task, _, _ = generate(MajorityVoteController(4, extract, early_stop=False), texts("x", "x", "3", "x"))
    assert task.details == {"answer": "3", "votes": {"3": 1}, "voters": 1}
    task, _, _ = generate(MajorityVoteController(2, extract), texts("x", "y"))
    assert (task.details["answer"], task.output_str) == (None, "x")


def test_methods_nest() -> None:
    best = BestOfNController(2, reward=lambda task: len(task.output_str or ""))
    written = texts("1", "22", "3", "22", "5", "66")
    task, progress, _ = generate(MajorityVoteController(3, controller=best, early_stop=False), written)
    assert sum(task.details["votes"].values()) == 3 and progress.done == 6


# ------------------------------------------------------------------------------------------------------ refine


def wrong_until(good: str) -> Callable[[str], str | None]:
    return lambda text: None if text == good else f"not {text}"


def test_it_refines_until_the_check_passes() -> None:
    messages = [{"role": "user", "content": "Say c."}]
    task, _, worker = generate(SelfRefineController(wrong_until("c"), 5), texts("a", "b", "c"), messages)
    assert (task.output_str, task.details) == ("c", {"rounds": 3, "passed": True})
    assert worker.tasks[2].prompt == [
        *messages,
        {"role": "assistant", "content": "a"}, {"role": "user", "content": "not a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "not b"},
    ]  # fmt: skip


def test_it_ends_after_its_rounds_and_says_that_nothing_passed() -> None:
    task, _, worker = generate(SelfRefineController(wrong_until("z"), 2), texts("a", "b"))
    assert (task.output_str, task.details) == ("b", {"rounds": 2, "passed": False})
    assert worker.tasks[1].prompt == "pa\n\nnot a\n\n"
    with pytest.raises(TaskError, match="no memory"):
        generate(SelfRefineController(wrong_until("z")), texts("a", ResultError("no memory")))


# ------------------------------------------------------------------------------------------------------ early stop


def test_a_generation_is_cut_where_its_text_decides() -> None:
    controller = EarlyStopController(lambda text: "c" in text, streaming_step=2)
    task, progress, worker = generate(controller, texts("abcdefghij" * 9), options={"max_tokens": 90})
    assert (task.output_str, task.finish_reason, task.status) == ("abcd", "stop", TaskStatus.DONE)
    assert list(task.output_tokens) == [97, 98, 99, 100]
    assert task.details["stopped"] and task.details["tokens_spared"] == progress.tokens_spared > 70
    assert worker.aborted == 1 and progress.cancelled == 1


def test_what_never_decides_runs_to_its_end() -> None:
    task, progress, _ = generate(EarlyStopController(lambda text: False), texts("abcdef"))
    assert (task.output_str, task.details["stopped"], progress.cancelled) == ("abcdef", False, 0)
    with pytest.raises(TaskError, match="no memory"):
        generate(EarlyStopController(lambda text: False), texts(ResultError("no memory")))


def test_the_double_is_stopped_early_too() -> None:
    async def main() -> None:
        handle, asked = FakeHandle(100), []
        worker = FakeWorker(handle)
        controller = EarlyStopController(lambda text: asked.append(text) or len(asked) == 3, streaming_step=2)
        task = await ScaffoldingLlm(controller, {GENERATION: worker}).generate_async("p")
        assert task.details["stopped"] and worker.aborted == [handle] and asked == [""] * 3

    run(main())


# ------------------------------------------------------------------------------------------------------ tree search


def grow(task: GenerationTask, number: int) -> str:
    """Every third continuation ends in an a; a text that is long enough ends."""
    return "xya"[number % 3]


def test_the_best_beams_are_continued() -> None:
    controller = TreeSearchController(lambda text: text.count("a"), beams=1, width=3, depth=3)
    task, _, worker = generate(controller, lambda task, n: "xya"[n % 3] + "!", options={"seed": 10})
    # Every continuation is complete: there is nothing to go on with.
    assert (task.output_str, task.details) == ("a!", {"score": 1, "levels": 1, "complete": True})
    assert [sample.options["seed"] for sample in worker.tasks] == [10, 11, 12]
    assert all(sample.options["max_tokens"] == 16 for sample in worker.tasks)


@pytest.mark.parametrize(
    ("prompt", "last"),
    [
        ("p", "paa"),
        ([5, 6], [5, 6, 97, 97]),
        (
            [{"role": "user", "content": "p"}],
            [{"role": "user", "content": "p"}, {"role": "assistant", "content": "aa"}],
        ),
    ],
)
def test_each_level_goes_on_from_its_beams(prompt: Any, last: Any) -> None:
    async def main() -> None:
        worker = WritingWorker(grow, finish="length")
        controller = TreeSearchController(lambda text: text.count("a"), beams=1, width=3, depth=3)
        task = await ScaffoldingLlm(controller, {GENERATION: worker}).generate_async(prompt)
        assert (task.output_str, task.finish_reason) == ("aaa", "length")
        assert task.details == {"score": 3, "levels": 3, "complete": False}
        assert worker.tasks[-1].prompt == last and len(worker.tasks) == 9
        assert list(task.output_tokens) == [97] * 3

    run(main())


def test_a_level_without_any_continuation_fails_with_the_reason() -> None:
    with pytest.raises(TaskError, match="no continuation succeeded: no memory"):
        generate(TreeSearchController(len, width=1), texts(ResultError("no memory")))


# ------------------------------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: BestOfNController(0), "n"),
        (lambda: MajorityVoteController(0), "n"),
        (lambda: SelfRefineController(wrong_until(""), 0), "max_rounds"),
        (lambda: EarlyStopController(bool, 0), "streaming_step"),
        (lambda: TreeSearchController(len, depth=0), "depth"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make: Callable[[], object], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: must be at least 1, not 0"):
        make()


def test_native_generation_passes_its_failure_on() -> None:
    with pytest.raises(TaskError, match="no memory"):
        generate(NativeGenerationController(), texts(ResultError("no memory")))


def test_prompts() -> None:
    assert not is_messages("text") and not is_messages([1, 2]) and is_messages([{"role": "user", "content": "x"}])
    for wrong in ([], [1, "a"], 7, [{}, 1]):
        with pytest.raises(PromptError, match="^prompt: "):
            is_messages(wrong)  # type: ignore[arg-type]
    assert continued("p", "ab\ufffd", [1]) == ("pab", {})
    with pytest.raises(PromptError, match="to get feedback"):
        with_feedback([1, 2], "a", "b")
