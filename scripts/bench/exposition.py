"""What a server of ours says at /metrics, read from the outside."""

from __future__ import annotations

import time
import urllib.request

#: CPU time of the executor's loop: grows with each of its reports, if only by the cost of the report.
SHIPPING = "tailrace_executor_shipping_seconds_total"
#: Seconds. An executor reports once a second while there is something new; one that has not for so long has nothing.
_QUIET = 1.5


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
    """The same as of now: waits for the executor's next report, or until it is clear that it has nothing to say."""
    now = before = read(url)
    deadline = time.monotonic() + _QUIET
    while now.get(SHIPPING) == before.get(SHIPPING) and time.monotonic() < deadline:
        time.sleep(0.02)
        now = read(url)
    return now
