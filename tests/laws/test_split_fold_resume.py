"""Split invariance, fold, resume, and what a text must be: on every post-processor, on random requests and steps."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow
from tests.helpers import ALL_POST_PROCESSORS
from tests.laws.cases import END, NAMES, PAIRS, STREAMING, Case, cases, steps, token_bytes
from tests.recordings.checker import events, strict_json

#: Post-processors whose laws stand elsewhere, beside what is special about them.
ELSEWHERE = {
    "chat_harmony_stream": "tests/serve/test_harmony_adapter.py",
    "chat_harmony_unary": "tests/serve/test_harmony_adapter.py",
    "responses_stream": "tests/serve/test_responses_utils.py",
    "responses_unary": "tests/serve/test_responses_utils.py",
    "scaffolding_stream": "tests/serve/test_scaffolded_chat.py",
    "scaffolding_unary": "tests/serve/test_scaffolded_chat.py",
}


def test_every_post_processor_has_its_laws() -> None:
    """A new entry of the table is tried by being registered: here, or where this says."""
    assert set(ALL_POST_PROCESSORS) == {*NAMES, *ELSEWHERE}
    root = Path(__file__).parents[2]
    assert all((root / file).is_file() for file in ELSEWHERE.values())


# ------------------------------------------------------------------------------------------------------ split


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_split_invariance(name: str, data: st.DataObject) -> None:
    """However the tokens are cut, ordered over the choices and coalesced, the merged response is the same."""
    case = data.draw(cases(name))
    bench = case.bench()
    for backlog in data.draw(steps(case)):
        bench.backlog(backlog)
    assert case.read(bench.body) == case.read(case.play(case.each()))
    assert bench.worker.open_requests == 0


@pytest.mark.parametrize("name", STREAMING)
@given(st.data(), st.integers(2, 6))
def test_a_stream_interval_changes_no_text(name: str, data: st.DataObject, interval: int) -> None:
    """The server's, which counts where the request has none of its own."""
    case = data.draw(cases(name, intervals=False))
    assert case.read(case.play(case.each(), stream_interval=interval)) == case.read(case.play(case.each()))


@pytest.mark.parametrize("name", STREAMING)
@given(st.data(), st.integers(1, 6))
def test_a_requests_interval_changes_no_text(name: str, data: st.DataObject, started: int) -> None:
    case = data.draw(cases(name))
    asked = {key: value for key, value in case.body.items() if key != "stream_interval"}
    plain = replace(case, body=asked)
    assert case.read(case.play(case.each(), stream_interval=started)) == plain.read(plain.play(plain.each()))


# ------------------------------------------------------------------------------------------------------ fold


@pytest.mark.parametrize(("stream", "unary"), PAIRS)
@given(st.data())
def test_the_document_is_the_fold_of_the_stream(stream: str, unary: str, data: st.DataObject) -> None:
    case = data.draw(cases(stream))
    rows = case.each()
    streamed, document = case.read(case.play(rows)), case.read(case.play(rows, unary), unary)
    if streamed.error is not None or document.error is not None:
        assert streamed.error == document.error
        return
    assert streamed.choices == document.choices
    assert streamed.usage in (None, document.usage) and document.usage is not None


# ------------------------------------------------------------------------------------------------------ resume


def histories(rows: Sequence[StepRow], ended: set[int]) -> list[StepRow]:
    """What an executor sends a second worker: each output's rows joined, those first whose end the client has."""
    joined: dict[int, StepRow] = {}
    for row in rows:
        before = joined.get(row.index)
        if before is None:
            joined[row.index] = row
            continue
        logprobs = None if row.logprobs is None else [*(before.logprobs or ()), *row.logprobs]
        joined[row.index] = row._replace(token_ids=[*before.token_ids, *row.token_ids], logprobs=logprobs)
    return sorted(joined.values(), key=lambda row: (row.index not in ended, row.index))


@pytest.mark.parametrize("name", NAMES)
@given(st.data(), st.integers(0, 60), st.integers(0, 8), st.sampled_from([1, 1, 3]))
def test_resume(name: str, data: st.DataObject, heard: int, ahead: int, interval: int) -> None:
    """The client has heard of some rows, the executor has generated more: a second worker gives the rest, no byte
    twice."""
    case = data.draw(cases(name))
    rows = case.each()
    heard = min(heard, len(rows))
    first = case.bench(stream_interval=interval)
    for row in rows[:heard]:
        first.give(row)
    if first.ended:
        return
    delivered = [(0, False)] * len(case.outputs)
    for _, _, index, count, flags, _ in first.rows:
        delivered[index] = (count, bool(flags & 1))
    second = case.bench(delivered=delivered, stream_interval=interval)
    generated = rows[: heard + ahead]
    for row in histories(generated, {index for index, (_, ended) in enumerate(delivered) if ended}):
        second.give(row)
    for row in rows[heard + ahead :]:
        second.give(row)
    assert case.read(first.body + second.body) == case.read(case.play(rows))


@pytest.mark.parametrize("name", STREAMING)
@given(st.data(), st.integers(0, 14))
def test_a_resumed_run_gives_exactly_the_bytes_that_are_missing(name: str, data: st.DataObject, heard: int) -> None:
    """With the same steps behind the border: k tokens with the first d silent are what the first run gave after d."""
    case = data.draw(cases(name, most=1))
    rows = case.each()
    first = case.bench()
    for row in rows:
        first.give(row)
    told = [count for _, _, _, count, flags, _ in first.rows if count <= heard and not flags]
    d = max(told, default=0)
    after = b"".join(payload for _, _, _, count, flags, payload in first.rows if count > d or flags)
    for cut in {0, d}:
        (history,) = histories(rows[:cut], set()) if cut else (None,)
        again = case.bench(delivered=[(d, False)])
        for row in [*([history] if history else []), *rows[cut:]]:
            again.give(row)
        assert again.body == after


# ------------------------------------------------------------------------------------------------------ the text


def wanted(case: Case, ids: Sequence[int], stopped: bool) -> tuple[str, int, str | None]:
    """(text, tokens, stop) by brute force: the bytes of all tokens, decoded; the stop that completes first, the longest
    of those that complete at one place."""
    skip, stops = case.body["skip_special_tokens"], case.body.get("stop", ())
    decoder, text, known = codecs.getincrementaldecoder("utf-8")("replace"), "", 0
    for number, token in enumerate(ids, 1):
        hidden = stopped and number == len(ids)
        data = b"" if hidden else token_bytes(token, skip)
        text += decoder.decode(data, final=number == len(ids))
        for end in range(known, len(text) + 1):
            complete = [stop for stop in stops if text[:end].endswith(stop)]
            if complete:
                stop = max(complete, key=len)
                shown = case.body.get("include_stop_str_in_output", False)
                return text[: end if shown else end - len(stop)], number, stop
        known = len(text)
    return text, len(ids), None


@pytest.mark.parametrize("name", ["chat_stream", "chat_unary", "completion_stream", "completion_unary"])
@given(st.data())
def test_the_text_is_what_all_ids_decode_to_cut_at_the_first_stop(name: str, data: st.DataObject) -> None:
    case = data.draw(cases(name, failing=False))
    merged, total = case.read(case.play(case.each())), 0
    for index, output in enumerate(case.outputs):
        shown = case.body.get("include_stop_str_in_output", False) and output.stop_token and output.ids[-1] != END
        text, count, stop = wanted(case, output.ids, output.stop_token and not shown)
        choice = merged.choices[index]
        echo = "Once" if case.body.get("echo") else ""
        assert choice.content == echo + text
        total += count
        if stop is not None:
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        else:
            reason = output.ids[-1] if output.stop_token and output.ids[-1] != END else None
            assert (choice.finish_reason, choice.stop_reason) == (output.finish, reason)
        if output.logprobs:
            assert len(choice.logprobs) == count
    if merged.usage is not None:
        assert merged.usage["completion_tokens"] == total


# ------------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
def test_a_response_ends_once(name: str, data: st.DataObject) -> None:
    """The end is told with the last bytes, and whatever comes behind it says nothing."""
    case = data.draw(cases(name))
    bench = case.bench()
    for backlog in data.draw(steps(case)):
        bench.backlog(backlog)
    body = bench.body
    flags = [row[4] for row in bench.rows]
    assert [bool(flag & 2) for flag in flags] == [False] * (len(flags) - 1) + [True]
    for row in case.each():
        assert bench.give(row) == b""
    assert bench.body == body and len(bench.rows) == len(flags)
    cancelled = [index for _, index in bench.cancels]
    assert len(set(cancelled)) == len(cancelled)


@pytest.mark.parametrize("name", STREAMING)
@given(st.data())
def test_what_is_held_back_is_the_beginning_of_something(name: str, data: st.DataObject) -> None:
    """After every token the text sent lacks at most the beginning of a stop string and of a character."""
    case = data.draw(cases(name, most=1, failing=False, intervals=False))
    bench = case.bench()
    (output,) = case.outputs
    for number, row in enumerate(output.rows([1] * len(output.ids), 0), 1):
        bench.give(row)
        if bench.ended:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(
            b"".join(token_bytes(token, case.body["skip_special_tokens"]) for token in output.ids[:number])
        )
        sent = sent_text(case, bench.body)
        held = text.removeprefix(sent)
        assert text.startswith(sent)
        assert not held or any(stop.startswith(held) and stop != held for stop in case.body.get("stop", ()))


def sent_text(case: Case, body: bytes) -> str:
    """The text of a stream that has not ended."""
    if case.name == "deltas":
        return "".join(choice.content for choice in case.read(body).choices.values())
    chunks = [strict_json(event) for event in events(body)] if body else []
    texts = [
        item["delta"].get("content", "") if "delta" in item else item["text"] for c in chunks for item in c["choices"]
    ]
    return "".join(texts).removeprefix("Once" if case.body.get("echo") else "")
