"""JSON objects to dataclasses, checked: an error names the place in the file and the field."""

import dataclasses
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """A JSON value does not have the shape of the record it is read as."""


def decode(cls: type[T], value: Any, where: str) -> T:
    """Builds the dataclass `cls` from a JSON object.

    Args:
        cls: a dataclass whose fields are str, int, float, bool, None, lists, string-keyed dicts, unions of these, or
            dataclasses of such fields.
        value: what `json.loads` gave.
        where: file, and line if there is one, for messages.

    Raises:
        RecordError: a field is missing, unknown or of another type; the message starts with `where` and the field.
    """
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected an object with the fields of {cls.__name__}, found {_kind(value)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise RecordError(f"{where}: unknown field {unknown[0]!r} in {cls.__name__}; known: {', '.join(fields)}")
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _convert(hints[name], value[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where}: field {name!r} of {cls.__name__} is missing")
    return cls(**arguments)


def encode(record: Any) -> dict[str, Any]:
    """The JSON-able form of a dataclass, the inverse of `decode`."""
    return dataclasses.asdict(record)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        for choice in choices[:-1]:
            try:
                return _convert(choice, value, where)
            except RecordError:
                continue
        return _convert(choices[-1], value, where)
    if origin is list:
        if not isinstance(value, list):
            raise RecordError(f"{where}: expected a list, found {_kind(value)}")
        (item_hint,) = typing.get_args(hint)
        return [_convert(item_hint, item, f"{where}[{index}]") for index, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(f"{where}: expected an object, found {_kind(value)}")
        item_hint = typing.get_args(hint)[1]
        return {key: _convert(item_hint, item, f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        return decode(hint, value, where)
    # JSON writes 1.0 and 1 alike, and a Python bool is an int: neither may slip through as the other.
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise RecordError(f"{where}: expected {hint.__name__}, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
