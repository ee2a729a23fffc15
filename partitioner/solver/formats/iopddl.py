"""Files of the contest on intra-operator parallelism (google/iopddl).

A problem is `{"problem": {"nodes": {"intervals", "costs", "usages"}, "edges": {"nodes", "costs"},
"usage_limit"}}`, plain or gzipped; a solution is a list of strategy indices, one a node, alone or
as `{"solution": [...]}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from partitioner.solver.formats.json_files import FormatError, write_json
from partitioner.solver.pairwise.problem import Ints, Pairwise


def parse(data: Any) -> Pairwise:
    """A problem from JSON content.

    Raises:
        SolverError: The first fault found, with its values.
    """
    problem = data.get("problem") if isinstance(data, dict) else None
    if not isinstance(problem, dict):
        raise FormatError('no "problem" object')
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
    intervals, ends = _pairs(nodes, "intervals"), _pairs(edges, "nodes")
    return Pairwise(offsets, costs, usages, intervals, ends, edge_offsets, edge_costs, limit)


def _field(owner: Mapping[str, Any], name: str, expected: type) -> Any:
    value = owner.get(name)
    if not isinstance(value, expected):
        noun = "a list" if expected is list else "an object"
        raise FormatError(f'"{name}" is {_short(value)}, not {noun}')
    return value


def _ragged(owner: Mapping[str, Any], name: str) -> tuple[Ints, Ints]:
    """A list of lists of whole numbers, flat, and the offset of each list."""
    lists = _field(owner, name, list)
    for index, entry in enumerate(lists):
        if type(entry) is not list:
            raise FormatError(f'entry {index} of "{name}" is {_short(entry)}, not a list')
    offsets = np.array([0, *accumulate(map(len, lists))], dtype=np.int64)
    return _whole(chain.from_iterable(lists), name), offsets


def _whole(values: Iterable[Any], name: str) -> Ints:
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
    """Write a problem, whole or not at all; gzipped if the name ends in `.gz`."""
    content = {
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
    write_json({"problem": content}, path)


def _lists(values: Ints, offsets: Ints) -> list[list[int]]:
    flat = values.tolist()
    return [flat[a:b] for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]


def parse_solution(data: Any) -> list[int]:
    """A solution from JSON content: strategy indices, alone or as `{"solution": [...]}`."""
    chosen = data.get("solution", data.get("strategies")) if isinstance(data, dict) else data
    if not isinstance(chosen, list) or set(map(type, chosen)) - {int}:
        raise FormatError("not a list of strategy indices, one a node")
    return chosen
