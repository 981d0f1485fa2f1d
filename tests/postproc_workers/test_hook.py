"""Hooks: what each answer does, and that whatever goes wrong in one fails its request closed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from executor.result import CompletionOutput
from postproc_workers.hook import EMIT, SUPPRESS, Emit, HookAction, Replace, Suppress, Terminate, load_hook
from tests.helpers import CHAT, COMPLETIONS, Bench, System, request_of, row, spec_of, tokens
from tests.recordings.checker import Merged, merge_document, merge_stream

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def hook_of(answer: Callable[[CompletionOutput, str], Any]) -> Callable[[], Any]:
    """A hook class whose objects answer like the function."""

    class Hook:
        def __call__(self, output: CompletionOutput, text: str) -> HookAction:
            action: HookAction = answer(output, text)
            return action

    return Hook


def bench_of(answer: Callable[[CompletionOutput, str], Any], **body: Any) -> Bench:
    bench = Bench(spec_of(CHAT, **body), hook=hook_of(answer))
    for token in HELLO[:-1]:
        bench.give(row([token]))
    if not bench.ended:
        bench.give(row(HELLO[-1:], "stop", stop_token=True))
    return bench


def merged(bench: Bench, **options: bool) -> Merged:
    return merge_stream(bench.body, CHAT, **options)


@pytest.mark.parametrize("answer", [EMIT, Emit()])
def test_emit_changes_nothing(answer: HookAction) -> None:
    assert merged(bench_of(lambda output, text: answer)).choices[0].content == "Hello world, the answer is 42."


def test_replace_sends_other_text() -> None:
    bench = bench_of(lambda output, text: Replace("#" * len(text)) if text.isdigit() else EMIT)
    assert merged(bench).choices[0].content == "Hello world, the answer is ##."


@pytest.mark.parametrize("answer", [SUPPRESS, Suppress()])
def test_suppressed_tokens_still_count(answer: HookAction) -> None:
    bench = bench_of(lambda output, text: answer if text == " answer" else EMIT, stream_options={"include_usage": True})
    whole = merged(bench, include_usage=True)
    assert whole.choices[0].content == "Hello world, the is 42."
    assert whole.usage is not None and whole.usage["completion_tokens"] == len(HELLO)


def test_terminate_ends_one_output_and_tells_the_engine() -> None:
    bench = Bench(
        spec_of(CHAT, n=2),
        hook=hook_of(lambda output, text: Terminate("!", "length") if output.index and text == " world" else EMIT),
    )
    bench.give(
        row(HELLO[:1]), row(HELLO[:1], index=1), row(HELLO[1:2]), row(HELLO[1:2], index=1), row(HELLO[2:3], index=1)
    )
    assert bench.cancels == [(0, 1)] and not bench.ended
    bench.give(row(HELLO[2:], "stop", stop_token=True))
    choices = merged(bench).choices
    assert (choices[0].content, choices[0].finish_reason) == ("Hello world, the answer is 42.", "stop")
    assert (choices[1].content, choices[1].finish_reason, choices[1].stop_reason) == ("Hello!", "length", None)
    assert bench.worker.stats.late == 1


def test_terminate_with_a_reason_of_its_own() -> None:
    bench = bench_of(lambda output, text: Terminate(finish_reason="content_filter") if "answer" in text else EMIT)
    choice = merged(bench).choices[0]
    assert (choice.content, choice.finish_reason) == ("Hello world, the", "content_filter") and bench.cancels == [
        (0, 0)
    ]


def test_terminate_in_the_engines_last_row() -> None:
    """Nothing is left to cancel; the hook's reason holds."""
    bench = Bench(spec_of(CHAT), hook=hook_of(lambda output, text: Terminate("x", "content_filter")))
    bench.give(row(HELLO, "stop", stop_token=True))
    choice = merged(bench).choices[0]
    assert (choice.content, choice.finish_reason) == ("x", "content_filter") and bench.cancels == []


def test_terminate_in_the_row_of_an_error_ends_the_stream_once() -> None:
    bench = Bench(spec_of(CHAT), hook=hook_of(lambda output, text: Terminate("x", "stop")))
    bench.give(row(HELLO[:2], "error", message="broken"))
    whole = merged(bench)
    assert whole.error is None and whole.choices[0].content == "x"


def test_a_hook_sees_each_step_once_before_it_happens() -> None:
    seen: list[tuple[int, int, str]] = []

    def watch(output: CompletionOutput, text: str) -> HookAction:
        seen.append((output.index, len(output.token_ids), text))
        return EMIT

    bench = Bench(spec_of(CHAT, stop=["is 4"], n=2), hook=hook_of(watch))
    bench.give(row(HELLO[:2]), row(HELLO[:1], index=1))
    bench.give(row(HELLO[2:6]))
    bench.give(row(HELLO[6:8]), row([], "abort", index=1))
    assert seen == [(0, 0, "Hello world"), (1, 0, "Hello"), (0, 2, ", the answer "), (0, 6, ""), (1, 1, "")]


def test_a_hook_keeps_its_state_for_one_request() -> None:
    made: list[int] = []

    class Counting:
        def __init__(self) -> None:
            made.append(0)
            self.calls = 0

        def __call__(self, output: CompletionOutput, text: str) -> HookAction:
            self.calls += 1
            return Replace(f"{self.calls} ")

    system = System(hook=Counting)
    clients = [system.open(request_of(rid, spec_of(CHAT))) for rid in (1, 2)]
    for at in range(3):
        system.scripted.give(*(row(HELLO[at : at + 1], "length" if at == 2 else None, rid=rid) for rid in (1, 2)))
    for _ in range(4):
        system.turn()
    assert [merge_stream(client.body, CHAT).choices[0].content for client in clients] == ["1 2 3 "] * 2 and len(
        made
    ) == 2


def raising(output: CompletionOutput, text: str) -> HookAction:
    if text == " world":
        raise KeyError("hook")
    return EMIT


WRONG: dict[str, Any] = {
    "None": None, "a string": "x", "True": True, "the class": Suppress, "bytes": Replace(b"x"),
    "a number": Replace(5),  # type: ignore[arg-type]
    "no text": Replace(None), "no reason": Terminate("x", None), "an empty reason": Terminate("x", ""),
    "a list": Terminate(["x"]),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", [*WRONG, "exception"])
@pytest.mark.parametrize("stream", [True, False])
def test_whatever_goes_wrong_fails_closed(name: str, stream: bool) -> None:
    """The step's text is not sent, the client gets an error, the engine is told."""
    answer = raising if name == "exception" else lambda output, text: WRONG[name] if text == " world" else EMIT
    bench = Bench(spec_of(CHAT, n=2, stream=stream), hook=hook_of(answer))
    bench.give(row(HELLO[:1]), row(HELLO[:1], index=1))
    bench.give(row(HELLO[1:2]), row(HELLO[2:3], index=1))
    assert bench.ended and sorted(bench.cancels) == [(0, 0), (0, 1)] and bench.worker.open_requests == 0
    whole = merged(bench) if stream else merge_document(bench.body, CHAT)
    assert whole.error is not None and b"world" not in bench.body
    if stream:
        assert [choice.content for choice in whole.choices.values()] == ["Hello", "Hello"]


def test_a_hook_that_breaks_in_its_constructor_fails_each_request_alone() -> None:
    class Broken:
        def __init__(self) -> None:
            raise OSError("no licence")

    bench = Bench(spec_of(COMPLETIONS), hook=Broken)  # type: ignore[arg-type]
    bench.give(row(HELLO[:1]))
    assert merge_document(bench.body, COMPLETIONS).error is not None and bench.cancels == [(0, 0)]


def test_a_hook_that_goes_by_steps_does_not_hang_a_resumed_request() -> None:
    """Steps are cut by load: a hook that answers by them may end an output on one worker and not on the next."""

    class EndsAtASecondStep:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, output: CompletionOutput, text: str) -> HookAction:
            self.calls += 1
            return Terminate() if self.calls == 2 else EMIT

    system = System(workers=2, hook=EndsAtASecondStep)
    client = system.open(request_of(1, spec_of(CHAT)))
    system.scripted.give(row(HELLO[:1], rid=1))
    system.scripted.give(row(HELLO[1:2], rid=1))
    system.executor()
    system.work(0)
    system.executor()
    system.work(0)
    system.kill(0)
    system.run()
    assert merge_stream(client.body, CHAT).choices[0].finish_reason == "stop"
    assert system.core.dispatcher.open_requests == 0


def test_loading_by_name() -> None:
    assert load_hook(None) is None
    assert load_hook("tests.postproc_workers.test_hook:ForLoading") is ForLoading
    for name, message in (
        ("tests.postproc_workers.test_hook", "form"), (":x", "form"), ("no_such_module:X", "no_such_module"),
        ("tests.postproc_workers.test_hook:Nothing", "Nothing"), ("tests.postproc_workers.test_hook:HELLO",
        "not a class"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_hook(name)


class ForLoading:
    """Something to load."""

    def __call__(self, output: CompletionOutput, text: str) -> HookAction:
        return EMIT
