"""Constraints as users write them: tables of a file or a mapping, and submodules by their paths."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import escape
from numbers import Real
from typing import Any

from partitioner.ir.errors import did_you_mean
from partitioner.ir.nodes.loads import Loads
from partitioner.strategies.constraints.values import ConstraintError, NamedDims, Pin

#: Forms of the values of a pin; all others are texts.
_FORMS = {
    "nodes": 'a list of names, like ["layer0.*"]',
    **dict.fromkeys(("device", "dim"), "a whole number"),
    "devices": "a list of different devices, like [0, 1]",
    **dict.fromkeys(("replicate", "cut"), "true"),
}
_TABLES = ("pin", "dims", "layout", "loads")
_KEYS = {"nodes", "op", "device", "devices", "tensor", "dim", "axis", "replicate", "cut"}


def tables(
    data: Mapping[str, Any], where: str, short: str
) -> tuple[tuple[Pin, ...], NamedDims | None, Loads]:
    """Pins, named dims and loads of the tables of a file.

    Args:
        where: Their place, for errors.
        short: The same in the texts of constraints.

    Raises:
        ConstraintError: A key is unknown, or a value is malformed.
    """
    entries = data.get("pin", [])
    unknown = sorted(set(data) - set(_TABLES))
    if unknown:
        raise ConstraintError(
            f"{where}: only [[pin]] tables, [dims], [layout] and [loads] are known, found "
            f"{unknown}{did_you_mean(unknown[0], _TABLES)}"
        )
    if not isinstance(entries, list):
        raise ConstraintError(f"{where}: pin = {entries!r}; write each pin as a [[pin]] table")
    named = None
    if "dims" in data or "layout" in data:
        named = named_dims(data.get("dims", {}), data.get("layout", {}), short)
    numbered = enumerate(entries, 1)
    pins = tuple(_pin(entry, f"{short} pin {number}") for number, entry in numbered)
    table = data.get("loads", {})
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise ConstraintError(f"{short}: [loads] is a table of names, not {table!r}")
    for name, numbers in table.items():
        are_numbers = isinstance(numbers, list | tuple) and all(map(_may_be_load, numbers))
        if not are_numbers or not any(numbers):
            raise ConstraintError(
                f"{short} loads {name!r}: {numbers!r} is not a list of numbers of at least 0, one "
                "for each expert and not all of them 0"
            )
    return pins, named, tuple((name, tuple(map(float, numbers))) for name, numbers in table.items())


def named_dims(dims: Any, layout: Any, source: str) -> NamedDims:
    """Named dims of two tables, whose values are lists, or strings with commas.

    Raises:
        ConstraintError: A table or a value is malformed, or a name has no dims.
    """
    seeds = {name: _words(value, f"{source} dim {name}") for name, value in _table(dims, source)}
    axes = {
        name: _words(value, f"{source} layout {name}") for name, value in _table(layout, source)
    }
    for name, texts in seeds.items():
        for text in texts:
            if not re.fullmatch(r".+\.-?\d+", text, re.ASCII):
                raise ConstraintError(
                    f"{source} dim {name}: {text!r} names no dim: end it with one, as in '{text}.0'"
                )
        if not texts:
            raise ConstraintError(f"{source} dim {name}: it names no dim of a tensor")
    for name, named in axes.items():
        if name not in seeds:
            hint = did_you_mean(name, seeds)
            raise ConstraintError(f"{source} layout {name}: no dim has that name{hint}")
        if len(set(named)) < len(named):
            raise ConstraintError(f"{source} layout {name}: an axis is named twice")
    return NamedDims(seeds, axes, source)


def placements(placement: Mapping[str, int | Sequence[int]]) -> tuple[Pin, ...]:
    """Pins of submodules to devices, or groups of them.

    Raises:
        ConstraintError: A path or a device is malformed, or a submodule is part of another one.
    """
    entries: Mapping[Any, Any] = placement  # not checked
    for path, device in entries.items():
        if not isinstance(path, str) or not all(path.split(".")):
            raise ConstraintError(f"placement: {path!r} is not the path of a submodule")
        if not _are_devices(_group(device)):
            raise ConstraintError(
                f"placement of {path!r}: {device!r} is not a device or a group of them"
            )
        parts = path.split(".")
        outer = entries.keys() & {".".join(parts[:size]) for size in range(1, len(parts))}
        if outer:
            raise ConstraintError(
                f"placement: {path!r} is part of {min(outer)!r}, which is placed too"
            )
    return tuple(
        Pin(
            f"placement of {path!r}",
            (f"/{escape(path.replace('.', '/'))}/*",),
            devices=_group(at),
        )
        for path, at in placement.items()
    )


def _pin(entry: Any, text: str) -> Pin:
    if not isinstance(entry, Mapping) or set(entry) - _KEYS:
        unknown = sorted(set(entry) - _KEYS) if isinstance(entry, Mapping) else entry
        hint = did_you_mean(unknown[0], _KEYS) if isinstance(unknown, list) else ""
        raise ConstraintError(
            f"{text}: unknown keys {unknown}; known are {', '.join(sorted(_KEYS))}{hint}"
        )
    checks: Mapping[str, Callable[[Any], bool]] = {
        "nodes": lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v),
        **dict.fromkeys(("device", "dim"), lambda v: type(v) is int),
        "devices": lambda v: isinstance(v, list) and _are_devices(tuple(v)),
        **dict.fromkeys(("replicate", "cut"), lambda v: v is True),
    }
    for key, value in entry.items():
        if not checks.get(key, lambda v: isinstance(v, str))(value):
            raise ConstraintError(f"{text}: {key} = {value!r} is not {_FORMS.get(key, 'a text')}")
    subject = [key for key in ("nodes", "op", "tensor") if key in entry]
    demand = [key for key in ("device", "devices", "dim", "replicate", "cut") if key in entry]
    is_place = demand in (["device"], ["devices"])
    mixed = (subject == ["tensor"]) == is_place
    stray = "axis" in entry and is_place
    if len(subject) != 1 or len(demand) != 1 or mixed or stray:
        raise ConstraintError(
            f"{text}: give nodes or op with device or devices, or tensor with dim, "
            f"replicate = true or cut = true (and axis); found {sorted(entry)}"
        )
    values = {key: value for key, value in entry.items() if key not in ("device", "devices")}
    group = _group(entry.get("devices", entry.get("device", ())))
    return Pin(text, **{**values, "nodes": tuple(entry.get("nodes", ())), "devices": group})


def _table(table: Any, source: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(table, Mapping) or not all(isinstance(name, str) for name in table):
        raise ConstraintError(f"{source}: [dims] and [layout] are tables of names, not {table!r}")
    return table.items()


def _may_be_load(number: object) -> bool:
    """Test for a number of at least 0, of Python or NumPy, that a float can hold."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return False
    try:
        return 0 <= float(number) < math.inf
    except OverflowError:
        return False


def _words(value: Any, where: str) -> tuple[str, ...]:
    """The strings of a list, or of a string with commas; none of ""."""
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        raise ConstraintError(f"{where}: {value!r} is not a string or a list of strings")
    return tuple(word.strip() for word in words if word.strip())


def _group(devices: Any) -> tuple[Any, ...]:
    return tuple(devices) if isinstance(devices, list | tuple) else (devices,)


def _are_devices(group: tuple[Any, ...]) -> bool:
    are_whole = all(type(device) is int and device >= 0 for device in group)
    return are_whole and len(set(group)) == len(group) > 0
