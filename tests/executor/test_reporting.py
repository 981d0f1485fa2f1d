"""When counters are told."""

from __future__ import annotations

from executor.reporting import INTERVAL, SILENCE, Reporting


def told(reporting: Reporting, now: float, counters: object) -> bool:
    return reporting.due(now) and reporting.news(now, counters)


def test_once_an_interval_while_they_change() -> None:
    reporting = Reporting()
    times = [number * INTERVAL / 4 for number in range(1, 41)]
    assert sum(told(reporting, now, {"tokens": now}) for now in times) == 10


def test_what_is_known_is_repeated_rarely() -> None:
    reporting = Reporting()
    reports = [now for now in range(1, 1 + 3 * int(SILENCE)) if told(reporting, float(now), {"tokens": 1})]
    assert reports == [1, 1 + SILENCE, 1 + 2 * SILENCE]


def test_news_do_not_wait() -> None:
    reporting = Reporting()
    assert told(reporting, 1.0, [1]) and not told(reporting, 1.0 + INTERVAL, [1])
    assert told(reporting, 1.0 + 2 * INTERVAL, [2]) and not told(reporting, 1.0 + 3 * INTERVAL, [2])
