"""Settings of every test run: no model hub, and Hypothesis with the same examples every time.

``TAILRACE_LONG=1`` asks for many more examples, drawn anew in every run.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import HealthCheck, settings  # noqa: E402

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci",
    max_examples=20,
    stateful_step_count=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_SLOW,
)
settings.register_profile(
    "long", max_examples=1000, stateful_step_count=60, database=None, deadline=None, suppress_health_check=_SLOW
)
settings.load_profile("long" if os.environ.get("TAILRACE_LONG") == "1" else "ci")
