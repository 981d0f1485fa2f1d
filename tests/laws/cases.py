"""What the laws are tried on: requests, outputs and steps drawn at random, and a reader for each post-processor's
bytes.

Text is drawn as tokens: parts of tags and of stop strings, parts of characters, bytes that no character begins with.
Plain letters would find nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from executor.engines.base import StepRow, TokenLogprob
from executor.request import SamplingParams
from executor.result import OutputDelta
from executor.wire import decode_deltas
from postproc_workers.deltas import deltas_request
from postproc_workers.spec import StreamSpec
from tests.helpers import CHAT, COMPLETIONS, Bench, spec_of, tokens, vocabulary
from tests.recordings.checker import Choice, Merged, merge_document, merge_stream

#: Post-processors that the laws here are tried on.
NAMES = ("deltas", "chat_stream", "chat_unary", "completion_stream", "completion_unary")
STREAMING = ("deltas", "chat_stream", "completion_stream")
PAIRS = (("chat_stream", "chat_unary"), ("completion_stream", "completion_unary"))

END = tokens("<|end|>")[0]
FRAGMENTS = tokens(
    "<thi", "nk>", "</thi", "</tool", "_call>", "<|", "<|im", "ST", "STO", "OP", "P.", "STOP", "TOP", "aab", "aa",
    "ab", "a", "b",
    "END", "EN", "D.", "User", ":", "###", "Hello", " world", " ", ".", ". ", "\n", "\n\n", '"', "\\", "é", "世",
    "界", "世界", "😀", "서울",
    "e\u0301", "\u200d", "\ufffd", "\u2028", "\x00", "<|pad|>", "<|role|>", "<think>", "</think>", "\\xf0\\x9f",
    "\\x98\\x80",
    "\\xf0\\x9f\\x98", "\\x80!", "\\xe4\\xb8", "\\x96b", " \\xf0", "a\\xe4", "<0x96>", "<0xFF>", "<0xC3>",
)  # fmt: skip
STOPS = [
    "STOP", "OP", "aab", "ab", "TOP.", "</tool_call>", "<|im", "<|pad|>", "世界", "界", "😀", "\ufffd", "User:",
    "\n\n", "###", ". ", "a\u0301", "bb",
]  # fmt: skip
BAD = 5000


@dataclass(frozen=True)
class Output:
    """One choice as the engine generates it. finish, stop_token, message as in StepRow."""

    ids: list[int]
    finish: str
    stop_token: bool = False
    logprobs: bool = False

    def row(self, start: int, stop: int, index: int) -> StepRow:
        """The row of the ids from start to stop; the last one ends the output."""
        ids = self.ids[start:stop]
        logprobs = [self._entry(place) for place in range(start, stop)] if self.logprobs else None
        if stop < len(self.ids):
            return StepRow(0, index, ids, logprobs=logprobs)
        message = "broken" if self.finish == "error" else ""
        return StepRow(0, index, ids, self.finish, self.stop_token and bool(ids), message, logprobs)

    def rows(self, sizes: Sequence[int], index: int) -> list[StepRow]:
        """Rows of these sizes, the rest in the last."""
        rows, start = [], 0
        for size in sizes:
            if start + size >= len(self.ids):
                break
            rows.append(self.row(start, start + size, index))
            start += size
        return [*rows, self.row(start, len(self.ids), index)]

    def _entry(self, place: int) -> TokenLogprob:
        value = -1.0 - place / 8
        return TokenLogprob(value, ((self.ids[place], value), (FRAGMENTS[place % len(FRAGMENTS)], value - 1)))


@dataclass(frozen=True)
class Case:
    """A request for one post-processor, and its outputs. body: what of the request differs from the default."""

    name: str
    body: dict[str, Any]
    outputs: list[Output]
    options: dict[str, bool] = field(default_factory=dict)

    def spec(self, name: str | None = None) -> StreamSpec:
        """The spec for this post-processor, or for another of the same endpoint."""
        name = name or self.name
        body = dict(self.body)
        if name == "deltas":
            sampling = SamplingParams(logprobs=body.get("top_logprobs", 0) if body.get("logprobs") else None)
            request = deltas_request(
                0,
                [[1, 2, 3]],
                sampling,
                n=len(self.outputs),
                stop=body.get("stop", ()),
                skip_special_tokens=body["skip_special_tokens"],
            )
            return StreamSpec.decode(request.spec)
        if "unary" in name:
            body.pop("stream_options", None)
        return spec_of(CHAT if "chat" in name else COMPLETIONS, stream="unary" not in name, n=len(self.outputs), **body)

    def each(self) -> list[StepRow]:
        """The undisturbed run: one id per row, the choices in turn."""
        columns = [output.rows([1] * len(output.ids), index) for index, output in enumerate(self.outputs)]
        return [column[turn] for turn in range(max(map(len, columns))) for column in columns if turn < len(column)]

    def bench(self, name: str | None = None, **options: Any) -> Bench:
        """A worker with this request open."""
        return Bench(self.spec(name), **options)

    def play(self, rows: Sequence[StepRow], name: str | None = None, **options: Any) -> bytes:
        """The bytes of these rows, one step each."""
        bench = self.bench(name, **options)
        for row in rows:
            bench.give(row)
        return bench.body

    def read(self, body: bytes, name: str | None = None) -> Merged:
        """The response, merged; where a chunk ended is forgotten."""
        merged = read(body, name or self.name, self.options)
        merged.chunks = []
        return merged


def read(body: bytes, name: str, options: dict[str, bool]) -> Merged:
    """The bytes of a finished request, merged."""
    if name == "deltas":
        return _read_deltas(body)
    endpoint = CHAT if "chat" in name else COMPLETIONS
    if "unary" in name:
        return merge_document(body, endpoint)
    return merge_stream(body, endpoint, **options)


def _read_deltas(body: bytes) -> Merged:
    merged = Merged()
    for step in decode_deltas(body):
        if not isinstance(step, OutputDelta):
            merged.error = {"message": step}
            continue
        choice = merged.choices.setdefault(step.index, Choice())
        assert choice.finish_reason is None and merged.error is None, "a step behind the end"
        choice.content += step.text
        choice.logprobs += [entry._asdict() for entry in step.logprobs]
        choice.tool_calls += [{"id": token} for token in step.token_ids]  # no field for ids: they compare all the same
        choice.finish_reason, choice.stop_reason = step.finish_reason, step.stop_reason
    return merged


# ------------------------------------------------------------------------------------------------------ drawing


@st.composite
def outputs(draw: st.DrawFn, *, logprobs: bool, stop_ids: Sequence[int], failing: bool) -> Output:
    """One choice: ids, and one of the ways in which an engine ends it."""
    ids = draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14))
    ends = ["length", "end", "abort", *(["client"] if stop_ids else []), *(["error", "bad"] if failing else [])]
    match draw(st.sampled_from(ends)):
        case "end":
            return Output([*ids, END], "stop", True, logprobs)
        case "client":
            return Output([*ids, stop_ids[0]], "stop", True, logprobs)
        case "bad":
            return Output([*ids, BAD, *ids[:2]], "length", False, logprobs)
        case reason:
            return Output(ids, reason, False, logprobs)


@st.composite
def cases(draw: st.DrawFn, name: str, *, most: int = 3, failing: bool = True, intervals: bool = True) -> Case:
    """A case for one post-processor. Only a single choice fails: how far the others got is the steps' business.
    intervals: the request may ask for events of several tokens."""
    chat, n = "chat" in name or name == "deltas", draw(st.integers(1, most))
    body: dict[str, Any] = {"skip_special_tokens": draw(st.booleans())}
    if draw(st.booleans()):
        body["stop"] = draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True))
        body["include_stop_str_in_output"] = draw(st.booleans())
    logprobs = draw(st.booleans())
    if logprobs:
        top = draw(st.integers(0, 2))
        body |= {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}
    if intervals and draw(st.booleans()):
        body["stream_interval"] = draw(st.integers(1, 4))
    stop_ids = draw(st.sampled_from([[], tokens("b")]))
    if stop_ids:
        body["stop_token_ids"] = stop_ids
    if not chat and not logprobs:
        body["echo"] = draw(st.booleans())
    options = {}
    if name.endswith("stream") and draw(st.booleans()):
        options = {"include_usage": True, "continuous": draw(st.booleans())}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": options["continuous"]}
    one = outputs(logprobs=logprobs, stop_ids=stop_ids, failing=failing and n == 1)
    return Case(name, body, [draw(one) for _ in range(n)], options)


@st.composite
def steps(draw: st.DrawFn, case: Case) -> list[list[list[StepRow]]]:
    """The rows in any cut and any order of the choices, in steps, and steps in backlogs that are handled in one go."""
    columns = [
        output.rows(draw(st.lists(st.integers(1, 5), max_size=len(output.ids))), index)
        for index, output in enumerate(case.outputs)
    ]
    order = draw(st.permutations([index for index, column in enumerate(columns) for _ in column]))
    rows = [columns[index].pop(0) for index in order]
    return _grouped(draw, _grouped(draw, rows))


def _grouped(draw: st.DrawFn, items: list[Any]) -> list[list[Any]]:
    groups: list[list[Any]] = []
    for item in items:
        if groups and draw(st.booleans()):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


# ------------------------------------------------------------------------------------------------------ an oracle


def token_bytes(token: int, skip_special_tokens: bool) -> bytes:
    """What a token adds to the text, as bytes."""
    data = vocabulary().token_bytes(token)
    special = data in (b"<|end|>", b"<|pad|>", b"<|role|>")
    return b"" if special and skip_special_tokens else data
