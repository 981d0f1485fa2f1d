"""Isolation: whatever one request's stages raise, the others of the step do not notice. On every post-processor there
is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.messages import FAILED, REQUEST_END, Open, StepRecords
from executor.result import DetokenizedGenerationResultBase
from postproc_workers.post_processor import PostProcessor
from postproc_workers.worker import PostprocWorker
from tests.helpers import ALL_POST_PROCESSORS, vocabulary
from tests.laws.cases import NAMES, Case, cases

ERRORS = [
    ValueError("x"),
    KeyError("x"),
    RuntimeError("x"),
    RecursionError("x"),
    MemoryError(),
    AssertionError(),
    StopIteration("x"),
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def breaking(entry: PostProcessor, at: int, error: Exception) -> PostProcessor:
    """The post-processor, which raises at its n-th call."""
    calls = iter(range(10**9))

    def process(record: DetokenizedGenerationResultBase, args: Any) -> bytes:
        if next(calls) == at:
            raise error
        return entry.process(record, args)

    return entry._replace(process=process, express=None)


class Vocabulary:
    """A vocabulary whose detokenizers break at the n-th token."""

    def __init__(self, at: int, error: Exception) -> None:
        self._inner, self._at, self._error = vocabulary(), at, error
        self.size, self.kind = self._inner.size, self._inner.kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def detokenizer(self, **flags: bool) -> Any:
        return Detokenizer(self._inner.detokenizer(**flags), iter(range(10**9)), self._at, self._error)


class Detokenizer:
    """A detokenizer that breaks at the n-th call."""

    strings: list[str | None] = []
    pending = b""

    def __init__(self, inner: Any, calls: Any, at: int, error: Exception) -> None:
        self.flush = inner.flush
        self.decode = self._breaking(inner.decode, calls, at, error)
        self.pieces = self._breaking(inner.pieces, calls, at, error)

    def _breaking(self, call: Callable[[Any], Any], calls: Any, at: int, error: Exception) -> Callable[[Any], Any]:
        def broken(ids: Any) -> Any:
            if next(calls) == at:
                raise error
            return call(ids)

        return broken


def run(
    case: Case, table: Mapping[str, PostProcessor], names: list[str], rows_of: Callable[[int], list[Any]]
) -> dict[int, list[tuple[int, bytes]]]:
    """Requests 0, 1, ... with these post-processors, all in the same steps: what each got, as (flags, bytes)."""
    worker = PostprocWorker(vocabulary(), table)
    got: dict[int, list[tuple[int, bytes]]] = {rid: [] for rid in range(len(names))}
    specs = []
    for rid, name in enumerate(names):
        spec = case.spec()
        specs.append(
            Open(
                rid,
                0,
                0,
                type(spec)(**{f: getattr(spec, f) for f in spec.__slots__} | {"post_processor": name}).encode(),
            )
        )
    steps = [StepRecords([], [], [], [], opens=specs)]
    steps += [
        StepRecords.build([row for rid in range(len(names)) for row in rows_of(rid)[at : at + 1]])
        for at in range(len(rows_of(0)))
    ]
    for step in steps:
        for _, emissions in worker.receive([step]).emissions:
            for rid, _, _, _, flags, payload in emissions.rows():
                got[rid].append((flags, payload))
    assert worker.open_requests == 0
    return got


@pytest.mark.parametrize("name", NAMES)
@given(st.data(), st.integers(0, 10), st.sampled_from(ERRORS))
def test_a_post_processor_that_raises(name: str, data: st.DataObject, at: int, error: Exception) -> None:
    case = data.draw(cases(name, failing=False))
    rows = case.each()
    table = {**ALL_POST_PROCESSORS, "sick": breaking(ALL_POST_PROCESSORS[name], at, error)}
    got = run(case, table, [name, "sick", name], lambda rid: [row._replace(rid=rid) for row in rows])
    alone = run(case, table, [name], lambda rid: rows)[0]
    assert got[0] == got[2] == alone
    flags, payload = got[1][-1]
    assert flags & REQUEST_END
    if flags & FAILED:
        assert type(error).__name__.encode() in payload
        assert got[1][:-1] == alone[: len(got[1]) - 1]
    else:
        assert got[1] == alone, "it was not called that often"


@pytest.mark.parametrize("name", NAMES)
@given(st.data(), st.integers(0, 10), st.sampled_from(ERRORS))
def test_a_detokenizer_that_raises(name: str, data: st.DataObject, at: int, error: Exception) -> None:
    """One worker, two requests in a row: the second one's detokenizers are new, and work."""
    case = data.draw(cases(name, most=1, failing=False))
    worker: PostprocWorker = PostprocWorker(Vocabulary(at, error), ALL_POST_PROCESSORS)  # type: ignore[arg-type]
    for rid in range(2):
        worker.receive([StepRecords([], [], [], [], opens=[Open(rid, 0, 0, case.spec().encode())])])
    ends = []
    for row in case.each():
        output = worker.receive([StepRecords.build([row._replace(rid=rid) for rid in range(2)])])
        ends += [
            (rid, flags)
            for _, emissions in output.emissions
            for rid, _, _, _, flags, _ in emissions.rows()
            if flags & REQUEST_END
        ]
    assert [rid for rid, _ in sorted(ends)] == [0, 1] and worker.open_requests == 0
