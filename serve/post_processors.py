"""All post-processors by name: what a worker is given at start-up, by the dotted name of this table.

It stands apart from the functions so that one family of them may build on another: harmony's and the Responses API's on
those of the text endpoints.
"""

from __future__ import annotations

from postproc_workers.deltas import POST_PROCESSORS as DELTAS
from postproc_workers.post_processor import PostProcessor
from serve.harmony_adapter import (
    HarmonyPostprocArgs,
    chat_harmony_streaming_post_processor,
    chat_harmony_unary_post_processor,
)
from serve.postprocess_handlers import POST_PROCESSORS as TEXT_POST_PROCESSORS
from serve.postprocess_handlers import fail_stream, fail_unary
from serve.responses_utils import (
    ResponsesPostprocArgs,
    fail_response,
    responses_api_streaming_post_processor,
    responses_api_unary_post_processor,
)
from serve.scaffolded_chat import scaffolded_args, scaffolding_post_processor

POST_PROCESSORS: dict[str, PostProcessor] = {
    **DELTAS,
    **TEXT_POST_PROCESSORS,
    "chat_harmony_stream": PostProcessor(chat_harmony_streaming_post_processor, HarmonyPostprocArgs, fail_stream),
    "chat_harmony_unary": PostProcessor(
        chat_harmony_unary_post_processor, HarmonyPostprocArgs, fail_unary, streams=False
    ),
    "scaffolding_stream": PostProcessor(scaffolding_post_processor, scaffolded_args, fail_stream),
    "scaffolding_unary": PostProcessor(scaffolding_post_processor, scaffolded_args, fail_unary, streams=False),
    "responses_stream": PostProcessor(responses_api_streaming_post_processor, ResponsesPostprocArgs, fail_response),
    "responses_unary": PostProcessor(
        responses_api_unary_post_processor, ResponsesPostprocArgs, fail_response, streams=False
    ),
}
