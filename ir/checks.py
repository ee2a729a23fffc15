"""Type checks of values from outside: annotations bind neither callers nor files."""

from __future__ import annotations

import json
from numbers import Integral, Real
from typing import Any


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
