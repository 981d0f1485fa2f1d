"""Inference-time methods over results that are stepped: best of N, majority vote, self-refinement, tree search, and
whatever else is written as a controller. See docs/scaffolding.md.

``serve.scaffolding.local`` starts an executor for a script; it imports what that takes, and is not imported here.
"""

from serve.scaffolding.async_generation import AsyncGeneration, AsyncGenerationTask, async_generation_handler
from serve.scaffolding.best_of_n import BestOfNController
from serve.scaffolding.controller import Controller, NativeGenerationController, ParallelProcess, Process
from serve.scaffolding.early_stop import EarlyStopController
from serve.scaffolding.executor_worker import ExecutorWorker
from serve.scaffolding.majority_vote import MajorityVoteController
from serve.scaffolding.openai_worker import OpenAIWorker
from serve.scaffolding.progress import Progress
from serve.scaffolding.progress_line import ProgressLine
from serve.scaffolding.scaffolding_llm import ScaffoldingLlm, ScaffoldingResult
from serve.scaffolding.self_refine import SelfRefineController
from serve.scaffolding.streaming import (
    StepOutput,
    StreamGenerationTask,
    stream_generation_handler,
    streaming_generate_helper,
)
from serve.scaffolding.task import GENERATION, GenerationTask, Task, TaskError, TaskStatus, samples
from serve.scaffolding.tree_search import TreeSearchController
from serve.scaffolding.worker import Worker

__all__ = [
    "GENERATION",
    "AsyncGeneration",
    "AsyncGenerationTask",
    "BestOfNController",
    "Controller",
    "EarlyStopController",
    "ExecutorWorker",
    "GenerationTask",
    "MajorityVoteController",
    "NativeGenerationController",
    "OpenAIWorker",
    "ParallelProcess",
    "Process",
    "Progress",
    "ProgressLine",
    "ScaffoldingLlm",
    "ScaffoldingResult",
    "SelfRefineController",
    "StepOutput",
    "StreamGenerationTask",
    "Task",
    "TaskError",
    "TaskStatus",
    "TreeSearchController",
    "Worker",
    "async_generation_handler",
    "samples",
    "stream_generation_handler",
    "streaming_generate_helper",
]
