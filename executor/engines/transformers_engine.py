"""Tokens from a Hugging Face model, by transformers' own continuous batching (paged cache, prefix sharing, scheduling).

Two threads meet here. The *generation thread* is the library's: it schedules, runs the model and delivers each step's
outputs to :class:`_Router`. The *executor's thread* calls the methods of :class:`TransformersEngine`. Between them
lie a queue of the library's for requests, a deque of ours for outputs, and the sampling states by request id.
Requests go by a fresh library id on every ``add``, so what is still in flight of a cancelled output names nobody.

**Deltas.** The library delivers, per step and output, the list of all ids so far, after a preemption too (it then moves
generated ids into the prompt and accounts for that itself when it delivers). Each output has a cursor here, and a row
carries the ids after it. The history of an output that is taken up is prompt to the library, so it is not in that list;
:mod:`executor.engines.sampling` is told where the real prompt ends.

**Death.** A failing forward pass ends the generation thread: the library fails every request, then stops. Such failures
are not passed on as errors of the requests, whose histories another engine can resume: ``collect`` gives what was made
before and then raises EngineDeadError. A request that fails alone ends with an ``error`` row.

Written against transformers 5.24 (``transformers/generation/continuous_batching``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
from transformers.generation.logits_process import LogitsProcessorList

from executor.engines.base import (
    EngineDeadError,
    EngineInfo,
    Part,
    StepRow,
    check_history,
    check_ids,
    check_request,
    ending_ids,
)
from executor.engines.gathering import Gathering
from executor.engines.loading import (
    Limits,
    batching_config,
    check_dtype,
    end_of_sequence,
    load_model,
    model_length,
    parse_device,
)
from executor.engines.sampling import OutputSampling, SamplingProcessor
from executor.request import SamplingParams

logger = logging.getLogger("tailrace.engine")

#: How soon a generation thread is missed that died with nothing to deliver, and nobody woken.
WATCH_SECONDS = 1.0
WARM_UP_SECONDS = 600.0
STOP_SECONDS = 30.0


@dataclass(slots=True)
class _Stream:
    """An output that the library works on. history: ids that it came with; sent: ids that went into rows."""

    rid: int
    index: int
    library_id: str
    ending: frozenset[int]
    sampling: OutputSampling
    history: int = 0
    sent: int = 0


class _Router:
    """The library's ``output_router``. The generation thread calls it; so does ``add``, for what is over at once."""

    def __init__(self, stopping: Callable[[], bool]) -> None:
        #: outputs in the order they were made; the executor's thread pops from the left
        self.outputs: deque[GenerationOutput] = deque()
        #: why the generation thread gives up
        self.fatal: Exception | None = None
        self.wake: Callable[[], None] = lambda: None
        self._stopping = stopping

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        self.outputs.extend(outputs)
        self.wake()

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        if self._stopping():
            # The thread fails all requests because it stops: no failure of theirs. Waking lets collect() see it.
            self.fatal = error
            self.wake()
            return
        state.status = RequestStatus.FAILED
        state.error = str(error) or type(error).__name__
        self.deliver(state.to_generation_output())


class TransformersEngine:
    """An ``Engine`` on a local directory in Hugging Face layout.

    model_dir: config.json, weights (safetensors) and, optionally, generation_config.json with the end-of-sequence ids.
    device: ``auto`` (CUDA if there is one, else the CPU) or a torch device such as ``cuda:1``.
    dtype: ``auto`` (float32 on a CPU; else the checkpoint's, bfloat16 for float32), ``float32``, ``bfloat16``,
        ``float16``. float32 is the CPU's default because bfloat16, 10-20% faster where the CPU has instructions for it
        and many times slower elsewhere, would let other requests in the batch change a seeded answer.
    max_batch_tokens, max_num_seqs, max_model_len: see :class:`~executor.engines.loading.Limits`.

    Raises ValueError naming the argument; ``start`` raises OSError or ValueError for a model that cannot be loaded.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_batch_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        self._model_dir = Path(model_dir)
        self._device = parse_device(device)
        self._dtype = check_dtype(dtype)
        self._limits = Limits(max_batch_tokens, max_num_seqs, max_model_len)
        self._processor = SamplingProcessor()
        self._router = _Router(self._stopping)
        self._manager: Any = None
        #: known once started
        self._eos: tuple[int, ...] = ()
        self._vocab_size = self._max_model_len = 0
        self._closed = False
        self._gathering = Gathering()
        self._serial = count()
        #: library id -> stream, and (rid, index) -> stream: the outputs not finished and not cancelled
        self._streams: dict[str, _Stream] = {}
        self._by_output: dict[tuple[int, int], _Stream] = {}

    # -- life ----------------------------------------------------------------------------------------------------------

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Load the model, lay out the cache, run a first request, and only then say what there is."""
        model = load_model(self._model_dir, self._device, self._dtype)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._eos = end_of_sequence(model)
        with torch.inference_mode():
            self._start_manager(model)
            self._warm_up()
        self._router.wake = wake
        supported = tuple(f.name for f in fields(SamplingParams))
        return EngineInfo("transformers", self._vocab_size, self._max_model_len, supported, self._eos)

    def _start_manager(self, model: Any) -> None:
        began = time.monotonic()
        # A configuration of our own: the model's may bring processors (penalties, suppressed ids) that no request asked
        # for. Each request names its ending ids, hence -1, the library's "none".
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
        manager = model.init_continuous_batching(generation, batching_config(model, self._device, self._limits))
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self._processor]))
        manager.logit_processor.tensors_required = 1  # the library writes one row of arguments per processor
        manager.output_router = self._router
        self._manager = manager
        manager.warmup()  # lays out the cache; router and processor must be in place before
        cache = manager.batch_processor.cache
        size, took = cache.cache_tensor.numel() / 2**20, time.monotonic() - began
        logger.info("cache of %d tokens, %.0f MiB, in %.1f s", cache.max_tokens_read, size, took)
        self._fit(model_length(self._limits.max_model_len, model), infer_max_single_request_tokens(cache))
        manager.start()

    def _fit(self, length: int, cache_tokens: int) -> None:
        if length > cache_tokens:
            logger.warning("max_model_len is %d instead of %d: the cache holds no more", cache_tokens, length)
        self._max_model_len = min(length, cache_tokens)

    def _warm_up(self) -> None:
        """One request through everything: first-use costs fall here, and a model that cannot run fails the start."""
        began, made = time.monotonic(), threading.Event()
        self._router.wake = made.set
        self.add(0, 0, [0], SamplingParams(max_tokens=2, top_p=0.9, logprobs=1, ignore_eos=True))
        while self._streams:
            if time.monotonic() - began > WARM_UP_SECONDS:
                raise EngineDeadError(f"the first request took more than {WARM_UP_SECONDS:.0f} s")
            made.wait(WATCH_SECONDS)
            made.clear()
            self.collect()
        logger.info("warmed up in %.1f s", time.monotonic() - began)

    def close(self) -> None:
        """Stop the generation thread, which finishes the step it is in, and free model and cache."""
        if self._closed:
            return
        self._closed = True
        manager, self._manager = self._manager, None
        if manager is not None and manager.is_running():
            manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
        self._streams.clear()
        self._by_output.clear()
        self._processor.outputs.clear()
        self._router.outputs.clear()

    # -- requests in ---------------------------------------------------------------------------------------------------

    def add(
        self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams, history: Sequence[int] = ()
    ) -> None:
        """Queue one output; the library's queue has no bound, so this never waits.

        Raises UnsupportedError naming the field, EngineDeadError when nothing will ever generate it.
        """
        ending = ending_ids(sampling, self._eos)
        check_request(prompt_ids, sampling, vocab_size=self._vocab_size, max_model_len=self._max_model_len)
        check_history(history, sampling, ending)
        check_ids("history", history, self._vocab_size)
        self.cancel(rid, index)
        inside = tuple(sorted(token for token in ending if 0 <= token < self._vocab_size))
        output = OutputSampling.of(sampling, index, len(prompt_ids), inside)
        library_id = f"{rid}.{index}#{next(self._serial)}"
        stream = _Stream(rid, index, library_id, frozenset(inside), output, len(history))
        # Registered before it is queued: the generation thread may take it up at once.
        self._streams[library_id] = self._by_output[rid, index] = stream
        self._processor.outputs[library_id] = output
        self._queue(stream, [*prompt_ids, *history], sampling.max_tokens - len(history))

    def _queue(self, stream: _Stream, sequence: list[int], max_new_tokens: int) -> None:
        if not max_new_tokens:  # the library would read it all for one id more, and keep that if it is an ending one
            self._router.deliver(GenerationOutput(stream.library_id, status=RequestStatus.FINISHED))
            return
        ending = list(stream.sampling.ending) or -1
        queued = self._manager.add_request(
            sequence, stream.library_id, max_new_tokens, streaming=True, eos_token_id=ending
        )
        if queued is None:
            self._forget(stream)
            raise EngineDeadError(self._reason())

    def cancel(self, rid: int, index: int) -> None:
        """Forget an output; its cache is free before the library's next step."""
        stream = self._by_output.get((rid, index))
        if stream is None:
            return
        self._forget(stream)
        self._manager.cancel_request(stream.library_id)

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.library_id, None)
        self._by_output.pop((stream.rid, stream.index), None)
        self._processor.outputs.pop(stream.library_id, None)

    # -- rows out ------------------------------------------------------------------------------------------------------

    def collect(self) -> list[Part]:
        """What was made, in order. Raises EngineDeadError once the generation thread is gone and all is handed out."""
        outputs = self._router.outputs
        while outputs:
            output = outputs.popleft()
            stream = self._streams.get(output.request_id)
            if stream is not None:
                self._gather(stream, output)
        parts = self._gathering.take()
        if not parts:
            self._watch()
        return parts

    def _gather(self, stream: _Stream, output: GenerationOutput) -> None:
        token_ids = output.generated_tokens
        more = len(token_ids) - stream.sent
        if more == 1 and not stream.index and stream.sampling.params.logprobs is None and not output.is_finished():
            self._gathering.usual(stream.rid, token_ids[stream.sent])
            stream.sent += 1
        else:
            self._gathering.odd(self._row(stream, output))

    def _row(self, stream: _Stream, output: GenerationOutput) -> StepRow:
        tokens = output.generated_tokens[stream.sent :]
        first = stream.history + stream.sent
        stream.sent += len(tokens)
        logprobs = None
        if stream.sampling.params.logprobs is not None:
            logprobs = [stream.sampling.logprobs.pop(n) for n in range(first, first + len(tokens))]
        if not output.is_finished():
            return StepRow(stream.rid, stream.index, tokens, logprobs=logprobs)
        self._forget(stream)
        if output.status == RequestStatus.FAILED:
            return StepRow(stream.rid, stream.index, tokens, "error", False, output.error or "", logprobs)
        stopped = bool(tokens) and tokens[-1] in stream.ending
        return StepRow(stream.rid, stream.index, tokens, "stop" if stopped else "length", stopped, "", logprobs)

    def _watch(self) -> None:
        if self._closed or self._manager is None:
            return
        if self._stopping() or not self._manager.is_running():
            if self._router.outputs:
                return  # delivered since collect() looked; they come first
            raise EngineDeadError(self._reason())
        # After a preemption the library admits nothing new until an output finishes. When the outputs left are all
        # cancelled instead, none finishes and the preempted would wait for ever.
        scheduler = self._manager.batch_processor.scheduler
        if scheduler.block_new_requests and not scheduler.active_requests:
            scheduler.block_new_requests = False

    def poll_timeout(self) -> float | None:
        """A wake tells of every output; this is for what cannot wake, see :meth:`_watch`."""
        return WATCH_SECONDS

    def _stopping(self) -> bool:
        """Whether the generation thread was told to stop, by us or by its own failure."""
        status = self._manager.background_thread_status if self._manager is not None else None
        return status is None or status.local_status != status.DONT_STOP

    def _reason(self) -> str:
        if self._closed or self._manager is None:
            return "the engine is not running"
        error = self._router.fatal or self._manager.background_thread_status.fatal_error
        return f"the generation thread died: {error!r}" if error else "the generation thread stopped"

    def stats(self) -> dict[str, Any]:
        """running, waiting: outputs; cache_usage: share of the cache in use, 0 to 1."""
        if self._manager is None or self._manager.batch_processor is None:
            return {"running": 0, "waiting": 0, "cache_usage": 0.0}
        processor = self._manager.batch_processor
        # Lengths only: each is one atomic read of what the generation thread owns.
        running, queued = len(processor.scheduler.active_requests), self._manager.input_queue.qsize()
        return {
            "running": running,
            "waiting": queued + len(processor.scheduler.waiting_requests),
            "cache_usage": 1.0 - processor.cache.compute_free_capacity(),
        }
