"""Engines by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from executor.engines import ENGINES, engine_factory
from executor.engines.replay_engine import ReplayEngine


def test_by_name() -> None:
    assert engine_factory("replay") is ReplayEngine


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_name_leads_somewhere(name: str) -> None:
    assert callable(engine_factory(name))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"^engine: 'warp' is none of replay, transformers"):
        engine_factory("warp")


def test_replay_does_without_torch() -> None:
    code = "import sys; from executor.engines import engine_factory; engine_factory('replay')({}); "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
