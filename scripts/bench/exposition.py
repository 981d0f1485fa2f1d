"""What a server of ours says at /metrics, read from the outside."""

from __future__ import annotations

import time
import urllib.request

#: CPU time of the executor's loop: grows with each of its reports, if only by the cost of the report.
SHIPPING = "tailrace_executor_shipping_seconds_total"
#: Executors report once a second; one that has not for so long is not there.
_SILENCE = 10.0


def read(url: str) -> dict[str, float]:
    """All samples: ``name`` and ``name{labels}`` -> value; under the bare name summed over the labels.

    Raises OSError if there is no such page.
    """
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            labelled, value = line.rsplit(" ", 1)
            values[labelled] = float(value)
            name = labelled.partition("{")[0]
            if name != labelled:
                values[name] = values.get(name, 0.0) + float(value)
    return values


def fresh(url: str) -> dict[str, float]:
    """The same as of now: waits for the executor's next report. TimeoutError if none comes."""
    before, deadline = read(url), time.monotonic() + _SILENCE
    while time.monotonic() < deadline:
        now = read(url)
        if now.get(SHIPPING) != before.get(SHIPPING):
            return now
        time.sleep(0.02)
    raise TimeoutError(f"{url}/metrics: no report of an executor within {_SILENCE:g} s")
