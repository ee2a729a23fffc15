"""Type checks of values from outside, of JSON too: annotations bind neither callers nor files."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import FunctionType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, is_typeddict

Kind = TypeVar("Kind")
_hints = cache(get_type_hints)

#: The largest figure: JSON's numbers have no limit, floats do.
_MOST = math.nextafter(math.inf, 0.0)


def is_a(value: object, *kinds: type) -> bool:
    """`isinstance`, for values that are annotated so but not checked."""
    return isinstance(value, kinds)


def is_whole(value: object) -> bool:
    """Test whether a value is an integer, NumPy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Test whether a value is a real number, NumPy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(data: Any) -> str:
    """A value of JSON in a message."""
    return json.dumps(data)[:80]


def text(data: Any) -> str:
    """The value of JSON if it is text; else a TypeError."""
    if not isinstance(data, str):
        raise TypeError(f"{shown(data)} is not text")
    return data


def count(data: Any) -> int:
    """The value of JSON if it is a whole number of at least 0; else a ValueError."""
    if type(data) is not int or not 0 <= data < 2**63:
        raise ValueError(f"{shown(data)} is not a whole number of at least 0")
    return data


def fits(value: Any, kind: Any) -> bool:
    """Test whether a value of JSON is of a type; numbers must not be below 0.

    Args:
        kind: `str`, `bool`, `int`, `float`, a Literal, list, dict, tuple (as a list), union,
            TypedDict or dataclass of these (its fields, less any that have a default), or a
            function that tells.
    """
    if isinstance(kind, FunctionType):
        return bool(kind(value))
    if is_typeddict(kind) or is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(value, dict):
            return False
        is_whole = _required(kind) <= value.keys() <= hints.keys()
        return is_whole and all(fits(one, hints[name]) for name, one in value.items())
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in args)
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(one, args[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, args[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= _MOST
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    return type(value) is kind


def _required(kind: Any) -> frozenset[str]:
    if is_typeddict(kind):
        keys: frozenset[str] = kind.__required_keys__
        return keys
    own = (one for one in fields(kind) if one.default is MISSING)
    return frozenset(one.name for one in own if one.default_factory is MISSING)


def read(kind: type[Kind], data: Any) -> Kind:
    """Make a dataclass of its fields in JSON.

    KeyError, TypeError or ValueError names one that is missing, unknown or of no such value.
    """
    if not isinstance(data, dict):
        raise TypeError(f"{data!r} has no fields")
    own: Any = kind
    hints, missing = _hints(own), _required(own) - data.keys()
    if missing:
        raise KeyError(min(missing))
    return kind(**{name: value_of(name, one, hints.get(name)) for name, one in data.items()})


def value_of(name: str, value: Any, kind: Any) -> Any:
    """A field's value, in JSON, as one of its type: a list as a tuple, an object as a dataclass."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        return tuple(value_of(name, one, args[0]) for one in value)
    if is_dataclass(kind):
        return read(kind, value)  # type: ignore[arg-type]
    if kind is None or fits(value, kind):  # None: an unknown field, of which the dataclass tells
        return tuple(value) if isinstance(value, list) and origin is not list else value
    if origin is Literal:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(args)}")
    numbers = {int: "a whole number of at least 0", float: "a finite number of at least 0"}
    raise ValueError(f"{name} {value!r} is not {numbers.get(kind, 'of its type')}")
