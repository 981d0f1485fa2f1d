"""The life of one child process and of those that replace it, as a table; pure.

A *seat* is what has to be occupied: "the executor", "the third worker". Children come and go in it, one at a time.
What happened to a child is an event; the table says in which state the seat is then, and what has to be done.
``executor.seat`` does it.

    NEW ──START──▶ STARTING ──READY──▶ WORKING ──HUNG──▶ KILLED
                      │                 │   ▲              │
                    FAILED         EXITED   READY          │
                      ▼                 ▼   │              │
                    ENDED            PAUSED │ ◀──EXITED────┘
                                   ▲    │   │
                              FAILED    PAUSE_OVER
                                   │    ▼   │
                                  RESTARTING

    any ──STOP──▶ STOPPING ──EXITED, FAILED──▶ ENDED        (ENDED at once where there is no child)
    EXITED, FAILED, once too often ──▶ HOPELESS

Three things decide the shape:

- The *first* start is not tried again: a server that cannot start says why and ends. Only a seat that was occupied
  once is worth a wait, hence STARTING and RESTARTING.
- Events are late by nature: the child ends while it is being killed, it becomes ready while it is asked to end, a tick
  finds it hung when its end has just been told. What can arrive late stands in ``TABLE`` and does nothing; what cannot
  happen at all stands in ``IMPOSSIBLE`` and raises. Together they are complete.
- Whether it is once too often needs counters, and a table has none: ``Supervised`` has them, and says FAILED_TOO_OFTEN
  for FAILED, EXITED_TOO_OFTEN for EXITED.

``Pulse`` tells a child that hangs from a parent that slept.
"""

from __future__ import annotations

import enum

SETTLED = 10.0
"""Seconds of work after which a child counts as sound: its successor starts at once."""

MIN_PAUSE = 0.05
MAX_PAUSE = 10.0
"""Seconds before the next start: they double from the first to the second with each child that came to nothing."""
MAX_PAUSE_AFTER_LIFE = 0.5
"""The longest for one that had become ready. It can work, so whoever kills it costs us a start now and then, while its
clients wait for the next one."""

MISSES = 10
"""Ticks in a row without a beat after which a child hangs."""


class State(enum.Enum):
    """Where a seat stands."""

    NEW = "new"
    STARTING = "starting"  # the first child, not ready yet
    WORKING = "working"
    KILLED = "killed"  # because it hangs; its end is not told yet
    PAUSED = "paused"  # nobody is there; the next one starts when the pause is over
    RESTARTING = "restarting"  # a replacement, not ready yet
    STOPPING = "stopping"  # asked to end, or killed before it was ready; its end is not told yet
    ENDED = "ended"  # as it was asked to, or because the first start failed
    HOPELESS = "hopeless"  # failed once too often


class Event(enum.Enum):
    """What happened to a seat or to its child."""

    START = "start"
    READY = "ready"
    FAILED = "failed"  # a start did: the child said so, or ended before it was ready, or never came to be; it is gone
    FAILED_TOO_OFTEN = "failed too often"
    EXITED = "exited"  # after it was ready
    EXITED_TOO_OFTEN = "exited too often"
    HUNG = "hung"  # the present child did: it is for the caller to forget the clock of the one before
    PAUSE_OVER = "pause over"
    STOP = "stop"
    OVERDUE = "overdue"  # asked to end, it did not in time


class Action(enum.Enum):
    """What has to be done, in this order where there are several."""

    SPAWN = "spawn"
    ANNOUNCE = "announce"  # tell that the child can work
    MOURN = "mourn"  # tell that an announced child is gone
    KILL = "kill"
    ASK_TO_END = "ask to end"
    PAUSE = "pause"  # for Supervised.pause seconds, then PAUSE_OVER
    GIVE_UP = "give up"  # tell that no child will come any more


TABLE: dict[tuple[State, Event], tuple[State, tuple[Action, ...]]] = {
    (State.NEW, Event.START): (State.STARTING, (Action.SPAWN,)),
    (State.NEW, Event.STOP): (State.ENDED, ()),
    #
    (State.STARTING, Event.READY): (State.WORKING, (Action.ANNOUNCE,)),
    (State.STARTING, Event.FAILED): (State.ENDED, ()),
    (State.STARTING, Event.STOP): (State.STOPPING, (Action.KILL,)),
    #
    (State.WORKING, Event.EXITED): (State.PAUSED, (Action.MOURN, Action.PAUSE)),
    (State.WORKING, Event.EXITED_TOO_OFTEN): (State.HOPELESS, (Action.MOURN, Action.GIVE_UP)),
    (State.WORKING, Event.HUNG): (State.KILLED, (Action.KILL,)),
    (State.WORKING, Event.STOP): (State.STOPPING, (Action.ASK_TO_END,)),
    #
    (State.KILLED, Event.EXITED): (State.PAUSED, (Action.MOURN, Action.PAUSE)),
    (State.KILLED, Event.EXITED_TOO_OFTEN): (State.HOPELESS, (Action.MOURN, Action.GIVE_UP)),
    (State.KILLED, Event.HUNG): (State.KILLED, ()),
    (State.KILLED, Event.STOP): (State.STOPPING, ()),
    #
    (State.PAUSED, Event.PAUSE_OVER): (State.RESTARTING, (Action.SPAWN,)),
    (State.PAUSED, Event.HUNG): (State.PAUSED, ()),
    (State.PAUSED, Event.STOP): (State.ENDED, ()),
    #
    (State.RESTARTING, Event.READY): (State.WORKING, (Action.ANNOUNCE,)),
    (State.RESTARTING, Event.FAILED): (State.PAUSED, (Action.PAUSE,)),
    (State.RESTARTING, Event.FAILED_TOO_OFTEN): (State.HOPELESS, (Action.GIVE_UP,)),
    (State.RESTARTING, Event.HUNG): (State.RESTARTING, ()),
    (State.RESTARTING, Event.STOP): (State.STOPPING, (Action.KILL,)),
    #
    (State.STOPPING, Event.READY): (State.STOPPING, ()),
    (State.STOPPING, Event.FAILED): (State.ENDED, ()),
    (State.STOPPING, Event.EXITED): (State.ENDED, ()),
    (State.STOPPING, Event.HUNG): (State.STOPPING, ()),
    (State.STOPPING, Event.STOP): (State.STOPPING, ()),
    (State.STOPPING, Event.OVERDUE): (State.STOPPING, (Action.KILL,)),
    #
    (State.ENDED, Event.READY): (State.ENDED, ()),
    (State.ENDED, Event.FAILED): (State.ENDED, ()),
    (State.ENDED, Event.EXITED): (State.ENDED, ()),
    (State.ENDED, Event.HUNG): (State.ENDED, ()),
    (State.ENDED, Event.PAUSE_OVER): (State.ENDED, ()),
    (State.ENDED, Event.STOP): (State.ENDED, ()),
    (State.ENDED, Event.OVERDUE): (State.ENDED, ()),
    #
    (State.HOPELESS, Event.HUNG): (State.HOPELESS, ()),
    (State.HOPELESS, Event.STOP): (State.ENDED, ()),
}

_NO_CHILD = (Event.READY, Event.FAILED, Event.FAILED_TOO_OFTEN, Event.EXITED, Event.EXITED_TOO_OFTEN, Event.OVERDUE)
_NOT_READY = (Event.START, Event.EXITED, Event.EXITED_TOO_OFTEN, Event.PAUSE_OVER, Event.OVERDUE)
_READY = (Event.START, Event.READY, Event.FAILED, Event.FAILED_TOO_OFTEN, Event.PAUSE_OVER, Event.OVERDUE)

IMPOSSIBLE: dict[State, frozenset[Event]] = {
    State.NEW: frozenset((*_NO_CHILD, Event.HUNG, Event.PAUSE_OVER)),
    State.STARTING: frozenset((*_NOT_READY, Event.FAILED_TOO_OFTEN, Event.HUNG)),
    State.WORKING: frozenset(_READY),
    State.KILLED: frozenset(_READY),
    State.PAUSED: frozenset((*_NO_CHILD, Event.START)),
    State.RESTARTING: frozenset(_NOT_READY),
    State.STOPPING: frozenset((Event.START, Event.FAILED_TOO_OFTEN, Event.EXITED_TOO_OFTEN, Event.PAUSE_OVER)),
    State.ENDED: frozenset((Event.START, Event.FAILED_TOO_OFTEN, Event.EXITED_TOO_OFTEN)),
    State.HOPELESS: frozenset((*_NO_CHILD, Event.START, Event.PAUSE_OVER)),
}
"""What cannot happen, by state: an event of it is a fault of ours, and raises."""


class ImpossibleEvent(RuntimeError):
    """An event that the seat's state rules out; the message says both."""


class Supervised:
    """A seat's state, its counters, and how long the next pause is.

    max_failed_starts: so many in a row are too often, unless the caller says that others do the work meanwhile.
    max_short_lives: so many children in a row that became ready and lived for less than SETTLED seconds are too often,
    whatever else lives; 0: never.
    """

    def __init__(self, max_failed_starts: int = 5, max_short_lives: int = 0) -> None:
        self.state = State.NEW
        #: children started, or tried to
        self.starts = 0
        #: replacements that failed to start, since the last one that was ready
        self.failures = 0
        #: children that became ready and died soon, since the last one that settled
        self.short_lives = 0
        #: seconds
        self.pause = 0.0
        self._max_failed_starts = max_failed_starts
        self._max_short_lives = max_short_lives
        #: when the child became ready, and when it hung if it did; seconds of the caller's clock
        self._ready_at = 0.0
        self._hung_at: float | None = None

    @property
    def restarts(self) -> int:
        """Starts after the first, failed ones included: a crash loop shows in their number."""
        return max(0, self.starts - 1)

    def handle(self, event: Event, now: float, others_alive: bool = False) -> tuple[Action, ...]:
        """Take an event, return what has to be done; ImpossibleEvent, without a change, if it cannot be.

        now: seconds of any clock that goes forward; with HUNG, when the child turned last. others_alive: whether the
        work goes on without this seat.
        """
        if (self.state, event) not in TABLE:
            raise ImpossibleEvent(f"{event.value} while {self.state.value}")
        if event is Event.READY:
            self._ready_at, self._hung_at, self.failures = now, None, 0
        elif event is Event.HUNG and self.state is State.WORKING:
            self._hung_at = now
        elif event is Event.FAILED and self.state is State.RESTARTING:
            event = self._count_failure(others_alive)
        elif event is Event.EXITED and self.state in (State.WORKING, State.KILLED):
            event = self._count_life(now)
        self.state, actions = TABLE[self.state, event]
        self.starts += Action.SPAWN in actions
        return actions

    def validate(self) -> None:
        """AssertionError if state and counters contradict each other. For tests."""
        assert (self.starts == 0) == (self.state is State.NEW) or self.state is State.ENDED
        assert self.pause == 0 or MIN_PAUSE <= self.pause <= MAX_PAUSE
        assert 0 <= self.failures <= self.restarts and 0 <= self.short_lives <= self.starts
        assert self.failures == 0 or self.state not in (State.NEW, State.STARTING, State.WORKING, State.KILLED)
        if self.state is State.HOPELESS:
            lives = self._max_short_lives and self.short_lives >= self._max_short_lives
            assert lives or self.failures >= self._max_failed_starts

    def _count_failure(self, others_alive: bool) -> Event:
        self.failures += 1
        self._lengthen_pause(MAX_PAUSE)
        too_often = self.failures >= self._max_failed_starts and not others_alive
        return Event.FAILED_TOO_OFTEN if too_often else Event.FAILED

    def _count_life(self, now: float) -> Event:
        """A child that hung has lived until then: else one that hangs at once, every time, would seem sound."""
        lived = (now if self._hung_at is None else self._hung_at) - self._ready_at
        if lived >= SETTLED:
            self.short_lives, self.pause = 0, 0.0
            return Event.EXITED
        self.short_lives += 1
        self._lengthen_pause(MAX_PAUSE_AFTER_LIFE)
        return Event.EXITED_TOO_OFTEN if self.short_lives == self._max_short_lives else Event.EXITED

    def _lengthen_pause(self, longest: float) -> None:
        self.pause = min(max(2 * self.pause, MIN_PAUSE), longest)


class Pulse:
    """Whether a child hangs, told from its beats and from the parent's own ticks.

    Time that has passed proves nothing: after a suspended parent or a closed lid, every child seems silent for hours.
    So what counts are ticks of the parent that came on time, and found no beat since the one before: a parent that
    stands still has none, and after it wakes the child has all of them to say that it lives.

    hang_timeout: seconds until a silent child hangs; ticks are due every ``interval``.
    """

    def __init__(self, hang_timeout: float) -> None:
        self.interval = hang_timeout / MISSES
        self._misses = 0
        self._beaten = False

    def beat(self) -> None:
        """The child's loop has turned."""
        self._beaten = True

    def tick(self, elapsed: float) -> bool:
        """A tick, ``elapsed`` seconds after the one before; True once the child hangs."""
        if self._beaten:
            self._misses = 0
        elif elapsed < 2 * self.interval:
            self._misses += 1
        self._beaten = False
        return self._misses >= MISSES
