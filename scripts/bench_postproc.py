#!/usr/bin/env python3
"""CPU time per token of one post-processing worker, beside the floor of the same run.

The worker gets encoded step frames, as the executor would send them, and makes encoded emissions: the wire's decode and
encode are included, sockets are not. The floor is the least that any Python worker has to do per token, in the simplest
loop that does it. It is timed before and after the worker; machines drift, so compare ratios, not microseconds of
different runs.

* Every workload: look up the id's bytes, check that they are UTF-8, escape the text and put it between two constants.
* ``stops``: look for the first character of a stop string as well, and where there is one, for the stop strings and
  for what has to be held back.
* ``logprobs``: both, and: decode the step's columns, put together the JSON of the token and of its five alternatives
  from parts that were made ahead for every id of the vocabulary, write the six numbers, and encode the emissions. Its
  bytes are compared with the worker's, and are the same from the second token to the last but one. What it leaves out
  is what depends on the request: to find its state, to see whether it ends, to keep what a resume needs, to guard
  against values that JSON cannot hold.

    scripts/bench_postproc.py [--requests 256] [--tokens 256] [--workload NAME|all] [--sweep] [--json]
                              [--plot out.png]
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import re
import struct
import sys
import time
from array import array
from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import Emissions, Open, StepRecords
from executor.models import resolve_model
from executor.wire import FrameReader, decode, encode
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from serve.post_processors import POST_PROCESSORS
from serve.recordings import admit_recording

SWEEP = (16, 64, 256, 1024, 4096)
WORKLOADS = ("chat", "logprobs", "stops", "reasoning", "tools", "harmony", "responses")
#: A line is the best of at least 3 runs, and of so many that short ones mean something too.
REPEATS, ENOUGH_TOKENS = 3, 400_000
STOPS = ("</answer>", "Observation:", "\n\nUser:", "<|end|>")
TOP = 5

TEXT = """The tailrace carries the water away from the turbine. If it is too narrow, the turbine slows down, however
much water stands above it: "power" is a matter of both ends. def flow(head: float, area: float) -> float: return area *
(2 * 9.81 * head) ** 0.5  # m³/s. Größe, façade, naïve; 水が流れる。 Ладога 1 < 2 && 3 > 2 👍 done.
"""


HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>")
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}}}]  # fmt: skip


def script(workload: str, words: int) -> str:
    """What the model says, some ``words`` long: prose, or prose in the workload's format."""
    prose = TEXT * (words * 8 // len(TEXT) + 1)
    half = prose[: words * 4]
    call = json.dumps({"name": "search", "arguments": {"query": half[:600], "limit": 3}}, ensure_ascii=False)
    return {
        "reasoning": f"<think>\n{half}\n</think>\n\n{prose}",
        "tools": f"{half[:400]}\n" + f"<tool_call>\n{call}\n</tool_call>\n" * (words // 100 + 1),
        "harmony": f"<|channel|>analysis<|message|>{half}<|end|><|start|>assistant<|channel|>final<|message|>{prose}",
    }.get(workload, prose)


def spec(workload: str) -> StreamSpec:
    """A stream's spec, made by admission from what a client would send for this workload."""
    body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": "Go ahead."}]}
    asked: dict[str, dict[str, Any]] = {
        "logprobs": {"logprobs": True, "top_logprobs": TOP, "stop": list(STOPS)},
        "stops": {"stop": list(STOPS)},
        "tools": {"tools": TOOLS},
    }
    body |= asked.get(workload, {})
    recording: dict[str, Any] = {
        "name": "bench",
        "endpoint": "/v1/responses" if workload == "responses" else "/v1/chat/completions",
        "request": {"model": "bench", "input": "Go ahead."} if workload == "responses" else body,
        "server": {
            "tool_parser": "harmony" if workload == "harmony" else "hermes" if workload == "tools" else None,
            "reasoning_parser": {"harmony": "harmony", "reasoning": "qwen3"}.get(workload),
        },
        "prompt_tokens": 20,
    }
    made = admit_recording(recording, True)
    if isinstance(made, bytes):
        raise RuntimeError(made.decode())
    return made


def entries(ids: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities as a model has them: 32-bit floats, best first. The text of round ones would be cheaper."""
    draw = random.Random(1)

    def entry() -> TokenLogprob:
        values = sorted((-draw.expovariate(0.5) for _ in range(TOP)), reverse=True)
        values = list(struct.unpack(f"{TOP}f", struct.pack(f"{TOP}f", *values)))
        return TokenLogprob(values[0], tuple(zip(draw.choices(ids, k=TOP), values)))

    return [entry() for _ in range(997)]


def frames(ids: Sequence[int], requests: int, tokens: int, workload: str) -> list[bytes]:
    """The step frames of ``requests`` streams of ``tokens`` tokens each, one token a step."""
    opened = spec(workload).encode()
    made = [encode(StepRecords([], [], [], [], opens=[Open(rid, 0, 0, opened) for rid in range(requests)]))]
    drawn = entries(ids) if workload == "logprobs" else []
    # Formats have a beginning, so those streams are all alike; in prose each begins elsewhere.
    apart = 0 if workload in ("reasoning", "tools", "harmony") else 7
    for step in range(tokens):
        last = step == tokens - 1
        rows = [
            StepRow(
                rid,
                0,
                (ids[(rid * apart + step) % len(ids)],),
                "length" if last else None,
                logprobs=[drawn[(rid * 31 + step) % len(drawn)]] if drawn else None,
            )
            for rid in range(requests)
        ]
        made.append(encode(StepRecords.build(rows, stamp=1)))
    return made


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of one run, without garbage collections of what was there before."""
    gc.collect()
    gc.disable()
    begin = time.process_time()
    work()
    seconds = time.process_time() - begin
    gc.enable()
    return seconds


def event_ends() -> tuple[bytes, bytes]:
    """What an event has before its text and behind its log-probabilities."""
    args = spec("logprobs").args
    head = {"id": args["id"], "object": "chat.completion.chunk", "created": args["created"], "model": args["model"]}
    start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":0,"delta":{"content":'
    return start, b',"finish_reason":null}]}\n\n'


FIRST = re.compile("[" + re.escape("".join({stop[0] for stop in STOPS})) + "]").search
PREFIXES = {stop[:n] for stop in STOPS for n in range(1, len(stop))}


def held_back(text: str) -> int:
    """How many characters at its end may be the beginning of a stop string; there must be none in the text."""
    if any(stop in text for stop in STOPS):
        raise RuntimeError("the text has a stop string: then there is nothing to measure")
    return next((n for n in range(min(len(text), max(map(len, PREFIXES))), 0, -1) if text[-n:] in PREFIXES), 0)


Parts = tuple[list[bytes], list[bytes]]


def floor(table: Sequence[bytes], ids: Sequence[int], tokens: int, stops: bool) -> float:
    """CPU seconds for ``tokens`` tokens at the floor."""
    head, tail = event_ends()
    tail = b'},"logprobs":null' + tail
    stream = (list(ids) * (tokens // len(ids) + 1))[:tokens]

    def work() -> None:
        pending, held, out = b"", "", []
        for token in stream:
            data = pending + table[token] if pending else table[token]
            text, used = utf_8_decode(data, "replace", False)
            pending = data[used:]
            if stops and (held or FIRST(text)):
                text = held + text
                cut = len(text) - held_back(text)
                text, held = text[:cut], text[cut:]
            if text:
                out.append(head + orjson.dumps(text) + tail)
            if len(out) > 256:
                out.clear()

    return timed(work)


def entry_parts(table: Sequence[bytes]) -> Parts:
    """By id, the JSON of a token with a place for its number: as an alternative, and as the one that was drawn."""
    alternatives, drawn = [], []
    for data in table:
        token = orjson.dumps({"token": data.decode(errors="replace")})[:-1].replace(b"%", b"%%")
        part = token + b',"logprob":%b,"bytes":' + orjson.dumps(list(data))
        alternatives.append(part + b"}")
        drawn.append(part + b',"top_logprobs":[')
    return alternatives, drawn


def logprobs_floor(table: Sequence[bytes], parts: Parts, steps: Sequence[bytes], requests: int) -> Iterator[bytes]:
    """The work of ``logprobs`` at the floor, over all step frames but the first; gives out the emissions of each."""
    start, end = event_ends()
    head, tail = start[: -len(b'{"content":')], b']}],"refusal":null}' + end
    middle = b',"logprobs":{"content":['
    alternatives, drawn = parts
    pending, held, sent = [b""] * requests, [""] * requests, [0] * requests
    for frame in steps[1:]:
        fields = msgpack.unpackb(frame)
        rids = memoryview(fields["rid"]).cast("q").tolist()
        tokens = memoryview(fields["token"]).cast("i").tolist()
        events = []
        for rid, token, record in zip(rids, tokens, struct.iter_unpack("<d" + "id" * TOP, fields["lp"])):
            data = pending[rid] + table[token]
            text, used = utf_8_decode(data, "replace", False)
            pending[rid] = data[used:]
            if held[rid] or FIRST(text):
                text = held[rid] + text
                cut = len(text) - held_back(text)
                text, held[rid] = text[:cut], text[cut:]
            template = drawn[token] + b",".join([alternatives[other] for other in record[1::2]])
            entry = template % tuple(orjson.dumps(record[::2])[1:-1].split(b","))
            delta = b'{"content":' + orjson.dumps(text) + b"}" if text else b"{}"
            events.append(b"".join((head, delta, middle, entry, tail)))
            sent[rid] += 1
        counts = array("I", [sent[rid] for rid in rids]).tobytes()
        sizes = array("I", map(len, events)).tobytes()
        columns = {"rid": fields["rid"], "count": counts, "size": sizes, "payload": b"".join(events)}
        yield msgpack.packb({"t": "emissions", "worker": 0, **columns})


def check_logprobs_floor(vocabulary: Vocabulary, least: Iterable[bytes], steps: Sequence[bytes]) -> None:
    """The floor has to do the work: its events are the worker's, apart from the role and the end."""
    worker = PostprocWorker(vocabulary, POST_PROCESSORS)
    worker.receive([decode(steps[0])])  # type: ignore[list-item]
    for number, (frame, made) in enumerate(zip(steps[1:], least)):
        payload = dict(worker.receive([decode(frame)]).emissions)[0].payload  # type: ignore[list-item]
        emissions = decode(made)
        alike = isinstance(emissions, Emissions) and emissions.payload == payload
        if not alike and 0 < number < len(steps) - 2:
            raise RuntimeError("the floor's bytes are not the worker's")


def worker_seconds(vocabulary: Vocabulary, steps: Sequence[bytes]) -> float:
    """CPU seconds of a worker over all step frames; the first opens the streams and is not counted."""
    worker = PostprocWorker(vocabulary, POST_PROCESSORS)
    worker.receive([decode(steps[0])])  # type: ignore[list-item]
    read = FrameReader(logging.getLogger("bench")).read

    def work() -> None:
        for frame in steps[1:]:
            for _, emissions in worker.receive([read(frame)]).emissions:  # type: ignore[list-item]
                encode(emissions)

    seconds = timed(work)
    if worker.open_requests:
        raise RuntimeError(f"{worker.open_requests} finished requests have left state behind")
    return seconds


def measure(vocabulary: Vocabulary, ids: Sequence[int], requests: int, tokens: int, workload: str) -> dict[str, Any]:
    """One line of the table: the best of a few runs of both, floor first and last."""
    table = [vocabulary.token_bytes(i) for i in range(vocabulary.size)]
    steps, count = frames(ids, requests, tokens, workload), requests * tokens
    floor_count = min(count, 200_000)
    parts = entry_parts(table)
    if workload == "logprobs":
        check_logprobs_floor(vocabulary, logprobs_floor(table, parts, steps, requests), steps)

    def floor_us() -> float:
        if workload == "logprobs":
            return timed(lambda: deque(logprobs_floor(table, parts, steps, requests), 0)) / count * 1e6
        return floor(table, ids, floor_count, workload == "stops") / floor_count * 1e6

    floors, workers = [floor_us()], []
    for _ in range(max(REPEATS, min(50, ENOUGH_TOKENS // count))):
        workers.append(worker_seconds(vocabulary, steps) / count * 1e6)
        floors.append(floor_us())
    # In halves, because a single run on a busy machine says little.
    before, after = min(floors[: len(floors) // 2 + 1]), min(floors[len(floors) // 2 :])
    return {
        "workload": workload, "requests": requests, "tokens": tokens,
        "worker_us_per_token": round(min(workers), 3), "floor_us_per_token": round(min(floors), 3),
        "floor_before": round(before, 3), "floor_after": round(after, 3), "ratio": round(min(workers) / min(floors), 2),
    }  # fmt: skip


def show(lines: Sequence[dict[str, Any]]) -> None:
    """The table, for a person."""
    names = f"{'workload':<10}{'requests':>9}{'tokens':>8}{'worker µs':>11}{'floor µs':>10}{'before, after':>16}"
    print(f"{names}{'ratio':>7}")
    for line in lines:
        print(
            f"{line['workload']:<10}{line['requests']:>9}{line['tokens']:>8}{line['worker_us_per_token']:>11.3f}"
            f"{line['floor_us_per_token']:>10.3f}{line['floor_before']:>9.3f},{line['floor_after']:>6.3f}"
            f"{line['ratio']:>7.2f}"
        )


def plot(lines: Sequence[dict[str, Any]], path: str) -> None:
    """Cost per token against concurrency, one line a workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for workload in dict.fromkeys(line["workload"] for line in lines):
        own = [line for line in lines if line["workload"] == workload]
        axes.plot([x["requests"] for x in own], [x["worker_us_per_token"] for x in own], marker="o", label=workload)
        axes.plot([x["requests"] for x in own], [x["floor_us_per_token"] for x in own], linestyle=":", color="gray")
    axes.set(xscale="log", xlabel="concurrent requests", ylabel="CPU µs per token", title="one worker (dotted: floor)")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"plot: {path}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time per token of one post-processing worker.")
    parser.add_argument("--requests", type=int, default=256, help="concurrent streams (256)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per stream (256)")
    parser.add_argument("--workload", default="chat", choices=(*WORKLOADS, "all"))
    parser.add_argument("--sweep", action="store_true", help=f"concurrency {', '.join(map(str, SWEEP))}")
    parser.add_argument("--tokenizer", help="tokenizer.json or directory (default: the embedded model's)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--plot", metavar="PNG", help="draw cost against concurrency")
    options = parser.parse_args()
    source = Path(
        options.tokenizer or resolve_model(None, progress=lambda text: print(text, file=sys.stderr)).directory
    )
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json" if source.is_dir() else source))
    tokenizer.add_special_tokens(list(HARMONY_MARKS))  # known ones are left as they are
    vocabulary = Vocabulary.from_library(tokenizer)
    workloads = WORKLOADS if options.workload == "all" else (options.workload,)
    counts = SWEEP if options.sweep else (options.requests,)
    lines = []
    for workload in workloads:
        for requests in counts:
            ids = tokenizer.encode(script(workload, options.tokens), add_special_tokens=False).ids
            lines.append(measure(vocabulary, ids, requests, options.tokens, workload))
    if options.json:
        print(json.dumps({"lines": lines}))
    else:
        show(lines)
    if options.plot:
        plot(lines, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
