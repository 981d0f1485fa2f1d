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


def test_a_response_is_found_again_with_its_conversation() -> None:
    store = ResponseStore()
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"), previous_id="a")
    assert store.document("b") == document("b")
    assert [item["content"] for item in store.history("b")] == ["one", "so", "two", "so"]
    assert store.history(None) == ()


def test_a_conversation_outlives_the_responses_before_it() -> None:
    store = ResponseStore(max_responses=1)
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"), previous_id="a")
    assert len(store) == 1
    assert len(store.history("b")) == 4
    with pytest.raises(BadRequestError, match="no response 'a'; it was not stored, was deleted, or had to make room"):
        store.history("a")


def test_what_was_used_longest_ago_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    store.put(document("a"), said("one"))
    store.put(document("b"), said("two"))
    store.history("a")
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
        store.history("a")
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
        store.put(document(name, "x" * length), said("y"), previous_id=previous or None)
        entries = [entry for each in "abcdef" if (entry := store.get(each)) is not None]
        assert len(entries) == len(store) <= 3
        assert sum(entry.size for entry in entries) == store.size <= 1500
        assert all(entry.size >= sum(len(json.dumps(item)) for item in entry.items) // 2 for entry in entries)
