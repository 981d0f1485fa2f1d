"""An engine without a model: it emits token streams that are given, or made up by rule, at a chosen pace.

Tests and benchmarks stand on it. Its configuration is a mapping; unknown keys and wrong values raise ValueError naming
the key.

========================  ============================================================================================
key                       meaning (default)
========================  ============================================================================================
``vocab_size``            ids are in ``range(vocab_size)`` (32000)
``max_model_len``         prompt and generated ids of one output (2**20)
``eos_token_ids``         the "model's" end-of-sequence ids; synthetic streams never emit them ([])
``special_token_ids``     further ids that synthetic streams never emit ([])
``synthetic_ids``         synthetic streams emit only ids below this; 0: any of the vocabulary (0)
``step_interval``         seconds between steps; 0: every ``collect()`` makes one (0)
``batch_size``            outputs per step at most; the others wait until one ends (256)
``tokens_per_step``       ids per output and step, as of speculative decoding (1)
``scripts``               list of given streams, below; none: all streams are synthetic ([])
``rule``                  which script an output takes: ``order``, ``rid`` or ``prompt`` (order)
``fail_after_steps``      after that many steps, their rows given out, the engine is dead: ``collect()`` raises
                          EngineDeadError. An engine started anew makes as many again. 0: never (0)
========================  ============================================================================================

**Scripts.** Each is a mapping: ``token_ids``; ``finish_reason`` (``stop``, ``length`` or ``error``; default ``stop``);
``stop_token_id`` (optional: the last of ``token_ids``, the end-of-sequence or stop token that ended it); ``message``
(with ``error``); ``logprobs`` (optional, per id ``{"logprob": float, "top": [[id, logprob], ...]}``); ``prompt`` (ids,
for the rule ``prompt``). This is an output of a recording, with two more keys.

- ``order``: the n-th output added takes script n, modulo their number.
- ``rid``: output i of request r takes script r + i, modulo their number.
- ``prompt``: of the scripts whose ``prompt`` the output's prompt starts with, those with the longest; output i takes
  the i-th of them, modulo their number. An output that no script fits is synthetic.

A script ends with its own finish. Earlier ends come first: an end-of-sequence id (unless ``ignore_eos``) or an id of
``stop_token_ids``, after ``min_tokens``, ends an output with ``stop``; ``max_tokens`` with ``length``.

**Synthetic streams** end at ``max_tokens`` unless an id of the request's ``stop_token_ids`` comes first. The next id is
a function of the output's index and all ids before it, prompt and generated: their number, and a CRC-32 that each new
id extends. So a stream is a function of (prompt, index, position).

**Taking up an output.** With a history, a synthetic stream goes on behind it, and so does a script; one that does not
begin with the history is refused, since no engine of this configuration has generated that. The rules ``rid`` and
``prompt`` find the script again in an engine started anew. ``order`` counts anew there, so it takes, from the script
whose turn it is, the first one that begins with the history: the right one if no other begins so. An output that had no
ids yet takes its turn like a new one. Where engines are restarted, ``rid`` and ``prompt`` are the better rules.

Ids in the *prompt* go on likewise, though limits and log-probabilities count from its end: a synthetic stream whose
prompt ends with ids of its own goes on behind them. So does a script found by ``prompt``: what follows the script's
prompt, if it is the script's own beginning, is not repeated.

**Pace.** With an interval, the n-th step is due n intervals after there was something to do; a ``collect()`` that comes
late makes the steps it missed, up to :data:`MAX_CATCH_UP`, as a GPU would have. The clock is an argument, so a test
needs no waiting.

Sampling values mean nothing here, and all are accepted whose ids are in the vocabulary. Log-probabilities, where asked
for, are made up from the ids unless the script has them. One synthetic id costs about 0.7 µs, with 4096 outputs in a
step.
"""

from __future__ import annotations

import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from executor.engines.base import (
    EngineDeadError,
    EngineInfo,
    Part,
    StepColumns,
    StepRow,
    TokenLogprob,
    UnsupportedError,
    check_history,
    check_ids,
    check_request,
    ending_ids,
)
from executor.engines.replay_config import ReplayConfig, Script
from executor.request import SamplingParams
from executor.rids import Rids

#: Missed steps that one collect() makes good: enough for a slow loop, few enough that a stopped one comes back.
MAX_CATCH_UP = 16

#: Odd, from the golden ratio. The checksum alone would do, were it not linear: on its own it runs into short cycles.
MIXER = 0x9E3779B1


@dataclass(slots=True, eq=False)
class _Output:
    """An output in the making."""

    rid: int
    index: int
    #: the finish at the end of this many ids, when no id ends it before
    end: int
    finish: str
    #: ids that end the output, from the position ``min_tokens`` on
    ending: frozenset[int]
    min_tokens: int
    #: top alternatives per id, or None for no log-probabilities
    logprobs: int | None
    #: checksum of all ids so far, for synthetic streams
    state: int
    script: Script | None = None
    #: where in the script the output starts: ids of it that the prompt has
    offset: int = 0
    prompt_len: int = 0
    #: ids generated, the history that the output came with among them
    made: int = 0
    cancelled: bool = False
    #: one synthetic id per step and nothing to look at but ``end``: the benchmarks' case
    plain: bool = False


class _Chorus:
    """Plain outputs of which none is at its end: what a benchmark of the whole system pays for. Its values are columns
    meanwhile: object by object, a step takes half as long again.

    rids: of those of index 0, which come first. left: steps until the first of them is at its end.
    """

    def __init__(self, outputs: Sequence[_Output], rids: Rids) -> None:
        self.rids = rids
        self.others = outputs[len(rids) :]
        self.left = min((output.end - output.made for output in outputs), default=sys.maxsize) - 1
        self._outputs = outputs
        self._made = 0
        self._states = [output.state for output in outputs]
        self._lengths = [output.prompt_len + output.made for output in outputs]

    def step(self, packed: Sequence[bytes]) -> list[int]:
        """One id for each, as its place in the vocabulary."""
        self.left -= 1
        self._made = made = self._made + 1
        size, pairs = len(packed), zip(self._states, self._lengths)
        places = [((state + length + made) * MIXER >> 17) % size for state, length in pairs]
        self._states = list(map(zlib.crc32, map(packed.__getitem__, places), self._states))
        return places

    def disband(self) -> None:
        """Each is by itself again."""
        for output, state in zip(self._outputs, self._states):
            output.state = state
            output.made += self._made


class ReplayEngine:
    """An ``Engine`` that needs no weights. clock: seconds, monotonic."""

    def __init__(self, config: Mapping[str, Any] | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = ReplayConfig.of(config or {})
        self._clock = clock
        self._silent = self._config.silent
        #: what synthetic streams are made of, and as the checksum takes it
        self._vocabulary = self._config.emitted
        self._packed = [token.to_bytes(4, "little") for token in self._vocabulary]
        self._made_up: dict[tuple[int, int], TokenLogprob] = {}
        self._added = 0
        self._steps = 0
        self._last_step = self._config.fail_after_steps or sys.maxsize
        #: when the next step is due; None while nothing runs
        self._due: float | None = None
        self._running: list[_Output] = []
        #: those running that step together, those that step by themselves, and whether that is not so any more
        self._chorus, self._soloists, self._changed = _Chorus((), Rids()), list[_Output](), False
        self._waiting: deque[_Output] = deque()
        self._outputs: dict[tuple[int, int], _Output] = {}

    def start(self, wake: Callable[[], None]) -> EngineInfo:
        """Ready at once. ``wake`` is never called: ``poll_timeout`` says when the next step is due."""
        supported = tuple(f.name for f in fields(SamplingParams))
        config = self._config
        return EngineInfo("replay", config.vocab_size, config.max_model_len, supported, tuple(config.eos_token_ids))

    def add(
        self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams, history: Sequence[int] = ()
    ) -> None:
        """Queue one output. Raises UnsupportedError for a prompt that does not fit, an id outside the vocabulary, or a
        history that is over or not this output's."""
        limits = self._config
        check_request(prompt_ids, sampling, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
        output = self._output(rid, index, prompt_ids, sampling, history)
        self.cancel(rid, index)
        self._added += 1
        self._outputs[rid, index] = output
        self._waiting.append(output)
        if self._due is None:
            self._due = self._clock() + self._config.step_interval

    def _output(
        self, rid: int, index: int, prompt_ids: Sequence[int], sampling: SamplingParams, history: Sequence[int]
    ) -> _Output:
        ending = ending_ids(sampling, self._config.eos_token_ids)
        check_history(history, sampling, ending)
        script, offset = self._find_script(rid, index, prompt_ids, history)
        end, finish, state = sampling.max_tokens, "length", 0
        if script is None:
            check_ids("history", history, self._config.vocab_size)
            ending -= self._silent
            state = _checksum(index, prompt_ids, history)
        elif len(script.token_ids) - offset <= end:
            end, finish = len(script.token_ids) - offset, script.finish_reason
        output = _Output(rid, index, end, finish, ending, sampling.min_tokens, sampling.logprobs, state)
        output.script, output.offset, output.prompt_len, output.made = script, offset, len(prompt_ids), len(history)
        if script is not None and history:
            _check_script(output, script, history)
        once = self._config.tokens_per_step == 1
        output.plain = once and script is None and not ending and sampling.logprobs is None
        return output

    def _find_script(
        self, rid: int, index: int, prompt_ids: Sequence[int], history: Sequence[int]
    ) -> tuple[Script | None, int]:
        scripts = self._config.scripts
        if not scripts:
            return None, 0
        if self._config.rule == "order":
            turn = self._added % len(scripts)
            in_turn = [*scripts[turn:], *scripts[:turn]] if history else [scripts[turn]]
            return next((script for script in in_turn if script.has(history)), in_turn[0]), 0
        if self._config.rule == "rid":
            return scripts[(rid + index) % len(scripts)], 0
        prompt = list(prompt_ids)
        fitting = [script for script in scripts if prompt[: len(script.prompt)] == list(script.prompt)]
        longest = max((len(script.prompt) for script in fitting), default=0)
        fitting = [script for script in fitting if len(script.prompt) == longest]
        if not fitting:
            return None, 0
        script = fitting[index % len(fitting)]
        begun = prompt[longest:]
        return script, len(begun) if script.has(begun) else 0

    def cancel(self, rid: int, index: int) -> None:
        """No row follows. The output leaves its queue at the next step, so a cancel costs a dictionary look-up."""
        output = self._outputs.pop((rid, index), None)
        if output is not None:
            output.cancelled = self._changed = True

    def collect(self) -> list[Part]:
        """All steps that are due. Raises EngineDeadError after ``fail_after_steps``."""
        if self._steps == self._last_step:
            raise EngineDeadError(f"the engine was told to fail after {self._steps} steps")
        parts: list[Part] = []
        for _ in range(min(self._steps_due(), self._last_step - self._steps)):
            self._step(parts)
        if not self._outputs:
            self._due = None
            self._running.clear()  # cancelled ones: there is no next step to let them go
            self._waiting.clear()
            self._regroup()
        return parts

    def _steps_due(self) -> int:
        if self._due is None:
            return 0
        interval = self._config.step_interval
        if not interval:
            return 1
        late = self._clock() - self._due
        if late < 0:
            return 0
        missed = int(late / interval) + 1
        self._due += missed * interval
        return min(missed, MAX_CATCH_UP)

    def _step(self, parts: list[Part]) -> None:
        """One step of the batch: everybody running gets ids, those that ended make room."""
        if self._waiting and len(self._running) < self._config.batch_size:
            self._admit()
        regroup = self._changed or not self._chorus.left
        if regroup:
            self._regroup()
        self._sing(parts)
        ended = [output for output in self._soloists if self._advance(output, parts)]
        if regroup or ended:
            outputs, before = self._outputs, len(self._running)
            self._running = [output for output in self._running if outputs.get((output.rid, output.index)) is output]
            self._changed = len(self._running) != before
        self._steps += 1

    def _regroup(self) -> None:
        """Find out who steps together."""
        self._chorus.disband()
        plain: list[_Output] = []
        others: list[_Output] = []
        self._soloists = []
        for output in self._running:
            if output.plain and not output.cancelled and output.made + 1 < output.end:
                (others if output.index else plain).append(output)
            elif not output.cancelled:
                self._soloists.append(output)
        rids, before = Rids([output.rid for output in plain]), self._chorus.rids
        self._chorus = _Chorus(plain + others, before if rids == before else rids)
        self._changed = False

    def _sing(self, parts: list[Part]) -> None:
        """The chorus' columns and rows."""
        chorus, vocabulary = self._chorus, self._vocabulary
        token_ids = [vocabulary[place] for place in chorus.step(self._packed)]
        if chorus.rids:
            parts.append(StepColumns(chorus.rids, token_ids[: len(chorus.rids)]))
        for output, token in zip(chorus.others, token_ids[len(chorus.rids) :]):
            # Twice as fast as by StepRow's own constructor.
            parts.append(tuple.__new__(StepRow, (output.rid, output.index, (token,), None, False, "", None)))

    def _advance(self, output: _Output, parts: list[Part]) -> bool:
        """Any other output's row; whether it ended."""
        count = min(self._config.tokens_per_step, output.end - output.made)
        row = self._row(output, self._synthetic(output, count) if output.script is None else _scripted(output, count))
        parts.append(row)
        if row.finish_reason is not None:
            del self._outputs[output.rid, output.index]
        return row.finish_reason is not None

    def _admit(self) -> None:
        room = self._config.batch_size - len(self._running)
        self._running.extend(islice(iter(self._pop_waiting, None), room))
        self._changed = True

    def _pop_waiting(self) -> _Output | None:
        while self._waiting:
            output = self._waiting.popleft()
            if not output.cancelled:
                return output
        return None

    def _synthetic(self, output: _Output, count: int) -> list[int]:
        size, state = len(self._vocabulary), output.state
        tokens: list[int] = []
        position = output.prompt_len + output.made
        for made in range(position + 1, position + 1 + count):
            place = ((state + made) * MIXER >> 17) % size
            tokens.append(self._vocabulary[place])
            state = zlib.crc32(self._packed[place], state)
        output.state = state
        return tokens

    def _row(self, output: _Output, tokens: list[int]) -> StepRow:
        stop_token = False
        if output.ending and not output.ending.isdisjoint(tokens):
            tokens, stop_token = _cut(tokens, output)
        first = output.made
        made = output.made = first + len(tokens)
        logprobs = None if output.logprobs is None else self._logprobs(output, first, tokens)
        if stop_token:
            return StepRow(output.rid, output.index, tokens, "stop", True, "", logprobs)
        if made < output.end:
            return StepRow(output.rid, output.index, tokens, None, False, "", logprobs)
        return self._finished(output, tokens, logprobs)

    def _finished(self, output: _Output, tokens: list[int], logprobs: list[TokenLogprob] | None) -> StepRow:
        script, message = output.script, ""
        if script is None or output.finish == "length":
            return StepRow(output.rid, output.index, tokens, output.finish, False, "", logprobs)
        if output.finish == "error":
            message = script.message
        stop_token = output.finish == "stop" and script.stop_token_id is not None
        return StepRow(output.rid, output.index, tokens, output.finish, stop_token, message, logprobs)

    def _logprobs(self, output: _Output, first: int, tokens: list[int]) -> list[TokenLogprob]:
        top = output.logprobs or 0
        given = output.script.logprobs if output.script is not None else None
        if given is None:
            return [self._make_up(token, top) for token in tokens]
        start = output.offset + first
        return [_given(entry, top) for entry in given[start : start + len(tokens)]]

    def _make_up(self, token: int, top: int) -> TokenLogprob:
        """The token first, then its neighbours, each half as likely as the one before. Kept: making one takes 2 µs."""
        entry = self._made_up.get((token, top))
        if entry is None:
            logprob, vocab = -0.5 - (token % 64) / 64, self._config.vocab_size
            best = tuple(((token + n) % vocab, logprob - 0.693147 * n) for n in range(min(top, vocab)))
            entry = self._made_up[token, top] = TokenLogprob(logprob, best)
        return entry

    def poll_timeout(self) -> float | None:
        """Seconds to the next step; None while there is nothing to do. A dead engine wants to say so at once."""
        if self._steps == self._last_step:
            return 0.0
        if self._due is None:
            return None
        return max(0.0, self._due - self._clock()) if self._config.step_interval else 0.0

    def stats(self) -> dict[str, Any]:
        """running, waiting: outputs (those just added and those just cancelled count until the next step); steps."""
        return {"running": len(self._running), "waiting": len(self._waiting), "steps": self._steps}

    def close(self) -> None:
        """Forget everything."""
        self._running, self._due = [], None
        self._waiting.clear()
        self._outputs.clear()
        self._regroup()


def _checksum(index: int, *sequence: Sequence[int]) -> int:
    state = zlib.crc32(index.to_bytes(8, "little"))
    for token_ids in sequence:
        state = zlib.crc32(array("i", token_ids).tobytes(), state)
    return state


def _check_script(output: _Output, script: Script, history: Sequence[int]) -> None:
    """Raise UnsupportedError for ids that the script does not begin with, or that end with its own stop token."""
    if not script.has(history, output.offset):
        raise UnsupportedError("history: it is not how the output's script begins")
    if output.made == output.end and output.finish == "stop" and script.stop_token_id is not None:
        raise UnsupportedError("history: it holds the id that ended the output")


def _scripted(output: _Output, count: int) -> list[int]:
    assert output.script is not None
    first = output.offset + output.made
    return list(output.script.token_ids[first : first + count])


def _cut(tokens: list[int], output: _Output) -> tuple[list[int], bool]:
    """The ids up to the one that ends the output, if one of them does."""
    for n, token in enumerate(tokens):
        if token in output.ending and output.made + n >= output.min_tokens:
            return tokens[: n + 1], True
    return tokens, False


def _given(entry: Mapping[str, Any], top: int) -> TokenLogprob:
    alternatives = tuple((token, logprob) for token, logprob in entry.get("top", ())[:top])
    return TokenLogprob(entry["logprob"], alternatives)
