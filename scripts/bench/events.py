"""Server-sent events out of a body that comes in pieces, cut anywhere.

Lines end with LF, CRLF or CR, an event with an empty line. What is wanted of an event is its data; comments and other
fields are passed over. Nearly every piece is one whole event of a single ``data:`` line, which two slices read.
"""

from __future__ import annotations

_END = b"\n\n"


class EventReader:
    """Pieces of a body in, the data of events out."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that this piece ends."""
        if not self._rest and piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2 and piece[-1] == 10:
            return [piece[6:-2]]
        body = self._rest + piece if self._rest else piece
        tail = b""
        if b"\r" in body:
            # The last CR may be half of a CRLF; it waits for what comes after it.
            if body.endswith(b"\r"):
                body, tail = body[:-1], b"\r"
            body = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = body.split(_END)
        self._rest = rest + tail
        return [data for event in events if (data := _data(event)) is not None]

    def close(self) -> list[bytes]:
        """The data of an event whose empty line did not come before the body ended. Parsers of the standard drop it;
        servers are about whose last ``[DONE]`` ends so."""
        rest, self._rest = self._rest.replace(b"\r", b"\n"), b""
        data = _data(rest.rstrip(b"\n"))
        return [] if data is None else [data]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
