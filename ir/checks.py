"""What a value from outside is: annotations bind no caller and no file."""

from __future__ import annotations

from numbers import Integral, Real


def is_a(value: object, *kinds: type) -> bool:
    """Whether a value is of one of these classes, whatever its annotation promises."""
    return isinstance(value, kinds)


def is_whole(value: object) -> bool:
    """Whether a value is an integer (NumPy's count, True and False do not)."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number (True and False are not)."""
    return isinstance(value, Real) and not isinstance(value, bool)
