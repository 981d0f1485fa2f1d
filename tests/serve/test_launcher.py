"""A server that cannot start says why in one line, returns 1, and leaves nothing behind. Its children are real ones."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor.child import ChildError
from serve import executor_seat, launcher
from serve.config import Config
from serve.facts import default_sampling
from serve.tokenizer_loading import TokenizerError
from tests.process.server import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def put_run_directories_into(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(directory))


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


def test_no_such_model(capfd: pytest.CaptureFixture[str]) -> None:
    assert "MODEL: there is no /no/such/model" in refused(Config(model="/no/such/model", port=0), capfd)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [("nowhere_hook:H", "no module 'nowhere_hook'"), ("json:Nope", "has no 'Nope'"), ("json", "package.module:name")],
)
def test_a_wrong_hook(tokenizer: Path, capfd: pytest.CaptureFixture[str], hook: str, reason: str) -> None:
    line = refused(replay(tokenizer, post_processor_hook=hook), capfd)
    assert line.startswith("post_processor_hook: ") and reason in line


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('the driver is missing')", "the driver is missing"),
        ("from json import nothing", "cannot import name 'nothing'"),
        ("def broken(:", "(bad_hook.py, line 1)"),
    ],
)
def test_a_hook_whose_module_does_not_import(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    source: str, reason: str,
) -> None:  # fmt: skip
    (tmp_path / "bad_hook.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    line = refused(replay(tokenizer, post_processor_hook="bad_hook:Hook"), capfd)
    assert line.startswith("post_processor_hook: bad_hook:Hook cannot be imported: ") and reason in line


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
    with monkeypatch.context() as patched:
        put_run_directories_into(deep, patched)
        assert "set TMPDIR to a shorter one" in refused(replay(tokenizer), capfd)
    deep.rmdir()


def test_unknown_parsers(tokenizer: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "no_such_parser" in refused(replay(tokenizer, tool_parser="no_such_parser"), capfd)


def test_presets_of_a_model(tmp_path: Path) -> None:
    """What its generation_config.json says and we know; not what it leaves null."""
    presets = {"temperature": 0.6, "min_p": 0.1, "top_p": None, "max_length": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(presets))
    assert default_sampling(Config(model="x"), launcher.ModelFiles(tmp_path, "m")) == {"temperature": 0.6, "min_p": 0.1}


# ------------------------------------------------------------------ tokenizer and executor, started together


@contextlib.contextmanager
def launched(model: Path) -> Iterator[launcher.Launcher]:
    """A launcher for a model that is loaded at the same time as its tokenizer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = launcher.Launcher(Config(model="x"), launcher.ModelFiles(model, "m"), listener)
        yield made
    made._run_dir.remove()


class Executor:
    """An executor's process as its seat sees it: one that fails with ``error``, or gets ready for nothing but its
    end."""

    def __init__(self, error: ChildError | None) -> None:
        self._error = error

    async def spawn(self, name: str, module: str, config: Mapping[str, Any]) -> Executor:
        self._killed = asyncio.Event()
        return self

    async def ready(self) -> dict[str, Any]:
        if self._error is None:
            await self._killed.wait()
        raise self._error or ChildError("executor did not start: it was killed")

    def kill(self) -> None:
        self._killed.set()

    async def wait(self) -> int:
        await self._killed.wait()
        return -signal.SIGKILL


async def start_fails(made: launcher.Launcher, error: type[Exception], match: str) -> None:
    """Both are ended when one has failed: no task is left, and none holds an exception that nobody took."""
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    with pytest.raises(error, match=match):
        await asyncio.wait_for(made._load(), 30)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    assert unhandled == []


def test_a_broken_tokenizer_does_not_wait_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    monkeypatch.setattr(executor_seat, "ChildProcess", Executor(None))
    with launched(tmp_path) as made:
        asyncio.run(start_fails(made, TokenizerError, "no tokenizer can be loaded"))


def test_a_failed_executor_leaves_no_loading_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def load(source: Path) -> None:
        assert failed.wait(30)
        raise TokenizerError("too late to matter")

    async def main(made: launcher.Launcher) -> None:
        await start_fails(made, ChildError, "no memory")
        failed.set()

    monkeypatch.setattr(launcher, "load_tokenizer", load)
    monkeypatch.setattr(executor_seat, "ChildProcess", Executor(ChildError("executor did not start: no memory")))
    with launched(tmp_path) as made:
        asyncio.run(main(made))
