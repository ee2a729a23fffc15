"""Checks plain data against the TypedDicts of a schema."""

import math
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict


def check(data: Any, kind: Any, where: str = "data") -> None:
    """Raise AssertionError where data is not of the kind; numbers must be finite."""
    origin = get_origin(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        assert isinstance(data, dict), where
        assert set(data) == set(hints), f"{where}: {set(data) ^ set(hints)}"
        for key, value in data.items():
            check(value, hints[key], f"{where}.{key}")
    elif origin in (list, tuple):
        kinds = get_args(kind) * (len(data) if origin is list else 1)
        assert isinstance(data, origin), where
        for index, (value, of) in enumerate(zip(data, kinds, strict=True)):
            check(value, of, f"{where}[{index}]")
    elif origin in (Union, UnionType):
        fits = [option for option in get_args(kind) if (option is NoneType) == (data is None)]
        assert fits, where
        if data is not None:
            check(data, fits[0], where)
    else:
        _check_plain(data, kind, where)


def _check_plain(data: Any, kind: Any, where: str) -> None:
    if get_origin(kind) is Literal:
        assert data in get_args(kind), f"{where}: {data!r}"
    elif kind is float:
        assert type(data) in (int, float), f"{where}: {data!r}"
        assert math.isfinite(data), where
    else:
        assert type(data) is kind, f"{where}: {data!r} is not {kind}"
