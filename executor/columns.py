"""Columns of the wire: little-endian arrays packed as bytes, and how each is left out or kept where it brings nothing
new. What they mean is ``wire.py``'s business.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executor.messages import WireError
from executor.rids import Rids
from executor.same import all_are, same

#: Senders whose last column of rids is kept.
_SENDERS = 1 << 10

_SIZES = {"q": 8, "I": 4, "H": 2, "i": 4, "B": 1, "d": 8}
_SWAP = sys.byteorder == "big"


class _Packers(dict[tuple[str, int], Callable[..., bytes]]):
    """(code, number of values) -> what packs them. Compiled once: half the cost of an array's conversion. Bounded."""

    def __missing__(self, key: tuple[str, int]) -> Callable[..., bytes]:
        packer = struct.Struct(f"<{key[1]}{key[0]}").pack
        if len(self) < 1 << 12:
            self[key] = packer
        return packer


_PACKERS = _Packers()


def pack(code: str, values: Sequence[Any]) -> bytes:
    """A column of little-endian values; code as in ``struct``."""
    return _PACKERS[code, len(values)](*values)


def unpack(fields: Mapping[str, Any], name: str, code: str) -> list[Any]:
    """The values of a column; WireError where there is none of that kind."""
    try:
        # No copy into an array first: half the cost.
        values: list[Any] = memoryview(fields[name]).cast(code).tolist()  # type: ignore[call-overload]
    except (KeyError, TypeError):
        raise WireError(f"{name}: a column of {_SIZES[code]}-byte values is needed") from None
    if _SWAP:
        column = array(code, values)
        column.byteswap()
        return column.tolist()
    return values


def pack_rids(rids: Sequence[int]) -> bytes:
    """The column of rids, packed once where it is kept."""
    if type(rids) is not Rids:
        return pack("q", rids)
    if rids.packed is None:
        rids.packed = pack("q", rids)
    return rids.packed


_NONE = Rids(), Rids()


class KnownRids:
    """The last two columns of rids of each sender: most messages bring one of them again, the rows that stay or the few
    beside them. Equal columns become one object, which is what ``Rids`` promises, and are unpacked once."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[Rids, Rids]] = {}

    def unpack(self, fields: Mapping[str, Any], sender: int = 0) -> Rids:
        """The column ``rid`` of a frame."""
        packed = fields.get("rid")
        last, before = self._last.get(sender, _NONE)
        if last.packed == packed:
            return last
        if before.packed == packed:
            rids = before
        else:
            rids = Rids(unpack(fields, "rid", "q"))
            rids.packed = packed
        if len(self._last) < _SENDERS or sender in self._last:
            self._last[sender] = rids, last
        return rids


def pack_unusual(frame: dict[str, Any], name: str, code: str, values: Sequence[int], usual: int) -> None:
    """Add a column to a frame, unless every value is the usual one."""
    if not all_are(values, usual):
        frame[name] = pack(code, values)


def unpack_unusual(fields: Mapping[str, Any], name: str, code: str, rows: int, usual: int) -> Sequence[int]:
    """The values of a column that may have been left out."""
    return unpack(fields, name, code) if name in fields else same(usual, rows)
