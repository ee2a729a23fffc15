"""Values of JSON files, checked against the types that they should have."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from types import FunctionType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

#: The largest figure: JSON's numbers have no limit, floats do.
_MOST = math.nextafter(math.inf, 0.0)


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
        hints = get_type_hints(kind)
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
