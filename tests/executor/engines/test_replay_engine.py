"""The replay engine: the contract, given and synthetic streams, and its pace on a clock that the test turns."""

from __future__ import annotations

from typing import Any

import pytest

from executor.engines.base import EngineDeadError, StepRow, TokenLogprob, UnsupportedError, expand
from executor.engines.replay_engine import MAX_CATCH_UP, ReplayEngine
from executor.request import SamplingParams
from tests.executor.engines.contract import Driver, EngineContract, by_output, ids


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def drive(**config: Any) -> Driver:
    return Driver(ReplayEngine(config))


class TestContractOneByOne(EngineContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return drive(eos_token_ids=[2])


class TestContractInBursts(EngineContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return drive(eos_token_ids=[2], tokens_per_step=5, vocab_size=1000)


class TestContractFewAtATime(EngineContract):
    @pytest.fixture
    def driver(self) -> Driver:
        return drive(batch_size=2, vocab_size=100)


def test_synthetic_streams_never_emit_special_ids() -> None:
    rows = drive(vocab_size=8, eos_token_ids=[0, 3], special_token_ids=[5]).run([1], max_tokens=500)
    assert set(ids(rows)) == {1, 2, 4, 6, 7}
    assert rows[-1].finish_reason == "length"


@pytest.mark.parametrize("vocab_size", [256, 32000, 65536])
def test_synthetic_streams_differ_and_do_not_go_in_circles(vocab_size: int) -> None:
    driver = drive(vocab_size=vocab_size, tokens_per_step=500)
    for rid in range(50):
        driver.engine.add(rid, 0, [1, 2, rid], SamplingParams(max_tokens=500))
    streams = [tuple(ids(rows)) for rows in by_output(driver.finish(50)).values()]
    assert len(set(streams)) == 50
    for stream in streams:
        assert len(set(zip(stream, stream[1:], strict=False))) > 450


def test_bursts_change_no_id() -> None:
    each = ids(drive().run([4, 5], max_tokens=40))
    for tokens_per_step in (2, 7, 64):
        rows = drive(tokens_per_step=tokens_per_step).run([4, 5], max_tokens=40)
        assert ids(rows) == each
        assert max(len(row.token_ids) for row in rows) == min(tokens_per_step, 40)


def test_script_ends_with_its_own_finish() -> None:
    scripts = [
        {"token_ids": [11, 12, 13], "finish_reason": "length"},
        {"token_ids": [11, 12, 2], "finish_reason": "stop", "stop_token_id": 2},
        {"token_ids": [11, 12], "finish_reason": "stop"},
        {"token_ids": [11], "finish_reason": "error", "message": "boom"},
        {"token_ids": [], "finish_reason": "error"},
    ]
    driver = drive(scripts=scripts)
    last = [driver.run([1], max_tokens=99, ignore_eos=True)[-1] for _ in scripts]
    assert last[0] == StepRow(1, 0, [13], "length")
    assert last[1] == StepRow(1, 0, [2], "stop", True)
    assert last[2] == StepRow(1, 0, [12], "stop", False)
    assert last[3] == StepRow(1, 0, [11], "error", False, "boom")
    assert last[4] == StepRow(1, 0, [], "error", False, "the recorded engine failed")


@pytest.mark.parametrize("tokens_per_step", [1, 2, 10])
def test_earlier_ends_come_first(tokens_per_step: int) -> None:
    def end(**sampling: Any) -> tuple[list[int], str | None, bool]:
        config = {"eos_token_ids": [2], "tokens_per_step": tokens_per_step}
        rows = drive(scripts=[{"token_ids": [5, 2, 6, 7, 8]}], **config).run([1], **sampling)
        return ids(rows), rows[-1].finish_reason, rows[-1].stop_token

    assert end(max_tokens=9) == ([5, 2], "stop", True)
    assert end(max_tokens=9, ignore_eos=True) == ([5, 2, 6, 7, 8], "stop", False)
    assert end(max_tokens=9, ignore_eos=True, stop_token_ids=(7,)) == ([5, 2, 6, 7], "stop", True)
    assert end(max_tokens=9, min_tokens=2, stop_token_ids=(6,)) == ([5, 2, 6], "stop", True)
    assert end(max_tokens=3, ignore_eos=True) == ([5, 2, 6], "length", False)
    assert end(max_tokens=5, ignore_eos=True) == ([5, 2, 6, 7, 8], "stop", False)


def test_scripts_by_order_and_by_rid() -> None:
    scripts = [{"token_ids": [token]} for token in (10, 11, 12)]
    in_order = drive(scripts=scripts)
    assert [ids(in_order.run([1], rid=7)) for _ in range(4)] == [[10], [11], [12], [10]]
    by_rid = drive(scripts=scripts, rule="rid")
    assert [ids(by_rid.run([1], rid=rid, index=index)) for rid, index in [(7, 0), (7, 1), (7, 2), (3, 0)]] == [
        [11],
        [12],
        [10],
        [10],
    ]


def test_scripts_by_prompt() -> None:
    scripts = [
        {"prompt": [1], "token_ids": [20, 21, 22]},
        {"prompt": [1, 5], "token_ids": [30, 31, 32]},
        {"prompt": [1, 5], "token_ids": [40, 41, 42]},
    ]
    driver = drive(scripts=scripts, rule="prompt")
    assert ids(driver.run([1, 6])) == [20, 21, 22]
    assert ids(driver.run([1, 5])) == [30, 31, 32]
    assert ids(driver.run([1, 5], index=1)) == [40, 41, 42]
    assert ids(driver.run([1, 5, 40, 41], index=1)) == [42], "history is not repeated"
    assert ids(driver.run([1, 5, 30, 31, 32])) == []
    assert ids(driver.run([1, 5, 9])) == [30, 31, 32]
    assert len(ids(driver.run([9], max_tokens=7))) == 7, "no script fits: synthetic"


ENDS: list[dict[str, Any]] = [
    {"token_ids": [11, 12, 13], "finish_reason": "length"},
    {"token_ids": [21, 22, 2], "finish_reason": "stop", "stop_token_id": 2},
    {"token_ids": [31, 32, 33, 34], "finish_reason": "stop"},
    {"token_ids": [41, 42], "finish_reason": "error", "message": "boom"},
    {
        "token_ids": [51, 10**12, -3],
        "logprobs": [{"logprob": -n, "top": [[n, -n]]} for n in (1.0, 2.0, 3.0)],
    },
]


@pytest.mark.parametrize("tokens_per_step", [1, 2, 10])
@pytest.mark.parametrize("rule", ["order", "rid", "prompt"])
@pytest.mark.parametrize("number", range(len(ENDS)))
def test_scripts_are_taken_up_by_an_engine_started_anew(rule: str, number: int, tokens_per_step: int) -> None:
    config = {"scripts": ENDS, "rule": rule, "tokens_per_step": tokens_per_step}
    first, sampling = drive(**config), SamplingParams(max_tokens=9, logprobs=1, ignore_eos=True)
    for n in range(len(ENDS)):
        first.engine.add(10, n, [1], sampling)
    whole = by_output(first.finish(len(ENDS)))[10, number]
    for k in range(1 if rule == "order" else 0, len(ids(whole))):
        anew = drive(**config)
        anew.engine.add(10, number, [1], sampling, ids(whole)[:k])
        rest = anew.finish(1)
        assert ids(rest) == ids(whole)[k:]
        assert [entry for row in rest for entry in row.logprobs or ()] == [
            entry for row in whole for entry in row.logprobs or ()
        ][k:]
        assert rest[-1][3:6] == whole[-1][3:6]


def test_a_script_that_has_nothing_left_gives_its_finish() -> None:
    config = {"scripts": ENDS, "rule": "rid"}
    assert drive(**config).run([1], rid=0, history=[11, 12, 13]) == [StepRow(0, 0, [], "length")]
    assert drive(**config).run([1], rid=2, history=[31, 32, 33, 34]) == [StepRow(2, 0, [], "stop")]
    assert drive(**config).run([1], rid=3, history=[41, 42]) == [StepRow(3, 0, [], "error", False, "boom")]
    assert drive(**config).run([1], rid=2, history=[31, 32], max_tokens=2) == [StepRow(2, 0, [], "length")]
    with pytest.raises(UnsupportedError, match=r"^history: it holds the id that ended"):
        drive(**config).run([1], rid=1, history=[21, 22, 2])


@pytest.mark.parametrize("rule", ["order", "rid", "prompt"])
def test_a_history_that_no_script_begins_with_is_refused(rule: str) -> None:
    driver = drive(scripts=[{"token_ids": [11, 12]}, {"token_ids": [21]}], rule=rule)
    for history in ([11, 13], [11, 12, 13], [99]):
        with pytest.raises(UnsupportedError, match=r"^history: it is not how the output's script begins"):
            driver.engine.add(2, 0, [1], SamplingParams(), history)
    assert ids(driver.run([1], rid=2)) == [11, 12], "a refused output takes no turn"


def test_scripts_by_order_are_told_apart_by_their_beginnings() -> None:
    scripts = [{"token_ids": [7, 8, tail]} for tail in (10, 11, 12)]
    driver = drive(scripts=scripts)
    assert ids(driver.run([1], history=[7, 8, 11])) == [], "the second, though the first has its turn"
    assert ids(driver.run([1], history=[7, 8])) == [11], "of equal beginnings the one whose turn it is"
    assert ids(driver.run([1])) == [7, 8, 12], "each has taken a turn"


def test_a_history_goes_behind_what_the_prompt_has_of_a_script() -> None:
    scripts = [{"prompt": [1, 5], "token_ids": [30, 31, 32, 33, 34], "logprobs": [{"logprob": -n} for n in range(5)]}]
    rows = drive(scripts=scripts, rule="prompt").run([1, 5, 30], history=[31, 32], max_tokens=3, logprobs=0)
    assert rows == [StepRow(1, 0, [33], "length", False, "", [TokenLogprob(-3)])]


def test_given_logprobs() -> None:
    entries = [{"logprob": -0.5, "top": [[7, -0.5], [8, -1.5]]}, {"logprob": -2.0}]
    driver = drive(scripts=[{"token_ids": [7, 9], "logprobs": entries}], tokens_per_step=2)
    (row,) = driver.run([1], logprobs=1)
    assert row.logprobs == [TokenLogprob(-0.5, ((7, -0.5),)), TokenLogprob(-2.0, ())]
    (row,) = driver.run([1])
    assert row.logprobs is None


def test_batch_size_bounds_a_step_and_the_first_come_first() -> None:
    driver = drive(batch_size=2)
    for rid in range(4):
        driver.engine.add(rid, 0, [1], SamplingParams(max_tokens=2))
    assert driver.engine.stats() == {"running": 0, "waiting": 4, "steps": 0}
    steps = [[row.rid for row in expand(driver.collect())] for _ in range(5)]
    assert steps == [[0, 1], [0, 1], [2, 3], [2, 3], []]


def test_a_cancelled_output_makes_room() -> None:
    driver = drive(batch_size=1)
    for rid in range(4):
        driver.engine.add(rid, 0, [1], SamplingParams(max_tokens=3))
    assert [row.rid for row in expand(driver.collect())] == [0]
    driver.engine.cancel(0, 0)
    driver.engine.cancel(1, 0)
    assert driver.collect() == []
    assert [row.rid for row in expand(driver.collect())] == [2]


def test_pace() -> None:
    clock = Clock()
    engine = ReplayEngine({"step_interval": 0.5}, clock=clock)
    engine.start(lambda: None)
    assert engine.poll_timeout() is None and engine.collect() == []
    engine.add(1, 0, [1], SamplingParams(max_tokens=100))
    assert engine.poll_timeout() == 0.5 and engine.collect() == []
    clock.now += 0.5
    assert engine.poll_timeout() == 0.0 and len(engine.collect()) == 1
    assert engine.poll_timeout() == 0.5 and engine.collect() == []
    clock.now += 1.75
    assert len(engine.collect()) == 3, "the steps that were missed"
    assert engine.poll_timeout() == 0.25
    clock.now += 1000.0
    assert len(engine.collect()) == MAX_CATCH_UP
    assert 0.0 < (engine.poll_timeout() or 0.0) <= 0.5, "the debt is forgotten"
    engine.cancel(1, 0)
    clock.now += 0.5
    assert engine.collect() == [] and engine.poll_timeout() is None


def test_without_an_interval_every_collect_is_a_step() -> None:
    driver = drive()
    assert driver.engine.poll_timeout() is None
    driver.engine.add(1, 0, [1], SamplingParams(max_tokens=2))
    assert driver.engine.poll_timeout() == 0.0
    assert len(driver.collect()) == len(driver.collect()) == 1
    assert driver.engine.poll_timeout() is None and driver.collect() == []


@pytest.mark.parametrize("interval", [0.0, 0.5])
def test_it_fails_after_so_many_steps(interval: float) -> None:
    clock = Clock()
    engine = ReplayEngine({"fail_after_steps": 5, "step_interval": interval}, clock=clock)
    engine.start(lambda: None)
    engine.add(1, 0, [1], SamplingParams(max_tokens=100))
    rows = []
    for _ in range(2 if interval else 5):
        clock.now += interval * 3
        rows += expand(engine.collect())
    assert len(rows) == 5, "missed steps too, up to the last"
    assert engine.poll_timeout() == 0.0
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="told to fail after 5 steps"):
            engine.collect()
    engine.close()


def test_close_forgets() -> None:
    driver = drive()
    driver.engine.add(1, 0, [1], SamplingParams())
    driver.engine.close()
    driver.engine.close()
    assert driver.collect() == [] and driver.engine.poll_timeout() is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speed": 3}, r"^speed: no such key"),
        ({"vocab_size": 0}, r"^vocab_size: must be an integer >= 1"),
        ({"vocab_size": True}, r"^vocab_size: "),
        ({"max_model_len": "many"}, r"^max_model_len: "),
        ({"batch_size": 0}, r"^batch_size: "),
        ({"tokens_per_step": 0}, r"^tokens_per_step: "),
        ({"fail_after_steps": -1}, r"^fail_after_steps: must be an integer >= 0"),
        ({"fail_after_steps": 1.5}, r"^fail_after_steps: "),
        ({"step_interval": -1}, r"^step_interval: must be seconds >= 0"),
        ({"eos_token_ids": 2}, r"^eos_token_ids: must be a list of token ids"),
        ({"special_token_ids": [-1]}, r"^special_token_ids: "),
        ({"vocab_size": 2, "eos_token_ids": [0, 1]}, r"^vocab_size: must be more"),
        ({"rule": "random"}, r"^rule: must be one of order, rid, prompt"),
        ({"scripts": 3}, r"^scripts: must be a list"),
        ({"scripts": [3]}, r"^scripts\[0\]: must be a mapping"),
        ({"scripts": [{}]}, r"^scripts\[0\].token_ids: must be given"),
        ({"scripts": [{"token_ids": ["a"]}]}, r"^scripts\[0\].token_ids: "),
        ({"scripts": [{"token_ids": []}, {"token_ids": [], "colour": 1}]}, r"^scripts\[1\].colour: no such key"),
        ({"scripts": [{"token_ids": [1], "finish_reason": "abort"}]}, r"^scripts\[0\].finish_reason: "),
        ({"scripts": [{"token_ids": [1], "stop_token_id": 2}]}, r"^scripts\[0\].stop_token_id: "),
        ({"scripts": [{"token_ids": [1], "logprobs": []}]}, r"^scripts\[0\].logprobs: "),
        ({"scripts": [{"token_ids": [1], "prompt": "x"}]}, r"^scripts\[0\].prompt: "),
    ],
)
def test_wrong_configurations_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReplayEngine(config)
