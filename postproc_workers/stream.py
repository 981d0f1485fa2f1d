"""One request's post-processing: rows of token ids in, bytes of its response out.

    ids -> detokenizer -> stop strings -> hook -> record -> post-processor -> bytes

Everything here is a pure function of the spec and the tokens, whatever the cut into rows. That is what makes a resumed
stream possible: a worker that takes over gets the history again, folds what the client already has in silence
(``delivered``), and goes on.

Where a stop string is cut: the matcher (``stop_strings.py``) finds it in the text; ``_cut`` here maps the place to
the token that completed it, and ids, logprobs and usage end with that token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from executor.engines.base import TokenLogprob
from executor.messages import BODY, FAILED, OUTPUT_END, REQUEST_END, Finish, Open
from executor.result import CompletionOutput, DetokenizedGenerationResultBase, Logprob
from postproc_workers.detokenizer import check_ids
from postproc_workers.hook import Emit, HookError, HookFactory, PostProcessorHook, Replace, Suppress, Terminate
from postproc_workers.post_processor import PostProcessor
from postproc_workers.spec import StreamSpec
from postproc_workers.stop_strings import StopStrings
from postproc_workers.vocabulary import TokenError, Vocabulary

End = tuple[str, str | int | None]
"""(finish_reason, stop_reason)"""

RecordCreator = Callable[[int, StreamSpec, Vocabulary, bool], DetokenizedGenerationResultBase]


def default_record_creator(
    rid: int, spec: StreamSpec, vocabulary: Vocabulary, keep_text: bool
) -> DetokenizedGenerationResultBase:
    """The record of a new request."""
    return DetokenizedGenerationResultBase(rid, spec.outputs, spec.prompt_tokens, keep_text, vocabulary)


class Stage:
    """What one output keeps between rows, apart from its ids: incomplete characters, a stop's prefix, a held chunk.

    plain: rows of one id may take the fast lane of ``PostprocWorker``: no stop strings, hook, log-probabilities, held
        chunk, recording or resume.
    silent, silent_end: tokens, and the end, that the client has already.
    """

    __slots__ = (
        "index", "plain", "output", "detokenizer", "decode", "pieces", "flush", "matcher", "ended", "silent", "silent_end",
        "interval", "held_ids", "held_text", "held_logprobs", "raw_ids", "raw_logprobs", "raw_finish",
    )  # fmt: skip

    def __init__(
        self,
        output: CompletionOutput,
        spec: StreamSpec,
        vocabulary: Vocabulary,
        stops: StopStrings | None,
        hooked: bool,
        interval: int,
    ) -> None:
        detokenizer = vocabulary.detokenizer(
            skip_special_tokens=spec.skip_special_tokens,
            spaces_between_special_tokens=spec.spaces_between_special_tokens,
            continuation=spec.continuation,
            keep=frozenset(spec.visible_tokens),
        )
        self.index, self.output, self.detokenizer = output.index, output, detokenizer
        self.decode, self.pieces, self.flush = detokenizer.decode, detokenizer.pieces, detokenizer.flush
        self.matcher = stops.matcher() if stops is not None else None
        self.ended = False
        self.silent, self.silent_end = 0, False
        self.interval = interval
        self.held_ids: list[int] = []
        self.held_text = ""
        self.held_logprobs: list[Logprob] = []
        self.raw_ids: list[int] | None = [] if spec.recording is not None else None
        self.raw_logprobs: list[TokenLogprob] = []
        self.raw_finish: Finish | None = None
        self.plain = stops is None and not hooked and interval == 1 and spec.logprobs is None and not spec.recording


class Stream:
    """One open request in a worker.

    flags: what the last row ended, as the emission flags of ``executor.wire``; the worker clears it.
    cancels: outputs that ended here before the engine ended them; the worker passes them on and clears the list.
    late_tokens: tokens that came for an output that had already ended.
    """

    __slots__ = (
        "rid", "epoch", "frontend", "spec", "record", "args", "process", "stages", "flags", "cancels", "late_tokens",
        "_post_processor", "_shown_stops", "_size", "_logprobs", "_hook_factory", "_hook",
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
        self._shown_stops = frozenset(spec.stop_token_ids) if spec.include_stop else frozenset()
        self._size = vocabulary.size
        self._hook_factory = hook_factory
        self._hook: PostProcessorHook | None = None
        self._logprobs = spec.logprobs is not None
        stops = StopStrings(spec.stop, include=spec.include_stop) if spec.stop else None
        interval = stream_interval if post_processor.streams else 1
        self.stages = [
            Stage(out, spec, vocabulary, stops, hook_factory is not None, interval) for out in self.record.outputs
        ]
        for stage, (count, ended) in zip(self.stages, opened.delivered):
            stage.silent, stage.silent_end = count, ended
            stage.plain = stage.plain and not count and not ended

    def step(
        self, index: int, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        """The bytes that one row adds to the response, b"" for none. Raises whatever a stage raises: see ``fail``."""
        stage = self.stages[index]
        if stage.ended:
            self.late_tokens += len(tokens)
            return b""
        if stage.raw_ids is not None:
            self._keep(stage, tokens, finish, logprobs)
        try:
            return self._row(stage, tokens, finish, logprobs)
        except TokenError as error:
            return self._stop_at_bad_id(stage, tokens, logprobs, error)

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
            "outputs": [self._recorded_output(stage) for stage in self.stages],
        }

    # -------------------------------------------------------------------------------- the general path

    def _row(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        if stage.silent or stage.silent_end:
            return self._resume(stage, tokens, finish, logprobs)
        return self._advance(stage, tokens, finish, logprobs)

    def _stop_at_bad_id(
        self, stage: Stage, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, error: TokenError
    ) -> bytes:
        """Decoding refuses a row as a whole, so the ids before the bad one have not been read yet: their text still reaches
        the client, then the request fails, unless they end the output: what comes behind its end is late, good or bad."""
        split = next((i for i, token in enumerate(tokens) if not 0 <= token < self._size), len(tokens))
        if split == len(tokens):  # the row is good, and the id one that a post-processor asked about
            raise error
        stage.interval = 1  # nothing is held back for a chunk that will not come
        payload = b""
        if split or stage.held_ids:
            payload = self._row(stage, tokens[:split], None, logprobs[:split] if logprobs else logprobs)
        if stage.ended:
            self.late_tokens += len(tokens) - split
            return payload
        return payload + self.fail(str(error))

    def _advance(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        text, tokens, entries, end = self._read(stage, tokens, finish, logprobs)
        failed = finish is not None and finish.reason == "error" and end is None
        if failed and not tokens and not text and not stage.held_ids:
            return self.fail(finish.message if finish else "")  # nothing to send first: it can still be an HTTP error
        if self._hook_factory is not None:
            text, end = self._ask_hook(self._hook_factory, stage, text, end)
            failed = failed and end is None
        if stage.interval > 1 and not failed and not self._due(stage, tokens, text, entries, end):
            return b""
        if stage.held_ids:
            text, tokens, entries = self._unhold(stage, tokens, text, entries)
        self.record.advance(stage.index, tokens, text, entries)
        if end is not None:
            self._end(stage, end, finish)
        payload = self.process(self.record, self.args)
        return payload + self.fail(finish.message if finish else "") if failed else payload

    def _read(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> tuple[str, Sequence[int], Sequence[Logprob], End | None]:
        """(text, ids, logprobs, end) of a row, cut behind a stop string that completes in it."""
        visible = self._visible(tokens, finish)
        if stage.matcher is None and not self._logprobs:
            text = stage.decode(visible) if visible else ""
            return (
                (text + stage.flush(), tokens, (), self._engine_end(finish, tokens))
                if finish
                else (text, tokens, (), None)
            )
        pieces = stage.pieces(visible)
        if finish is not None and (tail := stage.flush()):
            # The tail belongs to the row's last id. Were it given to the last visible one, a stop string or an offset in the
            # text would depend on whether a hidden stop token came in the same row.
            hidden = len(visible) < len(tokens)
            pieces = [*pieces, tail] if hidden or not pieces else [*pieces[:-1], pieces[-1] + tail]
        return self._match(stage, pieces, tokens, finish, logprobs)

    def _visible(self, tokens: Sequence[int], finish: Finish | None) -> Sequence[int]:
        """The ids whose text is shown: without the stop token that ended the output, unless the client wants to see it."""
        hides = finish is not None and finish.stop_token and tokens and tokens[-1] not in self._shown_stops
        return tokens[:-1] if hides else tokens

    def _match(
        self,
        stage: Stage,
        pieces: list[str],
        tokens: Sequence[int],
        finish: Finish | None,
        logprobs: Sequence[TokenLogprob] | None,
    ) -> tuple[str, Sequence[int], Sequence[Logprob], End | None]:
        text, matcher, end = "".join(pieces), stage.matcher, self._engine_end(finish, tokens)
        if matcher is not None:
            text = matcher.feed(text)
            if matcher.matched is not None:
                tokens = tokens[: _cut(pieces, matcher.match_end)]
                end = ("stop", matcher.matched)
            elif finish is not None:
                text += matcher.flush()
        entries = _entries(tokens, logprobs, pieces) if self._logprobs else ()
        return text, tokens, entries, end

    def _engine_end(self, finish: Finish | None, tokens: Sequence[int]) -> End | None:
        if finish is None or finish.reason == "error":
            return None
        stopped = finish.stop_token and tokens and tokens[-1] in self.spec.stop_token_ids
        return finish.reason, tokens[-1] if stopped else None

    def _ask_hook(self, factory: HookFactory, stage: Stage, text: str, end: End | None) -> tuple[str, End | None]:
        if self._hook is None:  # made here, where an exception in its constructor fails this request and no other
            self._hook = factory()
        match self._hook(self.record.outputs[stage.index], text):
            case Emit():
                return text, end
            case Replace(str(other)):
                return other, end
            case Suppress():
                return "", end
            case Terminate(str(last), str(reason)) if reason:
                return last, (reason, None)
            case answer:
                raise HookError(
                    f"the hook answered {answer!r:.80}, not Emit, Replace, Suppress or Terminate with strings"
                )

    def _end(self, stage: Stage, end: End, finish: Finish | None) -> None:
        if finish is None:  # ended here, the engine does not know yet
            self.cancels.append(stage.index)
        stage.ended, stage.plain = True, False
        self.record.finish_output(stage.index, *end)
        self.flags = OUTPUT_END
        if self.record.finished:
            self.flags |= REQUEST_END if self._post_processor.streams else REQUEST_END | BODY

    # -------------------------------------------------------------------------------- resume, chunking, recording

    def _resume(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> bytes:
        """Fold what the client has in silence; what lies behind it goes the usual way."""
        check_ids(self._visible(tokens, finish), self._size)  # now: a row that is refused must not be folded in part
        # Where the client has the end too, all tokens of the output are silent: it may have been cut by a stop string.
        split = len(tokens) if stage.silent_end else min(stage.silent, len(tokens))
        interval, stage.interval = stage.interval, 1  # nothing may be held across the border: the client has it
        entries = logprobs[:split] if logprobs else logprobs
        self._advance(stage, tokens[:split], finish if stage.silent_end else None, entries)
        stage.interval = interval
        stage.silent = max(stage.silent - split, 0)
        if stage.silent_end or (split == len(tokens) and finish is None):
            return b""
        return self._advance(stage, tokens[split:], finish, logprobs[split:] if logprobs else logprobs)

    def _due(self, stage: Stage, tokens: Sequence[int], text: str, entries: Sequence[Logprob], end: End | None) -> bool:
        """Whether a chunk goes out now; if not, the row is held. The first token and the end always go at once."""
        if end is not None or not self.record.outputs[stage.index].token_ids:
            return True
        if len(stage.held_ids) + len(tokens) >= stage.interval:
            return True
        stage.held_ids += tokens
        stage.held_text += text
        stage.held_logprobs += entries
        return False

    def _unhold(
        self, stage: Stage, tokens: Sequence[int], text: str, entries: Sequence[Logprob]
    ) -> tuple[str, Sequence[int], Sequence[Logprob]]:
        joined = (stage.held_text + text, [*stage.held_ids, *tokens], [*stage.held_logprobs, *entries])
        stage.held_ids, stage.held_text, stage.held_logprobs = [], "", []
        return joined

    def _keep(
        self, stage: Stage, tokens: Sequence[int], finish: Finish | None, logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        assert stage.raw_ids is not None
        stage.raw_ids += tokens
        stage.raw_logprobs += logprobs or ()
        stage.raw_finish = finish

    def _recorded_output(self, stage: Stage) -> dict[str, object]:
        ids, finish = stage.raw_ids or [], stage.raw_finish
        # An output that a stop string or a hook ended has no engine finish; a replay stops it at the same place.
        entry: dict[str, object] = {
            "index": stage.index,
            "token_ids": ids,
            "finish_reason": finish.reason if finish else "stop",
        }
        if finish is not None and finish.stop_token and ids:
            entry["stop_token_id"] = ids[-1]
        if stage.raw_logprobs:
            entry["logprobs"] = [
                {"logprob": _json_float(e.logprob), "top": [[i, _json_float(value)] for i, value in e.top]}
                for e in stage.raw_logprobs
            ]
        return entry


def _json_float(value: float) -> float:
    """JSON has no infinity and no NaN; responses show them as the lowest log-probability there is, which this is too."""
    return value if value > -sys.float_info.max else -sys.float_info.max


def _cut(pieces: Sequence[str], end: int) -> int:
    """How many tokens are needed for the first ``end`` characters of the joined pieces."""
    length = 0
    for i, piece in enumerate(pieces):
        length += len(piece)
        if length >= end:
            return i + 1
    return len(pieces)


def _entries(tokens: Sequence[int], logprobs: Sequence[TokenLogprob] | None, pieces: Sequence[str]) -> list[Logprob]:
    """Logprobs of a row's tokens; a hidden stop token has no piece."""
    if logprobs is None:
        return []
    texts = [*pieces, *[""] * (len(tokens) - len(pieces))]
    return [Logprob(t, e.logprob, e.top, piece) for t, e, piece in zip(tokens, logprobs, texts)]
