"""What the flags of TLS name is looked at before a start, and each refusal names its flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.config import Config
from serve.tls import TlsError, check_tls, tls_options
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def test_good_files(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("good")
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    check_tls(Config())
    check_tls(Config(ssl_certfile=str(certificate), ssl_keyfile=str(key)))
    check_tls(Config(ssl_certfile=str(both), ssl_ca_certs=str(authority.certificate)))


def test_options_of_uvicorn(authority: Authority) -> None:
    assert tls_options(Config()) == {}
    options = tls_options(Config(ssl_certfile="c", ssl_keyfile="k"))
    assert (options["ssl_certfile"], options["ssl_keyfile"], options["ssl_cert_reqs"]) == ("c", "k", 0)
    assert tls_options(Config(ssl_certfile="c", ssl_ca_certs="a"))["ssl_cert_reqs"] == 2


def refused(reason: str, **flags: Path | str) -> None:
    with pytest.raises(TlsError, match=f"^{reason}"):
        check_tls(Config(**{name: str(value) for name, value in flags.items()}))  # type: ignore[arg-type]


def test_no_certificate() -> None:
    refused("--ssl_keyfile needs --ssl_certfile", ssl_keyfile="k")
    refused("--ssl_ca_certs needs --ssl_certfile", ssl_ca_certs="k")


def test_files_that_are_not_there(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("there")
    missing = tmp_path / "missing"
    refused(f"--ssl_certfile: {missing} cannot be used: No such file", ssl_certfile=missing, ssl_keyfile=key)
    refused(f"--ssl_keyfile: {missing} cannot be used: No such file", ssl_certfile=certificate, ssl_keyfile=missing)
    refused(
        f"--ssl_ca_certs: {missing} cannot be used: No such file",
        ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=missing,
    )  # fmt: skip
    refused(f"--ssl_certfile: {tmp_path} cannot be used: Is a directory", ssl_certfile=tmp_path)


def test_files_of_another_kind(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.issue("kind")
    text = tmp_path / "text"
    text.write_text("nothing of the kind")
    refused("--ssl_certfile: .* it holds no certificate", ssl_certfile=text, ssl_keyfile=key)
    refused("--ssl_certfile: .* it holds no certificate", ssl_certfile=key, ssl_keyfile=key)
    refused("--ssl_keyfile: ", ssl_certfile=certificate, ssl_keyfile=text)
    refused("--ssl_certfile: ", ssl_certfile=certificate)  # without its key
    refused("--ssl_ca_certs: ", ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=text)


def test_the_key_of_another_certificate(authority: Authority) -> None:
    refused(
        "--ssl_keyfile: .* the key is not the certificate's",
        ssl_certfile=authority.issue("one")[0], ssl_keyfile=authority.issue("other")[1],
    )  # fmt: skip


def test_an_encrypted_key(authority: Authority) -> None:
    """OpenSSL would ask for the password, on a terminal that a service does not have."""
    certificate, key = authority.issue("hidden", password=b"secret")
    refused("--ssl_keyfile: .* it is encrypted", ssl_certfile=certificate, ssl_keyfile=key)
