"""What goes from a worker to one front end, in order, and what waits because that one takes nothing at the moment."""

from __future__ import annotations

from collections.abc import Callable


class Outbound:
    """The way to a front end. send_now: tries to, False when its queue is full. full: it was, and something waits here.

    Its queue is short. What a front end is behind has to gather in the worker, as ids, where it becomes larger chunks:
    in a queue it would only become older. So nothing new is made for one that is full, and no more waits here than one
    batch's messages and a report.
    """

    __slots__ = ("_send_now", "_frames", "_report")

    def __init__(self, send_now: Callable[[bytes], bool]) -> None:
        self._send_now = send_now
        self._frames: list[bytes] = []
        #: the newest: it has all that the ones before it had
        self._report: bytes | None = None

    @property
    def full(self) -> bool:
        """Whether something waits."""
        return bool(self._frames) or self._report is not None

    def send(self, frame: bytes) -> None:
        """Send without waiting, or keep."""
        if self._frames or not self._send_now(frame):
            self._frames.append(frame)

    def report(self, frame: bytes) -> None:
        """The same for a report, in the place of one that waits."""
        if self.full or not self._send_now(frame):
            self._report = frame

    def retry(self) -> None:
        """Send of what waits as much as is taken."""
        sent = 0
        while sent < len(self._frames) and self._send_now(self._frames[sent]):
            sent += 1
        del self._frames[:sent]
        if not self._frames and self._report is not None and self._send_now(self._report):
            self._report = None
