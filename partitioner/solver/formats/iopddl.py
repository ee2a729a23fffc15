"""Read and write the files of the contest on intra-operator parallelism (google/iopddl).

A problem is `{"problem": {"nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"},
"usage_limit"}}`, plain or gzipped; a solution is a list of strategy indices, one a node, alone or
as `{"solution": [...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from partitioner.files import write_file
from partitioner.solver.formats.json_files import FormatError, read_json, write_json
from partitioner.solver.pairwise.problem import Ints, Pairwise
from partitioner.solver.problem import SolverError


def read(path: Path, data: Any = None) -> Pairwise:
    """Read a problem.

    Args:
        path: The file.
        data: Its content, if it is already known.

    Raises:
        FormatError: The file cannot be read or breaks the format.
    """
    try:
        return parse(read_json(path) if data is None else data)
    except FormatError as error:
        raise (
            error if str(error).startswith(str(path)) else FormatError(f"{path}: {error}")
        ) from None
    except SolverError as error:
        raise FormatError(f"{path}: {error}") from None


def is_problem(data: Any) -> bool:
    """Whether JSON content looks like a problem of the contest."""
    return isinstance(data, dict) and isinstance(data.get("problem"), dict)


def parse(data: Any) -> Pairwise:
    """A problem from JSON content.

    Raises:
        SolverError: The first fault found, with its values.
    """
    if not is_problem(data):
        raise FormatError('no "problem" object')
    problem = data["problem"]
    nodes, edges = _field(problem, "nodes", dict), _field(problem, "edges", dict)
    costs, offsets = _ragged(nodes, "costs")
    usages, usage_offsets = _ragged(nodes, "usages")
    for v in np.flatnonzero(np.diff(offsets)[: len(usage_offsets) - 1] != np.diff(usage_offsets)):
        raise FormatError(f"node {v} has not as many usages as costs")
    if len(offsets) != len(usage_offsets):
        raise FormatError(f"{len(usage_offsets) - 1} usages for {len(offsets) - 1} nodes")
    edge_costs, edge_offsets = _ragged(edges, "costs")
    limit = problem.get("usage_limit")
    if limit is not None and type(limit) is not int:
        raise FormatError(f'"usage_limit" is {_short(limit)}, not a whole number')
    return Pairwise(
        offsets,
        costs,
        usages,
        _pairs(nodes, "intervals"),
        _pairs(edges, "nodes"),
        edge_offsets,
        edge_costs,
        limit,
    )


def _field(owner: Mapping[str, Any], name: str, kind: type) -> Any:
    value = owner.get(name)
    if not isinstance(value, kind):
        what = "list" if kind is list else "object"
        raise FormatError(
            f'"{name}" is {_short(value)}, not a {what}'.replace("a object", "an object")
        )
    return value


def _ragged(owner: Mapping[str, Any], name: str) -> tuple[Ints, Ints]:
    """A list of lists of whole numbers, flat, and the offset of each list."""
    lists = _field(owner, name, list)
    for index, own in enumerate(lists):
        if type(own) is not list:
            raise FormatError(f'entry {index} of "{name}" is {_short(own)}, not a list')
    offsets = np.array([0, *accumulate(map(len, lists))], dtype=np.int64)
    return _whole(chain.from_iterable(lists), name), offsets


def _whole(values: Any, name: str) -> Ints:
    numbers = list(values)
    if set(map(type, numbers)) - {int}:
        wrong = next(value for value in numbers if type(value) is not int)
        raise FormatError(f'"{name}" has {_short(wrong)}, not a whole number')
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        large = max(numbers, key=abs)
        raise FormatError(f'"{name}" has {_short(large)}, more than 64 bits') from None


def _pairs(owner: Mapping[str, Any], name: str) -> Ints:
    flat, offsets = _ragged(owner, name)
    for index in np.flatnonzero(np.diff(offsets) != 2)[:1]:
        count = offsets[index + 1] - offsets[index]
        raise FormatError(f'entry {index} of "{name}" has {count} numbers, not 2')
    return flat.reshape(-1, 2)


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, int) or value < 10**30 else "a huge number"
    return text if len(text) <= 40 else f"{text[:37]}..."


def write(problem: Pairwise, path: Path) -> None:
    """Write a problem, whole or not at all; gzipped if the name ends in `.gz`.

    Raises:
        FileError: The file cannot be written.
    """
    whole = {
        "nodes": {
            "intervals": problem.intervals.tolist(),
            "costs": _lists(problem.costs, problem.offsets),
            "usages": _lists(problem.usages, problem.offsets),
        },
        "edges": {
            "nodes": problem.edges.tolist(),
            "costs": _lists(problem.edge_costs, problem.edge_offsets),
        },
        "usage_limit": problem.limit,
    }
    write_json({"problem": whole}, path)


def _lists(values: Ints, offsets: Ints) -> list[list[int]]:
    flat = values.tolist()
    return [flat[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def read_solution(path: Path) -> list[int]:
    """Read a solution: a list of strategy indices, alone or as `{"solution": [...]}`.

    Raises:
        FormatError: The file cannot be read or holds something else.
    """
    data = read_json(path)
    found = data.get("solution", data.get("strategies")) if isinstance(data, dict) else data
    if not isinstance(found, list) or set(map(type, found)) - {int}:
        raise FormatError(f"{path}: not a list of strategy indices, one a node")
    return found


def write_solution(chosen: Sequence[int], path: Path) -> None:
    """Write a solution as `{"solution": [...]}`, whole or not at all.

    Raises:
        FileError: The file cannot be written.
    """
    write_file(path, (json.dumps({"solution": list(chosen)}) + "\n").encode())
