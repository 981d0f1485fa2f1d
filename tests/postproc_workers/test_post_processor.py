"""How a worker gets its table of post-processors: by dotted name."""

from __future__ import annotations

import pytest

from postproc_workers.post_processor import load_object, load_post_processors
from tests.helpers import ALL_POST_PROCESSORS

NOT_A_TABLE = {"x": 5}


@pytest.mark.parametrize("name", ["postproc_workers.deltas:POST_PROCESSORS", "serve.post_processors:POST_PROCESSORS"])
def test_the_tables_that_there_are(name: str) -> None:
    table = load_post_processors(name)
    assert table and all(ALL_POST_PROCESSORS[key] is entry for key, entry in table.items())
    assert all(entry.streams == ("unary" not in key) for key, entry in table.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "form"),
        ("serve.post_processors", "form"),
        ("serve.post_processors:", "form"),
        ("no.such.module:X", "no module 'no'"),
        ("serve.no_such:X", "no_such"),
        ("serve.post_processors:NO_SUCH", "NO_SUCH"),
        ("tests.postproc_workers.test_post_processor:NOT_A_TABLE", "not a mapping"),
        ("tests.helpers:CHAT", "not a mapping"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"post_processors.*{message}"):
        load_post_processors(name)


def test_any_object_is_found_by_name() -> None:
    assert load_object("tests.postproc_workers.test_post_processor:NOT_A_TABLE", "what") is NOT_A_TABLE
