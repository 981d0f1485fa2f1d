"""The replay engine's configuration, checked key by key; ``replay_engine`` says what the keys mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

RULES = ("order", "rid", "prompt")
FINISH_REASONS = ("stop", "length", "error")


@dataclass(frozen=True, slots=True)
class Script:
    """A given stream; see the module's docstring."""

    token_ids: Sequence[int]
    finish_reason: str = "stop"
    stop_token_id: int | None = None
    message: str = "the recorded engine failed"
    logprobs: Sequence[Mapping[str, Any]] | None = None
    prompt: Sequence[int] = ()

    def __post_init__(self) -> None:
        # Any integers: what becomes of an id outside the vocabulary is for tests to see.
        _require(_are_integers(self.token_ids), "token_ids", "a list of integers")
        _require(_are_ids(self.prompt), "prompt", "a list of token ids")
        _require(self.finish_reason in FINISH_REASONS, "finish_reason", f"one of {', '.join(FINISH_REASONS)}")
        last = self.token_ids[-1] if self.token_ids else None
        _require(self.stop_token_id in (None, last), "stop_token_id", "the last of token_ids")
        count = len(self.token_ids)
        _require(self.logprobs is None or len(self.logprobs) == count, "logprobs", f"a list of {count}, one per id")

    def has(self, token_ids: Sequence[int], offset: int = 0) -> bool:
        """Whether its ids from ``offset`` on begin with these."""
        return list(self.token_ids[offset : offset + len(token_ids)]) == list(token_ids)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The configuration, checked; see the module's docstring."""

    vocab_size: int = 32000
    max_model_len: int = 1 << 20
    eos_token_ids: Sequence[int] = ()
    special_token_ids: Sequence[int] = ()
    synthetic_ids: int = 0
    step_interval: float = 0.0
    batch_size: int = 256
    tokens_per_step: int = 1
    scripts: Sequence[Script] = ()
    rule: str = "order"
    fail_after_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_model_len", "batch_size", "tokens_per_step"):
            _require(_is_int(getattr(self, name)) and getattr(self, name) >= 1, name, "an integer >= 1")
        for name in ("eos_token_ids", "special_token_ids"):
            _require(_are_ids(getattr(self, name)), name, "a list of token ids")
        for name in ("fail_after_steps", "synthetic_ids"):
            _require(_is_int(getattr(self, name)) and getattr(self, name) >= 0, name, "an integer >= 0")
        interval = self.step_interval
        _require(isinstance(interval, (int, float)) and interval >= 0, "step_interval", "seconds >= 0")
        _require(self.rule in RULES, "rule", f"one of {', '.join(RULES)}")
        _require(bool(self.emitted), "vocab_size", "more than the ids that are never emitted")

    @property
    def silent(self) -> frozenset[int]:
        """What synthetic streams never emit."""
        return frozenset((*self.eos_token_ids, *self.special_token_ids))

    @property
    def emitted(self) -> list[int]:
        """What synthetic streams are made of."""
        silent, size = self.silent, min(self.synthetic_ids or self.vocab_size, self.vocab_size)
        return [token for token in range(size) if token not in silent]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ReplayConfig:
        """Check a plain mapping. Raises ValueError naming the key."""
        values = dict(config)
        _known(values, cls, "")
        scripts = values.get("scripts") or ()
        _require(isinstance(scripts, Sequence), "scripts", "a list")
        values["scripts"] = tuple(_script(n, script) for n, script in enumerate(scripts))
        return cls(**values)


def _script(n: int, script: Mapping[str, Any]) -> Script:
    _require(isinstance(script, Mapping), f"scripts[{n}]", "a mapping")
    _known(script, Script, f"scripts[{n}].")
    _require("token_ids" in script, f"scripts[{n}].token_ids", "given")
    try:
        return Script(**script)
    except ValueError as error:
        raise ValueError(f"scripts[{n}].{error}") from None


def _known(values: Mapping[str, Any], kind: type, prefix: str) -> None:
    names = {f.name for f in fields(kind)}
    for name in values:
        if name not in names:
            raise ValueError(f"{prefix}{name}: no such key; there are {', '.join(sorted(names))}")


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{name}: must be {what}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_integers(values: Any) -> bool:
    return isinstance(values, Sequence) and all(map(_is_int, values))


def _are_ids(values: Any) -> bool:
    return _are_integers(values) and all(value >= 0 for value in values)
