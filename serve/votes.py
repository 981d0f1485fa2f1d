"""The answer that most of several texts give: what majority vote means, in controllers and over HTTP. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Extractor = Callable[[str], Hashable | None]

#: A sign, digits with or without commas between thousands, a fraction; not inside of a word or of another number.
_NUMBER = re.compile(r"(?<!\w)-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def last_line(text: str) -> str | None:
    """The last line that is not blank, without the space around it."""
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def last_number(text: str) -> str | None:
    """The last number, without the commas between thousands."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


#: How an answer is read from a text, by the names that a request may give.
EXTRACTORS: Mapping[str, Extractor] = {"text": str.strip, "last_line": last_line, "last_number": last_number}


def count_votes(answers: Iterable[Hashable | None]) -> Counter[Hashable]:
    """Votes by answer, in the order of their first voters. None is no vote."""
    return Counter(answer for answer in answers if answer is not None)


def elect(answers: Sequence[Hashable | None]) -> int:
    """The place of the first voter of the answer with the most votes; of equal answers, the one whose first voter comes
    first. 0 when nobody votes."""
    votes = count_votes(answers)
    return answers.index(max(votes, key=lambda answer: votes[answer])) if votes else 0


def is_certain(votes: Counter[Hashable], running: int) -> bool:
    """Whether no outcome of those still running changes the answer with the most votes."""
    if not votes:
        return False
    first, second = [*(count for _, count in votes.most_common(2)), 0][:2]
    return first > second + running
