"""What a run is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Formats that a server can be started with; each is a round of its own, since a server speaks one.
FORMATS = ("hermes", "harmony")


@dataclass(frozen=True, slots=True)
class Options:
    """Times are seconds, intervals the mean time between two events; an interval of 0 means never.

    seconds: how long the disturbance lasts, over all rounds; start, undisturbed runs and end come on top.
    longest: the longest undisturbed stream. out: where differences are kept; None makes a folder when there is one.
    """

    seconds: float = 30.0
    seed: int = 0
    clients: int = 200
    workers: int = 3
    worker_kill_interval: float = 1.8
    worker_stop_interval: float = 7.0
    executor_kill_interval: float = 18.0
    flood_interval: float = 6.0
    longest: float = 6.0
    formats: tuple[str, ...] = FORMATS
    out: Path | None = None
