#!/usr/bin/env python3
"""CPU time per token of one post-processing worker, beside the floor of the same run.

The worker gets encoded step frames, as the executor would send them, and makes encoded emissions: the wire's decode and
encode are included, sockets are not. The floor is the least that any Python worker has to do per token: look up the
id's bytes, check that they are UTF-8, escape the text and put it between two constants. It is timed before and after
the worker; machines drift, so compare ratios, not microseconds of different runs.

    scripts/bench_postproc.py [--requests 256] [--tokens 256] [--workload NAME|all] [--sweep] [--json]
                              [--plot out.png]
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer

from executor.engines.base import StepRow, TokenLogprob
from executor.messages import Open, StepRecords
from executor.models import resolve_model
from executor.wire import decode, encode
from postproc_workers.spec import StreamSpec
from postproc_workers.vocabulary import Vocabulary
from postproc_workers.worker import PostprocWorker
from serve.post_processors import POST_PROCESSORS
from serve.recordings import admit_recording

SWEEP = (16, 64, 256, 1024, 4096)
WORKLOADS = ("chat", "logprobs", "stops", "reasoning", "tools", "harmony", "responses")
#: A line is the best of at least 3 runs, and of so many that short ones mean something too.
REPEATS, ENOUGH_TOKENS = 3, 400_000

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
    stops = ["</answer>", "Observation:", "\n\nUser:", "<|end|>"]
    body |= {
        "logprobs": {"logprobs": True, "top_logprobs": 5, "stop": stops},
        "stops": {"stop": stops},
        "tools": {"tools": TOOLS},
    }.get(workload, {})
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


def frames(ids: Sequence[int], requests: int, tokens: int, workload: str) -> list[bytes]:
    """The step frames of ``requests`` streams of ``tokens`` tokens each, one token a step."""
    opened = spec(workload).encode()
    made = [encode(StepRecords([], [], [], [], opens=[Open(rid, 0, 0, opened) for rid in range(requests)]))]
    entry = None
    if workload == "logprobs":
        entry = [TokenLogprob(-0.125, tuple((i, -0.125 - i) for i in range(5)))]
    # Formats have a beginning, so those streams are all alike; in prose each begins elsewhere.
    apart = 0 if workload in ("reasoning", "tools", "harmony") else 7
    for step in range(tokens):
        last = step == tokens - 1
        rows = [
            StepRow(rid, 0, (ids[(rid * apart + step) % len(ids)],), "length" if last else None, logprobs=entry)
            for rid in range(requests)
        ]
        made.append(encode(StepRecords.build(rows, stamp=1)))
    return made


def timed(work: Callable[[], None]) -> float:
    """CPU seconds of one run, without garbage collections of what was there before."""
    gc.collect()
    gc.disable()
    begin = time.process_time()
    work()
    seconds = time.process_time() - begin
    gc.enable()
    return seconds


def floor(table: Sequence[bytes], ids: Sequence[int], tokens: int) -> float:
    """CPU seconds for ``tokens`` tokens at the floor."""
    head = b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    head += b'"created":1700000000,"model":"bench","choices":[{"index":0,"delta":{"content":'
    tail = b'},"logprobs":null,"finish_reason":null}]}\n\n'
    stream = (list(ids) * (tokens // len(ids) + 1))[:tokens]

    def work() -> None:
        pending, out = b"", []
        for token in stream:
            data = pending + table[token] if pending else table[token]
            text, used = utf_8_decode(data, "replace", False)
            pending = data[used:]
            if text:
                out.append(head + orjson.dumps(text) + tail)
            if len(out) > 256:
                out.clear()

    return timed(work)


def worker_seconds(vocabulary: Vocabulary, steps: Sequence[bytes]) -> float:
    """CPU seconds of a worker over all step frames; the first opens the streams and is not counted."""
    worker = PostprocWorker(vocabulary, POST_PROCESSORS)
    worker.receive([decode(steps[0])])  # type: ignore[list-item]

    def work() -> None:
        for frame in steps[1:]:
            for emissions in worker.receive([decode(frame)]).emissions.values():  # type: ignore[list-item]
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
    floors, workers = [floor(table, ids, floor_count)], []
    for _ in range(max(REPEATS, min(50, ENOUGH_TOKENS // count))):
        workers.append(worker_seconds(vocabulary, steps))
        floors.append(floor(table, ids, floor_count))
    best, least = min(workers) / count * 1e6, min(floors) / floor_count * 1e6
    return {
        "workload": workload, "requests": requests, "tokens": tokens,
        "worker_us_per_token": round(best, 3), "floor_us_per_token": round(least, 3), "ratio": round(best / least, 2),
    }  # fmt: skip


def show(lines: Sequence[dict[str, Any]]) -> None:
    """The table, for a person."""
    print(f"{'workload':<10}{'requests':>9}{'tokens':>8}{'worker µs':>11}{'floor µs':>10}{'ratio':>7}")
    for line in lines:
        print(
            f"{line['workload']:<10}{line['requests']:>9}{line['tokens']:>8}{line['worker_us_per_token']:>11.3f}"
            f"{line['floor_us_per_token']:>10.3f}{line['ratio']:>7.2f}"
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
