"""The transformers engine: the contract and its own promises on a tiny random model, and sense on the embedded one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.engines import loading
from executor.engines.base import EngineDeadError, UnsupportedError
from executor.engines.sampling import SamplingProcessor
from executor.engines.transformers_engine import TransformersEngine
from executor.models import resolve_model
from executor.request import SamplingParams
from tests.executor.engines.contract import Driver, EngineContract, by_output, ids, logprobs
from tests.executor.engines.tiny_model import EOS, MAX_LENGTH, VOCAB, generate, save_tiny_model

PROMPTS = [[1, 20, 30, 40], [1, 50], [1, 60, 61, 62, 63, 64, 65], [1, 99, 98, 97]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def driver(model_dir: Path) -> Iterator[Driver]:
    yield from _driven(TransformersEngine(model_dir, device="cpu", max_num_seqs=8))


@pytest.fixture
def fresh(model_dir: Path) -> Iterator[Driver]:
    """An engine that a test may break."""
    yield from _driven(TransformersEngine(model_dir, device="cpu", max_num_seqs=8))


def _driven(engine: TransformersEngine) -> Iterator[Driver]:
    try:
        yield Driver(engine)
    finally:
        engine.close()


class TestContract(EngineContract):
    TOLERANCE = 1e-4


def test_info(driver: Driver) -> None:
    assert driver.info.name == "transformers"
    assert (driver.info.vocab_size, driver.info.max_model_len) == (VOCAB, MAX_LENGTH)
    assert driver.info.eos_token_ids == (EOS,)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_what_generate_makes(driver: Driver, model_dir: Path, prompt: list[int]) -> None:
    assert ids(driver.run(prompt, temperature=0.0, max_tokens=40)) == generate(model_dir, prompt, 40)


def test_mixed_batch_leaves_each_its_own(driver: Driver) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 3, "top_p": 0.8, "top_k": 20, "min_p": 0.02, "temperature": 0.7},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logit_bias": {33: 100.0}},
        {"seed": 3, "logprobs": 2},
    ]
    alone = [ids(driver.run(PROMPTS[0], max_tokens=20, ignore_eos=True, **kind)) for kind in kinds]
    for rid, kind in enumerate(kinds):
        driver.engine.add(rid, 0, PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True, **kind))
    outputs = by_output(driver.finish(len(kinds)))
    assert [ids(outputs[rid, 0]) for rid in range(len(kinds))] == alone
    assert alone[4] == [33] * 20
    assert alone[5] == alone[1]
    assert len({tuple(stream) for stream in alone}) == 5


def test_end_of_sequence(driver: Driver) -> None:
    bias = {EOS: 1000.0}
    rows = driver.run(PROMPTS[0], temperature=0.0, max_tokens=9, min_tokens=4, logit_bias=bias)
    assert len(ids(rows)) == 5 and ids(rows)[-1] == EOS and EOS not in ids(rows)[:4]
    assert rows[-1].finish_reason == "stop" and rows[-1].stop_token
    rows = driver.run(PROMPTS[0], temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias=bias)
    assert ids(rows) == [EOS] * 9 and rows[-1].finish_reason == "length" and not rows[-1].stop_token


def test_end_of_sequence_at_the_limit_is_a_stop(driver: Driver) -> None:
    (row,) = driver.run(PROMPTS[0], temperature=0.0, max_tokens=1, logit_bias={EOS: 1000.0})
    assert row.finish_reason == "stop" and row.stop_token


def test_logprobs_are_of_the_raw_scores(driver: Driver, model_dir: Path) -> None:
    plain = driver.run(PROMPTS[0], temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=5)
    forced = driver.run(PROMPTS[0], temperature=0.0, max_tokens=1, logit_bias={33: 100.0}, logprobs=5)
    assert plain[0].logprobs and forced[0].logprobs
    assert forced[0].logprobs[0].top == plain[0].logprobs[0].top
    assert forced[0].logprobs[0].logprob < plain[0].logprobs[0].logprob
    assert plain[0].logprobs[0].top[0] == (plain[0].token_ids[0], plain[0].logprobs[0].logprob)
    probabilities = [2.718281828**value for _, value in plain[0].logprobs[0].top]
    assert 0.0 < sum(probabilities) < 1.0


def test_stop_tokens_outside_the_vocabulary(driver: Driver) -> None:
    rows = driver.run([1], max_tokens=3, min_tokens=3, ignore_eos=True, stop_token_ids=(VOCAB, -5, 10**9))
    assert len(ids(rows)) == 3


def test_a_long_prompt_goes_in_several_steps_and_is_shared(driver: Driver, model_dir: Path) -> None:
    prompt = [1] + [3 + n * 7 % 150 for n in range(400)]
    expected = generate(model_dir, prompt, 8)
    assert ids(driver.run(prompt, temperature=0.0, max_tokens=8)) == expected
    assert ids(driver.run(prompt, temperature=0.0, max_tokens=8)) == expected


def test_cancel_frees_the_cache(fresh: Driver) -> None:
    for rid in range(4):
        fresh.engine.add(rid, 0, PROMPTS[rid], SamplingParams(max_tokens=400, ignore_eos=True))
    fresh.until(lambda rows: len({row.rid for row in rows}) == 4)
    assert fresh.engine.stats()["running"] == 4
    for rid in range(4):
        fresh.engine.cancel(rid, 0)
    # What was cancelled before this request is gone before its first step.
    fresh.run([1], rid=9, max_tokens=1)
    assert fresh.engine.stats()["running"] == fresh.engine.stats()["waiting"] == 0
    manager: Any = fresh.engine._manager  # type: ignore[attr-defined]
    assert not manager.batch_processor.cache.cache_allocators["full_attention"].block_table


def test_preempted_outputs_go_on_as_if_nothing_had_been(
    driver: Driver, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, seed=5, logprobs=1, presence_penalty=0.3)
    expected = {}
    for rid in range(6):
        expected[rid] = ids(driver.run([1, 10 + rid], rid=rid, **_fields(sampling)))
    page_bytes = 2 * loading.CPU_PAGE_TOKENS * 2 * 2 * 16 * 4
    monkeypatch.setattr(loading, "CPU_CACHE_BYTES", 17 * page_bytes)  # 6 outputs of 5 pages each want 30
    for small in _driven(TransformersEngine(model_dir, device="cpu", max_num_seqs=8)):
        resets = _count_resets(small, monkeypatch)
        for rid in range(6):
            small.engine.add(rid, 0, [1, 10 + rid], sampling)
        outputs = by_output(small.finish(6))
        assert resets
        for rid, stream in expected.items():
            assert ids(outputs[rid, 0]) == stream
            assert sum(len(row.logprobs or ()) for row in outputs[rid, 0]) == 150


def test_taken_up_outputs_are_preempted_like_others(
    driver: Driver, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, seed=5, logprobs=1, presence_penalty=0.3)
    expected = {rid: driver.run([1, 10 + rid], rid=rid, **_fields(sampling)) for rid in range(6)}
    page_bytes = 2 * loading.CPU_PAGE_TOKENS * 2 * 2 * 16 * 4
    monkeypatch.setattr(loading, "CPU_CACHE_BYTES", 17 * page_bytes)
    for small in _driven(TransformersEngine(model_dir, device="cpu", max_num_seqs=8)):
        resets = _count_resets(small, monkeypatch)
        for rid, rows in expected.items():
            small.engine.add(rid, 0, [1, 10 + rid], sampling, ids(rows)[: 10 + rid])
        outputs = by_output(small.finish(6))
        assert resets
        for rid, rows in expected.items():
            assert ids(outputs[rid, 0]) == ids(rows)[10 + rid :]
            assert len(logprobs(outputs[rid, 0])) == 140 - rid


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}


def _count_resets(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The library's request ids that lose their cache, as they do."""
    manager: Any = driver.engine._manager  # type: ignore[attr-defined]
    cache, freed = manager.batch_processor.cache, []
    free = cache.free_blocks

    def free_blocks(request_id: str, no_cache: bool = False) -> None:
        if no_cache:
            freed.append(request_id)
        free(request_id, no_cache)

    monkeypatch.setattr(cache, "free_blocks", free_blocks)
    return freed


def test_waiting_outputs_are_admitted_when_all_running_ones_are_cancelled(fresh: Driver) -> None:
    """The library stops admitting after a preemption until an output finishes, and a cancelled one never does."""
    manager: Any = fresh.engine._manager  # type: ignore[attr-defined]
    manager.batch_processor.scheduler.block_new_requests = True
    assert len(ids(fresh.run(PROMPTS[0], max_tokens=5, ignore_eos=True))) == 5


def test_a_dead_generation_thread_is_told_after_its_last_rows(fresh: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.engine.add(1, 0, PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    fresh.until(bool)

    def broken(self: SamplingProcessor, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(SamplingProcessor, "__call__", broken)
    rows = []
    with pytest.raises(EngineDeadError, match="the device is on fire"):
        rows += fresh.until(lambda rows: any(row.finish_reason for row in rows))
    assert rows == []
    for history in ([], [40]):
        with pytest.raises(EngineDeadError):
            fresh.engine.add(2, 0, PROMPTS[0], SamplingParams(), history)
    fresh.engine.close()


def test_a_thread_that_died_idle_is_missed(fresh: Driver) -> None:
    manager: Any = fresh.engine._manager  # type: ignore[attr-defined]
    manager.stop(block=True, hard_stop=True)
    assert fresh.engine.poll_timeout() is not None
    with pytest.raises(EngineDeadError):
        fresh.engine.collect()


def test_an_output_that_fails_alone_ends_alone(fresh: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    manager: Any = fresh.engine._manager  # type: ignore[attr-defined]
    scheduler = manager.batch_processor.scheduler
    accept = scheduler.add_waiting_request

    def refuse(state: Any) -> None:
        if state.request_id.startswith("1."):
            raise ValueError("no room for you")
        accept(state)

    monkeypatch.setattr(scheduler, "add_waiting_request", refuse)
    for rid in (1, 2):
        fresh.engine.add(rid, 0, PROMPTS[0], SamplingParams(max_tokens=5, ignore_eos=True))
    outputs = by_output(fresh.finish(2))
    assert [(row.finish_reason, row.message) for row in outputs[1, 0]] == [("error", "no room for you")]
    assert len(ids(outputs[2, 0])) == 5


def test_close_is_idempotent_and_ends_the_thread(fresh: Driver) -> None:
    manager: Any = fresh.engine._manager  # type: ignore[attr-defined]
    fresh.engine.add(1, 0, PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    fresh.until(bool)
    fresh.engine.close()
    fresh.engine.close()
    assert not manager.is_running()
    assert fresh.engine.collect() == []
    assert fresh.engine.stats() == {"running": 0, "waiting": 0, "cache_usage": 0.0}


def test_close_before_start(model_dir: Path) -> None:
    TransformersEngine(model_dir).close()


def test_a_cache_too_small_shortens_the_model(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CPU_CACHE_BYTES", 1)
    for short in _driven(TransformersEngine(model_dir, device="cpu")):
        assert short.info.max_model_len == loading.CPU_PAGE_TOKENS
        with pytest.raises(UnsupportedError, match=r"^max_tokens: "):
            short.engine.add(1, 0, [1] * 20, SamplingParams(max_tokens=20))
        assert len(ids(short.run([1] * 20, max_tokens=12, ignore_eos=True))) == 12


def test_a_length_that_was_asked_for_is_kept(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "CPU_CACHE_BYTES", 1)
    engine = TransformersEngine(model_dir, device="cpu", max_model_len=200, max_batch_tokens=16, max_num_seqs=2)
    for driver in _driven(engine):
        assert driver.info.max_model_len == 200
        assert len(ids(driver.run([1] * 150, max_tokens=50, ignore_eos=True))) == 50


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"device": "abacus"}, "device"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_num_seqs": -1}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_wrong_arguments_are_named(model_dir: Path, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        TransformersEngine(model_dir, **arguments)


def test_a_length_beyond_the_model(model_dir: Path) -> None:
    engine = TransformersEngine(model_dir, device="cpu", max_model_len=MAX_LENGTH + 1)
    with pytest.raises(ValueError, match=r"^max_model_len: "):
        engine.start(lambda: None)


def test_bfloat16(model_dir: Path) -> None:
    for driver in _driven(TransformersEngine(model_dir, device="cpu", dtype="bfloat16", max_num_seqs=2)):
        assert len(ids(driver.run(PROMPTS[0], max_tokens=6, ignore_eos=True, seed=1))) == 6


@pytest.fixture(scope="module")
def embedded() -> Iterator[tuple[Driver, Path]]:
    directory = resolve_model(None, progress=print).directory
    for driver in _driven(TransformersEngine(directory, device="cpu", max_num_seqs=8, max_model_len=1024)):
        yield driver, directory


def _chat(directory: Path, question: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    message = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"])


@pytest.mark.model
def test_the_embedded_model_answers_as_generate_does(embedded: tuple[Driver, Path]) -> None:
    from transformers import AutoTokenizer

    driver, directory = embedded
    questions = ["What is the capital of France?", "Count to five."]
    prompts = [_chat(directory, question) for question in questions]
    for rid, prompt in enumerate(prompts):
        driver.engine.add(rid, 0, prompt, SamplingParams(temperature=0.0, max_tokens=24))
    outputs = by_output(driver.finish(2))
    for rid, prompt in enumerate(prompts):
        assert ids(outputs[rid, 0]) == generate(directory, prompt, 24)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert "Paris" in tokenizer.decode(ids(outputs[0, 0]))
    assert outputs[0, 0][-1].finish_reason == "stop" and outputs[0, 0][-1].stop_token


@pytest.mark.model
def test_the_embedded_model_is_taken_up(embedded: tuple[Driver, Path]) -> None:
    driver, directory = embedded
    prompt = _chat(directory, "What is the capital of France?")
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 6}):
        whole = driver.run(prompt, max_tokens=12, **sampling)
        for k in (1, 5, len(ids(whole)) - 1):
            rest = driver.run(prompt, max_tokens=12, history=ids(whole)[:k], **sampling)
            assert ids(rest) == ids(whole)[k:]
            assert rest[-1][3:] == whole[-1][3:]


@pytest.mark.model
def test_the_embedded_model_keeps_seeds_apart(embedded: tuple[Driver, Path]) -> None:
    driver, directory = embedded
    prompt = _chat(directory, "Tell me something.")
    sampling: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 16, "seed": 42}
    alone = ids(driver.run(prompt, **sampling))
    for rid in range(4):
        driver.engine.add(rid, 0, prompt, SamplingParams(**sampling | {"seed": 40 + rid}))
    outputs = by_output(driver.finish(4))
    assert ids(outputs[2, 0]) == alone
    assert len({tuple(ids(rows)) for rows in outputs.values()}) == 4
