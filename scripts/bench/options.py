"""The flags of ``bench_serving.py``: those of ``vllm bench serve`` where it has them, with the same meaning.

Two defaults differ. ``--endpoint`` follows ``--backend``, and ``--percentile-metrics`` has ``e2el`` too.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .arrivals import RAMPS, RampUp

Value = TypeVar("Value")

#: Backend -> where its requests go.
ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
#: Reported on demand: the wait for a turn under --max-concurrency, and E2EL with it.
QUEUE_METRICS = ("client_queue_time", "e2el_including_client_queue")
OBJECTIVES = ("ttft", "tpot", "e2el")
SAMPLING = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line; ``bench_serving.py --help`` says what each is.

    url: scheme, host and port, without a path.
    random_range_ratio: of the prompts' lengths and of the answers'.
    body: what every request's body has besides prompt, model and length: ``--extra-body`` over the sampling flags.
    goodput: objective -> milliseconds.
    ignore_eos: set for random prompts unless the command line says otherwise.
    """

    url: str
    backend: str
    endpoint: str
    model: str | None
    served_model_name: str | None
    tokenizer: Path | None
    headers: tuple[tuple[str, str], ...]
    body: dict[str, Any]
    ignore_eos: bool
    insecure: bool
    dataset_name: str
    dataset_path: Path | None
    disable_shuffle: bool
    random_input_len: int
    random_output_len: int
    random_range_ratio: tuple[float, float]
    random_prefix_len: int
    custom_output_len: int | None
    num_prompts: int
    num_warmups: int
    seed: int
    request_rate: float
    burstiness: float
    ramp_up: RampUp | None
    max_concurrency: int | None
    request_timeout: float
    ready_check_timeout_sec: float
    goodput: dict[str, float]
    percentile_metrics: tuple[str, ...]
    metric_percentiles: tuple[float, ...]
    label: str | None
    metadata: tuple[tuple[str, str], ...]
    save_result: bool
    save_detailed: bool
    append_result: bool
    result_dir: Path
    result_filename: str | None
    disable_tqdm: bool
    server_pid: int | None
    plot: Path | None

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.backend == "openai-chat"


def parse(argv: Sequence[str] | None = None) -> Options:
    """Options of a command line. SystemExit with code 2, and a message that names the flag, when they make no sense."""
    parser = _parser()
    given = vars(parser.parse_args(argv))
    if given["dataset_name"] == "custom" and given["dataset_path"] is None:
        parser.error("--dataset-name custom needs --dataset-path")
    if given["dataset_name"] == "random" and given["dataset_path"] is not None:
        parser.error("--dataset-path is for --dataset-name custom")
    host, port, base = given.pop("host"), given.pop("port"), given.pop("base_url")
    _lengths(given)
    given["ramp_up"] = _ramp_up(parser, given)
    sampling = {name: value for name in SAMPLING if (value := given.pop(name)) is not None}
    given |= {
        "url": base or f"http://{f'[{host}]' if ':' in host else host}:{port}",
        "endpoint": given["endpoint"] or ENDPOINTS[given["backend"]],
        "body": sampling | given.pop("extra_body"),
        "headers": tuple(given.pop("header")),
        "metadata": tuple(given["metadata"]),
        "goodput": dict(given["goodput"]),
        "ignore_eos": given["dataset_name"] == "random" if given["ignore_eos"] is None else given["ignore_eos"],
    }
    return Options(**given)


def _lengths(given: dict[str, Any]) -> None:
    """``--input-len`` and ``--output-len`` stand for those of whichever dataset is used."""
    if (length := given.pop("input_len")) is not None:
        given["random_input_len"] = length
    if (length := given.pop("output_len")) is not None:
        given["random_output_len"] = given["custom_output_len"] = length


def _ramp_up(parser: argparse.ArgumentParser, given: dict[str, Any]) -> RampUp | None:
    """The flags of a growing rate as one."""
    strategy, start, end = (given.pop(f"ramp_up_{name}") for name in ("strategy", "start_rps", "end_rps"))
    if strategy is None:
        if start is not None or end is not None:
            parser.error("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if start is None or end is None:
        parser.error("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if start > end:
        parser.error(f"--ramp-up-start-rps {start:g} is more than --ramp-up-end-rps {end:g}")
    if given["request_rate"] != math.inf:
        parser.error("--request-rate and --ramp-up-strategy exclude each other")
    return RampUp(strategy, start, end)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_serving.py",
        description="Drives an OpenAI-compatible server and says how fast it answers, and what that costs.",
        epilog="OPENAI_API_KEY in the environment is sent as a bearer token.",
    )
    _server(parser.add_argument_group("the server").add_argument)
    _dataset(parser.add_argument_group("what is asked").add_argument)
    _sampling(parser.add_argument_group("how it is to be answered").add_argument)
    _traffic(parser.add_argument_group("when it is asked").add_argument)
    _report(parser.add_argument_group("the report").add_argument)
    return parser


def _server(add: Callable[..., object]) -> None:
    add("--backend", choices=sorted(ENDPOINTS), default="openai", help="completions (openai, vllm) or openai-chat")
    add("--base-url", type=_url, help="http://HOST:PORT or https://...; instead of --host and --port")
    add("--host", default="127.0.0.1", help="(%(default)s)")
    add("--port", type=int, default=8000, help="(%(default)s)")
    add("--endpoint", type=_path, help="path that requests go to (by --backend)")
    add("--model", help="name of the model (the first that the server lists)")
    add("--served-model-name", help="what requests call it (--model)")
    add("--tokenizer", type=Path, help="tokenizer.json or its directory: makes random prompts of exact length, and "
        "counts tokens where the server does not say")  # fmt: skip
    add("--header", type=_pair, nargs="*", default=[], metavar="KEY=VALUE", help="more headers")
    add("--insecure", action="store_true", help="do not check the server's certificate")
    add("--server-pid", type=_positive, help="whose CPU time to count, with its children's (whoever listens on the "
        "port, if that is on this machine)")  # fmt: skip


def _dataset(add: Callable[..., object]) -> None:
    add("--dataset-name", choices=("random", "custom"), default="random", help="(%(default)s)")
    add("--dataset-path", type=Path, help='custom: JSON lines {"prompt": ...} or {"messages": [...]}, optionally with '
        '"output_tokens"')  # fmt: skip
    add("--disable-shuffle", action="store_true", help="custom: in the file's order")
    add("--num-prompts", type=_positive, default=1000, help="(%(default)s)")
    add("--input-len", type=_positive, help="same as --random-input-len")
    add("--output-len", type=_positive, help="same as --random-output-len and --custom-output-len")
    add("--random-input-len", type=_positive, default=1024, help="tokens of a prompt, without the prefix (%(default)s)")
    add("--random-output-len", type=_positive, default=128, help="tokens of an answer at most (%(default)s)")
    add("--random-range-ratio", type=_ratios, default=(0.0, 0.0), metavar="R", help="lengths are drawn from "
        "length*(1-R) to length*(1+R); 0 <= R < 1. Of prompts and answers apart: "
        '{"input": R, "output": R} (0)')  # fmt: skip
    add("--random-prefix-len", type=_natural, default=0, help="tokens that all prompts begin with (%(default)s)")
    add("--custom-output-len", type=_custom_length, help="tokens of an answer at most, for all; -1: as the file says "
        "(the file's output_tokens, else 256)")  # fmt: skip
    add("--seed", type=_seed, default=0, help="decides prompts, lengths and arrivals (%(default)s)")


def _sampling(add: Callable[..., object]) -> None:
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="generate up to the given length (for random "
        "prompts). Servers that do not know the field may refuse it")  # fmt: skip
    for name, kind in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="(the server's)")
    add("--extra-body", type=_object, default={}, metavar="JSON", help="more fields of every request")


def _traffic(add: Callable[..., object]) -> None:
    add("--request-rate", type=_rate, default=math.inf, help="requests per second; inf: all at once (%(default)s)")
    add("--burstiness", type=_rate, default=1.0, help="shape of the gamma distribution of the gaps between requests: "
        "1 is a Poisson process, less comes in bursts, more is more even (%(default)s)")  # fmt: skip
    add("--ramp-up-strategy", choices=RAMPS, help="a rate that grows, in the place of --request-rate")
    add("--ramp-up-start-rps", type=_finite_rate, help="requests per second at first")
    add("--ramp-up-end-rps", type=_finite_rate, help="and at last")
    add("--max-concurrency", type=_positive, help="requests open at once (no limit)")
    add("--num-warmups", type=_natural, default=0, help="requests before those that count (%(default)s)")
    add("--request-timeout", type=_seconds, default=6 * 3600.0, help="seconds for a whole answer; 0: for ever "
        "(%(default)s)")  # fmt: skip
    add("--ready-check-timeout-sec", type=_seconds, default=0.0, help="wait so long for the server (%(default)s)")


def _report(add: Callable[..., object]) -> None:
    add("--goodput", type=_objective, nargs="+", default=[], metavar="NAME:MS", help="count requests within all of "
        f"these; names: {', '.join(OBJECTIVES)}")  # fmt: skip
    add("--percentile-metrics", type=_metrics, default=METRICS, metavar="NAMES", help="what to report, of "
        f"{','.join(METRICS)} (these), {','.join(QUEUE_METRICS)}")  # fmt: skip
    add("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,P", help="(99)")
    add("--label", help="first word of the result file's name (the backend)")
    add("--metadata", type=_pair, nargs="*", default=[], metavar="KEY=VALUE", help="more keys of the result file")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with what each request came to")
    add("--append-result", action="store_true", help="add a line of JSON to the file that there is")
    add("--result-dir", type=Path, default=Path(), help="where (here)")
    add("--result-filename", help="its name (from label, rate, model and date)")
    add("--plot", type=Path, metavar="OUT.png", help="draw the run; needs matplotlib")
    add("--disable-tqdm", action="store_true", help="no progress bar")


# ------------------------------------------------------------------------------------------------ values of flags


def _natural(text: str) -> int:
    return _checked(int(text), lambda value: value >= 0, "at least 0")


def _seed(text: str) -> int:
    return _checked(int(text), lambda value: 0 <= value < 1 << 32, "at least 0 and less than 2**32")


def _positive(text: str) -> int:
    return _checked(int(text), lambda value: value >= 1, "at least 1")


def _custom_length(text: str) -> int:
    return _checked(int(text), lambda value: value == -1 or value >= 1, "-1 or at least 1")


def _rate(text: str) -> float:
    return _checked(float(text), lambda value: value > 0, "more than 0")


def _finite_rate(text: str) -> float:
    return _checked(_rate(text), math.isfinite, "a number of requests per second")


def _ratios(text: str) -> tuple[float, float]:
    try:
        both = (float(text),) * 2
    except ValueError:
        given = _object(text)
        if {*given} != {"input", "output"}:
            raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor {{"input": R, "output": R}}') from None
        both = float(given["input"]), float(given["output"])
    return _ratio(both[0]), _ratio(both[1])


def _ratio(value: float) -> float:
    return _checked(value, lambda value: 0 <= value < 1, "at least 0 and less than 1")


def _seconds(text: str) -> float:
    return _checked(float(text), lambda value: 0 <= value < math.inf, "a number of seconds")


def _checked(value: Value, holds: Callable[[Value], bool], what: str) -> Value:
    if not holds(value):
        raise argparse.ArgumentTypeError(f"{value} is not {what}")
    return value


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    # Clients of this protocol are often given the address with its /v1; the endpoint has that too.
    if not usable or parts.path.rstrip("/") not in ("", "/v1"):
        raise argparse.ArgumentTypeError(f"{text!r} is not http://HOST:PORT; a path goes to --endpoint")
    return f"{parts.scheme}://{parts.netloc}"


def _path(text: str) -> str:
    return text if text.startswith("/") else f"/{text}"


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or {"\r", "\n"} & {*text}:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"no JSON: {error}") from None
    return _checked(value, lambda value: isinstance(value, dict), "a JSON object")


def _objective(text: str) -> tuple[str, float]:
    name, colon, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if not colon or name not in OBJECTIVES or not limit >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MS with a name of {', '.join(OBJECTIVES)}")
    return name, limit


def _metrics(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if unknown := {*names} - {*METRICS, *QUEUE_METRICS}:
        raise argparse.ArgumentTypeError(f"no such metric: {', '.join(sorted(unknown))}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(_checked(float(word), lambda value: 0 <= value <= 100, "a percentile") for word in text.split(","))
