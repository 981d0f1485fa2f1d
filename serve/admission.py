"""From a parsed request to an admitted one: what to generate, and the spec of the stream that carries it. Pure.

Two questions are kept apart. *May this run here?* is asked by :func:`admit_chat` and :func:`admit_completion`, which
refuse with a 4xx whatever this server, model or engine cannot honour. *What does its stream look like?* is answered by
:func:`chat_spec` and :func:`completion_spec`, which refuse nothing: a replay uses them alone, for requests that some
server has already answered.

Everything random or clock-like arrives in :class:`Minted`. That is what makes a stream a function of its request and
its tokens, and a resubmitted request the same request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from executor.messages import MAX_OUTPUTS
from executor.request import GREEDY_BELOW, GenerationRequest, SamplingParams
from postproc_workers.spec import StreamSpec
from serve.body import MAX_QUOTED
from serve.errors import BadRequestError, ContextLengthError, NotFoundError
from serve.harmony_adapter import harmony_spec
from serve.openai_protocol import ChatCompletionRequest, CompletionRequest
from serve.parsers import HARMONY, reasoning_gate, visible_markers
from serve.recorded_request import RecordedServer, recorded_chat, recorded_completion

AnyRequest = ChatCompletionRequest | CompletionRequest

PROMPT_TAIL = 256  #: characters of a rendered prompt that a post-processor sees

#: SamplingParams fields that a model's generation_config.json may preset for requests that say nothing
PRESETS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

#: Tokens of a completion whose client gives no limit (the legacy endpoint's documented default).
COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What admission knows of the server: fixed once the engine has started.

    model: the name the model is served under.
    max_model_len: tokens of prompt and answer together; vocab_size: ids are in ``range(vocab_size)``.
    supported: SamplingParams fields that the engine honours.
    eos_token_ids: ids that end an output unless ``ignore_eos``.
    tool_parser, reasoning_parser: names the server was started with, or None.
    default_sampling: the model's own values for fields of PRESETS, for requests that give none.
    max_n: choices per prompt at most.
    record, record_prompts: whether streams are recorded, and whether with their prompts.
    reasoning_alias: reasoning is sent under the key ``reasoning`` too.
    tokenizer: path that a recording gives for its tokenizer; "" for none.
    root: what a client may load the tokenizer from: a name on the hub, or a path on this machine; "" for the name.
    """

    model: str
    max_model_len: int
    vocab_size: int
    supported: frozenset[str]
    eos_token_ids: tuple[int, ...] = ()
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    default_sampling: dict[str, Any] = field(default_factory=dict)
    max_n: int = 128
    record: bool = False
    record_prompts: bool = False
    reasoning_alias: bool = False
    tokenizer: str = ""
    root: str = ""


@dataclass(frozen=True, slots=True)
class Minted:
    """All that is random or clock-like about a request, made once by the caller.

    rid: our integer id. response_id: the ``id`` that the client sees. created: Unix time, seconds.
    seed: used when the client gives none, so that a resubmitted request continues the same draw.
    """

    rid: int
    response_id: str
    created: int
    seed: int


# ------------------------------------------------------------------ may this run here?


def check_model(name: str | None, facts: ServerFacts) -> None:
    """Raise NotFoundError unless ``name`` is the served model's, absent or empty."""
    if name and name != facts.model:
        raise NotFoundError(f"The model `{name[:MAX_QUOTED]}` does not exist.", param="model", code="model_not_found")


def admit_chat(
    request: ChatCompletionRequest, *, prompt: str, prompt_ids: list[int], facts: ServerFacts, minted: Minted
) -> GenerationRequest:
    """Admit a chat request whose messages were rendered to ``prompt`` and tokenized. Raises ApiError (4xx)."""
    _check_common(request, [prompt_ids], facts, "messages")
    if request.tools and request.effective_tool_choice != "none" and facts.tool_parser is None:
        raise _unsupported(
            "tools", 'the server was started without a tool parser; tool_choice "none" shows the tools only'
        )
    if request.stop and not request.stop_in_reasoning and facts.reasoning_parser == HARMONY:
        raise _unsupported("stop_in_reasoning", "stop strings are looked for in the whole output of harmony models")
    sampling = sampling_params(request, facts, len(prompt_ids), minted)
    spec = chat_spec(
        request, prompt=prompt, prompt_tokens=len(prompt_ids), facts=facts, minted=minted, streaming=request.stream
    )
    return GenerationRequest(minted.rid, [prompt_ids], sampling, spec.encode(), request.outputs)


def admit_completion(
    request: CompletionRequest,
    *,
    prompts: list[list[int]],
    prompt_texts: list[str],
    facts: ServerFacts,
    minted: Minted,
) -> GenerationRequest:
    """Admit a completion request with its tokenized prompts. Raises ApiError (4xx).

    prompt_texts: one per prompt; may be "" where the request does not ask for an echo.
    """
    _check_common(request, prompts, facts, "prompt")
    if request.echo and request.logprobs is not None:
        raise _unsupported("logprobs", "with echo it would need the prompt's log-probabilities, which are not computed")
    sampling = sampling_params(request, facts, max(map(len, prompts)), minted)
    spec = completion_spec(
        request,
        prompt_tokens=sum(map(len, prompts)),
        prompt_texts=prompt_texts,
        facts=facts,
        minted=minted,
        streaming=request.stream,
    )
    return GenerationRequest(minted.rid, prompts, sampling, spec.encode(), request.n)


def _check_common(request: AnyRequest, prompts: Sequence[Sequence[int]], facts: ServerFacts, param: str) -> None:
    check_model(request.model, facts)
    for ids in prompts:
        if not ids:
            raise _invalid(param, "has no tokens")
    _room(param, max(map(len, prompts)), facts)  # before the ids are looked at: millions of them take a while
    for ids in prompts:
        _check_ids(param, ids, facts)
    _check_outputs(request, len(prompts), facts)
    _check_stream_options(request)


def _check_outputs(request: AnyRequest, prompts: int, facts: ServerFacts) -> None:
    n, param = request.outputs, "n"
    if isinstance(request, ChatCompletionRequest) and request.scaffolding is not None:
        param = "scaffolding.n"
        if _needs_logprobs(request) and "logprobs" not in facts.supported:
            reason = f"{request.scaffolding.method} needs log-probabilities, which the engine does not give"
            raise _unsupported("scaffolding.method", reason)
    if n > facts.max_n:
        raise _invalid(param, f"must be at most {facts.max_n}, got {n}")
    if n * prompts > MAX_OUTPUTS:
        raise _invalid(param, f"times the number of prompts must be at most {MAX_OUTPUTS}, got {n * prompts}")


def _check_stream_options(request: AnyRequest) -> None:
    options = request.stream_options
    if options.model_fields_set and not request.stream:
        raise _invalid("stream_options", "is only allowed when stream is true")
    if options.continuous_usage_stats and not options.include_usage:
        raise _invalid("stream_options.continuous_usage_stats", "needs include_usage to be true")


def _check_ids(param: str, ids: Sequence[int], facts: ServerFacts) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < facts.vocab_size):
        outside = next(i for i in ids if not 0 <= i < facts.vocab_size)
        raise _invalid(param, f"holds token id {outside}; the model's ids are 0 to {facts.vocab_size - 1}")


def _invalid(param: str, message: str) -> BadRequestError:
    return BadRequestError(f"{param} {message}.", param=param, code="invalid_value")


def _unsupported(param: str, reason: str) -> BadRequestError:
    return BadRequestError(f"{param} is not supported: {reason}.", param=param, code="unsupported_parameter")


# ------------------------------------------------------------------ sampling


def sampling_params(request: AnyRequest, facts: ServerFacts, prompt_tokens: int, minted: Minted) -> SamplingParams:
    """How the request's tokens are drawn. Raises BadRequestError for what does not fit or is not honoured.

    prompt_tokens: length of the longest prompt; without a limit from the client the answer may fill the context.
    """
    max_tokens = _max_tokens(request, facts, prompt_tokens)
    if request.min_tokens > max_tokens:
        raise _invalid("min_tokens", f"must not exceed the {max_tokens} tokens that may be generated")
    _check_ids("stop_token_ids", request.stop_token_ids, facts)
    _check_ids("logit_bias", list(request.logit_bias), facts)
    asked = _asked(request)
    for name in SamplingParams(**asked).changed():
        if name not in facts.supported:
            raise _unsupported(name, "the engine does not honour it")
    return SamplingParams(max_tokens=max_tokens, **(_presets(facts, minted) | asked))


def _presets(facts: ServerFacts, minted: Minted) -> dict[str, Any]:
    """What holds where the client gives nothing. A model's preset that the engine does not honour is not the client's
    fault: it is left out."""
    presets = _normal(facts.default_sampling) | {"seed": minted.seed}
    names = facts.supported.intersection((*PRESETS, "seed"))
    return {name: value for name, value in presets.items() if name in names and value is not None}


def _asked(request: AnyRequest) -> dict[str, Any]:
    """What the client itself asks for, by SamplingParams field; where a model may have presets, only what is given."""
    given = {name: getattr(request, name) for name in (*PRESETS, "seed")}
    return {name: value for name, value in _normal(given).items() if value is not None} | {
        "stop_token_ids": tuple(request.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "min_tokens": request.min_tokens,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "logit_bias": request.logit_bias,
        "logprobs": _logprobs(request),
    }


def _normal(values: dict[str, Any]) -> dict[str, Any]:
    """One spelling for greedy and for "top_k is off" (-1 in vLLM, 0 in Hugging Face)."""
    normal = dict(values)
    if (temperature := normal.get("temperature")) is not None and temperature < GREEDY_BELOW:
        normal["temperature"] = 0.0
    if normal.get("top_k") == -1:
        normal["top_k"] = 0
    return normal


def _logprobs(request: AnyRequest) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        return request.top_logprobs if request.logprobs else 0 if _needs_logprobs(request) else None
    return request.logprobs


def _needs_logprobs(request: ChatCompletionRequest) -> bool:
    """Whether an answer is chosen by them, whoever is told them."""
    return request.scaffolding is not None and request.scaffolding.method == "best_of_n"


def _max_tokens(request: AnyRequest, facts: ServerFacts, prompt_tokens: int) -> int:
    """The limit asked for; else all that the context has room for, or in a completion the API's default of 16 tokens.
    The wording is one that gateways know."""
    param = "messages" if isinstance(request, ChatCompletionRequest) else "prompt"
    room = _room(param, prompt_tokens, facts)
    asked = request.token_limit
    if asked is not None and asked > room:
        raise ContextLengthError(
            f"{_limit(facts)} However, you requested {prompt_tokens + asked} tokens ({prompt_tokens} in the {param},"
            f" {asked} in the completion). Please reduce the {param} or the completion.",
            param=_limit_param(request),
        )
    return asked or (room if isinstance(request, ChatCompletionRequest) else min(room, COMPLETION_TOKENS))


def _room(param: str, prompt_tokens: int, facts: ServerFacts) -> int:
    """Tokens that the context has left for an answer."""
    room = facts.max_model_len - prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"{_limit(facts)} However, your {param} resulted in {prompt_tokens} tokens, which leaves no room for an"
            f" answer. Please reduce the length of the {param}.",
            param=param,
        )
    return room


def _limit(facts: ServerFacts) -> str:
    return f"This model's maximum context length is {facts.max_model_len} tokens."


def _limit_param(request: AnyRequest) -> str:
    newer = isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


# ------------------------------------------------------------------ what does its stream look like?


def chat_spec(
    request: ChatCompletionRequest,
    *,
    prompt: str,
    prompt_tokens: int,
    facts: ServerFacts,
    minted: Minted,
    streaming: bool,
) -> StreamSpec:
    """The spec of a chat stream. ``prompt`` is the rendered prompt or its tail, ``prompt_tokens`` its length."""
    tool_choice = request.effective_tool_choice
    args = _common_args(request, facts, minted) | {
        "role": "assistant",
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        "tool_parser": facts.tool_parser if tool_choice != "none" else None,
        "reasoning_parser": facts.reasoning_parser,
        "tools": request.plain_tools(),
        "tool_choice": tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "include_reasoning": request.include_reasoning,
        "reasoning_alias": facts.reasoning_alias,
        "prompt_tail": prompt[-PROMPT_TAIL:],
    }
    recording = None
    if facts.record:
        kept = prompt if facts.record_prompts else args["prompt_tail"]
        recording = recorded_chat(request, kept, _recorded_server(request, facts, minted))
    endpoint = "chat"
    if request.scaffolding is not None:
        endpoint = "scaffolding"
        args |= {"scaffolding": request.scaffolding.model_dump(), "streaming": streaming}
    spec = _spec(request, endpoint, args, request.outputs, prompt_tokens, streaming, recording)
    if not request.stop_in_reasoning:
        spec = replace(spec, stop_gate=reasoning_gate(facts.reasoning_parser, args["prompt_tail"]))
    # A format's markers may be special tokens, and its parser has to see them.
    markers = visible_markers(args["reasoning_parser"], args["tool_parser"])
    spec = replace(spec, visible_tokens=tuple(sorted(markers)), token_pieces=args["reasoning_parser"] is not None)
    return harmony_spec(spec, facts.reasoning_parser, facts.tool_parser)


def completion_spec(
    request: CompletionRequest,
    *,
    prompt_tokens: int,
    prompt_texts: list[str],
    facts: ServerFacts,
    minted: Minted,
    streaming: bool,
) -> StreamSpec:
    """The spec of a completion stream: one text per prompt, ``prompt_tokens`` for all of them together."""
    args = _common_args(request, facts, minted) | {
        "logprobs": request.logprobs,
        "echo": list(prompt_texts) if request.echo else None,
        "prompt_count": len(prompt_texts),
    }
    recording = None
    if facts.record:
        recording = recorded_completion(request, prompt_texts, _recorded_server(request, facts, minted))
    return _spec(request, "completion", args, request.n * len(prompt_texts), prompt_tokens, streaming, recording)


def _common_args(request: AnyRequest, facts: ServerFacts, minted: Minted) -> dict[str, Any]:
    options = request.stream_options
    return {
        "id": minted.response_id,
        "created": minted.created,
        "model": request.model or facts.model,
        "n": request.outputs,
        "include_usage": options.include_usage,
        "continuous_usage": options.include_usage and options.continuous_usage_stats,
    }


def _spec(
    request: AnyRequest,
    endpoint: str,
    args: dict[str, Any],
    outputs: int,
    prompt_tokens: int,
    streaming: bool,
    recording: dict[str, Any] | None,
) -> StreamSpec:
    return StreamSpec(
        post_processor=f"{endpoint}_stream" if streaming else f"{endpoint}_unary",
        args=args,
        outputs=outputs,
        streaming=streaming,
        prompt_tokens=prompt_tokens,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        continuation=endpoint == "completion",
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        stop_token_ids=tuple(request.stop_token_ids),
        logprobs=_logprobs(request),
        stream_interval=request.stream_interval,
        split_steps=request.split_steps,
        recording=recording,
    )


def _recorded_server(request: AnyRequest, facts: ServerFacts, minted: Minted) -> RecordedServer:
    server = {
        "tokenizer": facts.tokenizer or None,
        "tool_parser": facts.tool_parser,
        "reasoning_parser": facts.reasoning_parser,
    }
    said = {"id": minted.response_id, "created": minted.created, "model": request.model or facts.model}
    return RecordedServer(facts.record_prompts, server, said)
