"""Type checks of values from outside: annotations bind neither callers nor files."""

from __future__ import annotations

from numbers import Integral, Real


def is_a(value: object, *kinds: type) -> bool:
    """`isinstance`, for values that are annotated so but not checked."""
    return isinstance(value, kinds)


def is_whole(value: object) -> bool:
    """Test whether a value is an integer, NumPy's included; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Test whether a value is a real number, NumPy's included; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)
