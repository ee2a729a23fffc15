"""Fields of decoded JSON files of instances, each checked where it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from partitioner.solver.problem import SolverError

T = TypeVar("T")


def parsed(path: Path, data: object, parse: Callable[[object], T]) -> T:
    """What a file's decoded content says.

    Raises:
        SolverError: It is malformed; one line says where.
    """
    try:
        return parse(data)
    except SolverError as error:
        raise SolverError(f"{path}: {error}") from None


def as_object(data: object, where: str) -> Mapping[str, Any]:
    """The data, which must be an object."""
    if not isinstance(data, dict):
        raise SolverError(f"{where} is a {type(data).__name__}, not an object")
    return data


def entries(top: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    """The objects of the list at `key`."""
    if not isinstance(top.get(key), list):
        raise SolverError(f"{key!r} is not a list")
    return (as_object(entry, f"{key}[{index}]") for index, entry in enumerate(top[key]))


def number(entry: Mapping[str, Any], key: str, where: str) -> float:
    """The finite number of at least 0 at `key`."""
    value = entry.get(key)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not numeric or not 0 <= value < math.inf:
        raise SolverError(f"{key!r} of {where} is {value!r}, not a finite number of at least 0")
    return float(value)


def count(top: Mapping[str, Any], key: str) -> int:
    """The whole number of at least 0 at `key` of the file."""
    value = number(top, key, "the file")
    if not value.is_integer():
        raise SolverError(f"{key!r} is {value:g}, not a whole number")
    return int(value)


def by_id(top: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The objects of the list "nodes" by their ids."""
    nodes: dict[int, Mapping[str, Any]] = {}
    for node in entries(top, "nodes"):
        name = node.get("id")
        if not isinstance(name, int) or isinstance(name, bool):
            raise SolverError(f"a node's id is {name!r}, not an integer")
        if name in nodes:
            raise SolverError(f"node {name} appears twice")
        nodes[name] = node
    if not nodes:
        raise SolverError("there are no nodes")
    return nodes
