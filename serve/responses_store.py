"""Responses that clients may come back to: by ``previous_response_id``, by ``item_reference``, by GET and DELETE.

In memory, for one server and as long as it runs. Bounded by number and by bytes; what was used longest ago goes first.
An entry holds its whole conversation, so a chain of responses does not break when an older one goes. Neighbours of a
chain share their items, and each is charged for all of them: the bound is safe, if not tight.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from serve.errors import BadRequestError, NotFoundError

PlainItem = Mapping[str, Any]


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
    """id -> response. max_responses: 0 switches it off. max_bytes: of all of them together."""

    def __init__(self, max_responses: int = 1024, max_bytes: int = 64 << 20) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        #: Output items by id, of the responses that are here.
        self._outputs: dict[str, PlainItem] = {}
        self._size = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is stored at all."""
        return self._max_responses > 0

    @property
    def size(self) -> int:
        """Bytes charged to all entries."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

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
        self.delete(response["id"])
        self._entries[response["id"]] = StoredResponse(document, (*earlier, *items, *response["output"]), size)
        self._outputs.update({item["id"]: item for item in response["output"]})
        self._size += size
        while len(self._entries) > self._max_responses or self._size > self._max_bytes:
            self._forget(*self._entries.popitem(last=False))

    def get(self, response_id: str) -> StoredResponse | None:
        """A response, which counts as used."""
        entry = self._entries.get(response_id)
        if entry is not None:
            self._entries.move_to_end(response_id)
        return entry

    def delete(self, response_id: str) -> bool:
        """Forget a response; whether there was one."""
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._forget(response_id, entry)
        return entry is not None

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
        found = self._outputs.get(str(item.get("id")))
        if found is None:
            where = f"input.{index}.id"
            raise BadRequestError(f"{where}: there is no item {str(item.get('id'))[:128]!r}{self._why()}", param=where)
        return found

    def _why(self) -> str:
        if not self.enabled:
            return ": this server stores no responses."
        return "; it was not stored, was deleted, or had to make room for newer ones."

    def _forget(self, response_id: str, entry: StoredResponse) -> None:
        self._size -= entry.size
        for item in orjson.loads(entry.document)["output"]:
            self._outputs.pop(item["id"], None)
