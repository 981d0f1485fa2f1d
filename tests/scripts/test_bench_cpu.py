"""Whose CPU time is counted, on a /proc of our own making."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from scripts.bench.cpu import CpuError, Process, ProcessTable, is_loopback, program_name, usage
from tests.scripts.proc_tree import PYTHON, SERVER, SHELL, Proc


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """A shell that started a launcher, whose child listens on port 8080, and whose other child does not."""
    proc = Proc(tmp_path)
    proc.listen((8080, "555"))
    proc.process(1, 0, "init", exe="/sbin/init", group=1)
    proc.process(SHELL, 1, "bash", exe="/bin/bash", group=SHELL)
    proc.process(SERVER, SHELL, f"{PYTHON} -m server.launcher")
    proc.process(SERVER + 1, SERVER, f"{PYTHON} -u front.py", "444", "555")
    proc.process(SERVER + 2, SERVER, f"{PYTHON} -m worker", "333")
    proc.process(SERVER + 3, SERVER + 2, "/usr/bin/helper", exe="/usr/bin/helper")
    proc.process(SERVER + 9, SHELL, "/usr/bin/other", exe="/usr/bin/other")
    return proc


def test_a_server_is_its_launcher_and_all_that_descends_from_it(proc: Proc) -> None:
    roots = proc.table.server(8080)
    assert roots == {SERVER}
    names = {pid: process.name for pid, process in proc.table.tree(roots).items()}
    assert names == {SERVER: "server.launcher", SERVER + 1: "front.py", SERVER + 2: "worker", SERVER + 3: "helper"}


def test_a_shell_of_the_same_group_is_no_part_of_it(proc: Proc) -> None:
    proc.process(SERVER + 20, SHELL, f"{PYTHON} script.py", "222", group=SHELL)
    proc.listen((8081, "222"))
    assert proc.table.server(8081) == {SERVER + 20}


def test_a_program_of_another_group_is_no_part_of_it(proc: Proc) -> None:
    proc.process(SERVER + 20, SERVER + 1, f"{PYTHON} script.py", "222", group=SERVER + 20)
    proc.listen((8081, "222"))
    assert proc.table.server(8081) == {SERVER + 20}


def test_several_that_listen_on_one_port(proc: Proc) -> None:
    proc.process(SERVER + 20, SHELL, f"{PYTHON} a.py", "222", group=SERVER + 20)
    proc.process(SERVER + 21, SHELL, f"{PYTHON} b.py", "223", group=SERVER + 21)
    proc.listen((8081, "222"), (8081, "223"))
    assert proc.table.server(8081) == {SERVER + 20, SERVER + 21}


def test_ancestors_of_ours_and_we_are_no_part_of_it(proc: Proc) -> None:
    """A script that started the server and this process, all of one program and group."""
    proc.process(SERVER + 30, SHELL, f"{PYTHON} script.py", group=SERVER + 30)
    proc.process(SERVER + 31, SERVER + 30, f"{PYTHON} server.py", "222", group=SERVER + 30)
    proc.process(os.getpid(), SERVER + 30, f"{PYTHON} bench.py", group=SERVER + 30)
    proc.listen((8081, "222"))
    assert proc.table.server(8081) == {SERVER + 31}
    assert os.getpid() not in proc.table.tree({SERVER + 30})


@pytest.mark.parametrize("port", [8090, 8080 + 1])
def test_nobody_listens(proc: Proc, port: int) -> None:
    with pytest.raises(CpuError, match=f"port {port}"):
        proc.table.server(port)


def test_a_connection_to_a_port_is_no_listener(proc: Proc) -> None:
    proc.process(SERVER + 40, SHELL, "/usr/bin/client", "666")
    proc.listen()
    with pytest.raises(CpuError):
        proc.table.server(8080)


def test_processes_that_are_gone_meanwhile(proc: Proc) -> None:
    (proc.root / str(SERVER + 2) / "stat").unlink()
    assert {*proc.table.tree({SERVER})} == {SERVER, SERVER + 1}


def test_time_used(proc: Proc) -> None:
    proc.process(SERVER + 50, SHELL, "/usr/bin/x", cpu=1.25)
    (process,) = proc.table.tree({SERVER + 50}).values()
    assert process.cpu_seconds == pytest.approx(2.5), "in user mode and in the kernel"
    assert process.started == SERVER + 55


def test_threads_of_a_process(proc: Proc) -> None:
    proc.thread(SERVER, SERVER, "python", 1.5)
    proc.thread(SERVER, SERVER + 100, "ZMQbg/IO/0", 0.25, nanoseconds=256_000_001)
    threads = proc.table.threads(SERVER)
    assert {id: thread.name for id, thread in threads.items()} == {SERVER: "python", SERVER + 100: "ZMQbg/IO/0"}
    assert threads[SERVER].cpu_seconds == 1.5
    assert threads[SERVER + 100].cpu_seconds == 0.256000001
    assert proc.table.threads(SERVER + 999) == {}


def test_finer_than_ticks_unless_threads_have_ended(proc: Proc) -> None:
    proc.process(SERVER + 60, SHELL, "/usr/bin/x", cpu=1.0)
    (process,) = proc.table.tree({SERVER + 60}).values()
    assert proc.table.exact(process) == 2.0
    proc.thread(SERVER + 60, SERVER + 60, "x", 0, nanoseconds=1_999_000_000)
    assert proc.table.exact(process) == 2.0
    proc.thread(SERVER + 60, SERVER + 61, "y", 0, nanoseconds=5_000_000)
    assert proc.table.exact(process) == pytest.approx(2.004)


def test_threads_of_this_process() -> None:
    """The real /proc: the main thread's id is the process's, and what another thread computes is not the main one's."""
    spun = threading.Event()
    begin = threading.Event()

    def spin() -> None:
        begin.wait(30)
        least = time.thread_time() + 0.05
        while time.thread_time() < least:
            pass
        spun.set()
        stop.wait(30)

    stop = threading.Event()
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        before = ProcessTable().threads(os.getpid())
        begin.set()
        assert spun.wait(30)
        after = ProcessTable().threads(os.getpid())
    finally:
        begin.set()
        stop.set()
        thread.join()
    assert thread.native_id is not None
    assert os.getpid() in after
    assert after[thread.native_id].cpu_seconds - before[thread.native_id].cpu_seconds > 0.03


def at(pid: int, seconds: float, started: int = 1, name: str = "x") -> dict[int, Process]:
    return {pid: Process(pid, 1, 1, started, seconds, name)}


def test_usage_between_two_moments() -> None:
    before = at(1, 5.0) | at(2, 1.0) | at(3, 4.0) | at(4, 9.0)
    after = at(1, 5.5) | at(2, 3.0) | at(3, 0.5, started=2) | at(5, 0.75)
    found = [(one.pid, one.cpu_seconds) for one in usage(before, after)]
    assert found == [(2, 2.0), (5, 0.75), (1, 0.5), (3, 0.5)], "3 is another process by now, 4 is gone, 5 is new"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/usr/bin/python3 -m executor.process --x", "executor.process"),
        ("python -u -X dev /opt/app/serve.py --port 1", "serve.py"),
        ("/venv/bin/python /venv/bin/tailrace serve", "tailrace"),
        ("python3 -c import x", "python -c import"),
        ("python3", "python3"),
        ("/usr/bin/nginx -g x", "nginx"),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("x" * 50, "x" * 32),
        ("", ""),
    ],
)
def test_names_of_programs(command: str, name: str) -> None:
    assert program_name(command.split(" ")) == name


def test_a_title_with_spaces_is_kept() -> None:
    assert program_name(["worker: idle/busy", "", ""]) == "worker: idle/busy"


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a.b", False)],
)
def test_this_machine(host: str, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours
