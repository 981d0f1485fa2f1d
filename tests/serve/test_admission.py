"""Admission: what may run, how its tokens are drawn, and what a worker is told of its stream."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.request import GenerationRequest, SamplingParams
from postproc_workers.spec import StreamSpec
from serve.admission import (
    PRESETS,
    Minted,
    ServerFacts,
    admit_chat,
    admit_completion,
    chat_spec,
    check_model,
    completion_spec,
    sampling_params,
)
from serve.body import parse, parse_object
from serve.errors import ApiError, BadRequestError, NotFoundError
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest

ALL = frozenset(f.name for f in dataclasses.fields(SamplingParams))
FACTS = ServerFacts(model="llm", max_model_len=100, vocab_size=1000, supported=ALL)
MINTED = Minted(rid=7, response_id="chatcmpl-7", created=1_700_000_000, seed=42)
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PROMPT = "<|user|>Hi<|assistant|>"


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": [USER]} | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "Once"} | fields).encode())


def facts(**changed: Any) -> ServerFacts:
    return dataclasses.replace(FACTS, **changed)


def admitted(request: ChatCompletionRequest, server: ServerFacts = FACTS, prompt_tokens: int = 3) -> GenerationRequest:
    return admit_chat(request, prompt=PROMPT, prompt_ids=[1] * prompt_tokens, facts=server, minted=MINTED)


def completed(
    request: CompletionRequest, prompts: list[list[int]] | None = None, server: ServerFacts = FACTS
) -> GenerationRequest:
    prompts = [[1, 2]] if prompts is None else prompts
    return admit_completion(request, prompts=prompts, prompt_texts=["Once"] * len(prompts), facts=server, minted=MINTED)


def spec_of(request: ChatCompletionRequest, prompt: str = PROMPT, **changed: Any) -> StreamSpec:
    spec = chat_spec(
        request, prompt=prompt, prompt_tokens=3, facts=facts(**changed), minted=MINTED, streaming=request.stream
    )
    assert StreamSpec.decode(spec.encode()) == spec
    return spec


def completion_spec_of(request: CompletionRequest, texts: list[str], **changed: Any) -> StreamSpec:
    spec = completion_spec(
        request, prompt_tokens=9, prompt_texts=texts, facts=facts(**changed), minted=MINTED, streaming=request.stream
    )
    assert StreamSpec.decode(spec.encode()) == spec
    return spec


def sampling(
    request: ChatCompletionRequest | CompletionRequest, prompt_tokens: int = 3, **changed: Any
) -> SamplingParams:
    return sampling_params(request, facts(**changed), prompt_tokens, MINTED)


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("name", [None, "", "llm"])
def test_the_served_model_may_be_left_unnamed(name: str | None) -> None:
    check_model(name, FACTS)


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFoundError) as caught:
        admitted(chat(model="gpt-4o" + "x" * 10_000))
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")
    assert len(caught.value.body()) < 500
    assert "gpt-4o" in caught.value.message


REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"n": 129}, {}, "n"),
    ({"n": 3}, {"max_n": 2}, "n"),
    ({"min_tokens": 6, "max_tokens": 5}, {}, "min_tokens"),
    ({"min_tokens": 98}, {}, "min_tokens"),
    ({"max_tokens": 98}, {}, "max_tokens"),
    ({"stop_token_ids": [1000]}, {}, "stop_token_ids"),
    ({"logit_bias": {"1000": 1}}, {}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, {}, "stream_options"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, {}, "stream_options.continuous_usage_stats"),
    ({"temperature": 0.5}, {"supported": ALL - {"temperature"}}, "temperature"),
    ({"top_p": 0.5}, {"supported": ALL - {"top_p"}}, "top_p"),
    ({"top_k": 5}, {"supported": ALL - {"top_k"}}, "top_k"),
    ({"min_p": 0.5}, {"supported": ALL - {"min_p"}}, "min_p"),
    ({"seed": 5}, {"supported": ALL - {"seed"}}, "seed"),
    ({"stop_token_ids": [5]}, {"supported": ALL - {"stop_token_ids"}}, "stop_token_ids"),
    ({"ignore_eos": True}, {"supported": ALL - {"ignore_eos"}}, "ignore_eos"),
    ({"min_tokens": 1}, {"supported": ALL - {"min_tokens"}}, "min_tokens"),
    ({"presence_penalty": 1}, {"supported": ALL - {"presence_penalty"}}, "presence_penalty"),
    ({"frequency_penalty": 1}, {"supported": ALL - {"frequency_penalty"}}, "frequency_penalty"),
    ({"repetition_penalty": 1.1}, {"supported": ALL - {"repetition_penalty"}}, "repetition_penalty"),
    ({"logit_bias": {"5": 1}}, {"supported": ALL - {"logit_bias"}}, "logit_bias"),
]

CHAT_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"max_completion_tokens": 98}, {}, "max_completion_tokens"),
    ({"logprobs": True}, {"supported": ALL - {"logprobs"}}, "logprobs"),
    ({"tools": [TOOL]}, {}, "tools"),
    ({"tools": [TOOL], "tool_choice": "required"}, {}, "tools"),
    ({"stop": "x", "stop_in_reasoning": False}, {"reasoning_parser": "harmony"}, "stop_in_reasoning"),
    ({"scaffolding": {"method": "best_of_n", "n": 129}}, {}, "scaffolding.n"),
    ({"scaffolding": {"method": "best_of_n", "n": 2}}, {"supported": ALL - {"logprobs"}}, "scaffolding.method"),
]

COMPLETION_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"logprobs": 0}, {"supported": ALL - {"logprobs"}}, "logprobs"),
    ({"echo": True, "logprobs": 1}, {}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "server", "param"), REFUSALS + CHAT_REFUSALS)
def test_chat_refusals(fields: dict[str, Any], server: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        admitted(chat(**fields), facts(**server))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[0] in caught.value.message or caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("fields", "server", "param"), REFUSALS + COMPLETION_REFUSALS)
def test_completion_refusals(fields: dict[str, Any], server: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        completed(completion(**fields), [[1, 2, 3]], facts(**server))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("prompts", [[[]], [[1], []], [[1000]], [[1], [5, -1]]])
def test_prompts_that_no_model_reads(prompts: list[list[int]]) -> None:
    with pytest.raises(BadRequestError) as caught:
        completed(completion(), prompts)
    assert caught.value.param == "prompt"


def test_outputs_are_bounded_over_all_prompts() -> None:
    with pytest.raises(BadRequestError) as caught:
        completed(completion(n=128), [[1]] * 513)
    assert caught.value.param == "n" and "65536" in caught.value.message


@pytest.mark.parametrize(
    ("request_", "prompt_tokens", "param", "numbers"),
    [
        (chat(), 100, "messages", ("100",)),
        (chat(max_tokens=1), 250, "messages", ("100", "250")),
        (completion(), 101, "prompt", ("100", "101")),
        (chat(max_tokens=51), 50, "max_tokens", ("100", "101", "50", "51")),
        (chat(max_completion_tokens=51), 50, "max_completion_tokens", ("101",)),
        (completion(max_tokens=99), 2, "max_tokens", ("100", "101", "99")),
    ],
)
def test_what_does_not_fit_says_the_numbers(
    request_: ChatCompletionRequest | CompletionRequest, prompt_tokens: int, param: str, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(BadRequestError) as caught:
        sampling(request_, prompt_tokens)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "context_length_exceeded")
    assert all(number in caught.value.message for number in numbers)


# ------------------------------------------------------------------ how tokens are drawn


def test_without_a_limit_the_answer_may_fill_the_context() -> None:
    assert sampling(chat(), 99).max_tokens == 1
    assert sampling(chat(), 40).max_tokens == 60
    assert sampling(chat(max_tokens=60), 40).max_tokens == 60


def test_a_completion_without_a_limit_has_16_tokens_or_what_fits() -> None:
    assert sampling(completion(), 40).max_tokens == 16
    assert sampling(completion(), 90).max_tokens == 10


def test_the_longest_prompt_decides() -> None:
    assert completed(completion(), [[1], [1] * 95, [1, 2]]).sampling.max_tokens == 5


def test_every_field_reaches_the_engine() -> None:
    request = chat(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=9,
        stop_token_ids=[3, 4],
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.3,
        logit_bias={"5": -100},
        logprobs=True,
        top_logprobs=3,
    )
    assert sampling(request) == SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=9,
        stop_token_ids=(3, 4),
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        repetition_penalty=1.3,
        logit_bias={5: -100.0},
        logprobs=3,
    )


def test_a_seed_is_minted_when_none_is_given() -> None:
    assert sampling(chat()).seed == 42
    assert sampling(chat(seed=0)).seed == 0
    assert sampling(chat(), supported=ALL - {"seed"}).seed is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4)],
)
def test_chat_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert sampling(chat(**fields)).logprobs == logprobs
    assert spec_of(chat(**fields)).logprobs == logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_completion_logprobs(logprobs: int | None) -> None:
    assert sampling(completion(logprobs=logprobs)).logprobs == logprobs
    assert completion_spec_of(completion(logprobs=logprobs), ["a"]).logprobs == logprobs


@pytest.mark.parametrize(("sent", "drawn"), [(0, 0.0), (1e-9, 0.0), (5e-324, 0.0), (0.01, 0.01), (2, 2.0)])
def test_a_vanishing_temperature_is_greedy(sent: float, drawn: float) -> None:
    assert sampling(chat(temperature=sent)).temperature == drawn


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_spellings_of_top_k_off(top_k: int) -> None:
    assert sampling(chat(top_k=top_k), supported=ALL - {"top_k"}).top_k == 0


MODELS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def test_a_preset_for_every_field_that_may_have_one() -> None:
    assert tuple(MODELS) == PRESETS
    drawn = sampling(chat(), default_sampling=MODELS)
    assert drawn.changed() == MODELS | {"max_tokens": 97, "seed": 42}


def test_the_models_presets_hold_where_the_client_gives_none() -> None:
    drawn = sampling(chat(top_k=5), default_sampling=MODELS)
    assert drawn.changed() == MODELS | {"max_tokens": 97, "seed": 42, "top_k": 5}


def test_the_client_overrules_a_preset_even_with_the_usual_value() -> None:
    drawn = sampling(
        chat(temperature=1, top_p=1, top_k=-1, min_p=0, repetition_penalty=1, seed=42),
        default_sampling=MODELS,
    )
    assert drawn.changed() == {"max_tokens": 97, "seed": 42}


def test_a_preset_that_the_engine_does_not_honour_is_left_out() -> None:
    drawn = sampling(chat(), default_sampling=MODELS | {"top_p": None}, supported=ALL - {"repetition_penalty"})
    assert (drawn.repetition_penalty, drawn.top_p, drawn.temperature) == (1.0, 1.0, 0.6)


def test_usual_values_are_fine_for_an_engine_that_honours_nothing() -> None:
    usual = chat(temperature=1, top_p=1.0, top_k=0, min_p=0, presence_penalty=0, repetition_penalty=1, logit_bias={})
    assert sampling(usual, supported=frozenset()).changed() == {"max_tokens": 97}


# ------------------------------------------------------------------ what a worker is told


def test_an_admitted_chat() -> None:
    request = admitted(chat(n=3, stream=True))
    assert (request.rid, list(request.prompts), request.n, request.num_outputs) == (7, [[1, 1, 1]], 3, 3)
    spec = StreamSpec.decode(request.spec)
    assert (spec.post_processor, spec.streaming, spec.outputs, spec.prompt_tokens) == ("chat_stream", True, 3, 3)


def test_an_admitted_completion() -> None:
    request = completed(completion(n=2), [[1], [2, 3], [4]])
    assert (list(request.prompts), request.num_outputs) == ([[1], [2, 3], [4]], 6)
    spec = StreamSpec.decode(request.spec)
    assert (spec.post_processor, spec.streaming, spec.outputs, spec.prompt_tokens) == ("completion_unary", False, 6, 4)


def test_chat_arguments() -> None:
    assert spec_of(chat()).args == {
        "id": "chatcmpl-7",
        "created": 1_700_000_000,
        "model": "llm",
        "n": 1,
        "role": "assistant",
        "include_usage": False,
        "continuous_usage": False,
        "logprobs": False,
        "top_logprobs": 0,
        "tool_parser": None,
        "reasoning_parser": None,
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "include_reasoning": True,
        "reasoning_alias": False,
        "prompt_tail": PROMPT,
    }


def test_completion_arguments() -> None:
    spec = completion_spec_of(completion(prompt=["a", "b"], echo=True, n=2, logprobs=1), ["a", "b"])
    assert spec.args == {
        "id": "chatcmpl-7",
        "created": 1_700_000_000,
        "model": "llm",
        "n": 2,
        "include_usage": False,
        "continuous_usage": False,
        "logprobs": 1,
        "echo": ["a", "b"],
        "prompt_count": 2,
    }
    assert completion_spec_of(completion(), ["Once"]).args["echo"] is None


def test_the_streams_own_fields() -> None:
    fields: dict[str, Any] = {
        "stop": ["END", "。"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [5],
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "stream_interval": 7,
    }
    for spec in (spec_of(chat(**fields)), completion_spec_of(completion(**fields), ["Once"])):
        assert (spec.stop, spec.include_stop, spec.stop_token_ids) == (("END", "。"), True, (5,))
        assert not spec.skip_special_tokens and not spec.spaces_between_special_tokens
        assert spec.stream_interval == 7 and not spec.split_steps
    fields = {"split_steps": True, "stream_interval": 1}
    for spec in (spec_of(chat(**fields)), completion_spec_of(completion(**fields), ["Once"])):
        assert spec.split_steps
        assert spec.continuation == (spec.post_processor == "completion_unary")


@pytest.mark.parametrize(
    ("fields", "parser", "choice"),
    [
        ({}, None, "none"),
        ({"tools": []}, None, "none"),
        ({"tools": [TOOL]}, "hermes", "auto"),
        ({"tools": [TOOL], "tool_choice": "none"}, None, "none"),
        ({"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, "hermes", "required"),
    ],
)
def test_tools_choose_the_parser(fields: dict[str, Any], parser: str | None, choice: str) -> None:
    server = facts(tool_parser="hermes", reasoning_parser="qwen3")
    args = StreamSpec.decode(admitted(chat(**fields), server).spec).args
    assert (args["tool_parser"], args["tool_choice"], args["reasoning_parser"]) == (parser, choice, "qwen3")
    assert args["tools"] == fields.get("tools", [])
    assert args["parallel_tool_calls"] == fields.get("parallel_tool_calls", True)


def test_tools_that_are_only_shown_need_no_parser() -> None:
    admitted(chat(tools=[TOOL], tool_choice="none"))


def test_only_the_tail_of_the_prompt_travels() -> None:
    assert spec_of(chat(), "x" * 300 + "<think>\n").args["prompt_tail"] == "x" * 248 + "<think>\n"


@pytest.mark.parametrize(
    ("options", "usage"),
    [
        ({}, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),
    ],
)
def test_usage_options(options: dict[str, bool], usage: tuple[bool, bool]) -> None:
    args = spec_of(chat(stream=True, stream_options=options)).args
    assert (args["include_usage"], args["continuous_usage"]) == usage


def test_a_spec_refuses_nothing_that_was_answered_before() -> None:
    body = {"model": "another", "messages": [USER], "tools": [TOOL], "stream_options": {"include_usage": True}}
    spec = spec_of(parse_object(ChatCompletionRequest, body))
    assert spec.args["model"] == "another" and spec.args["include_usage"]


def test_the_same_request_has_the_same_bytes() -> None:
    fields: dict[str, Any] = {"stop": ["a"], "logit_bias": {"7": 1, "3": 2}, "tools": [TOOL], "tool_choice": "none"}
    assert admitted(chat(**fields)) == admitted(chat(**fields))


# ------------------------------------------------------------------ recordings


def test_nothing_is_recorded_unless_asked_for() -> None:
    assert spec_of(chat()).recording is None


def test_a_recording_holds_no_prompt_unless_asked_for() -> None:
    request = chat(messages=[{"role": "user", "content": "my secret"}], user="ann", metadata={"a": "b"}, stop="x")
    spec = spec_of(request, "<|user|>my secret<|assistant|><think>\n", record=True, tokenizer="t.json")
    assert spec.recording == {
        "name": "chatcmpl-7",
        "endpoint": "/v1/chat/completions",
        "request": {"messages": [{"role": "user", "content": ""}], "stop": "x"},
        "server": {"tokenizer": "t.json", "tool_parser": None, "reasoning_parser": None},
        "prompt": "<|assistant|><think>\n",
        "minted": {"id": "chatcmpl-7", "created": 1700000000, "model": "llm"},
    }


def test_a_recording_with_its_prompt() -> None:
    prompt = "x" * 500 + "<think>\n"
    recording = spec_of(chat(user="ann"), prompt, record=True, record_prompts=True, tool_parser="hermes").recording
    assert recording is not None
    assert recording["request"] == {"messages": [USER], "user": "ann"} and recording["prompt"] == prompt
    assert recording["server"] == {"tokenizer": None, "tool_parser": "hermes", "reasoning_parser": None}


@pytest.mark.parametrize(
    ("content", "prompt", "kept"),
    [
        ("Hi", "user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", "\n<think>\n"),
        ("Hi", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "\n<think>\n\n</think>\n\n"),
        ("Hi", "[INST] Hi [/INST]", " [/INST]"),
        ("Hi", "<|start|>assistant", None),
        ("ends in <secret>", "ends in <secret><｜Assistant｜><think>\n", None),
        ("[secret] ", "[secret] [/INST]", None),
        ("", "<secret><｜User｜><｜Assistant｜>", None),
    ],
)
def test_what_is_kept_of_a_prompt_quotes_nobody(content: str, prompt: str, kept: str | None) -> None:
    request = chat(messages=[{"role": "user", "content": content}])
    recording = spec_of(request, prompt, record=True).recording
    assert recording is not None
    assert recording.get("prompt") == kept


@pytest.mark.parametrize(
    ("prompt", "texts", "sent", "kept"),
    [
        ("secret", ["secret"], "", None),
        (["secret", "too"], ["secret", "too"], ["", ""], None),
        ([1, 2], ["secret"], "", None),
    ],
)
def test_a_completion_recording_without_prompts(prompt: Any, texts: list[str], sent: Any, kept: str | None) -> None:
    recording = completion_spec_of(completion(prompt=prompt), texts, record=True).recording
    assert recording is not None
    assert (recording["request"], recording.get("prompt")) == ({"prompt": sent}, kept)
    assert recording["endpoint"] == "/v1/completions"


def test_a_completion_recording_with_prompts() -> None:
    recording = completion_spec_of(completion(echo=True), ["Once"], record=True, record_prompts=True).recording
    assert recording is not None
    assert (recording["request"], recording["prompt"]) == ({"prompt": "Once", "echo": True}, "Once")


@pytest.mark.parametrize("record_prompts", [False, True])
def test_a_recorded_request_is_a_legal_request(record_prompts: bool) -> None:
    turns = [USER, {"role": "assistant", "content": "He"}]
    request = chat(messages=turns, continue_final_message=True, tools=[TOOL], tool_choice="required")
    recording = spec_of(request, record=True, record_prompts=record_prompts).recording
    assert recording is not None
    again = parse_object(ChatCompletionRequest, recording["request"])
    assert again.continue_final_message and again.tools == request.tools


# ------------------------------------------------------------------ any request at all

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1, 200),
    "min_tokens": st.integers(0, 200),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 50),
    "seed": st.integers(-(1 << 63), (1 << 63) - 1),
    "stop": st.lists(st.text("ab<>", min_size=1), max_size=16),
    "stop_token_ids": st.lists(st.integers(0, 1100), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 1100).map(str), st.floats(-100, 100), max_size=3),
    "n": st.integers(1, 200),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries(
        {}, optional={"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}
    ),
    "logprobs": st.booleans(),
    "tools": st.lists(st.just(TOOL), max_size=2),
    "chat_template_kwargs": st.dictionaries(st.text("ab"), st.integers(-(1 << 63), 1 << 70) | st.floats(-1, 1)),
}


@given(st.fixed_dictionaries({}, optional=FIELDS), st.booleans(), st.integers(0, 120))
def test_any_legal_request_is_admitted_or_refused(fields: dict[str, Any], record: bool, prompt_tokens: int) -> None:
    server = facts(record=record, record_prompts=record)
    try:
        request = admitted(chat(**fields), server, prompt_tokens)
    except ApiError as error:
        assert error.status == 400 and error.param
        return
    assert prompt_tokens + request.sampling.max_tokens <= server.max_model_len
    assert StreamSpec.decode(request.spec).outputs == request.num_outputs


# ------------------------------------------------------------------ scaffolding


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("method", "logprobs"), [("majority_vote", None), ("best_of_n", 0)])
def test_the_generations_of_a_scaffolded_chat_are_outputs_of_one_request(
    stream: bool, method: str, logprobs: int | None
) -> None:
    request = admitted(chat(stream=stream, seed=5, scaffolding={"method": method, "n": 8}))
    assert (request.n, request.num_outputs, request.sampling.seed) == (8, 8, 5)
    assert request.sampling.logprobs == logprobs
    spec = StreamSpec.decode(request.spec)
    assert spec.post_processor == ("scaffolding_stream" if stream else "scaffolding_unary")
    assert (spec.outputs, spec.prompt_tokens, spec.logprobs, spec.args["n"]) == (8, 3, logprobs, 8)
    assert spec.args["scaffolding"] == {"method": method, "n": 8, "extract": None}
    assert spec.args["logprobs"] is False


def test_log_probabilities_that_the_client_asks_for_do_for_the_choice_too() -> None:
    request = admitted(chat(logprobs=True, top_logprobs=2, scaffolding={"method": "best_of_n", "n": 2}))
    assert request.sampling.logprobs == 2


def test_a_vote_needs_no_log_probabilities() -> None:
    admitted(chat(scaffolding={"method": "majority_vote", "n": 2}), facts(supported=ALL - {"logprobs"}))
