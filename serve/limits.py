"""What clients may cost the front end: the limits that the launcher takes from its flags."""

from __future__ import annotations

from dataclasses import dataclass, fields

from serve.config import Config


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Sizes are bytes, times seconds; a time of 0 means never.

    max_requests: open at once. client_buffer_bytes: of an event stream, what may gather in this process for a client
    that does not take it. client_stall_timeout: how long a client may take nothing of what waits for it.
    keep_alive_interval: how long an event stream is silent before it gets a comment. max_body_bytes: of a request.
    """

    max_requests: int = 4096
    client_buffer_bytes: int = 1 << 20
    client_stall_timeout: float = 30.0
    keep_alive_interval: float = 15.0
    max_body_bytes: int = 32 << 20

    @classmethod
    def of(cls, config: Config) -> ClientLimits:
        """Those of a server's settings, where they have the same names."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})
