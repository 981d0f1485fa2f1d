"""A server that cannot start says why in one line, returns 1, and leaves nothing behind. Its children are real ones."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from serve import launcher
from serve.config import Config
from serve.launcher import StartError, load_tokenizer
from tests.process.server import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def put_run_directories_into(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(prefix: str) -> str:
        return tempfile.mkdtemp(prefix=prefix, dir=directory)

    monkeypatch.setattr(launcher, "tempfile", SimpleNamespace(mkdtemp=mkdtemp))


@pytest.fixture(autouse=True)
def run_directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for run directories, in which nothing may be left; signals and logging as they were."""
    directory = Path(tempfile.mkdtemp(prefix="tr-"))
    put_run_directories_into(directory, monkeypatch)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    others = set(psutil.Process().children())
    level = logging.getLogger("uvicorn").level
    yield directory
    for number, handler in before.items():
        signal.signal(number, handler)
    logging.getLogger("uvicorn").setLevel(level)
    left = os.listdir(directory)
    shutil.rmtree(directory)
    assert left == []
    assert not set(psutil.Process().children()) - others


def replay(tokenizer: Path | str, **settings: object) -> Config:
    values = {"engine": "replay", "tokenizer": str(tokenizer), "port": 0, "num_postprocess_workers": 1, **settings}
    return Config(**values)  # type: ignore[arg-type]


def refused(config: Config, capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a failed start leaves on stderr."""
    assert launcher.serve(config) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("tailrace serve: ")
    return line.removeprefix("tailrace serve: ")


def test_a_taken_port(tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(replay(tokenizer, port=port), capfd)


def test_no_such_host(tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "cannot listen on 256.1.1.1:0" in refused(replay(tokenizer, host="256.1.1.1"), capfd)


@pytest.mark.parametrize(
    ("host", "clients"), [("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"])]
)
def test_who_is_heard(host: str, clients: list[str]) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with launcher._listen(Config(host=host, port=0)) as listener:
        for client in clients:
            socket.create_connection((client, listener.getsockname()[1]), 5).close()


def test_no_tokenizer(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--tokenizer is needed" in refused(Config(engine="replay", port=0), capfd)
    assert refused(replay("/no/such/place"), capfd) == "--tokenizer: there is no /no/such/place"


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": {"type": "Other"}}'])
def test_something_that_is_no_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    assert f"no tokenizer can be loaded from {file}: " in refused(replay(file), capfd)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(StartError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path)


def test_no_such_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert "MODEL: there is no /no/such/model" in refused(Config(model="/no/such/model", port=0), capfd)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [("nowhere_hook:H", "no module 'nowhere_hook'"), ("json:Nope", "has no 'Nope'"), ("json", "package.module:name")],
)
def test_a_wrong_hook(tokenizer: Path, capfd: pytest.CaptureFixture[str], hook: str, reason: str) -> None:
    line = refused(replay(tokenizer, post_processor_hook=hook), capfd)
    assert line.startswith("post_processor_hook: ") and reason in line


def test_a_wrong_engine_config(tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = replay(tokenizer, engine_config={"scripts": [{"tokens": []}]})
    assert refused(config, capfd).startswith("executor did not start: scripts[0].tokens: no such key")


def test_a_worker_that_cannot_start(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The hook loads here, where it is looked at first, but not in a worker."""
    (tmp_path / "picky_hook.py").write_text(
        "import sys\nif 'serve.launcher' not in sys.modules:\n    raise ValueError('no licence for workers')\n"
        "class Hook: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(replay(tokenizer, post_processor_hook="picky_hook:Hook", num_postprocess_workers=2), capfd)
    assert line in ("worker-0 did not start: no licence for workers", "worker-1 did not start: no licence for workers")


def test_a_record_folder_that_cannot_be_made(
    tokenizer: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for workers in (0, 1):
        config = replay(tokenizer, record=str(tmp_path / "file" / "sub"), num_postprocess_workers=workers)
        assert refused(config, capfd).startswith(f"--record: {tmp_path}/file/sub cannot be made")


def test_a_place_for_sockets_with_too_long_a_name(
    tokenizer: Path, run_directories: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deep = run_directories / ("d" * 90)
    deep.mkdir()
    put_run_directories_into(deep, monkeypatch)
    assert "set TMPDIR to a shorter one" in refused(replay(tokenizer), capfd)
    deep.rmdir()


def test_unknown_parsers(tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no_such_parser" in refused(replay(tokenizer, tool_parser="no_such_parser"), capfd)


def test_presets_of_a_model(tmp_path: Path) -> None:
    """What its generation_config.json says and we know; not what it leaves null."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": None, "max_length": 5}))
    files = launcher.ModelFiles(tmp_path, "m")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = launcher.Launcher(Config(model="x"), files, listener)
    assert made._default_sampling() == {"temperature": 0.6}
    made._run_dir.rmdir()
