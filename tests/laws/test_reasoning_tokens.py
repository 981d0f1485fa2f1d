"""Usage counts the tokens of the reasoning: those with text between the markers, however the tokens came.

A token that lies across a marker belongs to the reasoning if any of its text does. Tokens are taken from the two small
tokenizers of the recordings: parts of markers, bytes of characters, special tokens without a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from serve.reasoning import REASONING_PARSERS
from tests.helpers import CHAT, FACTS, Bench, spec_of, vocabulary
from tests.recordings.build_tokenizers import ids
from tests.recordings.checker import merge_document, merge_stream
from tests.serve.test_responses_utils import spec as response_spec

OPEN, CLOSE = "<think>", "</think>"
FRAGMENTS: dict[str, list[list[int]]] = {
    "byte_level": [
        *([token] for token in ids("byte_level", [
            OPEN, OPEN, CLOSE, CLOSE, "nk>", "</thi", "<thi", "\n", "\n\n", "Hello", " world", "é", "😀", "ST", "STOP",
            "OP", "<|pad|>", "<|end|>", "\\xf0\\x9f", "\\x98\\x80", "\\xe4\\xb8", "<0x96>", "<0xFF>", "a\\xe4", "<",
            "a",
        ])),
        ids("byte_level", ["<thi", "nk>"]),
        ids("byte_level", ["</thi", "nk>"]),
        ids("byte_level", ["a", "<", "t", "h", "i", "nk>"]),
    ],
    "pieces": [
        *([token] for token in ids("pieces", [" Hello", " the", "\n", "ST", "OP", "世", "<0xE4>", "<0xB8>", "<0x96>"])),
        ids("pieces", ["<", *(f"<0x{byte:02X}>" for byte in b"think"), ">"]),
        ids("pieces", ["<", *(f"<0x{byte:02X}>" for byte in b"/think"), ">"]),
        ids("pieces", ["<", *(f"<0x{byte:02X}>" for byte in b"/think>")]),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Outputs of one request: their ids, and whether the last one is an end token that is not shown."""

    names: str
    outputs: list[list[int]]
    hides: bool
    body: dict[str, Any] = field(default_factory=dict)
    parser: str = "qwen3"

    @property
    def facts(self) -> Any:
        return replace(FACTS, reasoning_parser=self.parser, tool_parser="hermes")

    def spec(self, stream: bool, **more: Any) -> Any:
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
        body = self.body | options | more
        return spec_of(CHAT, stream=stream, facts=self.facts, n=len(self.outputs), **body)

    def rows(self, cuts: Sequence[Sequence[int]]) -> list[StepRow]:
        """The outputs' rows one after another, cut at these places; a cut at the end leaves the finish alone."""
        found = []
        for index, (output, places) in enumerate(zip(self.outputs, cuts)):
            last = len(output) - self.hides  # the token that ended the output comes with its end
            ends = [*sorted({place for place in places if 0 < place <= last}), len(output)]
            parts = [output[start:end] for start, end in zip([0, *ends], ends)]
            found += [StepRow(0, index, part) for part in parts[:-1]]
            found.append(StepRow(0, index, parts[-1], "stop" if self.hides else "length", self.hides))
        return found

    def each(self) -> list[StepRow]:
        return self.rows([range(1, len(output)) for output in self.outputs])


@st.composite
def cases(draw: st.DrawFn, *, most: int = 2) -> Case:
    names = draw(st.sampled_from(sorted(FRAGMENTS)))
    fragments = st.lists(st.sampled_from(FRAGMENTS[names]), min_size=1, max_size=10)
    outputs = [[token for part in draw(fragments) for token in part] for _ in range(draw(st.integers(1, most)))]
    hides = draw(st.booleans())
    if hides:
        outputs = [[*output, ids(names, ["<|end|>" if names == "byte_level" else "</s>"])[0]] for output in outputs]
    body: dict[str, Any] = {"skip_special_tokens": draw(st.booleans())}
    if draw(st.booleans()):
        body["stop"] = draw(st.lists(st.sampled_from(["STOP", "OP", "</thi", "<think>", "世"]), min_size=1, max_size=2))
        body["include_stop_str_in_output"] = draw(st.booleans())
    if draw(st.booleans()):
        body["include_reasoning"] = False
    if draw(st.booleans()):
        body |= {"logprobs": True}
    return Case(names, outputs, hides, body)


def drawn_rows(data: st.DataObject, case: Case) -> list[StepRow]:
    return case.rows([data.draw(st.lists(st.integers(1, len(output)), max_size=8)) for output in case.outputs])


def with_logprobs(case: Case, rows: Iterable[StepRow]) -> list[StepRow]:
    """The rows with log-probabilities where the request asks for them."""
    if not case.body.get("logprobs"):
        return list(rows)
    return [row._replace(logprobs=[TokenLogprob(-1.0)] * len(row.token_ids)) for row in rows]


def played(case: Case, spec: Any, rows: Iterable[StepRow], **options: Any) -> bytes:
    bench = Bench(spec, names=case.names, **options)
    for row in with_logprobs(case, rows):
        bench.give(row)
    assert bench.ended
    return bench.body


def counted(usage: Any) -> int:
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


def streamed(case: Case, rows: Iterable[StepRow], **options: Any) -> int:
    """Reasoning tokens in the usage of the stream."""
    return counted(merge_stream(played(case, case.spec(True), rows, **options), CHAT, include_usage=True).usage)


def unary(case: Case, rows: Iterable[StepRow]) -> int:
    return counted(merge_document(played(case, case.spec(False), rows), CHAT).usage)


# ------------------------------------------------------------------------------------------------------ an oracle


def expected(case: Case) -> int:
    """By the definition: the text of each token, and where the reasoning is in all of the text."""
    return sum(_expected(case, output) for output in case.outputs)


def _expected(case: Case, output: list[int]) -> int:
    detokenizer = vocabulary(case.names).detokenizer(skip_special_tokens=case.body["skip_special_tokens"])
    pieces = detokenizer.pieces(output[:-1] if case.hides else output)
    pieces.append(detokenizer.flush())
    text, ends = "", []
    for piece in pieces:
        text += piece
        ends.append(len(text))
    shown = len(_stopped(text, case.body.get("stop", ()), case.body.get("include_stop_str_in_output", False)))
    start = text[:shown].find(OPEN)
    if start < 0:
        return 0
    start += len(OPEN)
    end = text[:shown].find(CLOSE, start)
    end = shown if end < 0 else end
    # The tail belongs to the last token, be it hidden.
    ends = [*ends[:-2], ends[-1]] if not case.hides and len(ends) > 1 else ends
    return sum(before < end and after > start for before, after in zip([0, *ends], ends))


def _stopped(text: str, stops: Sequence[str], include: bool) -> str:
    """The text up to the stop that completes first."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return text


@given(st.data())
def test_tokens_with_text_between_the_markers(data: st.DataObject) -> None:
    case = data.draw(cases())
    assert streamed(case, case.each()) == expected(case)


@pytest.mark.parametrize(
    ("texts", "count"),
    [
        (["<think>", "Hello", " world", "</think>", "a", "b"], 2),
        (["<thi", "nk>", "Hello", "</thi", "nk>", "a"], 1),
        (["Hello", "<think>", "a", "b", "\n", "</think>", "<think>", "a", "</think>"], 3),
        (["<think>", "a", "b"], 2),
        (["<think>", "</think>", "a"], 0),
        (["a", "b", "</think>", "a"], 0),
        (["<think>", "\\xf0\\x9f", "\\x98\\x80", "a", "</think>"], 2),
        (["<think>", "a", "\\xf0\\x9f", "\\x98\\x80", "</think>"], 3),
        (["<think>", "a", "<|pad|>", "b", "</think>", "<|pad|>"], 3),
        (["<think>", "a", "STOP", "b", "</think>"], 1),
        (["<think>", "a", "ST"], 2),
        (["<think>", "\\xf0\\x9f"], 1),
        (["<think>", "a", "\\xf0\\x9f"], 2),
        (["<think>", "a", "</think>", "\\xf0\\x9f"], 1),
    ],
)
@pytest.mark.parametrize("stop", [[], ["STOP"]])
def test_examples(texts: list[str], count: int, stop: list[str]) -> None:
    if "STOP" in texts and not stop:
        count += 2
    case = Case("byte_level", [ids("byte_level", texts)], False, {"stop": stop, "skip_special_tokens": True})
    last = len(texts)
    for places in (range(1, last), [], [2, 3], [1, last], range(1, last + 1)):
        assert streamed(case, case.rows([places])) == unary(case, case.rows([places])) == count


# ------------------------------------------------------------------------------------------------------ the laws


@given(st.data())
def test_split_invariance_and_fold(data: st.DataObject) -> None:
    case = data.draw(cases())
    rows = drawn_rows(data, case)
    assert streamed(case, rows) == unary(case, rows) == streamed(case, case.each())


@given(st.data(), st.integers(2, 5))
def test_a_stream_interval_changes_nothing(data: st.DataObject, interval: int) -> None:
    case = data.draw(cases())
    assert streamed(case, drawn_rows(data, case), stream_interval=interval) == streamed(case, case.each())


@pytest.mark.parametrize("stream", [True, False])
@given(st.data())
def test_responses_count_as_chat_does(stream: bool, data: st.DataObject) -> None:
    case = data.draw(cases(most=1))
    body = {name: value for name, value in case.body.items() if name not in ("logprobs", "include_reasoning")}
    case = replace(case, body=body)
    written = played(case, response_spec(case.facts, stream=stream, **body), drawn_rows(data, case))
    response = json.loads(written.rpartition(b"\ndata: ")[2])
    response = response["response"] if stream else response
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == unary(case, case.each())


@given(st.data(), st.integers(0, 20))
def test_a_worker_that_takes_over_counts_all(data: st.DataObject, heard: int) -> None:
    case = data.draw(cases(most=1))
    rows = with_logprobs(case, case.each())
    first = Bench(case.spec(True), names=case.names)
    for row in rows[:heard]:
        first.give(row)
    if first.ended:
        return
    delivered = first.rows[-1][3] if first.rows else 0
    second = Bench(case.spec(True), names=case.names, delivered=[(delivered, False)])
    history = rows[:heard]
    if history:
        tokens = [token for row in history for token in row.token_ids]
        logprobs = [entry for row in history for entry in row.logprobs or ()] if case.body.get("logprobs") else None
        second.give(StepRow(0, 0, tokens, logprobs=logprobs))
    for row in rows[heard:]:
        second.give(row)
    whole = merge_stream(first.body + second.body, CHAT, include_usage=True)
    assert counted(whole.usage) == streamed(case, case.each())


@pytest.mark.parametrize("name", REASONING_PARSERS)
@given(st.data())
def test_every_format_counts_the_same_for_every_cut(name: str, data: st.DataObject) -> None:
    """Characters are the tokens here."""
    row = REASONING_PARSERS[name]
    texts = [*row.opens, *row.closes, *row.ends, *row.dropped, row.label, "Hm ", "\n", "é", row.closes[0][:3], "ST"]
    text = "".join(data.draw(st.lists(st.sampled_from([each for each in texts if each]), min_size=1, max_size=8)))
    body: dict[str, Any] = {"stop": ["STOP"]} if data.draw(st.booleans()) else {}
    case = Case("text", [[ord(char) for char in text]], False, body, name)
    rows = drawn_rows(data, case)
    count = streamed(case, rows)
    assert count == unary(case, rows) == streamed(case, case.each()) <= len(text)


@given(st.data())
def test_running_usage_never_exceeds_the_tokens(data: st.DataObject) -> None:
    case = data.draw(cases())
    options = {"include_usage": True, "continuous_usage_stats": True}
    written = played(case, case.spec(True, stream_options=options), drawn_rows(data, case))
    merged = merge_stream(written, CHAT, include_usage=True, continuous=True)  # it checks each usage
    assert counted(merged.usage) == streamed(case, case.each())
