"""The header of a harmony message: what may stand between ``<|start|>`` and ``<|message|>``, and what is none any more.

A well-formed header is (openai/harmony, docs/format.md)

    <|start|> ROLE [to=RECIPIENT] <|channel|> CHANNEL [to=RECIPIENT] [<|constrain|>] [TYPE] <|message|>

Models leave parts of it out. The hard thing is to tell, with the least text held back, a header whose ``<|message|>``
is still to come from an answer that began without one. So the text behind a mark is held only while it can still be a
header; ``scan`` says up to where it was one. It reads from left to right and never further than the first character
that cannot be part of a header, so what it finds does not depend on how much of the text had arrived.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: Words that a header is made of. None is a prefix of another, so that the first one found is the right one.
_ASSISTANT = ("assistant",)
_ROLES = (*_ASSISTANT, "user", "system", "developer", "tool")
_CHANNELS = ("analysis", "commentary", "final")
_TYPES = ("json", "code", "text", "markdown", "python", "xml", "yaml")
_TO = ("to=",)
_FUNCTIONS = "functions."

# Everything is bounded: a header must not be held, and read again, for ever.
_SPACE = re.compile(r"\s{0,64}")
#: A word that is none of them.
_WORD = re.compile(r"[\w.\-/+]{1,64}")
#: A recipient ends where its argument may begin: models forget the ``<|message|>`` between them.
_RECIPIENT = re.compile(r"[^\s{\[<\"']{1,256}")


class Section(NamedTuple):
    """Which words may come next, by the mark before them.

    roles, channels, types: known words, () where there is no such part here. free: the first part may be any word.
    strict: words alone do not make a header here; unless they name a recipient they are text.
    """

    roles: tuple[str, ...]
    channels: tuple[str, ...]
    types: tuple[str, ...] = _TYPES
    free: bool = False
    strict: bool = False


#: Behind the prompt, which ends in ``<|start|>assistant``.
INITIAL = Section(_ASSISTANT, _CHANNELS, strict=True)
#: Behind a message that was closed.
BETWEEN = Section(_ASSISTANT, _CHANNELS)
ROLE = Section(_ROLES, _CHANNELS, free=True)
CHANNEL = Section((), _CHANNELS, free=True)
TYPE = Section((), (), free=True)


class Header(NamedTuple):
    """What a section's text says.

    end: where the text stops being a header and the message has begun; None while it may still be one.
    odd: where a word begins that no header needs; it is text if no message follows. None without one.
    """

    channel: str = ""
    recipient: str = ""
    end: int | None = None
    odd: int | None = None

    def unopened(self, section: Section, text: str) -> str:
        """What of a section's text is to be kept when its message never begins."""
        if section.strict:
            return text
        return "" if self.odd is None else text[self.odd :]


class _Words:
    """A cursor over a section's text. waits: the text ended where more of it may follow."""

    __slots__ = ("at", "text", "waits")

    def __init__(self, text: str) -> None:
        self.text, self.at, self.waits = text, 0, False
        self.space()

    def space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def known(self, words: tuple[str, ...]) -> str:
        """Take one of ``words``; "" if none comes next; ``waits`` if one may. Nothing is taken while it waits."""
        for word in () if self.waits else words:
            if self.text.startswith(word, self.at):
                self.at += len(word)
                self.space()
                return word
        rest = self.text[self.at : self.at + 16]
        self.waits = self.waits or any(word.startswith(rest) for word in words)
        return ""

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what ``pattern`` matches; a run that reaches the end may go on."""
        found = None if self.waits else pattern.match(self.text, self.at)
        if found is None:
            self.waits = self.waits or self.at == len(self.text)
            return ""
        self.at = found.end()
        self.waits = self.waits or self.at == len(self.text)
        self.space()
        return found.group()


def scan(section: Section, text: str) -> Header:
    """Read a section's text as far as it is a header."""
    words = _Words(text)
    named, channel, odd = _names(section, words)
    recipient = _recipient(words)
    plain = words.at
    typed, word = _type(section, words, bool(recipient))
    odd = plain if word and odd is None and not recipient else odd
    recipient = recipient or _recipient(words)
    if words.waits or words.at == len(text):
        return Header(channel, recipient, None, odd)
    if recipient:
        return Header(channel, recipient, words.at if typed else plain)
    if odd is not None:
        return Header(channel, "", odd, odd)
    if section.strict or not (named or typed):
        return Header("", "", 0)
    return Header(channel, "", words.at if section is TYPE else plain)


def _names(section: Section, words: _Words) -> tuple[bool, str, int | None]:
    """(whether a role or channel was found, channel, where a role or channel of an unknown name begins)"""
    role = words.known(section.roles)
    channel = words.known(section.channels)
    if role or channel or not section.free or not section.channels:
        return bool(role or channel), channel, None
    start, word = words.at, words.run(_WORD)
    tool = word.startswith(_FUNCTIONS) or _FUNCTIONS.startswith(word)  # the role of a tool's message, perhaps cut off
    odd = None if tool else start
    return bool(word), "" if section.roles else word, odd


def _recipient(words: _Words) -> str:
    return words.run(_RECIPIENT) if words.known(_TO) else ""


def _type(section: Section, words: _Words, addressed: bool) -> tuple[bool, bool]:
    """Take a content type: (known, unknown). Any word is one where a recipient or ``<|constrain|>`` precedes it."""
    if words.known(section.types):
        return True, False
    return False, bool((addressed or section is TYPE) and words.run(_WORD))
