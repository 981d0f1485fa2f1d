"""What surrounds a worker: a config, frames, counters, recordings on disk."""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import pytest

from executor.engines.base import StepRow, TokenLogprob
from executor.histogram import BOUNDS
from executor.messages import Abort, Open, StepRecords, WireError
from executor.reporting import INTERVAL
from executor.wire import decode, encode
from postproc_workers.replay import replay
from postproc_workers.shell import WorkerShell
from postproc_workers.worker import WorkerOutput
from serve.admission import ServerFacts
from tests.executor.test_wire import SAMPLES
from tests.helpers import CHAT, COMPLETIONS, each, row, spec_of, tokens
from tests.recordings.build_tokenizers import FOLDER
from tests.recordings.checker import merge_stream, strict_json

HELLO = tokens("Hello", " world", ",", " the", " answer", " is", " ", "42", ".", "<|end|>")
TOKENIZER = FOLDER / "byte_level.json"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "tailrace.worker")


def shell_of(**config: Any) -> WorkerShell:
    postproc = {"tokenizer": str(TOKENIZER), "post_processors": "serve.post_processors:POST_PROCESSORS"}
    return WorkerShell({"worker": 3, "postproc": postproc | config.pop("postproc", {}), **config})


def body(*outputs: WorkerOutput) -> bytes:
    return b"".join(row[5] for output in outputs for _, emissions in output.emissions for row in emissions.rows())


def test_frames_become_bytes() -> None:
    shell = shell_of()
    frames = [encode(StepRecords.build([], [Open(1, 0, 0, spec_of(CHAT).encode())]))]
    frames += [encode(StepRecords.build([step], stamp=1)) for step in each(HELLO, "stop", rid=1, stop_token=True)]
    output = shell.handle(frames)
    assert merge_stream(body(output), CHAT).choices[0].content == "Hello world, the answer is 42."
    assert dict(output.emissions)[0].worker == 3
    counters = shell.counters()
    assert (counters["coalesced"], counters["tokens"], counters["batch_rows"], counters["open"]) == (9, 10, 10, 0)
    assert counters["busy_seconds"] > 0
    assert sum(counters["queue_age"][1:]) == 10  # the first frame had no stamp
    total, *counts = counters["post_processing"]
    assert sum(counts) == 1 and total == counters["busy_seconds"]


def ago(seconds: float) -> int:
    return time.monotonic_ns() - int(seconds * 1e9)


def test_the_age_of_each_step_is_counted() -> None:
    shell = shell_of()
    old, young = ([encode(StepRecords.build([row([1], rid=9)], stamp=ago(seconds)))] for seconds in (6, 3))
    shell.handle([*old, *young, encode(StepRecords.build([]))])
    total, *counts = shell.counters()["queue_age"]
    assert 9 <= total < 60 and sum(counts) == 2 and sum(counts[: bisect_left(BOUNDS, 2.5) + 1]) == 0
    shell.handle([encode(StepRecords.build([], stamp=ago(-1e6)))])  # a clock that is ahead of ours
    assert shell.counters()["queue_age"][:2] == [total, 1]
    shell.handle([encode(Abort(1))])
    assert sum(shell.counters()["post_processing"][1:]) == 2  # what is no step is no batch


def test_emissions_tell_when_their_oldest_step_and_they_themselves_left() -> None:
    shell = shell_of()
    opens = [Open(rid, 0, rid, spec_of(CHAT).encode()) for rid in range(2)]
    rows = [row(HELLO[:1], rid=rid) for rid in range(2)]
    stamps, before = [ago(2), ago(3)], time.monotonic_ns()
    frames = [encode(StepRecords.build(rows, opens if stamp == stamps[0] else (), stamp)) for stamp in stamps]
    made = dict(shell.handle(frames).emissions)
    assert made.keys() == {0, 1}
    for emissions in made.values():
        assert emissions.stamp == stamps[1] and before <= emissions.sent <= time.monotonic_ns()
    ((_, emissions),) = shell.handle([encode(StepRecords.build(rows[:1]))]).emissions
    assert emissions.stamp == 0 and emissions.sent >= before
    report = shell.report()
    assert report is not None and (report.stamp, report.sent) == (0, 0)


def test_what_is_no_step_is_refused_and_the_rest_is_handled() -> None:
    shell = shell_of()
    good = encode(StepRecords.build([row(HELLO[:1], "length", rid=1)], [Open(1, 0, 0, spec_of(CHAT).encode())]))
    output = shell.handle([b"", b"\xc1", encode(Abort(1)), good, good[:-3], b"\x80"])
    assert merge_stream(body(output), CHAT).choices[0].content == "Hello"
    assert shell.counters()["refused_frames"] == 5
    assert shell.handle([]).emissions == []


def test_no_frame_breaks_a_worker() -> None:
    """Whatever can be decoded is handled, and what comes of it can be encoded."""
    shell = shell_of()
    spec = spec_of(CHAT, n=2).encode()
    opens = [Open(1, 0, 0, spec), Open(2, 1, 0, spec, [(1, False), (0, True)])]
    steps = StepRecords.build(
        [StepRow(1, 0, HELLO[:2]), StepRow(2, 1, HELLO[:1], "stop", True), StepRow(1, 1, [], "abort")], opens, 7
    )
    for frame in (encode(steps), encode(SAMPLES["steps"]), encode(SAMPLES["plain steps"])):
        for place in range(len(frame)):
            for flip in (0x01, 0x40, 0x80, 0xFF):
                flipped = frame[:place] + bytes([frame[place] ^ flip]) + frame[place + 1 :]
                for _, emissions in shell.handle([flipped]).emissions:
                    assert decode(encode(emissions))


def test_reports_come_at_an_interval() -> None:
    shell = shell_of()
    first = shell.report()
    assert first is not None and first.worker == 3 and first.stats == shell.counters()
    assert decode(encode(first)) is not None
    assert shell.report() is None and INTERVAL > 0.1


@pytest.mark.parametrize(
    ("postproc", "named"),
    [
        ({"tokenizer": "/no/such/file.json"}, "no/such|No such"),
        ({"post_processors": "no.such:TABLE"}, "post_processors"),
        ({"post_processor_hook": "no.such:Hook"}, "post_processor_hook"),
    ],
)
def test_a_config_that_cannot_work(postproc: dict[str, Any], named: str) -> None:
    with pytest.raises(Exception, match=named):
        shell_of(postproc=postproc)


def test_a_vocabulary_may_be_larger_than_the_tokenizer() -> None:
    shell = shell_of(postproc={"vocab_size": 400})
    spec = Open(1, 0, 0, spec_of(CHAT).encode())
    output = shell.handle([encode(StepRecords.build([row([HELLO[0], 399], "length", rid=1)], [spec]))])
    assert merge_stream(body(output), CHAT).choices[0].content == "Hello"


# ------------------------------------------------------------------------------------------------------ recordings


def recorded(tmp_path: Path, endpoint: str, rows: list[StepRow], **request: Any) -> tuple[bytes, dict[str, Any]]:
    """(what the client got, the recording on disk)."""
    facts = ServerFacts("m", 2**31, 2**31, frozenset(), record=True, record_prompts=True, tokenizer=str(TOKENIZER))
    shell = shell_of(record_dir=str(tmp_path))
    spec = Open(1, 0, 0, spec_of(endpoint, facts=facts, **request).encode())
    outputs = [shell.handle([encode(StepRecords.build([], [spec]))])]
    outputs += [shell.handle([encode(StepRecords.build([step]))]) for step in rows]
    assert not list(tmp_path.iterdir()), "nothing is written before the bytes are on their way"
    for output in outputs:
        shell.write(output.recordings)
    (file,) = tmp_path.glob("*.jsonl")
    return body(*outputs), strict_json(file.read_text(encoding="utf-8"))


ENTRIES = [TokenLogprob(-float(i) / 8, ((5, -0.5), (6, -math.inf))) for i in range(len(HELLO))]
INFINITE = [TokenLogprob(-math.inf, ((5, -math.inf),)), *ENTRIES[1:]]
BAD = 9999


@pytest.mark.parametrize(
    ("endpoint", "request_body", "rows"),
    [
        (CHAT, {}, each(HELLO, "stop", rid=1, stop_token=True)),
        (CHAT, {"stream": False}, each(HELLO, "stop", rid=1, stop_token=True)),
        (CHAT, {"stop": ["is"]}, each(HELLO, "stop", rid=1, stop_token=True)),
        (CHAT, {"stop": ["nswer"], "include_stop_str_in_output": True}, [row(HELLO, "length", rid=1)]),
        (CHAT, {"stream_options": {"include_usage": True}}, each(HELLO[:3], "length", rid=1)),
        (CHAT, {}, [*each(HELLO[:3], rid=1), row([], "abort", rid=1)]),
        (CHAT, {}, [*each(HELLO[:3], rid=1), row([BAD], rid=1)]),
        (CHAT, {}, [row([BAD], rid=1)]),
        (CHAT, {}, [row([], "error", rid=1)]),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, [row(HELLO[:3], "length", rid=1, logprobs=ENTRIES[:3])]),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, [row(HELLO[:3], "length", rid=1, logprobs=INFINITE[:3])]),
        (COMPLETIONS, {"echo": True, "prompt": "Once"}, each(HELLO, "stop", rid=1, stop_token=True)),
        (COMPLETIONS, {"logprobs": 2}, [row(HELLO[:3], "length", rid=1, logprobs=INFINITE[:3])]),
    ],
)  # fmt: skip
def test_a_recording_replays_to_the_same_bytes(
    tmp_path: Path, endpoint: str, request_body: dict[str, Any], rows: list[StepRow]
) -> None:
    stream = request_body.get("stream", True)
    sent, recording = recorded(tmp_path, endpoint, rows, **request_body)
    whole = len(rows) == 1
    assert replay(recording, split="whole" if whole else "each", stream=stream) == sent


def test_a_recording_of_several_choices(tmp_path: Path) -> None:
    rows = [StepRow(1, i, HELLO[at : at + 1], "length" if at == 2 else None) for at in range(3) for i in range(2)]
    sent, recording = recorded(tmp_path, CHAT, rows, n=2)
    assert [file.stat().st_mode & 0o777 for file in tmp_path.rglob("*.jsonl")] == [0o600]
    assert merge_stream(replay(recording), CHAT).choices == merge_stream(sent, CHAT).choices


def test_a_disk_that_is_full_costs_the_recording_only(tmp_path: Path) -> None:
    facts = ServerFacts("m", 2**31, 2**31, frozenset(), record=True)
    shell = shell_of(record_dir=str(tmp_path / "gone"))
    spec = Open(1, 0, 0, spec_of(CHAT, facts=facts).encode())
    output = shell.handle([encode(StepRecords.build([row(HELLO[:1], "length", rid=1)], [spec]))])
    assert merge_stream(body(output), CHAT).choices[0].content == "Hello"
    shell.write(output.recordings)  # logs, and goes on
    assert len(output.recordings) == 1


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    facts = ServerFacts("m", 2**31, 2**31, frozenset(), record=True)
    spec = Open(1, 0, 0, spec_of(CHAT, facts=facts).encode())
    shell = shell_of()
    shell.write(shell.handle([encode(StepRecords.build([row(HELLO[:1], "length", rid=1)], [spec]))]).recordings)
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_file_is_harmless(tmp_path: Path) -> None:
    shell = shell_of(record_dir=str(tmp_path))
    shell.write([{"name": "../../etc/passwd\0 é" + "x" * 300}])
    (file,) = tmp_path.iterdir()
    assert file.parent == tmp_path and json.loads(file.read_text())["name"].startswith("../../etc")


def test_wire_errors_are_the_only_refusals() -> None:
    with pytest.raises(WireError):
        decode(b"")
