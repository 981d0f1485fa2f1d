"""Which part of a server's CPU time is the model's, by kind of server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench import exposition
from scripts.bench.cpu import Process
from scripts.bench.outside import Meter, Reading, kind_of
from tests.scripts.proc_tree import PYTHON, SERVER, Proc

URL = "http://127.0.0.1:1"


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def meter(proc: Proc, kind: str) -> Meter:
    return Meter(kind, URL, (SERVER,), proc.table)


def test_of_transformers_serve_the_main_thread_is_outside_and_so_are_its_children(proc: Proc) -> None:
    proc.process(SERVER, 1, "/venv/bin/python /venv/bin/transformers serve", cpu=5)  # 10 s with its kernel time
    for number, (name, seconds) in enumerate((("transformers", 1.5), ("transformers", 6.0), ("pt_main", 2.0))):
        proc.thread(SERVER, SERVER + number, name, seconds)
    proc.process(SERVER + 50, SERVER, f"{PYTHON} -m multiprocessing", cpu=0.25)
    reading = meter(proc, "transformers").begin()
    assert reading == Reading(10.5, 2.0)


def test_of_vllm_the_engines_processes_are_the_model(proc: Proc) -> None:
    proc.process(SERVER, 1, "/venv/bin/python /venv/bin/vllm serve", cpu=1)
    proc.process(SERVER + 1, SERVER, "VLLM::EngineCore_DP0", cpu=3)
    proc.process(SERVER + 2, SERVER + 1, "VLLM::Worker_TP1", cpu=2)
    proc.process(SERVER + 3, SERVER, "VLLM::ApiServer_1", cpu=0.5)
    assert meter(proc, "vllm").begin() == Reading(13.0, 3.0)


def test_a_vllm_in_one_process_is_not_known(proc: Proc) -> None:
    proc.process(SERVER, 1, "/venv/bin/python /venv/bin/vllm serve", cpu=1)
    assert meter(proc, "vllm").end() == Reading(2.0, None)


def test_of_ours_shipping_is_outside_and_the_rest_of_the_executor_is_not(
    proc: Proc, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: Iterator[float] = iter((0.125, 0.375))
    monkeypatch.setattr(exposition, "fresh", lambda url: {exposition.SHIPPING: next(reports)})
    proc.process(SERVER, 1, f"{PYTHON} -m serve.cli serve", cpu=1)
    proc.process(SERVER + 1, SERVER, f"{PYTHON} -m executor.process", cpu=8)
    proc.process(SERVER + 2, SERVER, f"{PYTHON} -m postproc_workers.process", cpu=0.5)
    before = meter(proc, "tailrace").begin()
    assert before == Reading(19.0, 3.125)
    assert meter(proc, "tailrace").end().since(before) == Reading(0.0, 0.25)


def test_of_another_server_only_the_sum_is_known(proc: Proc) -> None:
    proc.process(SERVER, 1, f"{PYTHON} server.py", cpu=1)
    reading = meter(proc, "other").begin()
    assert reading == Reading(2.0, None)
    assert reading.since(Reading(0.5, None)) == Reading(1.5, None)


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="kind: 'tgi' is none of tailrace, transformers"):
        Meter("tgi", URL, (1,))


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["serve.cli", "executor.process"], "tailrace"),
        (["transformers"], "transformers"),
        (["vllm", "VLLM::EngineCore"], "vllm"),
        (["vllm"], "vllm"),
        (["nginx"], "other"),
        ([], "other"),
    ],
)
def test_what_kind_of_server_it_is(names: list[str], kind: str) -> None:
    assert kind_of(Process(1, 1, 1, 1, 0.0, name) for name in names) == kind
