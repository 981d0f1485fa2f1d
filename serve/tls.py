"""TLS: the flags as uvicorn's options, and a look at the files before a model is loaded.

The protocol versions and ciphers are those of Python's ``ssl`` (TLS 1.2 and later). With ``--ssl_ca_certs`` a client
needs a certificate of these authorities before it can say anything at all.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve.config import Config


class TlsError(ValueError):
    """Certificates or a key that cannot be used; the message names the flag."""


def tls_options(config: Config) -> dict[str, Any]:
    """uvicorn's arguments; none without a certificate."""
    if config.ssl_certfile is None:
        return {}
    needed = ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": needed,
    }


def check_tls(config: Config) -> None:
    """Load all that the flags name; TlsError if uvicorn could not."""
    if config.ssl_certfile is None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(config, name) is not None:
                raise TlsError(f"--{name} needs --ssl_certfile too: there is no TLS without a certificate")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (path := getattr(config, name)) is not None:
            _load(name, path, Path(path).read_bytes)
    key = "ssl_certfile" if config.ssl_keyfile is None else "ssl_keyfile"
    _load("ssl_certfile", config.ssl_certfile, lambda: context.load_verify_locations(config.ssl_certfile))
    _load(key, getattr(config, key), lambda: _load_pair(context, config))
    if config.ssl_ca_certs is not None:
        _load("ssl_ca_certs", config.ssl_ca_certs, lambda: context.load_verify_locations(config.ssl_ca_certs))


def _load_pair(context: ssl.SSLContext, config: Config) -> None:
    """An encrypted key would make OpenSSL ask for its password on the terminal, where a service has nobody."""

    def refuse() -> str:
        raise OSError("it is encrypted; give a key without a password")

    context.load_cert_chain(str(config.ssl_certfile), config.ssl_keyfile, refuse)


def _load(name: str, path: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ssl.SSLError as error:
        raise TlsError(f"--{name}: {path} cannot be used: {_reason(error)}") from error
    except OSError as error:
        raise TlsError(f"--{name}: {path} cannot be used: {error.strerror or error}") from error


def _reason(error: ssl.SSLError) -> str:
    said = {
        "KEY_VALUES_MISMATCH": "the key is not the certificate's",
        "NO_CERTIFICATE_OR_CRL_FOUND": "it holds no certificate in PEM form",
        "NO_START_LINE": "it holds nothing of the kind in PEM form",
    }
    return said.get(error.reason or "", error.reason or str(error))
