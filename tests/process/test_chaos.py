"""A short run of the chaos script, and whether it would notice anything: its comparison, its plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.process.chaos.clients import check_answer
from tests.process.chaos.difference import Difference, compare, text_difference
from tests.process.chaos.merged import MALFORMED, merged
from tests.process.chaos.model import Model
from tests.process.chaos.options import FORMATS, Options
from tests.process.chaos.plan import make_plan
from tests.process.chaos.stage import Stage
from tests.process.chaos.tally import Findings, Tally
from tests.process.chaos.templates import CHAT, RESPONSES, Template, make_templates
from tests.process.client import Exchange

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "chaos.py"


def test_a_short_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [
        sys.executable, str(SCRIPT), "--seed", "7", "--seconds", "6", "--clients", "60", "--longest", "2.5",
        "--worker_kill_interval", "1", "--worker_stop_interval", "3", "--executor_kill_interval", "3",
        "--flood_interval", "3", "--format", "hermes", "--json", "--out", str(out),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout)
    assert figures["wrong"] == [] and not out.exists()
    assert figures["worker_kills"] >= 3 and figures["executor_kills"] >= 1 and figures["resumed"] > 0
    assert figures["completed"] > 60 and figures["disconnects"] > 0 and figures["refused_429"] > 0
    assert figures["garbage_requests"] > 0 and figures["garbage_frames"] > 0


# ------------------------------------------------------------------------------------------------------ differences

TEXT = "".join(f"{number * number * 7919 % 10007:x} " for number in range(900))


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        (TEXT, (0, 0, 0)),
        (TEXT[:100] + TEXT[150:], (50, 0, 0)),
        (TEXT[:-30], (30, 0, 0)),
        ("", (len(TEXT), 0, 0)),
        (TEXT[:100] + TEXT[80:], (0, 20, 0)),
        (TEXT + TEXT[-10:], (0, 10, 0)),
        (TEXT[:50] + "#" + TEXT[51:], (0, 0, 1)),
        (TEXT[:50] + "###" + TEXT[50:], (0, 0, 3)),
        (TEXT[:1000] + TEXT[900:2000] + TEXT[2050:3000] + TEXT[2990:], (50, 110, 0)),
    ],
)
def test_bytes_are_lost_repeated_or_changed(received: str, expected: tuple[int, int, int]) -> None:
    assert text_difference(TEXT, received) == expected


def test_a_missing_leaf_is_lost_and_another_one_is_changed() -> None:
    difference = compare({"content": "é", "finish": "stop"}, {"finish": "length", "error": "why"})
    assert difference == Difference(2, 0, 6 + 3, ["content", "finish", "error"])
    assert not compare({"content": "é"}, {"content": "é"})


# ------------------------------------------------------------------------------------------------------ responses


def chat_stream(*parts: str, finish: str = "stop") -> bytes:
    """A stream of chat with these deltas; its id and time are those of no other one."""
    head = {"id": f"chatcmpl-{len(parts)}", "object": "chat.completion.chunk", "created": len(parts), "model": "m"}

    def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        choice |= {"stop_reason": None} if reason else {}
        return b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"

    deltas = [{"role": "assistant", "content": ""}, *({"content": part} for part in parts)]
    return b"".join(map(chunk, deltas)) + chunk({}, finish) + b"data: [DONE]\n\n"


STREAM = Template("chat, stream", CHAT, {"stream": True})
ERROR = b'data: {"error":{"message":"no","type":"server_error","param":null,"code":null}}\n\ndata: [DONE]\n\n'


@pytest.fixture
def answered(tmp_path: Path) -> Callable[[bytes], Tally]:
    """What is counted for an answer to a request whose undisturbed one is ``Hello world``."""

    def check(body: bytes) -> Tally:
        stage = Stage(Options(), "", [STREAM], Findings(tmp_path))
        stage.expected[STREAM.name] = merged(STREAM, 200, chat_stream("Hello", " world"))
        exchange = Exchange(None, None, 200, body=bytearray(body))  # type: ignore[arg-type]
        check_answer(stage, exchange, STREAM)
        return stage.tally

    return check


def test_where_a_chunk_ends_is_no_difference(answered: Callable[[bytes], Tally]) -> None:
    cut = chat_stream("He", "llo wor", "ld")
    assert answered(cut) == Tally(completed=1, streams=1)
    assert answered(cut.replace(b"\n\ndata", b"\n\n: ping\n\ndata", 2)) == Tally(completed=1, streams=1)


@pytest.mark.parametrize(
    ("body", "counted"),
    [
        (chat_stream("Hello"), {"lost": 6}),
        (chat_stream("Hello", "lo", " world"), {"repeated": 2}),
        (chat_stream("Hullo", " world"), {"changed": 1}),
        (chat_stream("Hello", " world", finish="length"), {"changed": len("length")}),
    ],
)
def test_a_difference_is_counted(
    answered: Callable[[bytes], Tally], tmp_path: Path, body: bytes, counted: dict[str, int]
) -> None:
    assert answered(body) == Tally(completed=1, streams=1, differing=1, **counted)  # type: ignore[arg-type]
    (kept,) = tmp_path.iterdir()
    document = json.loads(kept.read_text())
    assert document["request"]["path"] == CHAT and document["expected"] != document["received"]


@pytest.mark.parametrize(
    "body", [chat_stream("Hello").removesuffix(b"data: [DONE]\n\n"), b"", b"data: {}\n\n", b"\xff\n\n"]
)
def test_a_malformed_stream_is_a_failure(answered: Callable[[bytes], Tally], body: bytes) -> None:
    assert len(answered(body).failures) == 1


def test_an_error_that_nothing_entitled_the_stream_to_is_a_failure(answered: Callable[[bytes], Tally]) -> None:
    begun = chat_stream("Hello").partition(b"data: [DONE]")[0].rpartition(b"data: ")[0]
    tally = answered(begun + ERROR)
    assert len(tally.failures) == 1 and '"message": "no"' in tally.failures[0]


def response_event(name: str, number: int, **fields: Any) -> bytes:
    event = {"type": f"response.{name}", **fields, "sequence_number": number}
    return f"event: response.{name}\ndata: {json.dumps(event)}\n\n".encode()


def response_stream(deltas: dict[int, str], end: int, name: str = "resp_1") -> bytes:
    parts = [response_event("output_text.delta", number, item_id=f"msg_{name}", delta=text)
             for number, text in deltas.items()]  # fmt: skip
    response = {"id": name, "created_at": len(name), "output": [{"id": f"msg_{name}"}]}
    created = response_event("created", 0, response=response)
    return created + b"".join(parts) + response_event("completed", end, response=response)


def test_streams_of_responses_differ_in_nothing_but_ids_numbers_and_chunks() -> None:
    template = Template("response, stream", RESPONSES, {"stream": True})
    one = merged(template, 200, response_stream({1: "Hel", 2: "lo"}, 3))
    assert one == merged(template, 200, response_stream({1: "Hello"}, 900, name="resp_another"))
    assert one != merged(template, 200, response_stream({1: "Hullo"}, 2))
    for malformed in (response_stream({5: "Hel", 4: "lo"}, 9), response_event("created", 0, response={})):
        with pytest.raises(MALFORMED):
            merged(template, 200, malformed)


# ------------------------------------------------------------------------------------------------------ seeds


def test_a_seed_decides_the_plan() -> None:
    plans = [make_plan(Options(seed=seed), 60.0, "hermes", 2.0) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    assert [event.at for event in plans[0]] == sorted(event.at for event in plans[0])


@pytest.mark.parametrize(("role", "least"), [("worker", 50), ("executor", 5)])
def test_two_minutes_bring_kills_enough(role: str, least: int) -> None:
    for seed in range(50):
        plans = [make_plan(Options(seed=seed), 120.0 / len(FORMATS), kind, 2.0) for kind in FORMATS]
        assert sum(event.kind == "kill" and event.role == role for plan in plans for event in plan) >= least


@pytest.mark.parametrize("interval", ["worker_kill", "worker_stop", "executor_kill", "flood"])
def test_what_is_never_to_happen_is_not_planned(interval: str) -> None:
    options = Options(**{f"{interval}_interval": 0.0})  # type: ignore[arg-type]
    role, _, kind = interval.rpartition("_")
    assert not [e for e in make_plan(options, 60.0, "hermes", 2.0) if e.kind == kind and (role or e.role) == e.role]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_seed_decides_what_is_asked_and_answered(kind: str) -> None:
    def draw(seed: int) -> tuple[list[Template], list[dict[str, Any]]]:
        model = Model(kind, Random(seed))
        return make_templates(model, 20, 2), model.scripts

    assert draw(1) == draw(1) != draw(2)
    templates, _ = draw(1)
    assert len({template.name for template in templates}) == len(templates)
