"""What is counted while clients run, and what went wrong."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.process.chaos.difference import Difference
from tests.process.chaos.merged import Leaves
from tests.process.chaos.templates import Template

#: Failures that are written out; more of them teach nothing new.
MAX_SAVED = 40


@dataclass(slots=True)
class Tally:
    """Counts of one round. All of them are of things that the clients and the disturber did or saw."""

    completed: int = 0
    streams: int = 0
    requests: int = 0
    worker_kills: int = 0
    executor_kills: int = 0
    stops: int = 0
    hangs_replaced: int = 0
    disconnects: int = 0
    stalls: int = 0
    stalls_cut: int = 0
    garbage_requests: int = 0
    garbage_frames: int = 0
    floods: int = 0
    #: requests that went on elsewhere, as the server counts them; what an executor counted last dies with it
    resumed: int = 0
    #: answers before any byte, by status: 429 and 503
    refused: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    differing: int = 0
    #: what must not have been, in words; each is one failure
    failures: list[str] = field(default_factory=list)
    #: seconds without any worker, or without an executor, that could work
    outage: float = 0.0
    #: the longest time that a stream had no news, beyond what it takes undisturbed; seconds
    longest_delay: float = 0.0


class Findings:
    """Keeps a tally, and writes each failure with its request, what was expected and what came."""

    def __init__(self, out: Path | None) -> None:
        self.tally = Tally()
        self._out = out
        self._saved = 0

    @property
    def folder(self) -> Path | None:
        """Where failures were written; None without any, unless one was given."""
        return self._out

    def failed(self, what: str, template: Template | None = None, **more: Any) -> None:
        """Something that must not be; ``more`` is kept beside the request."""
        self.tally.failures.append(what if template is None else f"{template.name}: {what}")
        self._save(what, template, more)

    def differs(
        self, template: Template, difference: Difference, expected: Leaves, received: Leaves, body: bytes
    ) -> None:
        """A response that is not what it has to be."""
        tally = self.tally
        tally.differing += 1
        tally.lost += difference.lost
        tally.repeated += difference.repeated
        tally.changed += difference.changed
        more = {"expected": expected, "received": received, "body": body.decode("utf-8", "backslashreplace")}
        self._save(f"differs in {', '.join(difference.places)}", template, more)

    def _save(self, what: str, template: Template | None, more: dict[str, Any]) -> None:
        if self._saved >= MAX_SAVED:
            return
        self._saved += 1
        request = {} if template is None else {"name": template.name, "path": template.path, "body": template.body}
        document = {"what": what, "request": request, **more}
        text = json.dumps(document, ensure_ascii=False, indent=1, default=str)
        (self._made_folder() / f"{self._saved:03d}.json").write_text(text, encoding="utf-8")

    def keep_log(self, log: str) -> None:
        """Keep what the server and its children said."""
        (self._made_folder() / "server.log").write_text(log, encoding="utf-8")

    def _made_folder(self) -> Path:
        if self._out is None:
            self._out = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._out.mkdir(parents=True, exist_ok=True)
        return self._out
