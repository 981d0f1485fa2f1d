"""Where keys come from, what is refused, and what is accepted as one."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import pytest

from serve.api_keys import ApiKeyError, ApiKeys, bearer, gather_keys


def test_keys_of_all_sources_in_order(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf# ours\n\n  from-file \r\nwith#hash\n#off\n")
    file.chmod(0o600)
    environment = {"TAILRACE_API_KEY": "from-environment", "OTHER": "x"}
    keys = gather_keys(["given", "given", "~!"], str(file), environment)
    assert keys == ("given", "~!", "from-file", "with#hash", "from-environment")
    assert environment == {"OTHER": "x"}, "children would inherit it"
    assert gather_keys([], None, environment) == ()


@pytest.mark.parametrize("key", ["", " ", "two words", "tab\t", "é", "line\n", "\udcff", "\x7f"])
def test_keys_that_no_header_can_carry(key: str) -> None:
    """Nor is one of them a reason to serve everybody. The message does not show it."""
    sources = {"--api_key": ([key], {}), "TAILRACE_API_KEY": (["good"], {"TAILRACE_API_KEY": key})}
    for source, (given, environment) in sources.items():
        with pytest.raises(ApiKeyError, match=f"^{source}: ") as caught:
            gather_keys(given, None, environment)
        assert not key.strip() or key not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key"),
        (b"# none\n\n \n", "holds no key"),
        (b"\xff\xfe\x00", "it is not text"),
        (b"one key\n", "no spaces"),
    ],
)
def test_files_without_keys(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(ApiKeyError, match=f"^--api_key_file: {file}.*{reason}"):
        gather_keys([], str(file), {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ApiKeyError, match=f"^--api_key_file: {path} cannot be read: {reason}"):
            gather_keys([], str(path), {})


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read(mode: int, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("s3cret")
    os.chmod(file, mode)
    with caplog.at_level(logging.WARNING):
        assert gather_keys([], str(file), {}) == ("s3cret",)
    assert (f"its mode is {mode:04o}" in caplog.text) == warned and "s3cret" not in caplog.text


def test_what_is_accepted() -> None:
    keys = ApiKeys(["one", "two"])
    assert keys.accept(b"one") and keys.accept(b"two")
    assert not any(keys.accept(wrong) for wrong in (b"", b"on", b"onee", b"One", b"one two", b"\xff"))
    assert not ApiKeys([]).accept(b"")
    assert not hasattr(keys, "__dict__") and "one" not in repr(keys)


def test_every_key_is_compared_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the first one fits must not be told by the time it takes."""
    keys, compared = ApiKeys(["one", "two", "three"]), []
    compare = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or compare(a, b))
    for key in (b"one", b"three", b"none"):
        keys.accept(key)
    assert compared == [32] * 9


@pytest.mark.parametrize(
    ("value", "token"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer  abc ", b"abc"),
        (b"BEARER a b", b"a b"),
        (b"Bearer", b""),
        (b"Basic abc", None),
        (b"abc", None),
        (b"", None),
    ],
)
def test_the_token_of_a_request(value: bytes, token: bytes | None) -> None:
    assert bearer([(b"host", b"x"), (b"authorization", value)]) == token
    assert bearer([(b"host", value)]) is None


def test_the_first_header_counts() -> None:
    """A second one, put behind by somebody on the way, changes nothing."""
    assert bearer([(b"authorization", b"Basic x"), (b"authorization", b"Bearer abc")]) is None
