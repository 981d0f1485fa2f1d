"""The command line: flags, their spellings and limits, and `tailrace replay`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serve import cli, launcher
from serve.config import Config

RECORDING = {
    "name": "first", "endpoint": "/v1/completions", "request": {"prompt": "x", "stop": "!"}, "prompt_tokens": 1,
    "outputs": [{"index": 0, "text": "Hello world! More", "finish_reason": "length"}],
}  # fmt: skip


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What servers would have been started with."""
    configs: list[Config] = []

    def serve(config: Config) -> int:
        configs.append(config)
        return 7

    monkeypatch.setattr(launcher, "serve", serve)
    return configs


def test_defaults(started: list[Config]) -> None:
    assert cli.main(["serve"]) == 7
    assert started == [Config()]


def test_every_flag(started: list[Config], tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text('{"vocab_size": 7}')
    flags: dict[str, tuple[str, Any]] = {
        "host": ("0.0.0.0", "0.0.0.0"), "port": ("0", 0), "num_postprocess_workers": ("3", 3), "tokenizer": ("t", "t"),
        "served_model_name": ("a-b_c", "a-b_c"), "stream_interval": ("4", 4), "post_processor_hook": ("a.b:C", "a.b:C"),
        "reasoning_parser": ("none", None), "tool_parser": ("none", None), "record": ("some-dir", "some-dir"),
        "max_body_bytes": ("100", 100), "shutdown_timeout": ("1.5", 1.5), "log_level": ("debug", "debug"),
        "engine": ("replay", "replay"), "engine_config": (str(tmp_path / "engine.json"), {"vocab_size": 7}),
        "device": ("cpu", "cpu"), "dtype": ("float32", "float32"), "max_batch_tokens": ("10", 10),
        "max_num_seqs": ("5", 5), "max_model_len": ("99", 99), "num_serve_frontends": ("2", 2),
    }  # fmt: skip
    underscores = [word for name, (text, _) in flags.items() for word in (f"--{name}", text)]
    dashes = [f"--{name.replace('_', '-')}={text}" for name, (text, _) in flags.items()]
    cli.main(["serve", "a/model-name", *underscores, "--record_prompts"])
    cli.main(["serve", "a/model-name", *dashes, "--record-prompts"])
    expected = Config(model="a/model-name", record_prompts=True, **{name: value for name, (_, value) in flags.items()})
    assert started == [expected, expected]


def test_engine_config_as_json(started: list[Config]) -> None:
    cli.main(["serve", "--engine_config", ' {"scripts": []}'])
    assert started[0].engine_config == {"scripts": []}


WRONG = {
    "--port 65536": "above 65535",
    "--port -1": "negative",
    "--port x": "invalid",
    "--num_postprocess_workers -2": "negative",
    "--num_serve_frontends 0": "not at least 1",
    "--num_serve_frontends 65": "more than 64",
    "--stream_interval 0": "not at least 1",
    "--max_body_bytes 0": "not at least 1",
    "--shutdown_timeout nan": "not a number of seconds",
    "--shutdown_timeout inf": "not a number of seconds",
    "--shutdown_timeout -3": "not a number of seconds",
    "--engine other": "invalid choice",
    "--engine_config [1]": "no JSON object",
    "--engine_config {": "no JSON object",
    "--engine_config nowhere.json": "no JSON object",
    "--log_level loud": "invalid choice",
    "--nope": "unrecognized arguments",
    "--por 1": "unrecognized arguments",
    "one two": "unrecognized arguments",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage(started: list[Config], capsys: pytest.CaptureFixture[str], line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", *line.split()])
    assert caught.value.code == 2 and not started
    assert WRONG[line] in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_a_command_is_needed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["serve", "--help"], ["replay", "--help"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 0
    assert "0." in capsys.readouterr().out


def test_ctrl_c_while_the_imports_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "serve.launcher", Interrupting())  # type: ignore[arg-type]
    assert cli.main(["serve"]) == 0


def test_the_front_end_does_without_torch() -> None:
    """It costs seconds and hundreds of megabytes, and transformers would import it; children still can."""
    program = (
        "import importlib.util, os, sys\nfrom serve import cli\n"
        "with cli._without_torch():\n    import serve.launcher\n"
        "import transformers\n"
        "assert 'torch' not in sys.modules and 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ\n"
        "assert importlib.util.find_spec('torch') is not None\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ), timeout=100
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr


# -------------------------------------------------------------------------------- replay


def written(tmp_path: Path, *recordings: Any) -> str:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps(recording) + "\n\n" for recording in recordings))
    return str(file)


def test_replay_prints_the_stream(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["replay", written(tmp_path, RECORDING)]) == 0
    out = capfdbinary.readouterr().out
    assert out.startswith(b"data: {") and out.endswith(b"data: [DONE]\n\n") and out.count(b"\n\n") > 5
    assert cli.main(["replay", written(tmp_path, RECORDING), "--split", "whole"]) == 0
    assert capfdbinary.readouterr().out.count(b"\n\n") < 4


def test_replay_prints_documents_one_a_line(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    file = written(tmp_path, RECORDING, {**RECORDING, "name": "second"})
    assert cli.main(["replay", file, "--unary"]) == 0
    lines = capfdbinary.readouterr().out.splitlines()
    assert [json.loads(line)["choices"][0]["text"] for line in lines] == ["Hello world"] * 2
    assert cli.main(["replay", file, "--unary", "--only", "seco"]) == 0
    assert len(capfdbinary.readouterr().out.splitlines()) == 1


REPLAY_ERRORS: dict[str, tuple[list[Any], list[str], str]] = {
    "no JSON": (["{"], [], "Expecting"),
    "a list": ([[1]], [], "a recording is a JSON object"),
    "no outputs": ([{"name": "a"}], [], "outputs"),
    "no finish": ([{**RECORDING, "outputs": [{"index": 0, "text": "x"}]}], [], "finish_reason"),
    "no tokenizer": ([{**RECORDING, "outputs": [{"token_ids": [1], "finish_reason": "stop"}]}], [], "server.tokenizer"),
    "no such split": ([RECORDING], ["--split", "some"], "split"),
    "no such cut": ([RECORDING], ["--split", "every:0"], "every:N"),
}


@pytest.mark.parametrize("name", REPLAY_ERRORS)
def test_replay_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    recordings, flags, message = REPLAY_ERRORS[name]
    file = tmp_path / "some.jsonl"
    file.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in recordings))
    assert cli.main(["replay", str(file), *flags]) == 1
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.startswith(f"tailrace replay: {file}: ") and captured.err.count("\n") == 1
    )
    assert message in captured.err


@pytest.mark.parametrize("path", ["nowhere.jsonl", "."])
def test_replay_without_a_file(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", path]) == 1
    assert capsys.readouterr().err.startswith(f"tailrace replay: {path}: ")


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`tailrace replay FILE | head` ends without a traceback."""
    long = {**RECORDING, "outputs": [{"index": 0, "text": "word " * 5_000, "finish_reason": "length"}]}
    command = f"'{sys.executable}' -m serve.cli replay '{written(tmp_path, long)}' | head -c 10"
    run = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, cwd=Path(cli.__file__).parents[1])
    assert run.stdout == b'data: {"id' and run.stderr == b""
