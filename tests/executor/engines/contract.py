"""What every engine must do, whatever it generates with: a class of tests to inherit, and how to drive an engine."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from executor.engines.base import Engine, EngineInfo, StepRow, UnsupportedError
from executor.request import SamplingParams

DEADLINE = 60.0


class Driver:
    """Steps an engine until what is asked for has come."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._woken = threading.Event()
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
            rows += self.engine.collect()
        return rows

    def finish(self, count: int) -> list[StepRow]:
        """Rows until ``count`` outputs have ended."""
        return self.until(lambda rows: sum(row.finish_reason is not None for row in rows) == count)

    def run(self, prompt: list[int], *, rid: int = 1, index: int = 0, **sampling: Any) -> list[StepRow]:
        """The rows of one output that has the engine for itself."""
        self.engine.add(rid, index, prompt, SamplingParams(**sampling))
        rows = self.finish(1)
        assert {(row.rid, row.index) for row in rows} == {(rid, index)}
        return rows


def ids(rows: list[StepRow]) -> list[int]:
    """All ids of one output."""
    return [token for row in rows for token in row.token_ids]


def by_output(rows: list[StepRow]) -> dict[tuple[int, int], list[StepRow]]:
    """(rid, index) -> its rows."""
    outputs: dict[tuple[int, int], list[StepRow]] = {}
    for row in rows:
        outputs.setdefault((row.rid, row.index), []).append(row)
    return outputs


class EngineContract:
    """Inherit it and give a fixture ``driver``: a :class:`Driver` of a started engine whose vocabulary has over 64 ids
    and which holds at least 200. ``PROMPT`` may be replaced."""

    PROMPT = [5, 6, 7, 8, 9]
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

    def test_cancel_stops_one_output_only(self, driver: Driver) -> None:
        for rid in (1, 2):
            driver.engine.add(rid, 0, self.PROMPT, SamplingParams(**self.SAMPLING | {"max_tokens": 100}))
        driver.until(lambda rows: {row.rid for row in rows} == {1, 2})
        driver.engine.cancel(1, 0)
        rows = driver.finish(1)
        assert {row.rid for row in rows} == {2}
        assert driver.engine.collect() == []

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
