"""Where token ids come from: the :class:`~executor.engines.base.Engine` protocol and the engines that follow it.

Engines are named here and imported only when chosen: picking ``replay`` never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

#: Engine name -> ``module:factory``. A further engine is one file and one line here.
ENGINES: dict[str, str] = {
    "transformers": "executor.engines.transformers_engine:TransformersEngine",
    "replay": "executor.engines.replay_engine:ReplayEngine",
}


def engine_factory(name: str) -> Callable[..., Any]:
    """The callable that builds the engine ``name``; it returns an ``Engine`` that is not started yet.

    Raises ValueError naming the engines there are.
    """
    if name not in ENGINES:
        raise ValueError(f"engine: {name!r} is none of {', '.join(sorted(ENGINES))}")
    module, _, attribute = ENGINES[name].partition(":")
    factory: Callable[..., Any] = getattr(import_module(module), attribute)
    return factory
