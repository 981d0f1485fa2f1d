"""Requests that wait for their first token: how many prompt tokens they have, and for how long they may. Pure.

The executor is the one place that knows when a request's first token came, whichever front end it is for, and also when
its client sees nothing yet (a unary response, text that is held back). So it says no, by ``Rejected``, to what is too
much, and to what has waited too long. No byte of such a request has been sent: it can still become a 429 or a 503.
"""

from __future__ import annotations

from executor.request import GenerationRequest
from executor.rids import Rids


class WaitingRequests:
    """In order of arrival. max_tokens: prompt tokens that may wait; timeout: seconds that a request may, 0 for ever."""

    def __init__(self, max_tokens: int = 1 << 62, timeout: float = 0.0) -> None:
        self.tokens = 0
        #: requests that were refused, by reason
        self.refused = {"queue": 0, "timeout": 0}
        self._max_tokens, self._timeout_ns = max_tokens, int(timeout * 1e9)
        #: rid -> (prompt tokens, the time at which it came, nanoseconds), oldest first
        self._entries: dict[int, tuple[int, int]] = {}
        #: the last column whose requests have left, as long as others wait
        self._left = Rids()

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, request: GenerationRequest, now: int) -> bool:
        """Take a request, or say that there is no room. A queue that is empty takes one of any size: it could never be
        served otherwise."""
        size = sum(map(len, request.prompts))
        if self._entries and self.tokens + size > self._max_tokens:
            self.refused["queue"] += 1
            return False
        self._entries[request.rid] = (size, now)
        self.tokens += size
        return True

    def leave(self, rid: int) -> None:
        """A request has its first token, or is over."""
        entry = self._entries.pop(rid, None)
        if entry is not None:
            self.tokens -= entry[0]
            if not self._entries:
                self._left = Rids()

    def leave_all(self, rids: Rids) -> None:
        """Requests of a column have a token. One that is waiting comes in no column that was there before."""
        if self._entries and rids is not self._left:
            self._left = rids
            for rid in self._entries.keys() & rids:
                self.leave(rid)

    def expired(self, now: int) -> list[int]:
        """Requests that have waited too long; they leave."""
        rids = []
        if self._timeout_ns:
            for rid, (_, since) in self._entries.items():
                if now - since < self._timeout_ns:
                    break
                rids.append(rid)
        for rid in rids:
            self.leave(rid)
        self.refused["timeout"] += len(rids)
        return rids
