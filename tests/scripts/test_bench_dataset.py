"""Flags, and the prompts that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.bench.dataset import WORDS, DatasetError, HuggingFaceTokenizer, Prompt, prompts
from scripts.bench.options import parse
from tests.recordings.build_tokenizers import byte_level


def made(*flags: str, tokenizer: HuggingFaceTokenizer | None = None) -> list[Prompt]:
    return prompts(parse(flags), tokenizer)[0]


# ------------------------------------------------------------------------------------------------ random


def test_without_a_tokenizer_prompts_are_words() -> None:
    first, second = made("--num-prompts", "2", "--random-input-len", "40", "--random-output-len", "9")
    assert isinstance(first.text, str) and isinstance(second.text, str)
    assert len(first.text.split()) == first.input_tokens == 40
    assert {*first.text.split()} <= {*WORDS}
    assert first.output_tokens == 9
    assert first.text != second.text


def test_the_seed_decides() -> None:
    flags = ("--num-prompts", "5", "--random-range-ratio", "0.5")
    assert made(*flags) == made(*flags)
    assert made(*flags) != made(*flags, "--seed", "1")


def test_a_longer_run_begins_with_the_same_prompts() -> None:
    flags = ("--random-range-ratio", "0.5", "--num-prompts")
    assert made(*flags, "9")[:4] == made(*flags, "4")


def test_lengths_are_drawn_around_the_given_ones() -> None:
    flags = ("--random-input-len", "10", "--random-output-len", "101", "--random-range-ratio", "0.25")
    drawn = made(*flags, "--num-prompts", "400")
    assert {prompt.input_tokens for prompt in drawn} == {*range(7, 14)}
    outputs = [prompt.output_tokens for prompt in drawn]
    assert (min(outputs), max(outputs)) == (75, 127)


def test_prompts_and_answers_may_vary_apart() -> None:
    flags = ("--random-input-len", "10", "--random-output-len", "101", "--num-prompts", "200")
    drawn = made(*flags, "--random-range-ratio", '{"input": 0, "output": 0.25}')
    assert {prompt.input_tokens for prompt in drawn} == {10}
    assert {prompt.output_tokens for prompt in drawn} <= {*range(75, 128)} and len(drawn) == 200
    assert len({prompt.output_tokens for prompt in drawn}) > 20


def test_prompts_begin_with_the_same_prefix() -> None:
    drawn = made("--random-prefix-len", "8", "--random-input-len", "4", "--num-prompts", "20")
    words = [str(prompt.text).split() for prompt in drawn]
    assert {prompt.input_tokens for prompt in drawn} == {12} == {len(one) for one in words}
    assert len({tuple(one[:8]) for one in words}) == 1
    assert len({tuple(one[8:]) for one in words}) == 20


def test_warm_up_has_prompts_of_its_own() -> None:
    measured, warmups = prompts(parse(["--num-prompts", "3", "--num-warmups", "2"]), None)
    assert len({str(prompt.text) for prompt in measured + warmups}) == 5


@pytest.fixture(scope="module", params=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer of hardly more than bytes, or one of words."""
    directory = tmp_path_factory.mktemp("tokenizer")
    made = byte_level() if request.param == "bytes" else _words()
    made.save(str(directory / "tokenizer.json"))
    return directory


def _words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=["<|end|>"], show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS), " ".join(reversed(WORDS))], trainer)
    return tokenizer


@pytest.mark.parametrize("place", [".", "tokenizer.json"])
def test_with_a_tokenizer_lengths_are_exact(tokenizer: Path, place: str) -> None:
    loaded = HuggingFaceTokenizer(tokenizer / place)
    flags = ("--random-input-len", "60", "--random-prefix-len", "17", "--num-prompts", "30")
    drawn = made(*flags, tokenizer=loaded)
    assert {len(loaded.encode(str(prompt.text))) for prompt in drawn} == {77}
    assert len({str(prompt.text) for prompt in drawn}) == 30
    heads = {tuple(loaded.encode(str(prompt.text))[:17]) for prompt in drawn}
    assert len(heads) == 1
    assert made(*flags, tokenizer=loaded) == drawn


def test_there_is_no_such_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"--tokenizer: there is no file .*tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)


# ------------------------------------------------------------------------------------------------ custom


def custom(file: Path, *flags: str) -> list[Prompt]:
    return made("--dataset-name", "custom", "--dataset-path", str(file), *flags)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"prompt": f"number {number}", "output_tokens": number + 1} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return tmp_path / "rows.jsonl"


def test_prompts_of_a_file_in_its_order(file: Path) -> None:
    drawn = custom(file, "--disable-shuffle", "--num-prompts", "8")
    assert [prompt.text for prompt in drawn] == [f"number {number % 6}" for number in range(8)]
    assert [prompt.output_tokens for prompt in drawn] == [1, 2, 3, 4, 5, 6, 1, 2]
    assert {prompt.input_tokens for prompt in drawn} == {2}


def test_prompts_of_a_file_are_shuffled(file: Path) -> None:
    drawn = custom(file, "--num-prompts", "6")
    assert sorted(str(prompt.text) for prompt in drawn) == [f"number {number}" for number in range(6)]
    assert drawn == custom(file, "--num-prompts", "6")
    assert drawn != custom(file, "--num-prompts", "6", "--disable-shuffle")


@pytest.mark.parametrize(("flags", "length"), [("", 256), ("--custom-output-len 9", 9), ("--output-len 8", 8)])
def test_a_prompt_that_says_nothing_of_its_length(tmp_path: Path, flags: str, length: int) -> None:
    (tmp_path / "x").write_text('{"prompt": "a"}')
    assert custom(tmp_path / "x", "--num-prompts", "1", *flags.split())[0].output_tokens == length


def test_a_given_length_goes_before_the_file(file: Path) -> None:
    assert {prompt.output_tokens for prompt in custom(file, "--custom-output-len", "9")} == {9}


def test_conversations(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}]
    (tmp_path / "x").write_text(json.dumps({"messages": messages}))
    (prompt,) = custom(tmp_path / "x", "--backend", "openai-chat", "--num-prompts", "1")
    assert prompt.body(parse(["--backend", "openai-chat"]), "m")["messages"] == messages


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("{", "x:2: "),
        ("[]", "x:2: no JSON object"),
        ('{"text": "a"}', "x:2: prompt: must be"),
        ('{"prompt": ""}', "x:2: prompt: must be"),
        ('{"messages": ["a"]}', "x:2: messages: need --backend openai-chat"),
        ('{"prompt": "a", "output_tokens": 0}', "x:2: output_tokens: must be an integer >= 1, and is 0"),
        ('{"prompt": "a", "output_tokens": true}', "x:2: output_tokens: must be"),
    ],
)
def test_a_row_that_is_wrong(tmp_path: Path, row: str, error: str) -> None:
    (tmp_path / "x").write_text('{"prompt": "a"}\n' + row)
    with pytest.raises(DatasetError, match=error):
        custom(tmp_path / "x")


def test_the_file_has_to_say_the_length(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"prompt": "a"}')
    with pytest.raises(DatasetError, match="output_tokens"):
        custom(tmp_path / "x", "--custom-output-len", "-1")


def test_no_file_and_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="--dataset-path"):
        custom(tmp_path / "x")
    (tmp_path / "x").write_text("\n")
    with pytest.raises(DatasetError, match="no prompt in it"):
        custom(tmp_path / "x")


# ------------------------------------------------------------------------------------------------ bodies and flags


def body(*flags: str) -> dict[str, Any]:
    return Prompt("why", 1, 5).body(parse(flags), "m")


def test_bodies_of_both_backends() -> None:
    common = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    assert body() == body("--backend", "vllm") == common | {"prompt": "why", "max_tokens": 5}
    messages = [{"role": "user", "content": "why"}]
    assert body("--backend", "openai-chat") == common | {"messages": messages, "max_completion_tokens": 5}


def test_sampling_and_other_fields() -> None:
    flags = ("--temperature", "0", "--top-k", "3", "--extra-body", '{"top_k": 4, "stop": ["a"], "max_tokens": 7}')
    more = {key: value for key, value in body(*flags).items() if key in ("temperature", "top_k", "stop", "max_tokens")}
    assert more == {"temperature": 0.0, "top_k": 4, "stop": ["a"], "max_tokens": 7}


def test_whether_the_end_is_ignored(file: Path) -> None:
    rows = ("--dataset-name", "custom", "--dataset-path", str(file))
    assert "ignore_eos" not in body(*rows) and "ignore_eos" not in body("--no-ignore-eos")
    assert body(*rows, "--ignore-eos")["ignore_eos"] is True


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        (["--host", "::1", "--port", "9"], "http://[::1]:9"),
        (["--base-url", "https://a.example/"], "https://a.example"),
        (["--base-url", "http://a:1/v1"], "http://a:1"),
    ],
)
def test_where_the_server_is(flags: list[str], url: str) -> None:
    assert parse(flags).url == url


def test_defaults_that_follow_from_others() -> None:
    assert parse([]).endpoint == "/v1/completions"
    assert parse(["--backend", "openai-chat"]).endpoint == "/v1/chat/completions"
    assert parse(["--endpoint", "v2/x"]).endpoint == "/v2/x"
    assert parse(["--input-len", "3", "--output-len", "4"]).random_input_len == 3
    assert parse(["--output-len", "4"]).random_output_len == parse(["--output-len", "4"]).custom_output_len == 4
    assert parse(["--goodput", "ttft:200", "e2el:3000.5"]).goodput == {"ttft": 200.0, "e2el": 3000.5}
    assert parse(["--header", "a=b=c", "x=y"]).headers == (("a", "b=c"), ("x", "y"))


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--dataset-name custom", "--dataset-name custom needs --dataset-path"),
        ("--dataset-path x", "--dataset-path is for --dataset-name custom"),
        ("--goodput itl:3", "argument --goodput: 'itl:3' is not NAME:MS"),
        ("--goodput ttft:-1", "argument --goodput"),
        ("--goodput ttft", "argument --goodput"),
        ("--header x", "argument --header: 'x' is not KEY=VALUE"),
        ("--extra-body [1]", "argument --extra-body: [1] is not a JSON object"),
        ("--extra-body {", "argument --extra-body: no JSON"),
        ("--base-url a:1", "argument --base-url"),
        ("--base-url http://a/b", "a path goes to --endpoint"),
        ("--base-url http://a:x", "argument --base-url"),
        ("--request-rate 0", "argument --request-rate: 0.0 is not more than 0"),
        ("--random-range-ratio 1", "argument --random-range-ratio"),
        ('--random-range-ratio {"input":0.5}', "is neither a number nor"),
        ('--random-range-ratio {"input":0.5,"output":1}', "1.0 is not at least 0 and less than 1"),
        ("--ramp-up-start-rps 1", "need --ramp-up-strategy"),
        ("--ramp-up-strategy linear --ramp-up-end-rps 1", "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 2 --ramp-up-end-rps 1", "2 is more than"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps inf", "argument --ramp-up-end-rps"),
        ("--ramp-up-strategy linear --ramp-up-start-rps 1 --ramp-up-end-rps 2 --request-rate 1", "exclude each other"),
        ("--custom-output-len 0", "argument --custom-output-len"),
        ("--num-prompts 0", "argument --num-prompts"),
        ("--request-timeout inf", "argument --request-timeout"),
        ("--percentile-metrics ttft,foo", "argument --percentile-metrics: no such metric: foo"),
        ("--metric-percentiles 101", "argument --metric-percentiles"),
        ("--seed -1", "argument --seed"),
        ("--seed 4294967296", "argument --seed"),
    ],
)
def test_flags_that_make_no_sense(flags: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags.split())
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_a_header_holds_no_second_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--header", "x=1\r\ny: 2"])
