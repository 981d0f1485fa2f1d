"""Expected and received leaves -> what was lost, repeated, changed, in bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import commonprefix

#: Characters by which two texts find together again.
_ANCHOR = 24


@dataclass(slots=True)
class Difference:
    """lost: expected and not there. repeated: there once more than expected. changed: anything else that is not as
    expected. places: the names of the leaves that differ."""

    lost: int = 0
    repeated: int = 0
    changed: int = 0
    places: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.places)

    def _add(self, name: str, lost: int, repeated: int, changed: int) -> None:
        self.lost, self.repeated, self.changed = self.lost + lost, self.repeated + repeated, self.changed + changed
        self.places.append(name)


def compare(expected: Mapping[str, str], received: Mapping[str, str]) -> Difference:
    """All leaves of both."""
    difference = Difference()
    for name in {**expected, **received}:
        before, after = expected.get(name), received.get(name)
        if before == after:
            continue
        if before is None or after is None:
            size = _size(before or after or "")
            difference._add(name, size if after is None else 0, 0, size if before is None else 0)
        else:
            difference._add(name, *text_difference(before, after))
    return difference


def text_difference(expected: str, received: str) -> tuple[int, int, int]:
    """Bytes (lost, repeated, changed). Where the texts part, the nearer place at which one of them goes on like the
    other tells what was left out or put in; what was put in is repeated if it stands in the expected text too."""
    end = len(commonprefix((expected[::-1], received[::-1])))
    before, after = expected[: len(expected) - end], received[: len(received) - end]
    lost = repeated = changed = i = j = 0
    while True:
        same = len(commonprefix((before[i:], after[j:])))
        i, j = i + same, j + same
        skipped, inserted = before.find(after[j : j + _ANCHOR], i), after.find(before[i : i + _ANCHOR], j)
        if i == len(before) or j == len(after) or max(skipped, inserted) < 0:
            break
        if skipped >= 0 and (inserted < 0 or skipped - i <= inserted - j):
            lost, i = lost + _size(before[i:skipped]), skipped
        else:
            more, j = after[j:inserted], inserted
            repeated, changed = (
                (repeated + _size(more), changed) if more in expected else (repeated, changed + _size(more))
            )
    rest = _replaced(before[i:], after[j:], expected)
    return lost + rest[0], repeated + rest[1], changed + rest[2]


def _replaced(before: str, after: str, expected: str) -> tuple[int, int, int]:
    if not after:
        return _size(before), 0, 0
    if not before and after in expected:
        return 0, _size(after), 0
    return 0, 0, max(_size(before), _size(after))


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
