"""JSON files of problems and solutions, plain or gzipped, and checked access to their fields."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from partitioner.foundations.files import open_file, write_file
from partitioner.ir.errors import typed
from partitioner.solver.problem import SolverError

T = TypeVar("T")

#: Larger files are refused, packed or not; the largest of the contest has 0.1 GB.
MAX_BYTES = 2 * 10**9
#: Larger numbers are refused, and smaller than one part of it, but for 0: sums, products and ratios
#: of a file's numbers are finite, so no search meets an infinite figure that is none of the file.
LARGEST = 1e60


class FormatError(SolverError):
    """A file that breaks its format."""


def read(path: Path, parse: Callable[[Any], T]) -> T:
    """Read a JSON file, plain or gzipped, and parse its content."""
    data = _read_json(path)
    try:
        return parse(data)
    except SolverError as error:
        raise FormatError(f"{path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        with open_file(path, MAX_BYTES) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            text = (gzip.GzipFile(fileobj=raw) if packed else raw).read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise FormatError(f"{path}: more than {MAX_BYTES} bytes")
        return json.loads(text)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    except (EOFError, zlib.error) as error:
        raise FormatError(f"{path}: broken gzip file ({error})") from None
    except RecursionError:
        raise FormatError(f"{path}: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{path}: not JSON ({error})") from None


def write_json(data: Any, path: Path) -> None:
    """Write a JSON file, whole or not at all; gzipped if its name ends in `.gz`."""
    text = json.dumps(data, allow_nan=False).encode()
    write_file(path, gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def write_solution(solution: Any, path: Path) -> None:
    """Write a solution as one line of JSON, whole or not at all."""
    write_file(path, (json.dumps(solution) + "\n").encode())


def as_object(data: Any, where: str) -> Mapping[str, Any]:
    """The data, which must be a JSON object.

    Raises:
        FormatError: It is none; so do all functions below if a field breaks its rule.
    """
    if not isinstance(data, dict):
        raise FormatError(f"{where} is {typed(data)}, not an object")
    return data


def objects(top: Mapping[str, Any], key: str) -> Iterable[Mapping[str, Any]]:
    """The objects of the list at `key`."""
    if not isinstance(top.get(key), list):
        raise FormatError(f"{key!r} is not a list")
    return (as_object(entry, f"{key}[{index}]") for index, entry in enumerate(top[key]))


def number(entry: Mapping[str, Any], key: str, where: str) -> float:
    """The number at `key`, which is 0 or within `LARGEST`."""
    value = entry.get(key)
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or not numeric or not 0 <= value < math.inf:
        raise FormatError(f"{key!r} of {where} is {value!r}, not a finite number of at least 0")
    if value and not 1 / LARGEST <= value <= LARGEST:
        size = "large" if value > 1 else "small"
        raise FormatError(
            f"{key!r} of {where} is too {size}: it must be 0, or {1 / LARGEST:g} to {LARGEST:g}"
        )
    return float(value)


def count(entry: Mapping[str, Any], key: str, where: str = "the file") -> int:
    """The whole number of at least 0 at `key`."""
    value = number(entry, key, where)
    if not value.is_integer():
        raise FormatError(f"{key!r} is {value:g}, not a whole number")
    return int(value)


def by_id(top: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The objects of the list "nodes" by their ids."""
    nodes: dict[int, Mapping[str, Any]] = {}
    for node in objects(top, "nodes"):
        name = node.get("id")
        if not isinstance(name, int) or isinstance(name, bool):
            raise FormatError(f"a node's id is {name!r}, not an integer")
        if name in nodes:
            raise FormatError(f"node {name} appears twice")
        nodes[name] = node
    if not nodes:
        raise FormatError("there are no nodes")
    return nodes


def edges(
    top: Mapping[str, Any], nodes: Mapping[int, object]
) -> Iterable[tuple[int, int, Mapping[str, Any]]]:
    """The objects of the list "edges", behind their ends, which are nodes."""
    for edge in objects(top, "edges"):
        source, target = edge.get("sourceId"), edge.get("destId")
        for end in (source, target):
            if not isinstance(end, int) or end not in nodes:
                raise FormatError(f"the edge from {source!r} to {target!r} has no node {end!r}")
        yield int(edge["sourceId"]), int(edge["destId"]), edge
