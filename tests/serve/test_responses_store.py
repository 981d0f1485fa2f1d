"""The store of responses: what can be found again, and what goes first when there is no room."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import BadRequestError, NotFoundError
from serve.responses_store import ResponseStore


def document(name: str, text: str = "so") -> bytes:
    output = [{"id": f"msg_{name}", "type": "message", "role": "assistant", "content": text}]
    return json.dumps({"id": name, "object": "response", "output": output}).encode()


def said(text: str) -> list[dict[str, Any]]:
    return [{"type": "message", "role": "user", "content": text}]


def contents(store: ResponseStore, name: str) -> list[str]:
    """The conversation up to a response."""
    entry = store.previous(name)
    assert entry is not None
    return [item["content"] for item in entry.items]


def test_a_response_is_found_again_with_its_conversation() -> None:
    store = ResponseStore()
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"), store.previous("a"))
    assert store.document("b") == document("b")
    assert contents(store, "b") == ["one", "so", "two", "so"]
    assert store.previous(None) is None


def test_a_conversation_outlives_the_responses_before_it() -> None:
    store = ResponseStore(max_responses=1)
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"), store.previous("a"))
    assert len(store) == 1
    assert len(contents(store, "b")) == 4
    with pytest.raises(BadRequestError, match="no response 'a'; it was not stored, was deleted, or had to make room"):
        store.previous("a")


@pytest.mark.parametrize("evicted", [True, False])
def test_a_conversation_is_whole_if_the_response_before_went_meanwhile(evicted: bool) -> None:
    store = ResponseStore(max_responses=1)
    store.put(document("a"), said("one"))
    before = store.previous("a")
    if evicted:
        store.put(document("other"), said("x"))
    else:
        store.delete("a")
    store.put(document("b"), said("two"), before)
    assert contents(store, "b") == ["one", "so", "two", "so"] and len(store) == 1
    entry = store.get("b")
    assert before is not None and entry is not None
    assert (
        entry.size
        == store.size
        == before.size + len(document("b")) + len(json.dumps(said("two"), separators=(",", ":")))
    )


def test_what_was_used_longest_ago_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"))
    store.previous("a")
    store.put(document("c"), said("three"))
    assert [store.get(name) is not None for name in "abc"] == [True, False, True]


def test_a_deleted_response_is_gone() -> None:
    store = ResponseStore()
    store.put(document("a"), said("one"))
    assert store.delete("a") and not store.delete("a")
    assert (len(store), store.size) == (0, 0)
    with pytest.raises(NotFoundError, match="There is no response 'a'"):
        store.document("a")


def test_one_that_is_too_large_is_not_kept_and_costs_the_others_nothing() -> None:
    store = ResponseStore(max_bytes=500)
    store.put(document("a"), said("one"))
    store.put(document("b", "x" * 1000), said("two"))
    assert store.get("a") is not None and store.get("b") is None


def test_switched_off_it_says_so() -> None:
    store = ResponseStore(max_responses=0)
    store.put(document("a"), said("one"))
    assert not store.enabled and len(store) == 0
    with pytest.raises(BadRequestError, match="this server stores no responses") as caught:
        store.previous("a")
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(NotFoundError, match="this server stores no responses"):
        store.document("a")


def test_a_reference_stands_for_a_stored_item() -> None:
    store = ResponseStore()
    store.put(document("a"), said("one"))
    references = [{"type": "item_reference", "id": "msg_a"}, {"id": "msg_a"}]
    assert [item["content"] for item in store.resolve([*references, *said("two")])] == ["so", "so", "two"]
    store.delete("a")
    with pytest.raises(BadRequestError, match=r"^input\.0\.id: there is no item 'msg_a'"):
        store.resolve(references)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 200), st.sampled_from(["", *"abcdef"]))))
def test_the_bounds_hold_whatever_comes(puts: list[tuple[str, int, str]]) -> None:
    store = ResponseStore(max_responses=3, max_bytes=1500)
    for name, length, previous in puts:
        store.put(document(name, "x" * length), said("y"), store.get(previous))
        entries = [entry for each in "abcdef" if (entry := store.get(each)) is not None]
        assert len(entries) == len(store) <= 3
        assert sum(entry.size for entry in entries) == store.size <= 1500
        assert all(entry.size >= sum(len(json.dumps(item)) for item in entry.items) // 2 for entry in entries)
