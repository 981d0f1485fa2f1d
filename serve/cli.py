"""The `tailrace` command: argv -> one frozen Config, or a replay.

Flags may be written with `-` or `_` between their words.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serve.config import MAX_FRONTENDS, Config, default_workers


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 ended as asked, 1 failed, 2 wrong usage."""
    arguments = _parser().parse_args([_with_underscores(word) for word in (sys.argv[1:] if argv is None else argv)])
    if arguments.command == "replay":
        return _replay(arguments)
    try:
        with _without_torch():
            from serve.launcher import serve  # transformers takes a second to import; `replay` and `--help` do without
    except KeyboardInterrupt:
        return 0
    return serve(_config(arguments))


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Keep transformers from importing torch into this process, the front end, which needs a tokenizer and no more:
    that is 2 s of every start and 240 MB. None in ``sys.modules`` is Python's word for a module that is not to be had;
    transformers asks once and remembers the answer."""
    if "torch" in sys.modules:
        yield
        return
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # it would advise to install torch
    before = os.environ.get(name)
    sys.modules["torch"], os.environ[name] = None, "1"  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"], os.environ[name]
        if before is not None:
            os.environ[name] = before


def _with_underscores(word: str) -> str:
    """One spelling of flags: ``--max-model-len=1`` and ``--max_model_len=1`` are the same. Values stay as they are."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _front_ends(text: str) -> int:
    value = _positive(text)
    if value > MAX_FRONTENDS:
        raise argparse.ArgumentTypeError(f"{text} is more than {MAX_FRONTENDS}")
    return value


def _port(text: str) -> int:
    value = _count(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):  # also false for "nan"
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _json_object(text: str) -> dict[str, Any]:
    """A JSON object, or the path of a file that holds one."""
    try:
        value = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"no JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("no JSON object")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace",
        description="Serve a language model to many streaming clients, with post-processing in worker processes.",
    )
    parser.add_argument("--version", action="version", version=importlib.metadata.version("tailrace"))
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="start an OpenAI-compatible server", allow_abbrev=False))
    _add_replay(commands.add_parser("replay", help="print what a client received in a recorded stream"))
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.description = "Start an OpenAI-compatible server. Flags may be written with - or _."
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a directory in Hugging Face layout, a .gguf file, or a hub name "
        "(default: the embedded SmolLM2-135M-Instruct)")  # fmt: skip
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=_port, default=8000, help="port to listen on; 0 takes a free one (default: %(default)s)")
    add("--num_postprocess_workers", type=_count, default=default_workers(), metavar="N",
        help="processes that turn tokens into responses; 0: in the front end "
             "(default for this machine: %(default)s)")  # fmt: skip
    add("--num_serve_frontends", type=_front_ends, default=1, metavar="K",
        help="processes that speak HTTP; with more than 1 they share the address (default: %(default)s)")  # fmt: skip
    add("--tokenizer", metavar="PATH", help="tokenizer directory or tokenizer.json, if not the model's own")
    add("--served_model_name", metavar="NAME", help="the name clients use (default: the model's)")
    _add_engine(parser)
    add("--stream_interval", type=_positive, default=1, metavar="K",
        help="tokens per event, where a request does not say; the first is never held back "
             "(default: %(default)s)")  # fmt: skip
    add("--post_processor_hook", metavar="PKG.MODULE:CLASS",
        help="your class, asked about the text of every output and step: "
             "emit, replace, suppress or terminate")  # fmt: skip
    add("--reasoning_parser", default="auto", metavar="NAME", help="format of the model's reasoning: a name, none, or "
        "auto, which looks at the chat template (default: %(default)s)")  # fmt: skip
    add("--tool_parser", default="auto", metavar="NAME", help="format of the model's tool calls: a name, none, or auto "
        "(default: %(default)s)")  # fmt: skip
    add("--reasoning_alias", action="store_true", help="send reasoning under the key `reasoning` too")
    add("--record", metavar="DIR", help="write a recording of every request into DIR, for `tailrace replay`")
    add("--record_prompts", action="store_true", help="recordings hold the prompts too")
    add("--max_body_bytes", type=_positive, default=32 << 20, metavar="BYTES",
        help="largest request body (default: %(default)s)")  # fmt: skip
    add("--shutdown_timeout", type=_seconds, default=30.0, metavar="SECONDS",
        help="how long open streams may go on after SIGTERM or ctrl-C; a second signal ends at once "
             "(default: %(default)s)")  # fmt: skip
    _add_limits(parser)
    _add_access(parser)
    add("--log_level", default="info", choices=("debug", "info", "warning", "error"), help="(default: %(default)s)")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    add = group.add_argument
    add(
        "--max_requests",
        type=_positive,
        default=4096,
        metavar="N",
        help="requests open at once; the next one gets a 429 (default: %(default)s)",
    )
    add(
        "--max_queued_tokens",
        type=_positive,
        default=4 << 20,
        metavar="N",
        help="prompt tokens of requests that wait for their first token; beyond, a 429 (default: %(default)s)",
    )
    add(
        "--queue_timeout",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long a request may wait for its first token, then a 503; 0: for ever (default: %(default)s)",
    )
    add(
        "--client_buffer_bytes",
        type=_positive,
        default=1 << 20,
        metavar="BYTES",
        help="what may gather for a client that reads slowly, until it is disconnected (default: %(default)s)",
    )
    add(
        "--client_stall_timeout",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a client may take nothing of what waits for it; 0: for ever (default: %(default)s)",
    )
    add(
        "--keep_alive_interval",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="an event stream without news gets a comment this often; 0: never (default: %(default)s)",
    )
    add(
        "--hang_timeout",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="a worker or executor whose loop stands still this long is replaced; 0: never (default: %(default)s)",
    )


def _add_access(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    add = group.add_argument
    add(
        "--api_key",
        action="append",
        default=[],
        metavar="KEY",
        help="a key that clients must send as a bearer token; may be given several times. Better in the environment as "
        "TAILRACE_API_KEY, or in a file: arguments are seen by every user of the machine",
    )
    add("--api_key_file", metavar="FILE", help="a file with one key per line")
    add(
        "--cors_origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="an origin whose pages may call this server from a browser, or *; may be given several times",
    )
    add("--ssl_certfile", metavar="FILE", help="certificate chain: serve HTTPS")
    add("--ssl_keyfile", metavar="FILE", help="its private key, if not in the same file")
    add("--ssl_ca_certs", metavar="FILE", help="accept only clients with a certificate of these authorities")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--engine", default="transformers", choices=("transformers", "replay"),
        help="what generates the tokens; replay needs no weights and emits given or synthetic ones "
             "(default: %(default)s)")  # fmt: skip
    add("--engine_config", type=_json_object, default={}, metavar="JSON",
        help="settings of the replay engine: a JSON object or a file that holds one")  # fmt: skip
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    add("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"), help="type of the weights")
    add("--max_batch_tokens", type=_positive, metavar="N", help="tokens in one engine step at most")
    add("--max_num_seqs", type=_positive, metavar="N", help="outputs in one engine step at most")
    add("--max_model_len", type=_positive, metavar="N", help="tokens of a prompt and its answer (default: the model's)")


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print exactly the bytes that a client received, from a recording; no model is needed."
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a .jsonl file of recordings (serve --record writes them)"
    )
    parser.add_argument("--split", default="each", help="how the tokens reach the worker: whole, each, every:N, at:K "
                        "or random:SEED; the merged text does not depend on it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--unary", action="store_true", help="print the JSON document instead of the stream")
    parser.add_argument("--only", default="", metavar="TEXT", help="only recordings whose name contains TEXT")
    group = parser.add_argument_group("raw text instead of a file, to try a format")
    group.add_argument("--text", metavar="TEXT", help="what the model said")
    group.add_argument("--reasoning_parser", metavar="NAME", help="format of its reasoning")
    group.add_argument("--tool_parser", metavar="NAME", help="format of its tool calls")
    group.add_argument(
        "--tools", metavar="FILE", help="a JSON list of tools in OpenAI's format, by which values are typed"
    )
    group.add_argument(
        "--prompt", default="", metavar="TEXT", help="the end of the prompt, which may open a reasoning block"
    )


def _config(arguments: argparse.Namespace) -> Config:
    values = {name: value for name, value in vars(arguments).items() if name != "command"}
    for name in ("reasoning_parser", "tool_parser"):
        values[name] = None if values[name] == "none" else values[name]
    for name in ("api_key", "cors_origin"):
        values[name] = tuple(values[name])
    return Config(**values)


def _replay(arguments: argparse.Namespace) -> int:
    from postproc_workers.replay import replay

    source = arguments.file or "--text"
    try:
        for recording in _recordings(arguments):
            if arguments.only in str(recording.get("name", "")):
                folder = Path(arguments.file or ".").parent
                body = replay(recording, split=arguments.split, stream=not arguments.unary, base_dir=folder)
                sys.stdout.buffer.write(body if body.endswith(b"\n") else body + b"\n")
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; nor may the interpreter's own flush at the end complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        print(f"tailrace replay: {source}: {error}", file=sys.stderr)
        return 1
    return 0


def _recordings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The recordings of a file, or one made of raw text. ValueError for anything else."""
    if (arguments.file is None) == (arguments.text is None):
        raise ValueError("give a file of recordings, or --text")
    if arguments.text is not None:
        return [_text_recording(arguments)]
    lines = Path(arguments.file).read_text(encoding="utf-8").split("\n")
    recordings = [json.loads(line) for line in lines if line.strip()]
    if not all(isinstance(recording, dict) for recording in recordings):
        raise ValueError("a recording is a JSON object")
    return recordings


def _text_recording(arguments: argparse.Namespace) -> dict[str, Any]:
    request: dict[str, Any] = {"model": "text", "messages": [{"role": "user", "content": ""}]}
    if arguments.tools is not None:
        request["tools"] = json.loads(Path(arguments.tools).read_text(encoding="utf-8"))
    elif arguments.tool_parser is not None:
        # Without a tool there is no call; undeclared names are called all the same.
        request["tools"] = [{"type": "function", "function": {"name": "any"}}]
    return {
        "name": "text",
        "endpoint": "/v1/chat/completions",
        "request": request,
        "server": {"tool_parser": arguments.tool_parser, "reasoning_parser": arguments.reasoning_parser},
        "prompt": arguments.prompt,
        "outputs": [{"index": 0, "text": arguments.text, "finish_reason": "stop"}],
    }


if __name__ == "__main__":
    sys.exit(main())
