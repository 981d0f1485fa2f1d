"""Every error a client can be told of, with its HTTP status and the OpenAI error object.

    ApiError                     status, message, type, param, code; 403 host_not_allowed
    ├── BadRequestError          400  invalid_request_error: the request itself is wrong; ``param`` names the field.
    │   │                        401 invalid_api_key, 408 request_timeout, 415, 431 headers_too_large
    │   └── ContextLengthError   400  invalid_request_error, context_length_exceeded
    ├── NotFoundError            404  not_found_error: no such model (model_not_found) or route
    ├── MethodNotAllowedError    405  invalid_request_error, method_not_allowed
    ├── PayloadTooLargeError     413  invalid_request_error, payload_too_large
    ├── OverloadedError          429  rate_limit_error, or 503 overloaded_error; ``retry_after`` seconds
    └── EngineError              500  server_error: ours, not the client's

The object is ``{"error": {"message", "type", "param", "code"}}``, as in OpenAI's API reference. A fault found after the
first byte has no status left to say it with, so the same object travels as an event: :func:`stream_error`.
"""

from __future__ import annotations

import json
import math


class ApiError(Exception):
    """A request that is answered with an error object. Status, type and code come from the class unless given."""

    status: int = 500
    type: str = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        type: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.code
        self.status = status if status is not None else self.status
        self.type = type if type is not None else self.type

    def body(self) -> bytes:
        """The JSON document of the response."""
        return _error_object(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        """Headers that belong to the error, besides the content type."""
        return {}


class BadRequestError(ApiError):
    """400: a field is missing, malformed, out of range, unknown, or cannot be honoured."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(BadRequestError):
    """400: the prompt, or the prompt and the tokens asked for, do not fit the model's context."""

    code = "context_length_exceeded"


class NotFoundError(ApiError):
    """404: the model or the route does not exist."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowedError(ApiError):
    """405: the route exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class PayloadTooLargeError(ApiError):
    """413: the body is longer than the server reads."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class OverloadedError(ApiError):
    """429 when this client should slow down, 503 when nobody is admitted (queue full, draining, still starting)."""

    status = 429

    def __init__(self, message: str, *, retry_after: float, status: int = 429, code: str | None = None) -> None:
        slow_down = status == 429
        super().__init__(
            message,
            status=status,
            type="rate_limit_error" if slow_down else "overloaded_error",
            code=code or ("rate_limit_exceeded" if slow_down else "overloaded"),
        )
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """``Retry-After`` in whole seconds, at least 1: with 0 a client would be back at once."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after)))}


class EngineError(ApiError):
    """500: the engine, a worker or the server itself failed."""

    code = "engine_error"


def stream_error(message: str, type: str = "server_error", code: str | None = None) -> bytes:
    """The error object as one server-sent event, for a stream whose status line is already gone."""
    return b"data: " + _error_object(message, type, None, code) + b"\n\n"


def _error_object(message: str, type: str, param: str | None, code: str | None) -> bytes:
    """ASCII-only JSON: a message may quote what a client sent, and must survive even if that is not valid Unicode."""
    error = {"message": message, "type": type, "param": param, "code": code}
    return json.dumps({"error": error}, separators=(",", ":")).encode("ascii")
