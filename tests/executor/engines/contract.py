"""What every engine must do, whatever it generates with: a class of tests to inherit, and how to drive an engine."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from executor.engines.base import (
    Engine,
    EngineInfo,
    Part,
    StepColumns,
    StepRow,
    TokenLogprob,
    UnsupportedError,
    expand,
)
from executor.request import SamplingParams
from executor.rids import Rids

DEADLINE = 60.0


class Driver:
    """Steps an engine until what is asked for has come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._woken = threading.Event()
        self._rids = Rids()
        self.info: EngineInfo = engine.start(self._woken.set)

    def until(self, done: Callable[[list[StepRow]], bool]) -> list[StepRow]:
        """Rows until ``done(rows)``."""
        rows: list[StepRow] = []
        deadline = time.monotonic() + DEADLINE
        while not done(rows):
            assert time.monotonic() < deadline, f"nothing came in {DEADLINE} s; rows so far: {rows[-5:]}"
            timeout = self.engine.poll_timeout()
            self._woken.wait(1.0 if timeout is None else min(timeout, 1.0))
            self._woken.clear()
            rows += expand(self.collect())
        return rows

    def collect(self) -> list[Part]:
        """What the engine gives, with its columns looked over."""
        parts = self.engine.collect()
        for part in parts:
            if isinstance(part, StepColumns):
                assert type(part.rids) is Rids and type(part.token_ids) is list
                assert len(part.token_ids) == len(part.rids) == len(set(part.rids)) > 0
                assert part.rids is self._rids or part.rids != self._rids, "the same column anew"
                self._rids = part.rids
            elif part.finish_reason is not None:  # its rid may come again
                self._rids = Rids()
        return parts

    def finish(self, count: int) -> list[StepRow]:
        """Rows until ``count`` outputs have ended."""
        return self.until(lambda rows: sum(row.finish_reason is not None for row in rows) == count)

    def run(
        self, prompt: list[int], *, rid: int = 1, index: int = 0, history: Sequence[int] = (), **sampling: Any
    ) -> list[StepRow]:
        """The rows of one output that has the engine for itself."""
        self.engine.add(rid, index, prompt, SamplingParams(**sampling), history)
        rows = self.finish(1)
        assert {(row.rid, row.index) for row in rows} == {(rid, index)}
        return rows


def ids(rows: list[StepRow]) -> list[int]:
    """All ids of one output."""
    return [token for row in rows for token in row.token_ids]


def logprobs(rows: list[StepRow]) -> list[TokenLogprob]:
    """All log-probabilities of one output."""
    return [entry for row in rows for entry in row.logprobs or ()]


def by_output(rows: list[StepRow]) -> dict[tuple[int, int], list[StepRow]]:
    """(rid, index) -> its rows."""
    outputs: dict[tuple[int, int], list[StepRow]] = {}
    for row in rows:
        outputs.setdefault((row.rid, row.index), []).append(row)
    return outputs


#: How outputs that are taken up are sampled, besides ``EngineContract.SAMPLING``.
TAKEN_UP: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filtered": {"temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "logprobs": 3},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logprobs": 0},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {33: 3.0, 34: 2.0, 35: -5.0}, "logprobs": 2},
    "greedy logprobs": {"temperature": 0.0, "logprobs": 4},
    "may end": {"ignore_eos": False},
    "min_tokens": {"ignore_eos": False, "min_tokens": 24},
}


class EngineContract:
    """Inherit it and give a fixture ``driver``: a :class:`Driver` of a started engine whose vocabulary has over 64 ids
    and which holds at least 200. ``PROMPT`` may be replaced."""

    PROMPT = [5, 6, 7, 8, 9]
    #: how much a log-probability may differ between a history that was made id by id and one that is read at once
    TOLERANCE = 0.0
    #: sampled, seeded, and never ended by chance
    SAMPLING: dict[str, Any] = {"max_tokens": 24, "seed": 11, "ignore_eos": True}

    def test_info_names_fields_of_sampling_params(self, driver: Driver) -> None:
        names = {f.name for f in dataclasses.fields(SamplingParams)}
        assert driver.info.supported and set(driver.info.supported) <= names
        assert driver.info.max_model_len >= 200
        assert all(0 <= token < driver.info.vocab_size for token in driver.info.eos_token_ids)

    def test_rows_of_an_output_end_once_and_last(self, driver: Driver) -> None:
        rows = driver.run(self.PROMPT, **self.SAMPLING)
        assert [row.finish_reason for row in rows] == [None] * (len(rows) - 1) + ["length"]
        assert len(ids(rows)) == 24
        assert all(row.token_ids or row.finish_reason for row in rows)
        assert all(0 <= token < driver.info.vocab_size for token in ids(rows))
        assert not any(row.stop_token or row.message or row.logprobs for row in rows)

    def test_one_token(self, driver: Driver) -> None:
        (row,) = driver.run(self.PROMPT, **self.SAMPLING | {"max_tokens": 1})
        assert len(row.token_ids) == 1 and row.finish_reason == "length"

    def test_outputs_side_by_side(self, driver: Driver) -> None:
        lengths = {(rid, index): 3 + rid + 2 * index for rid in (1, 2, 3) for index in (0, 1)}
        for (rid, index), length in lengths.items():
            sampling = SamplingParams(**self.SAMPLING | {"max_tokens": length})
            driver.engine.add(rid, index, [*self.PROMPT, rid], sampling)
        outputs = by_output(driver.finish(len(lengths)))
        assert {output: len(ids(rows)) for output, rows in outputs.items()} == lengths
        assert all(rows[-1].finish_reason == "length" for rows in outputs.values())

    def test_equal_seeds_give_equal_ids_alone_and_in_company(self, driver: Driver) -> None:
        alone = ids(driver.run(self.PROMPT, **self.SAMPLING))
        for rid in (1, 2, 3, 4):
            prompt = self.PROMPT if rid == 3 else [rid, *self.PROMPT, rid]
            driver.engine.add(rid, 0, prompt, SamplingParams(**self.SAMPLING))
        outputs = by_output(driver.finish(4))
        assert ids(outputs[3, 0]) == alone
        assert ids(outputs[2, 0]) != alone

    def test_outputs_of_a_request_differ(self, driver: Driver) -> None:
        streams = [ids(driver.run(self.PROMPT, index=index, **self.SAMPLING)) for index in (0, 1, 2)]
        assert len({tuple(stream) for stream in streams}) == 3

    def test_history_in_the_prompt_goes_on_as_before(self, driver: Driver) -> None:
        whole = ids(driver.run(self.PROMPT, **self.SAMPLING))
        rest = driver.run(self.PROMPT + whole[:10], **self.SAMPLING | {"max_tokens": 14})
        assert ids(rest) == whole[10:]

    @pytest.mark.parametrize("index", [0, 2])
    @pytest.mark.parametrize("name", TAKEN_UP)
    def test_taken_up_anywhere_it_goes_on_as_before(self, driver: Driver, name: str, index: int) -> None:
        sampling = self.SAMPLING | TAKEN_UP[name]
        whole = driver.run(self.PROMPT, index=index, **sampling)
        made = len(ids(whole))
        for k in sorted({0, 1, 2, 5, 11, made - 2, made - 1} & set(range(made))):
            rest = driver.run(self.PROMPT, index=index, history=ids(whole)[:k], **sampling)
            self._expect_rest(whole, k, rest)

    def _expect_rest(self, whole: list[StepRow], k: int, rest: list[StepRow]) -> None:
        assert ids(rest) == ids(whole)[k:]
        assert [row.finish_reason for row in rest[:-1]] == [None] * (len(rest) - 1)
        assert rest[-1][3:6] == whole[-1][3:6], "finish_reason, stop_token, message"
        expected = logprobs(whole)[k:]
        assert len(logprobs(rest)) == len(expected)
        for entry, other in zip(logprobs(rest), expected, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=self.TOLERANCE)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]
            assert [p for _, p in entry.top] == pytest.approx([p for _, p in other.top], abs=self.TOLERANCE)

    def test_taken_up_in_company(self, driver: Driver) -> None:
        sampling = self.SAMPLING | {"logprobs": 2, "frequency_penalty": 0.4}
        whole = driver.run(self.PROMPT, **sampling)
        for k in range(24):
            driver.engine.add(k, 0, self.PROMPT, SamplingParams(**sampling), ids(whole)[:k])
        outputs = by_output(driver.finish(24))
        for k in range(24):
            self._expect_rest(whole, k, outputs[k, 0])

    def test_taken_up_at_its_end_of_sequence(self, driver: Driver) -> None:
        """Where the bias means nothing, this is one more stream; elsewhere the seventh id is an ending one."""
        bias = {token: 1000.0 for token in driver.info.eos_token_ids}
        sampling = {"max_tokens": 9, "seed": 3, "min_tokens": 6, "logit_bias": bias}
        whole = driver.run(self.PROMPT, **sampling)
        for k in range(len(ids(whole))):
            self._expect_rest(whole, k, driver.run(self.PROMPT, history=ids(whole)[:k], **sampling))

    @pytest.mark.parametrize("min_tokens", [0, 2, 8, 20])
    def test_taken_up_it_ends_at_the_same_stop_token(self, driver: Driver, min_tokens: int) -> None:
        stops = tuple(ids(driver.run(self.PROMPT, **self.SAMPLING))[n] for n in (3, 9, 14))
        sampling = self.SAMPLING | {"stop_token_ids": stops, "min_tokens": min_tokens, "logprobs": 1}
        whole = driver.run(self.PROMPT, **sampling)
        for k in range(len(ids(whole))):
            self._expect_rest(whole, k, driver.run(self.PROMPT, history=ids(whole)[:k], **sampling))

    @pytest.mark.parametrize("top", [None, 2])
    def test_a_history_of_all_tokens_brings_an_empty_row(self, driver: Driver, top: int | None) -> None:
        """Even where the next id would be an end-of-sequence one."""
        bias = {token: 1000.0 for token in driver.info.eos_token_ids}
        sampling = self.SAMPLING | {"logprobs": top, "ignore_eos": False, "min_tokens": 24, "logit_bias": bias}
        whole = ids(driver.run(self.PROMPT, **sampling))
        (row,) = driver.run(self.PROMPT, history=whole, **sampling)
        assert (list(row.token_ids), row.finish_reason, row.stop_token, row.message) == ([], "length", False, "")
        assert row.logprobs == (None if top is None else [])
        assert driver.collect() == []
        driver.engine.add(1, 0, self.PROMPT, SamplingParams(**sampling), whole)
        driver.engine.cancel(1, 0)
        assert {row.rid for row in driver.run(self.PROMPT, rid=2, **sampling)} == {2}

    def test_a_history_counts_once(self, driver: Driver) -> None:
        """It is a part of max_tokens, so what fits the model fits it with a history too."""
        length = driver.info.max_model_len if driver.info.max_model_len < 1000 else 300
        sampling = self.SAMPLING | {"max_tokens": length - len(self.PROMPT)}
        whole = driver.run(self.PROMPT, **sampling)
        for k in (1, length // 2, length - len(self.PROMPT) - 1):
            self._expect_rest(whole, k, driver.run(self.PROMPT, history=ids(whole)[:k], **sampling))

    @pytest.mark.parametrize(
        ("history", "sampling"),
        [
            ([5, 6, 7], {"max_tokens": 2}),
            ([5, 7], {"stop_token_ids": (7,)}),
            ([7, 5], {"stop_token_ids": (7,)}),
            ([5, 6, 7], {"stop_token_ids": (7,), "min_tokens": 2}),
            ([5, 7], {"stop_token_ids": (7,), "max_tokens": 2}),
            ([1 << 30], {}),
            ([-1], {}),
        ],
    )
    def test_a_history_that_is_over_or_nobodys_is_refused(
        self, driver: Driver, history: list[int], sampling: dict[str, Any]
    ) -> None:
        with pytest.raises(UnsupportedError, match="^history: "):
            driver.engine.add(1, 0, self.PROMPT, SamplingParams(**sampling), history)
        assert {row.rid for row in driver.run(self.PROMPT, rid=2, **self.SAMPLING)} == {2}

    def test_cancel_stops_one_output_only(self, driver: Driver) -> None:
        for rid in (1, 2):
            driver.engine.add(rid, 0, self.PROMPT, SamplingParams(**self.SAMPLING | {"max_tokens": 100}))
        driver.until(lambda rows: {row.rid for row in rows} == {1, 2})
        driver.engine.cancel(1, 0)
        rows = driver.finish(1)
        assert {row.rid for row in rows} == {2}
        assert driver.collect() == []

    def test_cancelled_before_its_first_step(self, driver: Driver) -> None:
        driver.engine.add(1, 0, self.PROMPT, SamplingParams(**self.SAMPLING))
        driver.engine.cancel(1, 0)
        assert {row.rid for row in driver.run(self.PROMPT, rid=2, **self.SAMPLING)} == {2}

    def test_cancel_of_what_is_unknown_or_over_is_ignored(self, driver: Driver) -> None:
        driver.run(self.PROMPT, **self.SAMPLING)
        driver.engine.cancel(1, 0)
        driver.engine.cancel(12345, 7)
        assert len(ids(driver.run(self.PROMPT, **self.SAMPLING))) == 24

    def test_added_again_after_a_cancel(self, driver: Driver) -> None:
        driver.engine.add(1, 0, self.PROMPT, SamplingParams(**self.SAMPLING | {"max_tokens": 100}))
        driver.until(bool)
        driver.engine.cancel(1, 0)
        assert len(ids(driver.run(self.PROMPT, **self.SAMPLING))) == 24

    @pytest.mark.parametrize(
        ("prompt", "sampling", "field"),
        [
            ([], {}, "prompt"),
            ([-1], {}, "prompt"),
            ([1 << 30], {}, "prompt"),
            ([1], {"max_tokens": 0}, "max_tokens"),
            ([1], {"max_tokens": 1 << 30}, "max_tokens"),
            ([1], {"logit_bias": {1 << 30: 1.0}}, "logit_bias"),
            ([1], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ],
    )
    def test_what_cannot_be_done_is_refused_and_not_queued(
        self, driver: Driver, prompt: list[int], sampling: dict[str, Any], field: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=f"^{field}: "):
            driver.engine.add(1, 0, prompt, SamplingParams(**sampling))
        assert {row.rid for row in driver.run(self.PROMPT, rid=2, **self.SAMPLING)} == {2}

    def test_stop_token_ends_and_is_the_last_id(self, driver: Driver) -> None:
        whole = ids(driver.run(self.PROMPT, **self.SAMPLING))
        stop = whole[12]
        rows = driver.run(self.PROMPT, **self.SAMPLING, stop_token_ids=(stop,))
        assert ids(rows) == whole[: whole.index(stop) + 1]
        assert rows[-1].finish_reason == "stop" and rows[-1].stop_token

    def test_no_stop_before_min_tokens(self, driver: Driver) -> None:
        stop = ids(driver.run(self.PROMPT, **self.SAMPLING))[3]
        rows = driver.run(self.PROMPT, **self.SAMPLING, stop_token_ids=(stop,), min_tokens=8)
        assert len(ids(rows)) >= 8

    @pytest.mark.parametrize("top", [0, 3])
    def test_logprobs_are_one_per_id(self, driver: Driver, top: int) -> None:
        rows = driver.run(self.PROMPT, **self.SAMPLING, logprobs=top)
        for row in rows:
            assert row.logprobs is not None and len(row.logprobs) == len(row.token_ids)
            for entry in row.logprobs:
                assert entry.logprob <= 0.0 and len(entry.top) == top
                values = [value for _, value in entry.top]
                assert values == sorted(values, reverse=True)

    def test_stats_count_outputs(self, driver: Driver) -> None:
        driver.run(self.PROMPT, **self.SAMPLING)
        assert driver.engine.stats().items() >= {"running": 0, "waiting": 0}.items()
        driver.engine.add(1, 0, self.PROMPT, SamplingParams(**self.SAMPLING | {"max_tokens": 100}))
        stats = driver.engine.stats()
        assert stats["running"] + stats["waiting"] <= 1
        driver.engine.cancel(1, 0)
        driver.run(self.PROMPT, rid=2, **self.SAMPLING)
