"""Sets fields of messages. A value that protobuf does not take is refused in a sentence with the argument's name."""

from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

from tandem.exceptions import InvalidRequest

_ERRORS = (TypeError, ValueError, OverflowError)
_MAX_CHARS = 64
_TEXT = "a text"
_KINDS = {
    Field.CPPTYPE_STRING: _TEXT,
    Field.CPPTYPE_BOOL: "true or false",
    Field.CPPTYPE_INT32: f"an integer in [{-(2**31)}, {2**31 - 1}]",
    Field.CPPTYPE_INT64: f"an integer in [{-(2**63)}, {2**63 - 1}]",
    Field.CPPTYPE_UINT32: f"an integer in [0, {2**32 - 1}]",
    Field.CPPTYPE_UINT64: f"an integer in [0, {2**64 - 1}]",
    Field.CPPTYPE_FLOAT: "a number",
    Field.CPPTYPE_DOUBLE: "a number",
}


def set_field(message: Message, name: str, value: object, *, shown_name: str | None = None) -> None:
    """Set one field; None leaves it absent. Raises InvalidRequest that names the argument `shown_name`, or the
    field.
    """
    if value is None:
        return
    try:
        setattr(message, name, value)
    except _ERRORS as error:
        raise wrong_value(shown_name or name, _kind(message.DESCRIPTOR.fields_by_name[name]), value) from error


def extend_field(message: Message, name: str, values: Any, *, shown_name: str | None = None) -> None:
    """Append to a repeated field. As `set_field` otherwise, with the index of a wrong element."""
    shown_name = shown_name or name
    kind = _kind(message.DESCRIPTOR.fields_by_name[name])
    values = elements(values, shown_name)
    try:
        getattr(message, name).extend(values)
    except _ERRORS as error:
        for index, value in enumerate(values):
            if not _takes(message, name, value):
                raise wrong_value(f"{shown_name}[{index}]", kind, value) from error
        raise wrong_value(shown_name, f"a list, with {kind} as each element", values) from error


def update_map(message: Message, name: str, values: Any) -> None:
    """Set entries of a map. As `set_field` otherwise."""
    entry: Any = message.DESCRIPTOR.fields_by_name[name].message_type
    keys, numbers = (_kind(entry.fields_by_name[part]) for part in ("key", "value"))
    field = getattr(message, name)
    try:
        items = list(dict(values).items())
    except _ERRORS as error:
        raise wrong_value(name, f"a mapping from {keys} to {numbers}", values) from error
    for key, value in items:
        try:
            field[key] = value
        except _ERRORS as error:
            raise InvalidRequest(f"{name} must map {keys} to {numbers}, got {shown(key)}: {shown(value)}") from error


def set_seconds(message: Message, name: str, seconds: Any, *, shown_name: str | None = None) -> None:
    """Set a Duration; None leaves it absent. As `set_field` otherwise."""
    if seconds is None:
        return
    try:
        getattr(message, name).FromMicroseconds(round(seconds * 1_000_000))
    except _ERRORS as error:
        raise wrong_value(shown_name or name, "a number of seconds", seconds) from error


def elements(values: Any, name: str) -> list[Any]:
    """The elements of a list, or of anything else that can be iterated. Raises InvalidRequest."""
    try:
        return list(values)
    except TypeError as error:
        raise wrong_value(name, "a list", values) from error


def wrong_value(name: str, kind: str, value: object) -> InvalidRequest:
    """The error for an argument that has to be `kind`."""
    if kind == _TEXT and isinstance(value, str):  # one with surrogates, as Python makes of bytes that are no UTF-8
        kind = "valid Unicode"
    return InvalidRequest(f"{name} must be {kind}, got {shown(value)}")


def shown(value: object) -> str:
    """The value as Python writes it, or its type if that would be long."""
    if isinstance(value, int) and value.bit_length() > 8 * _MAX_CHARS:  # Python refuses to write the longest ones
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= _MAX_CHARS else f"a value of type {type(value).__name__}"


def _takes(message: Message, name: str, value: object) -> bool:
    try:
        getattr(type(message)(), name).append(value)
    except _ERRORS:
        return False
    return True


def _kind(field: Any) -> str:
    return _KINDS[field.cpp_type]
