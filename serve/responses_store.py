"""Responses that clients may come back to: by ``previous_response_id``, by ``item_reference``, by GET and DELETE.

For one server and as long as it runs; all of its front ends have the same. Bounded by number and by bytes; what was
used longest ago goes first. An entry holds its whole conversation, so a chain of responses does not break when an older
one goes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from serve.errors import BadRequestError, NotFoundError

PlainItem = Mapping[str, Any]

#: Seconds to wait for another process that writes. Each holds the file for less than a millisecond.
_LOCK_TIMEOUT = 5.0

#: The next value of ``used``: it grows with every use, so the smallest one is the oldest.
_NOW = "(SELECT coalesce(max(used), 0) + 1 FROM responses)"

#: A write-ahead log, so that who reads does not wait for who writes, and one who dies in the middle costs nothing.
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, document BLOB NOT NULL, items BLOB NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE TABLE IF NOT EXISTS outputs (id TEXT PRIMARY KEY, response TEXT NOT NULL, item BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS by_response ON outputs (response);
"""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response.

    document: the response object, as JSON. items: the conversation up to and with its output. size: bytes it is
    charged.
    """

    document: bytes
    items: tuple[PlainItem, ...]
    size: int


class ResponseStore:
    """id -> response. max_responses: 0 switches it off. max_bytes: of all of them together. path: a file that several
    processes share; by default it is all in memory."""

    def __init__(self, max_responses: int = 1024, max_bytes: int = 64 << 20, path: str | Path = ":memory:") -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        # Nothing of it outlives the server, so nothing has to be on a disk before the next thing happens.
        self._db = sqlite3.connect(path, isolation_level=None, timeout=_LOCK_TIMEOUT)
        self._db.executescript(_SCHEMA)

    @property
    def enabled(self) -> bool:
        """Whether anything is stored at all."""
        return self._max_responses > 0

    @property
    def size(self) -> int:
        """Bytes charged to all entries."""
        return int(self._value("SELECT coalesce(sum(size), 0) FROM responses"))

    def __len__(self) -> int:
        return int(self._value("SELECT count(*) FROM responses"))

    def close(self) -> None:
        """Let go of the file; idempotent."""
        self._db.close()

    def put(self, document: bytes, items: Sequence[PlainItem], before: StoredResponse | None = None) -> None:
        """Store a response. items: its input; its output is taken from ``document``. One that alone is over the bound
        is not kept.

        before: the response that it goes on from, as ``previous`` gave it when its request came. By now that may be
        gone from here, and the conversation must be whole all the same.
        """
        response = orjson.loads(document)
        size = len(document) + len(orjson.dumps(list(items))) + (before.size if before is not None else 0)
        if not self.enabled or size > self._max_bytes:
            return
        earlier = before.items if before is not None else ()
        conversation = orjson.dumps([*earlier, *items, *response["output"]])
        with self._transaction():
            self._forget(response["id"])
            self._db.execute(
                f"INSERT INTO responses VALUES (?, ?, ?, ?, {_NOW})", (response["id"], document, conversation, size)
            )
            outputs = [(item["id"], response["id"], orjson.dumps(item)) for item in response["output"]]
            self._db.executemany("INSERT OR REPLACE INTO outputs VALUES (?, ?, ?)", outputs)
            while len(self) > self._max_responses or self.size > self._max_bytes:
                self._forget(self._value("SELECT id FROM responses ORDER BY used LIMIT 1"))

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as used."""
        changed = f"UPDATE responses SET used = {_NOW} WHERE id = ? RETURNING document, items, size"
        for document, items, size in self._db.execute(changed, (_text(response_id),)).fetchall():
            return StoredResponse(document, tuple(orjson.loads(items)), size)
        return None

    def delete(self, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        with self._transaction():
            return self._forget(response_id)

    def document(self, response_id: str) -> bytes:
        """The response object. Raises NotFoundError."""
        entry = self.get(response_id)
        if entry is None:
            raise NotFoundError(f"There is no response {response_id[:128]!r}{self._why()}", param="response_id")
        return entry.document

    def previous(self, previous_id: str | None) -> StoredResponse | None:
        """The response that ``previous_response_id`` names. Raises BadRequestError when it is not here."""
        if previous_id is None:
            return None
        entry = self.get(previous_id)
        if entry is None:
            raise BadRequestError(
                f"previous_response_id: there is no response {previous_id!r}{self._why()}",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return entry

    def resolve(self, items: Sequence[PlainItem]) -> list[PlainItem]:
        """The items with those that are references replaced by what they stand for. Raises BadRequestError."""
        return [self._resolved(item, index) for index, item in enumerate(items)]

    def _resolved(self, item: PlainItem, index: int) -> PlainItem:
        if item.get("type") != "item_reference" and set(item) != {"id"}:
            return item
        found = self._value("SELECT item FROM outputs WHERE id = ?", _text(str(item.get("id"))))
        if found is None:
            where = f"input.{index}.id"
            raise BadRequestError(f"{where}: there is no item {str(item.get('id'))[:128]!r}{self._why()}", param=where)
        resolved: PlainItem = orjson.loads(found)
        return resolved

    def _why(self) -> str:
        if not self.enabled:
            return ": this server stores no responses."
        return "; it was not stored, was deleted, or had to make room for newer ones."

    def _forget(self, response_id: str) -> bool:
        self._db.execute("DELETE FROM outputs WHERE response = ?", (_text(response_id),))
        return self._db.execute("DELETE FROM responses WHERE id = ?", (_text(response_id),)).rowcount > 0

    def _value(self, query: str, *values: str) -> Any:
        row = self._db.execute(query, values).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or nothing, with nobody else in between."""
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            yield


def _text(name: str) -> str:
    """What a client named, as the database takes it: half a pair is no character, and names nothing."""
    return name.encode("utf-8", "replace").decode("utf-8")
