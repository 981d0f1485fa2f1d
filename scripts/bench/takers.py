"""The clients of ``drain.py``, as a child process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType


class Takers:
    """N clients that take whatever comes. ``ready`` returns once each has had something."""

    def __init__(self, host: str, port: int, count: int, request: bytes) -> None:
        script = Path(__file__).with_name("drain.py")
        self._child = subprocess.Popen(
            [sys.executable, str(script), host, str(port), str(count), str(len(request))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._child.stdin is not None
        self._child.stdin.write(request)
        self._child.stdin.flush()

    @property
    def pid(self) -> int:
        """Their process."""
        return self._child.pid

    def ready(self) -> None:
        """Wait until every client has had its first bytes. RuntimeError if they end before."""
        self._line()

    def taken(self) -> tuple[int, int]:
        """(bytes, events) so far."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"\n")
        self._child.stdin.flush()
        said = self._line()
        return said["bytes"], said["events"]

    def _line(self) -> dict[str, int]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the clients ended with exit code {self._child.wait()}")
        said: dict[str, int] = json.loads(line)
        return said

    def __enter__(self) -> Takers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(30)


def http_request(path: str, body: dict[str, object]) -> bytes:
    """A POST as every client sends it."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    return head.encode() + b"\r\n\r\n" + payload
