"""Who is hurt when: a function of the seed and the options, made before a round begins.

The k-th event of a kind comes somewhere in the k-th interval, so a round of S seconds has S / interval of them at least
and two never come far apart. A victim is drawn as a number from 0 to 1: which process that is depends on who lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.process.chaos.options import Options

#: How many ready workers one kill takes: mostly one, sometimes two at once, sometimes all there are.
_VICTIMS = (1,) * 16 + (2,) * 3 + (1000,)
#: Of kills, how many take the youngest of all: so a worker dies soon after its start again and again, until the pause
#: before its next one is long, and the others live long enough to count as sound. Were all of them to die young, the
#: server would have none for most of the time, and there would be nothing to disturb.
_YOUNGEST = 0.75
#: Of kills, how many take a worker that has not started yet, when there is one.
_STARTING = 0.1
#: Of stopped workers, how many are never continued; the others go on well before they count as hung.
_FOR_EVER = 0.5
#: Of stops, how many take the executor, where it may be hurt at all.
_EXECUTOR = 0.15


@dataclass(frozen=True, slots=True)
class Event:
    """Something to do ``at`` seconds after the beginning.

    kind: ``kill`` or ``stop``, both of a role, or ``flood``. role: ``worker`` or ``executor``. victim: 0 <= victim < 1,
    in the order of age; the last is the youngest. count: how many at once. starting: rather one that is not ready yet.
    seconds: how long a stopped one stands still; None: for ever.
    """

    at: float
    kind: str
    role: str
    victim: float
    count: int = 1
    starting: bool = False
    seconds: float | None = None


def make_plan(options: Options, seconds: float, name: str, hang_timeout: float) -> list[Event]:
    """The events of a round of so many seconds, in order; ``name`` tells the rounds of one seed apart."""
    intervals = {
        ("kill", "worker"): options.worker_kill_interval,
        ("stop", "worker"): options.worker_stop_interval,
        ("kill", "executor"): options.executor_kill_interval,
        ("flood", ""): options.flood_interval,
    }
    events = []
    for (kind, role), interval in intervals.items():
        random = Random(f"{options.seed} {name} {kind} {role}")
        for number in range(int(seconds / interval) + 1 if interval else 0):
            at = interval * (number + random.uniform(0.2, 0.8))
            event = _draw(random, at, kind, role, hang_timeout, bool(options.executor_kill_interval))
            events += [event] if at < seconds else []
    return sorted(events, key=lambda event: (event.at, event.kind))


def _draw(random: Random, at: float, kind: str, role: str, hang_timeout: float, executor: bool) -> Event:
    victim = random.random()
    if kind == "stop":
        role = "executor" if random.random() < _EXECUTOR and executor else role
        seconds = random.uniform(0.1, 0.5 * hang_timeout)
        return Event(at, kind, role, victim, seconds=None if random.random() < _FOR_EVER else seconds)
    if kind == "kill" and role == "worker":
        victim = victim if random.random() > _YOUNGEST else 0.999
        return Event(at, kind, role, victim, random.choice(_VICTIMS), random.random() < _STARTING)
    return Event(at, kind, role, victim)
