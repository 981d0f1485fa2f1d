"""When a process tells its counters: once a second while they change, and now and then while they do not. Pure.

A report that says nothing new costs its sender and each of its readers a wake-up of 0.1 ms, in an idle server most of
all that it does. The rare ones are for readers that came later.
"""

from __future__ import annotations

from typing import Any

INTERVAL = 1.0
"""Seconds between two reports of a process with something to say."""
SILENCE = 10.0
"""Seconds until what has been said is said again."""


class Reporting:
    """For one process. Times are seconds on its own clock."""

    def __init__(self) -> None:
        self._next = 0.0
        self._repeat = 0.0
        self._told: Any = None

    def due(self, now: float) -> bool:
        """Whether it is time to look at the counters; once an interval."""
        if now < self._next:
            return False
        self._next = now + INTERVAL
        return True

    def news(self, now: float, counters: Any) -> bool:
        """Whether they are to be told now. counters: what they are compared by, with those of the last report."""
        if counters == self._told and now < self._repeat:
            return False
        self._told, self._repeat = counters, now + SILENCE
        return True
