"""What a solution of a msr-fiddle/dnn-partitioning file costs, from the file alone.

It knows nothing of the search, nor of the problem that the file becomes for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partitioner.files import write_file
from partitioner.solver.formats.dnnp import Instance
from partitioner.solver.formats.json_files import FormatError, read_json

#: Kinds of devices, in the order of their lists in a file.
SIDES = ("accelerator", "CPU")
_KEYS = ("fpgas", "cpus")

Place = tuple[int, int]  #: Index into `SIDES`, and of the device there.


@dataclass(frozen=True)
class Split:
    """A solution: ids of nodes on each accelerator and on each CPU, as the file lists them."""

    fpgas: tuple[tuple[int, ...], ...]
    cpus: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class SplitOutcome:
    """What a solution costs.

    Attributes:
        cost_s: The largest load of a device; None if it has none (a node is missing, say).
        fullest_bytes: Bytes on the fullest accelerator.
        limit_bytes: Memory of an accelerator.
        fault: Why it is infeasible; empty if it is feasible.
    """

    cost_s: float | None
    fullest_bytes: float
    limit_bytes: float
    fault: str


def evaluate(instance: Instance, split: Split) -> SplitOutcome:
    """Price a solution exactly, by the throughput objective."""
    limit = instance.limit_bytes
    fault = next(_misplaced(instance, split), "")
    if fault:
        return SplitOutcome(None, 0.0, limit, fault)
    at = {node: place for place, node in _placed(split)}
    home = [at[own[0]] for own in instance.members]
    held = [
        math.fsum(
            size for size, own in zip(instance.size_bytes, home, strict=True) if own == (0, d)
        )
        for d in range(len(split.fpgas))
    ]
    over = [d for d, size in enumerate(held) if size > limit]
    if over:
        fault = f"accelerator {over[0]} holds {held[over[0]]:.12g} > limit {limit:.12g}"
    return SplitOutcome(_cost_s(instance, home), max(held, default=0.0), limit, fault)


def _misplaced(instance: Instance, split: Split) -> Iterator[str]:
    """Faults after which there is no cost."""
    at: dict[int, str] = {}
    known = {node for own in instance.members for node in own}
    for (side, device), node in _placed(split):
        name = f"{SIDES[side]} {device}"
        if node not in known:
            yield f"{name} has node {node}, which the problem does not have"
        if node in at:
            yield f"node {node} is on {at[node]} and on {name}"
        at[node] = name
    if missing := sorted(known - set(at)):
        yield f"{len(missing)} of {len(known)} nodes are on no device, the first is {missing[0]}"
    sides = (split.fpgas, split.cpus), (instance.accelerators, instance.cpus)
    for name, entries, count in zip(SIDES, *sides, strict=True):
        used = sum(map(bool, entries))
        if used > count:
            yield f"{used} {name}s are used, the problem has {count}"
    for own, seconds in zip(instance.members, instance.accelerator_s, strict=True):
        yield from _torn(own, at)
        if math.isinf(seconds) and at[own[0]].startswith(SIDES[0]):
            yield f"node {own[0]}, or one of its colour class, cannot be on {at[own[0]]}"


def _torn(own: Sequence[int], at: Mapping[int, str]) -> Iterator[str]:
    for node in own:
        if at[node] != at[own[0]]:
            yield (
                f"nodes {own[0]} and {node} are of one colour class, but on {at[own[0]]} and "
                f"{at[node]}"
            )


def _placed(split: Split) -> Iterator[tuple[Place, int]]:
    for side, entries in enumerate((split.fpgas, split.cpus)):
        for device, nodes in enumerate(entries):
            for node in nodes:
                yield (side, device), node


def _cost_s(instance: Instance, home: Sequence[Place]) -> float:
    """Largest load: nodes, and on accelerators each value once for leaving and once for coming."""
    terms: dict[Place, list[float]] = {at: [] for at in home}
    for node, at in enumerate(home):
        terms[at].append((instance.cpu_s if at[0] else instance.accelerator_s)[node])
    for value in instance.values:
        own = home[value.producer]
        away = {home[reader] for reader in value.readers} - {own}
        for at in (own, *away) if away else ():
            if at[0] == 0:
                terms[at].append(value.cost_s)
    return max(map(math.fsum, terms.values()))


def read_split(path: Path) -> Split:
    """Read a solution: `{"fpgas": [{"nodes": [ids]}, ...], "cpus": [...]}`.

    Raises:
        FormatError: The file cannot be read or holds something else.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in _KEYS):
        raise FormatError(f'{path}: not an object with the lists "fpgas" and "cpus"')
    fpgas, cpus = (tuple(_nodes(path, key, entry) for entry in data[key]) for key in _KEYS)
    return Split(fpgas, cpus)


def _nodes(path: Path, key: str, entry: Any) -> tuple[int, ...]:
    nodes = entry.get("nodes") if isinstance(entry, dict) else None
    if not isinstance(nodes, list) or set(map(type, nodes)) - {int}:
        raise FormatError(f'{path}: an entry of "{key}" has no list "nodes" of whole numbers')
    return tuple(nodes)


def write_split(solution: Mapping[str, Any], path: Path) -> None:
    """Write a solution as `dnnp_problem.to_solution` gives it, whole or not at all.

    Raises:
        FileError: The file cannot be written.
    """
    write_file(path, (json.dumps(solution) + "\n").encode())
