"""One request's post-processing: rows of token ids in, bytes of its response out.

    ids -> detokenizer -> stop strings (stage.py) -> hook -> record -> post-processor -> bytes

Everything here is a pure function of the spec and the tokens, whatever the cut into rows. That is what makes a resumed
stream possible: a worker that takes over gets the history again, folds what the client already has in silence
(``delivered``), and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from executor.engines.base import StepRow
from executor.history import history_rows
from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END, Finish, Open
from executor.result import DetokenizedGenerationResultBase
from postproc_workers.detokenizer import check_ids
from postproc_workers.hook import Emit, HookError, HookFactory, PostProcessorHook, Replace, Suppress, Terminate
from postproc_workers.logprobs import StepLogprobs
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import StreamSpec
from postproc_workers.stage import News, Stage
from postproc_workers.stop_strings import StopStrings
from postproc_workers.vocabulary import TokenError, Vocabulary

RecordCreator = Callable[[int, StreamSpec, Vocabulary, bool], DetokenizedGenerationResultBase]


def default_record_creator(
    rid: int, spec: StreamSpec, vocabulary: Vocabulary, keep_text: bool
) -> DetokenizedGenerationResultBase:
    """The record of a new request."""
    return DetokenizedGenerationResultBase(rid, spec.outputs, spec.prompt_tokens, keep_text, vocabulary)


class Stream:
    """One open request in a worker.

    flags: what the last row ended, as the emission flags of ``executor.messages``; the worker clears it.
    cancels: outputs that ended here before the engine ended them; the worker passes them on and clears the list.
    late_tokens: tokens that came for an output that had already ended.
    express: how a worker may write this stream's usual events itself, None where it may not; lane: what it keeps for
        that.
    split: whoever calls ``step`` cuts rows into rows of one id first, with the end in the last one.
    """

    __slots__ = (
        "rid", "epoch", "frontend", "spec", "record", "args", "process", "stages", "flags", "cancels", "late_tokens",
        "express", "lane", "split", "_post_processor", "_size", "_hook_factory", "_hook",
    )  # fmt: skip

    def __init__(
        self,
        opened: Open,
        spec: StreamSpec,
        vocabulary: Vocabulary,
        post_processor: PostProcessor,
        hook_factory: HookFactory | None = None,
        record_creator: RecordCreator = default_record_creator,
        stream_interval: int = 1,
    ) -> None:
        self.rid, self.epoch, self.frontend, self.spec = opened.rid, opened.epoch, opened.frontend, spec
        self.record = record_creator(opened.rid, spec, vocabulary, not post_processor.streams)
        self.args = post_processor.make_args(spec.args)
        self.process = post_processor.process
        self.flags = 0
        self.cancels: list[int] = []
        self.late_tokens = 0
        self._post_processor = post_processor
        self._size = vocabulary.size
        self._hook_factory = hook_factory
        self._hook: PostProcessorHook | None = None
        stops = StopStrings(spec.stop, include=spec.include_stop) if spec.stop else None
        self.split = spec.split_steps and post_processor.streams
        interval = spec.stream_interval or stream_interval
        if self.split or not post_processor.streams:
            interval = 1
        self.stages = [
            Stage(out, spec, vocabulary, stops, interval, hook_factory is not None) for out in self.record.outputs
        ]
        (first, *more) = self.stages
        usual = (first.plain and not first.watched) or first.gathers
        self.express = post_processor.express if usual and not more and not self.split else None
        self.lane: Any = None
        for stage, (count, ended) in zip(self.stages, opened.delivered):
            stage.silent, stage.silent_end = count, ended
            stage.plain = stage.plain and not count and not ended

    def step(self, index: int, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None) -> bytes:
        """The bytes that one row adds to the response, b"" for none. logprobs: records. Raises whatever a stage raises:
        see ``fail``."""
        stage = self.stages[index]
        if stage.ended:
            self.late_tokens += len(tokens)
            return b""
        if stage.waiting:
            tokens = stage.with_waiting(tokens)
        if stage.raw_ids is not None:
            stage.keep(tokens, finish)
        try:
            return self._row(stage, tokens, finish, logprobs)
        except TokenError as error:
            return self._stop_at_bad_id(stage, tokens, logprobs, error)

    def watched_step(self, stage: Stage, tokens: Sequence[int], text: str, logprobs: Sequence[bytes] | None) -> bytes:
        """The second fast lane of ``PostprocWorker``: ``step`` for a row of one id that brings no end, and for an
        output with stop strings or log-probabilities that is ``plain`` otherwise. text: what the id completed."""
        output, matcher, piece = stage.output, stage.matcher, text
        if matcher is not None:
            text = matcher.feed(text)
            if matcher.matched is not None:
                entries = stage.entries(tokens, logprobs, (piece,))
                return self._process(stage, News(text, tokens, entries, (), ("stop", matcher.matched)), None)
        if stage.records is not None:
            stage.records += logprobs or ()
            output.logprobs_diff = StepLogprobs(tokens, logprobs, (piece,)) if logprobs else ()
        output.token_ids.append(tokens[0])
        output.token_ids_diff, output.text_diff = tokens, text
        if output.parts is not None and text:
            output.parts.append(text)
        return self.process(self.record, self.args)

    def fail(self, message: str) -> bytes:
        """End the request with an error: the bytes that tell the client. The engine has to be told too."""
        message = message or "the engine failed"
        open_outputs = [stage.index for stage in self.stages if not stage.ended]
        for stage in self.stages:
            stage.ended, stage.plain = True, False
        self.cancels += open_outputs
        self.record.fail()
        payload, whole = self._post_processor.fail(self.args, message)
        self.flags = OUTPUT_END | REQUEST_END | FAILED | (BODY if whole else 0)
        return payload

    def recording(self) -> dict[str, object] | None:
        """The finished request as a recording, when its spec asks for one."""
        if self.spec.recording is None:
            return None
        return {
            **self.spec.recording,
            "prompt_tokens": self.spec.prompt_tokens,
            "outputs": [stage.recorded() for stage in self.stages],
        }

    def history(self) -> list[StepRow]:
        """The rows that this stream is made of so far, for an executor that has to go on from here."""
        rows: list[StepRow] = []
        for stage in self.stages:
            tokens, logprobs = stage.history()
            rows += history_rows(self.rid, stage.index, tokens, logprobs) or [StepRow(self.rid, stage.index, ())]
            if stage.ended:
                finish = stage.finish or Finish("stop")
                rows[-1] = rows[-1]._replace(
                    finish_reason=finish.reason, stop_token=finish.stop_token, message=finish.message
                )
        return rows

    # -------------------------------------------------------------------------------- the general path

    def _row(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None
    ) -> bytes:
        if stage.silent or stage.silent_end:
            return self._resume(stage, tokens, finish, logprobs)
        return self._advance(stage, tokens, finish, logprobs)

    def _stop_at_bad_id(
        self, stage: Stage, tokens: Sequence[int], logprobs: Sequence[bytes] | None, error: TokenError
    ) -> bytes:
        """Decoding refuses a row as a whole, so the ids before the bad one have not been read yet: their text still
        reaches the client, then the request fails, unless they end the output: what comes behind its end is late, good
        or bad."""
        split = next((i for i, token in enumerate(tokens) if not 0 <= token < self._size), len(tokens))
        if split == len(tokens):  # the row is good, and the id one that a post-processor asked about
            raise error
        stage.interval = 1  # nothing is held back for a chunk that will not come
        payload = b""
        if split or stage.holds:
            payload = self._row(stage, tokens[:split], None, logprobs[:split] if logprobs else logprobs)
        if stage.ended:
            self.late_tokens += len(tokens) - split
            return payload
        return payload + self.fail(str(error))

    def _advance(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None
    ) -> bytes:
        news = stage.read(tokens, finish, logprobs)
        failed = finish is not None and finish.reason == "error" and news.end is None
        if failed and not tokens and not news.text and not stage.holds:
            return self.fail(finish.message if finish else "")  # nothing to send first: it can still be an HTTP error
        if self._hook_factory is not None:
            news = self._ask_hook(self._hook_factory, stage, news)
            failed = failed and news.end is None
        if stage.interval > 1 and not failed and not stage.due(news):
            stage.hold(news)
            return b""
        payload = self._process(stage, stage.joined(news), finish)
        return payload + self.fail(finish.message if finish else "") if failed else payload

    def _process(self, stage: Stage, news: News, finish: Finish | None) -> bytes:
        self.record.advance(stage.index, news.token_ids, news.text, news.logprobs)
        stage.output.pieces_diff = news.pieces
        if news.end is not None:
            self._end(stage, news, finish)
        payload = self.process(self.record, self.args)
        stage.output.pieces_diff = ()  # the fast lane does not set it
        return payload

    def _ask_hook(self, factory: HookFactory, stage: Stage, news: News) -> News:
        if self._hook is None:  # made here, where an exception in its constructor fails this request and no other
            self._hook = factory()
        match self._hook(self.record.outputs[stage.index], news.text):
            case Emit():
                return news
            case Replace(str(other)):
                return news._replace(text=other)
            case Suppress():
                return news._replace(text="")
            case Terminate(str(last), str(reason)) if reason:
                return news._replace(text=last, end=(reason, None))
            case answer:
                raise HookError(
                    f"the hook answered {answer!r:.80}, not Emit, Replace, Suppress or Terminate with strings"
                )

    def _end(self, stage: Stage, news: News, finish: Finish | None) -> None:
        assert news.end is not None
        if finish is None:  # ended here, the engine does not know yet
            self.cancels.append(stage.index)
        stage.ended, stage.plain = True, False
        self.record.finish_output(stage.index, *news.end)
        self.flags = OUTPUT_END
        if self.record.finished:
            self.flags |= REQUEST_END if self._post_processor.streams else REQUEST_END | BODY

    # -------------------------------------------------------------------------------- resume

    def _resume(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[bytes] | None
    ) -> bytes:
        """Fold what the client has in silence; what lies behind it goes the usual way."""
        check_ids(stage.visible(tokens, finish), self._size)  # now: a row that is refused must not be folded in part
        # Where the client has the end too, all tokens of the output are silent: it may have been cut by a stop string.
        split = len(tokens) if stage.silent_end else min(stage.silent, len(tokens))
        interval, stage.interval = stage.interval, 1  # nothing may be held across the border: the client has it
        entries = logprobs[:split] if logprobs else logprobs
        self._advance(stage, tokens[:split], finish if stage.silent_end else None, entries)
        stage.interval = interval
        stage.silent = max(stage.silent - split, 0)
        stage.plain = stage.fast and not (stage.silent or stage.silent_end or stage.ended)
        if not stage.silent and (resumed := getattr(self.args, "resumed", None)) is not None:
            resumed()  # a format that numbers its events goes on behind those that the client has
        if stage.silent_end or (split == len(tokens) and finish is None):
            return b""
        return self._advance(stage, tokens[split:], finish, logprobs[split:] if logprobs else logprobs)
