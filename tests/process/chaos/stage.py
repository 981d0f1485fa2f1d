"""What all who act in a round share."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from tests.process.chaos.merged import Leaves
from tests.process.chaos.options import Options
from tests.process.chaos.tally import Findings, Tally
from tests.process.chaos.templates import Template

#: Any answer has to have ended by then, whatever happens to it.
DEADLINE = 60.0


@dataclass(slots=True)
class Stage:
    """url: of the server. templates: what clients choose from. expected: template name -> the undisturbed answer; gaps:
    -> the longest time for which that had no news, in seconds.

    over: set when the disturbance ends; whoever acts begins nothing new then.
    """

    options: Options
    url: str
    templates: list[Template]
    findings: Findings
    expected: dict[str, Leaves] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    #: requests that are open now
    open: int = 0
    #: whether there are a worker and an executor that can work
    whole: bool = True

    @property
    def tally(self) -> Tally:
        """The counts."""
        return self.findings.tally

    async def pause(self, seconds: float) -> bool:
        """Wait; True if the disturbance goes on then."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.over.wait(), seconds)
        return not self.over.is_set()
