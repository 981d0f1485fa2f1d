"""The default post-processor: no HTTP format, just each step as plain data, for handles in other processes.

``deltas_request`` makes the request whose ``GenerationResult`` a caller steps (``GenerationExecutor.submit``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from executor.request import GenerationRequest, PostprocParams, SamplingParams
from executor.result import DetokenizedGenerationResultBase, OutputDelta
from executor.wire import encode_delta, encode_failure
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import StreamSpec


def deltas_post_processor(record: DetokenizedGenerationResultBase, args: Any) -> bytes:
    """The last step of ``record.updated``."""
    output = record.updated
    return encode_delta(
        OutputDelta(
            output.index,
            output.token_ids_diff,
            output.text_diff,
            output.logprobs_diff,
            output.finish_reason,
            output.stop_reason,
        )
    )


def _fail(args: Any, message: str) -> tuple[bytes, bool]:
    return encode_failure(message), False


def _no_args(args: Mapping[str, Any]) -> None:
    return None


#: The post-processor of this file.
DELTAS = PostprocParams("deltas")


def deltas_request(
    rid: int,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    n: int = 1,
    stop: Sequence[str] = (),
    skip_special_tokens: bool = True,
    postproc: PostprocParams = DELTAS,
    frontend: int = 0,
) -> GenerationRequest:
    """A request whose steps come back as plain data. ``stop``: up to 16 strings. ``postproc``: another post-processor
    that answers in deltas, by its name in the worker's table."""
    spec = StreamSpec(
        post_processor=postproc.post_processor,
        args=dict(postproc.args),
        outputs=len(prompts) * n,
        streaming=True,
        prompt_tokens=sum(map(len, prompts)),
        skip_special_tokens=skip_special_tokens,
        stop=tuple(stop),
        stop_token_ids=sampling.stop_token_ids,
        logprobs=sampling.logprobs,
    )
    return GenerationRequest(rid, prompts, sampling, spec.encode(), n, frontend)


POST_PROCESSORS = {DELTAS.post_processor: PostProcessor(deltas_post_processor, _no_args, _fail)}
