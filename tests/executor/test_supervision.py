"""A seat's table: whole, and what holds of every sequence of events; pauses and counters; who hangs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from executor.supervision import (
    IMPOSSIBLE,
    MAX_PAUSE,
    MAX_PAUSE_AFTER_LIFE,
    MISSES,
    SETTLED,
    TABLE,
    Action,
    Event,
    ImpossibleEvent,
    Pulse,
    State,
    Supervised,
)

PAIRS = list(product(State, Event))
#: A child may be there: spawned, and its end not told.
OCCUPIED = {State.STARTING, State.WORKING, State.KILLED, State.RESTARTING, State.STOPPING}
#: Of the counters' making, never the caller's.
TOO_OFTEN = {Event.FAILED_TOO_OFTEN, Event.EXITED_TOO_OFTEN}

by_pair = pytest.mark.parametrize(
    ("state", "event"), PAIRS, ids=[f"{state.name}-{event.name}" for state, event in PAIRS]
)


# ---------------------------------------------------------------------------------------------------- the table


def test_every_pair_is_in_the_table_or_impossible_and_none_is_both() -> None:
    impossible = [(state, event) for state, events in IMPOSSIBLE.items() for event in events]
    assert sorted([*TABLE, *impossible], key=PAIRS.index) == PAIRS


@by_pair
def test_a_pair_does_what_the_table_says_or_raises_and_changes_nothing(state: State, event: Event) -> None:
    seat = Supervised(max_failed_starts=100)
    seat.state = state
    before = vars(seat).copy()
    if (state, event) in TABLE:
        assert seat.handle(event, 0.0) == TABLE[state, event][1] and seat.state is TABLE[state, event][0]
    else:
        with pytest.raises(ImpossibleEvent, match=f"{event.value} while {state.value}"):
            seat.handle(event, 0.0)
        assert vars(seat) == before


@by_pair
def test_a_pair_keeps_order(state: State, event: Event) -> None:
    """What a row may do depends on who is in the seat before and after it."""
    if (state, event) not in TABLE:
        return
    after, actions = TABLE[state, event]
    assert (Action.SPAWN in actions) == (after in (State.STARTING, State.RESTARTING) and after is not state)
    assert (Action.ANNOUNCE in actions) == (after is State.WORKING)
    assert (Action.MOURN in actions) == (state in (State.WORKING, State.KILLED) and after not in OCCUPIED)
    assert (Action.PAUSE in actions) == (after is State.PAUSED and after is not state)
    assert (Action.GIVE_UP in actions) == (after is State.HOPELESS and after is not state)
    assert state in OCCUPIED or not {Action.KILL, Action.ASK_TO_END} & set(actions)


OVER = (State.STOPPING, State.ENDED)
LATE = [
    *product(OVER, (Event.READY, Event.FAILED, Event.EXITED, Event.HUNG, Event.STOP)),
    *((state, Event.HUNG) for state in (State.KILLED, State.PAUSED, State.RESTARTING, State.HOPELESS)),
    *((State.ENDED, event) for event in (Event.PAUSE_OVER, Event.OVERDUE)),
]


@pytest.mark.parametrize(("state", "event"), LATE, ids=[f"{state.name}-{event.name}" for state, event in LATE])
def test_what_comes_late_is_harmless(state: State, event: Event) -> None:
    after, actions = TABLE[state, event]
    assert actions == () and (after is state or state is State.STOPPING and after is State.ENDED)


# ---------------------------------------------------------------------------------------------------- any sequence


class AnySequence(RuleBasedStateMachine):
    """Events as they come, the impossible ones too; the model is a caller that keeps books of what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.seat = Supervised(max_failed_starts=3, max_short_lives=4)
        self.now = 0.0
        self.child = self.announced = self.stopped = False
        self.given_up = 0
        self.restarts = 0

    @rule(event=st.sampled_from(Event), seconds=st.sampled_from([0.0, 0.5, SETTLED, 100.0]), others=st.booleans())
    def any_event(self, event: Event, seconds: float, others: bool) -> None:
        if event in TOO_OFTEN or (event is Event.STOP and seconds):  # else most runs would end early
            return
        self._feed(event, seconds, others)

    @precondition(lambda self: self.seat.state in (State.WORKING, State.PAUSED, State.RESTARTING))
    @rule(seconds=st.sampled_from([0.0, SETTLED]), fails=st.booleans())
    def go_on(self, seconds: float, fails: bool) -> None:
        """What leads back to work, so that runs are long."""
        starting = Event.FAILED if fails else Event.READY
        event = {State.WORKING: Event.EXITED, State.PAUSED: Event.PAUSE_OVER}.get(self.seat.state, starting)
        self._feed(event, seconds, False)

    def _feed(self, event: Event, seconds: float, others: bool) -> None:
        self.now += seconds
        before = self.seat.state
        if event in IMPOSSIBLE[before]:
            with pytest.raises(ImpossibleEvent):
                self.seat.handle(event, self.now, others)
            assert self.seat.state is before
            return
        if event in (Event.EXITED, Event.FAILED):
            self.child = False
        self.stopped |= event is Event.STOP
        for action in self.seat.handle(event, self.now, others):
            self._do(action)
        if event is Event.FAILED and others:
            assert self.seat.state is not State.HOPELESS

    def _do(self, action: Action) -> None:
        if action is Action.SPAWN:
            assert not self.child and not self.stopped
            self.child = True
        elif action is Action.ANNOUNCE:
            assert self.child and not self.announced
            self.announced = True
        elif action is Action.MOURN:
            assert not self.child and self.announced
            self.announced = False
        elif action is Action.PAUSE:
            assert not self.child and not self.stopped
        elif action is Action.GIVE_UP:
            assert not self.child
            self.given_up += 1
        else:
            assert self.child

    @invariant()
    def books_agree(self) -> None:
        self.seat.validate()
        assert self.child == (self.seat.state in OCCUPIED)
        assert self.given_up == (self.seat.state is State.HOPELESS) or self.stopped and self.given_up <= 1
        assert self.stopped == (self.seat.state in (State.STOPPING, State.ENDED)) or self.seat.starts == 1
        assert not (self.stopped and self.seat.state is State.PAUSED)
        assert self.restarts <= self.seat.restarts <= self.restarts + 1
        self.restarts = self.seat.restarts


TestAnySequence = AnySequence.TestCase


# ---------------------------------------------------------------------------------------------------- pauses, counters


def working(**limits: int) -> Supervised:
    seat = Supervised(**limits)
    seat.handle(Event.START, 0.0)
    seat.handle(Event.READY, 0.0)
    return seat


def live(seat: Supervised, seconds: float) -> float:
    """The present child dies after so long, the next one becomes ready at once; returns the pause between them."""
    assert seat.handle(Event.EXITED, seconds) == (Action.MOURN, Action.PAUSE)
    pause = seat.pause
    seat.handle(Event.PAUSE_OVER, 0.0)
    seat.handle(Event.READY, 0.0)
    return pause


def test_pauses_grow_with_lives_that_came_to_nothing() -> None:
    seat = working()
    assert [live(seat, 0.1) for _ in range(9)] == [0.05, 0.1, 0.2, 0.4, *[MAX_PAUSE_AFTER_LIFE] * 5]
    assert live(seat, SETTLED - 0.1) == MAX_PAUSE_AFTER_LIFE
    assert live(seat, SETTLED) == 0.0 == live(seat, 1000.0)
    assert live(seat, 0.1) == 0.05
    assert seat.restarts == 13


def test_pauses_grow_with_failed_starts_and_go_on_growing_after_them() -> None:
    seat = working()
    seat.handle(Event.EXITED, SETTLED)
    pauses = [seat.pause]
    for _ in range(10):
        seat.handle(Event.PAUSE_OVER, 20.0)
        assert seat.handle(Event.FAILED, 20.0, others_alive=True) == (Action.PAUSE,)
        pauses.append(seat.pause)
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, MAX_PAUSE, MAX_PAUSE]
    seat.handle(Event.PAUSE_OVER, 0.0)
    seat.handle(Event.READY, 0.0)
    assert live(seat, 1.0) == MAX_PAUSE_AFTER_LIFE


def test_failed_starts_in_a_row_are_too_often_when_nobody_else_works() -> None:
    seat = working(max_failed_starts=2)
    seat.handle(Event.EXITED, 0.0)
    told = []
    for others_alive in (True, True, True, False):
        seat.handle(Event.PAUSE_OVER, 0.0)
        told.append(seat.handle(Event.FAILED, 0.0, others_alive))
    assert told == [(Action.PAUSE,)] * 3 + [(Action.GIVE_UP,)]
    assert seat.restarts == 4 == seat.failures and seat.state is State.HOPELESS


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_limit_itself_is_too_often(limit: int) -> None:
    seat = working(max_failed_starts=limit)
    seat.handle(Event.EXITED, 0.0)
    while seat.state is State.PAUSED:
        seat.handle(Event.PAUSE_OVER, 0.0)
        seat.handle(Event.FAILED, 0.0)
    assert seat.failures == limit and seat.state is State.HOPELESS


def test_a_start_that_succeeds_begins_the_count_anew() -> None:
    seat = working(max_failed_starts=2)
    for _ in range(3):
        seat.handle(Event.EXITED, 0.0)
        seat.handle(Event.PAUSE_OVER, 0.0)
        assert seat.handle(Event.FAILED, 0.0) == (Action.PAUSE,)
        seat.handle(Event.PAUSE_OVER, 0.0)
        seat.handle(Event.READY, 0.0)


def test_short_lives_in_a_row_are_too_often_where_a_limit_says_so() -> None:
    seat = working(max_short_lives=2)
    live(seat, 1.0)
    live(seat, SETTLED)
    live(seat, 1.0)
    assert seat.handle(Event.EXITED, 1.0, True) == (Action.MOURN, Action.GIVE_UP)


def test_a_child_that_hangs_has_lived_until_its_last_beat() -> None:
    seat = working(max_short_lives=2)
    for expected in ((Action.MOURN, Action.PAUSE), (Action.MOURN, Action.GIVE_UP)):
        assert seat.handle(Event.HUNG, 1.0) == (Action.KILL,)
        assert seat.handle(Event.HUNG, 100.0) == ()
        assert seat.handle(Event.EXITED, 100.0) == expected
        if seat.state is State.PAUSED:
            seat.handle(Event.PAUSE_OVER, 0.0)
            seat.handle(Event.READY, 0.0)


# ---------------------------------------------------------------------------------------------------- the pulse


def ticks(pulse: Pulse, count: int, elapsed: float | None = None) -> list[bool]:
    return [pulse.tick(pulse.interval if elapsed is None else elapsed) for _ in range(count)]


def test_silence_is_a_hang_once_it_has_lasted() -> None:
    pulse = Pulse(10.0)
    assert pulse.interval == 1.0
    assert ticks(pulse, MISSES) == [False] * (MISSES - 1) + [True]


def test_a_beat_begins_the_count_anew() -> None:
    pulse = Pulse(10.0)
    for _ in range(3):
        pulse.beat()
        assert not any(ticks(pulse, MISSES))
    assert ticks(pulse, 1) == [True]


def test_a_parent_that_stood_still_finds_nobody_hanging() -> None:
    """Each time it wakes, the time that has passed is a tick that came late, however long it was."""
    pulse = Pulse(10.0)
    assert not any(ticks(pulse, 1000, elapsed=3600.0))
    assert not any(ticks(pulse, MISSES - 1))
    assert ticks(pulse, 1) == [True]


@given(st.lists(st.sampled_from(["beat", "late", *["tick"] * 12]), min_size=5, max_size=60))
def test_a_hang_is_so_many_ticks_in_time_since_the_last_beat(events: list[str]) -> None:
    pulse = Pulse(1.0)
    hung = False
    for event in events:
        if event == "beat":
            pulse.beat()
        else:
            hung = pulse.tick(pulse.interval * (1 if event == "tick" else 10))
    silent = events[::-1].index("beat") if "beat" in events else len(events)
    in_time = events[len(events) - silent :].count("tick")
    if events[-1:] != ["beat"]:
        assert in_time >= MISSES if hung else in_time <= MISSES
