"""The way in: an HTTP body as a strict pydantic model, or a 400 that names the field in words a person understands.

Models of requests inherit ``Body``; what each of them accepts is said where they are (``openai_protocol.py``).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from serve.errors import BadRequestError

#: Brackets within brackets of a body; a tool's JSON schema stays far below, a stream's spec stops at 256.
MAX_DEPTH = 100
#: Characters of a field's name in an error: a client's own name may be as long as the body.
MAX_QUOTED = 200


def wrong(message: str, param: str = "") -> PydanticCustomError:
    """A refusal in our own words; ``param`` is relative to the model or field whose validator raises it."""
    return PydanticCustomError("request", "{message}", {"message": message, "param": param})


class Body(BaseModel):
    """Strict, closed, and with nulls dropped."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    #: fields of other servers that this one cannot honour: the values that ask for nothing, and what to say otherwise
    neutral: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {}

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def as_sent(self) -> dict[str, Any]:
        """The body as the client sent it, nulls and all; what a recording keeps. Not to be changed."""
        return self._sent or self.model_dump(exclude_unset=True)


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(model_class: type[AnyBody], body: bytes) -> AnyBody:
    """An HTTP body as a request. Raises BadRequestError, with the dotted name of the field where there is one."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"The body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(data, dict):
        raise BadRequestError("The body must be a JSON object.", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _too_deep(data):
        raise BadRequestError(f"The body is nested deeper than {MAX_DEPTH} levels.", code="invalid_json")
    return parse_object(model_class, data)


def parse_object(model_class: type[AnyBody], data: dict[str, Any]) -> AnyBody:
    """The same for a body that is already decoded, such as a recording's. ``data`` is kept, not copied."""
    _check_names(model_class, data)
    try:
        request = model_class.model_validate({name: data[name] for name in data if name not in model_class.neutral})
    except ValidationError as error:
        raise bad_request(error) from error
    request._sent = data
    return request


def _check_names(model_class: type[Body], data: dict[str, Any]) -> None:
    """Ask before the models do: they would list every unknown field of a body before we quote the first."""
    known, neutral = model_class.model_fields, model_class.neutral
    for name, value in data.items():
        if name in known or value is None:
            continue
        if name not in neutral:
            raise _unknown(name)
        accepted, reason = neutral[name]
        if not any(type(value) is type(other) and value == other for other in accepted):  # to Python, 0 == False
            raise BadRequestError(f"{name} is not supported: {reason}.", param=name, code="unsupported_parameter")


def _unknown(where: str) -> BadRequestError:
    where = where[:MAX_QUOTED]
    return BadRequestError(f"{where} is not a known field.", param=where, code="unknown_parameter")


def _too_deep(data: dict[str, Any]) -> bool:
    """Breadth first, one level at a time, so that depth costs no stack."""
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        entries = (e for box in level for e in (box.values() if type(box) is dict else box))
        level = [e for e in entries if type(e) is dict or type(e) is list]
        if not level:
            return False
    return True


def bad_request(error: ValidationError) -> BadRequestError:
    """The first thing wrong, as one sentence that starts with the field's name."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    context = first.get("ctx", {})
    if first["type"] == "request":
        where = ".".join(filter(None, (where, context["param"])))[:MAX_QUOTED]
        return BadRequestError(f"{where} {context['message']}.", param=where, code="invalid_value")
    if first["type"] == "extra_forbidden":
        return _unknown(where)
    if first["type"] == "missing":
        return BadRequestError(f"{where} is required.", param=where, code="missing_required_parameter")
    if first["type"] == "too_long":
        message = f"{where} must not hold more than {context['max_length']} entries."
        return BadRequestError(message, param=where, code="invalid_value")
    said = _SAID.get(first["type"], first["msg"].replace("Input should be", "must be", 1))
    return BadRequestError(f"{where} {said}, got {quote(first['input'])}.", param=where, code="invalid_value")


#: pydantic's words for what JSON calls otherwise, by error type
_SAID = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
}


def quote(value: Any) -> str:
    """A value as a person wrote it, cut to a length that fits a message."""
    if isinstance(value, list | dict):
        return str(value) if not value else "a list" if isinstance(value, list) else "an object"
    text = f'"{value}"' if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= 64 else text[:60] + "..."
