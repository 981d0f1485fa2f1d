"""Who is let in, by name, by key and by what a page may do; and the settings that are refused before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve.access import Access, AccessError, check_access
from serve.api_keys import ApiKeyError
from serve.config import Config
from serve.errors import ApiError
from serve.tls import TlsError


def ask(config: Config, path: str = "/v1/models", method: str = "GET", **headers: str) -> tuple[int, str | None, Any]:
    """(status, code, response headers) of a request; 200 when it is let in."""
    scope = {"type": "http", "path": path, "method": method}
    scope["headers"] = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]  # type: ignore[assignment]
    response: list[tuple[bytes, bytes]] = []
    try:
        Access(config).check(scope, response)
    except ApiError as error:
        assert error.type == "invalid_request_error"
        return error.status, error.code, response
    return 200, None, response


# ---------------------------------------------------------------------------------------------------- keys

KEYS = Config(api_key=("k1", "k2"))
REFUSED = (401, "invalid_api_key", [(b"www-authenticate", b"Bearer")])


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/version", "/", "/no/such", "/health/", "/openapi.json"])
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer k3"}, {"authorization": "k1"}, {"x_api_key": "k1"}])
def test_without_a_key(path: str, headers: dict[str, str]) -> None:
    for method in ("GET", "POST", "OPTIONS", "DELETE"):
        assert ask(KEYS, path, method, **headers) == REFUSED


@pytest.mark.parametrize("key", ["k1", "k2"])
def test_with_a_key(key: str) -> None:
    assert ask(KEYS, authorization=f"Bearer {key}") == (200, None, [])


def test_probes_need_no_key() -> None:
    for path in ("/live", "/health"):
        assert ask(KEYS, path)[0] == 200


def test_a_refusal_does_not_repeat_the_key() -> None:
    scope = {"path": "/", "method": "GET", "headers": [(b"authorization", b"Bearer sk-wrong")]}
    with pytest.raises(ApiError) as caught:
        Access(KEYS).check(scope, [])
    assert b"sk-wrong" not in caught.value.body()


# ---------------------------------------------------------------------------------------------------- names

NAMED = (403, "host_not_allowed", [])


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:8000", "localhost.:1", "a.localhost", "[::1]:8000", "10.1.2.3",
     "[fe80::1]", "host.docker.internal:8000", ""],
)  # fmt: skip
def test_names_that_nobody_can_take(host: str) -> None:
    for listens in ("127.0.0.1", "localhost", "::1"):
        assert ask(Config(host=listens), host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "evillocalhost",
     "xlocalhost", "internal", "[evil]", "127.0.0.1@evil.example", "\xff"],
)  # fmt: skip
def test_a_name_that_was_made_to_point_here(host: str) -> None:
    """DNS rebinding: the page is same-origin to its browser, and only the name gives it away."""
    for path in ("/v1/models", "/health"):
        assert ask(Config(), path, host=host, origin=f"http://{host}") == NAMED


def test_names_that_were_given() -> None:
    config = Config(cors_origin=("https://App.example:8443", "http://[fd00::1]:80"))
    assert ask(config, host="app.example")[0] == 200
    assert ask(config, host="other.example") == NAMED


@pytest.mark.parametrize(
    "config",
    [
        Config(host="0.0.0.0"), Config(host="::"), Config(host="192.168.1.5"), Config(host="myhost"),
        Config(cors_origin=("*",)),
    ],
)  # fmt: skip
def test_servers_that_answer_to_any_name(config: Config) -> None:
    assert ask(config, host="some.example")[0] == 200


def test_a_key_makes_the_name_needless() -> None:
    assert ask(KEYS, host="some.example", authorization="Bearer k1")[0] == 200
    assert ask(KEYS, host="some.example") == REFUSED


def test_no_host_at_all() -> None:
    """HTTP/1.0; no browser leaves it out."""
    assert ask(Config())[0] == 200


# ---------------------------------------------------------------------------------------------------- pages

JSON = "application/json"


@pytest.mark.parametrize("kind", [JSON, "Application/JSON; charset=utf-8", "application/vnd.api+json", "text/json"])
def test_a_page_that_had_to_ask(kind: str) -> None:
    assert ask(Config(), method="POST", origin="https://page.example", content_type=kind)[0] == 200


@pytest.mark.parametrize(
    "kind",
    [None, "", "text/plain", "text/plain;charset=UTF-8", "text/plain; application/json", "text/plain;x=json",
     "application/x-www-form-urlencoded", "multipart/form-data; boundary=json"],
)  # fmt: skip
@pytest.mark.parametrize("origin", ["https://page.example", "null"])
def test_a_page_that_did_not_ask(kind: str | None, origin: str) -> None:
    """All content types that a page may send without asking, and none, as of a Blob or a beacon."""
    headers = {"origin": origin} | ({} if kind is None else {"content_type": kind})
    for config in (Config(), Config(cors_origin=("https://other.example",)), Config(host="0.0.0.0")):
        assert ask(config, method="POST", **headers)[0] == 415
    assert ask(Config(), method="GET", **headers)[0] == 200


def test_programs_may_leave_the_content_type_out() -> None:
    assert ask(Config(), method="POST")[0] == 200


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "origin", ["https://a.example", "http://localhost:3000", "app://obsidian.md", "http://[::1]:3000", "*"]
)
def test_origins(origin: str) -> None:
    assert check_access(Config(cors_origin=(origin,)), {}).cors_origin == (origin,)


@pytest.mark.parametrize(
    "origin", ["", "a.example", "https://a.example/", "https://a.example/x", "null", "https://", "https://*.a.example/",
               "https://u@a.example", "https://a.example:x", "https://a b"],
)  # fmt: skip
def test_what_no_browser_sends_as_an_origin(origin: str) -> None:
    with pytest.raises(AccessError, match="^--cors_origin: "):
        check_access(Config(cors_origin=("https://a.example", origin)), {})


def test_the_settings_hold_every_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("b")
    checked = check_access(Config(api_key=("a",), api_key_file=str(file)), {"TAILRACE_API_KEY": "c"})
    assert (checked.api_key, checked.api_key_file) == (("a", "b", "c"), None)
    assert "api_key=" not in repr(checked)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ApiKeyError):
        check_access(Config(api_key=("",)), {})
    with pytest.raises(TlsError):
        check_access(Config(ssl_keyfile="x"), {})
