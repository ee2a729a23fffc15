"""Constraints as data: pins, named dims, and what these demand of the operators of a graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from numbers import Real
from typing import Any, TypeVar

from partitioner.ir.errors import PartitionerError, did_you_mean
from partitioner.ir.graph import Node
from partitioner.ir.layout import Sharding
from partitioner.ir.nodes.loads import Loads
from partitioner.ir.ops import row_of
from partitioner.ir.plan import PlacedNode

Value = TypeVar("Value")
Made = TypeVar("Made")


class ConstraintError(PartitionerError, ValueError):
    """A constraint file that is malformed, or that names a part that the model does not have.

    `position` is that of the node that is left without a strategy; -1 in other errors.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.position = position


def possible(values: Iterable[Value], make: Callable[[Value], Made]) -> list[Made]:
    """Give what is made of each of the values whose constraints can be had.

    Raises:
        ConstraintError: None of them can; that of the first.
    """
    made: list[Made] = []
    errors: list[ConstraintError] = []
    for value in values:
        try:
            made.append(make(value))
        except ConstraintError as error:
            errors.append(error)
    if errors and not made:
        raise errors[0]
    return made


@dataclass(frozen=True)
class Pin:
    """A constraint: its nodes or its tensor, and the demand on them; unset fields demand nothing.

    `side` is "made" if it binds only the producer of the tensor, "read" if only its readers (not
    as in-place operands), "" for both.
    """

    text: str  #: For errors.
    nodes: tuple[str, ...] = ()  #: Patterns of node names.
    op: str = ""  #: Op of nodes.
    devices: tuple[int, ...] = ()  #: Devices that the nodes run on; () for any.
    tensor: str = ""
    dim: int | None = None  #: Dim that the tensor is cut on.
    axis: str = ""  #: Mesh axis of `dim`, `replicate` or `cut`; "" for any.
    replicate: bool = False  #: The tensor is not cut.
    cut: bool = False  #: The tensor is cut on some dim.
    side: str = ""

    def names(self, node: Node) -> bool:
        """Test whether it is a pin of nodes, and of this one."""
        return node.op == self.op or any(fnmatchcase(node.name, name) for name in self.nodes)

    def concerns(self, node: Node) -> bool:
        """Test whether it binds a node as one that makes or reads its tensor."""
        if self.side and (self.tensor in node.outputs) != (self.side == "made"):
            return False
        return self.side != "read" or row_of(node).in_place is None

    def honoured(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether a strategy of a node is as demanded."""
        if self.devices:
            return not self.names(node) or set(placed.mesh.devices) == set(self.devices)
        if not self.concerns(node):
            return True
        sides = placed.results() if self.tensor in node.outputs else placed.operands()
        return all(self._fits(at.sharding) for value, at in sides if value == self.tensor)

    def why_not(self, candidates: Sequence[PlacedNode]) -> str:
        """Why no strategy of a node honours a pin that cuts its tensor; "" if it cuts none."""
        is_cut = self.cut or self.dim is not None
        if not is_cut or not any(placed.mesh.axes for placed in candidates):
            return ""
        along = "any dim" if self.dim is None else f"dim {self.dim}"
        over = f" over axis {self.axis!r}" if self.axis else ""
        return f"it cannot be cut along {along} of {self.tensor!r}{over}"

    def _fits(self, sharding: Sharding) -> bool:
        if self.replicate:
            return self.axis not in sharding.axes if self.axis else sharding.is_replicated
        if self.cut:
            cut = {axis for layout in sharding.dims for axis in layout.axes}
            return self.axis in cut if self.axis else bool(cut)
        if self.dim is None:
            return True
        axes = sharding.dims[self.dim].axes
        return self.axis in axes if self.axis else bool(axes)


@dataclass(frozen=True)
class NamedDims:
    """Dims by name, and the mesh axes that they lie over."""

    #: By name, its dims as "PATTERN.DIM"; the pattern is of tensors, nodes, modules or operators,
    #: and the dim may be negative.
    dims: Mapping[str, tuple[str, ...]]
    #: By name, the mesh axes that the dim is cut over; none if it is not cut.
    layout: Mapping[str, tuple[str, ...]]
    source: str = ""  #: The file, for errors.

    @property
    def where(self) -> str:
        """The beginning of a message: where the names were given."""
        return f"{self.source}: " if self.source else ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the layout."""
        return tuple(dict.fromkeys(axis for axes in self.layout.values() for axis in axes))


@dataclass(frozen=True)
class Along:
    """A demand on operators: those with a loop that is a named dim are cut along it."""

    text: str  #: For errors.
    axes: tuple[str, ...]  #: The mesh axes; without any, the loop is not cut.
    factors: Mapping[str, frozenset[str]]  #: By node, the factors that stand for the dim.
    #: Operators, for people, that read values with the dim and cannot be cut along it.
    ends: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Say how many operators it binds, and the first of those at which the dim ends."""
        count = len(self.factors)
        bound = f"{count} operator{' is' if count == 1 else 's are'}"
        if not self.axes:
            return f"{self.text}: {bound} not cut along it"
        more = f" and {len(self.ends) - 3} more" if len(self.ends) > 3 else ""
        end = f"; it ends at {', '.join(self.ends[:3])}{more}" if self.ends else ""
        return f"{self.text}: {bound} cut along it{end}"

    def honoured(self, node: Node, placed: PlacedNode) -> bool:
        """Test whether a strategy of a node is as demanded."""
        layouts = (placed.layouts.get(name) for name in self.factors.get(node.name, ()))
        return all(
            set(self.axes) <= set(at.axes if at else ()) if self.axes else not (at and at.axes)
            for at in layouts
        )


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

    They are refused as by `Constraints.of`.

    Args:
        where: Their place, for errors.
        short: The same in the texts of constraints.
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
    """Named dims of two tables, whose values are lists, or strings with commas."""
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
    """Pins of submodules to devices, or groups of them, as `Constraints.placed` says."""
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
        Pin(f"placement of {path!r}", (f"/{escape(path.replace('.', '/'))}/*",), devices=_group(at))
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
