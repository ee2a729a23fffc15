"""The cost of a solution of a msr-fiddle/dnn-partitioning file, from the file alone.

It knows neither the search nor the problem that the file becomes for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partitioner.solver.formats.dnnp import Instance
from partitioner.solver.formats.json_files import FormatError

#: Sorts of devices, in the order of their lists in a file.
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
    """A solution's cost, memory and feasibility."""

    #: The largest load of a device; None if it has none (a node is missing, say).
    cost_s: float | None
    fullest_bytes: float  #: Bytes on the fullest accelerator.
    fault: str  #: Why it is infeasible; empty if it is feasible.


def evaluate(instance: Instance, split: Split) -> SplitOutcome:
    """Price a solution exactly, by the throughput objective."""
    fault = next(_misplaced(instance, split), "")
    if fault:
        return SplitOutcome(None, 0.0, fault)
    place_of = {node: place for place, node in _placed(split)}
    home = [place_of[group[0]] for group in instance.members]
    by_place = list(zip(instance.size_bytes, home, strict=True))
    held = [
        math.fsum(size for size, place in by_place if place == (0, d))
        for d in range(len(split.fpgas))
    ]
    over = (
        f"accelerator {d} holds {size:.12g} > limit {instance.limit_bytes:.12g}"
        for d, size in enumerate(held)
        if size > instance.limit_bytes
    )
    return SplitOutcome(_cost_s(instance, home), max(held, default=0.0), next(over, ""))


def _misplaced(instance: Instance, split: Split) -> Iterator[str]:
    """Faults after which there is no cost."""
    at: dict[int, str] = {}
    known = {node for group in instance.members for node in group}
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
    for name, devices, count in zip(SIDES, *sides, strict=True):
        used = sum(map(bool, devices))
        if used > count:
            yield f"{used} {name}s are used, the problem has {count}"
    yield from _group_faults(instance, at)


def _group_faults(instance: Instance, at: Mapping[int, str]) -> Iterator[str]:
    for group, seconds in zip(instance.members, instance.accelerator_s, strict=True):
        for node in group:
            if at[node] != at[group[0]]:
                yield (
                    f"nodes {group[0]} and {node} are of one colour class, but on {at[group[0]]} "
                    f"and {at[node]}"
                )
        if math.isinf(seconds) and at[group[0]].startswith(SIDES[0]):
            yield f"node {group[0]}, or one of its colour class, cannot be on {at[group[0]]}"


def _placed(split: Split) -> Iterator[tuple[Place, int]]:
    for side, devices in enumerate((split.fpgas, split.cpus)):
        for device, nodes in enumerate(devices):
            for node in nodes:
                yield (side, device), node


def _cost_s(instance: Instance, home: Sequence[Place]) -> float:
    """Largest load: nodes, and on accelerators each value once for leaving and once for coming."""
    terms: dict[Place, list[float]] = {place: [] for place in home}
    for node, place in enumerate(home):
        terms[place].append((instance.cpu_s if place[0] else instance.accelerator_s)[node])
    for value in instance.values:
        producer = home[value.producer]
        away = {home[reader] for reader in value.readers} - {producer}
        for place in (producer, *away) if away else ():
            if place[0] == 0:
                terms[place].append(value.cost_s)
    return max(map(math.fsum, terms.values()))


def parse_split(data: Any) -> Split:
    """A solution from JSON content: `{"fpgas": [{"nodes": [ids]}, ...], "cpus": [...]}`.

    Raises:
        FormatError: It is something else.
    """
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in _KEYS):
        raise FormatError('not an object with the lists "fpgas" and "cpus"')
    fpgas, cpus = (tuple(_nodes(key, entry) for entry in data[key]) for key in _KEYS)
    return Split(fpgas, cpus)


def _nodes(key: str, entry: Any) -> tuple[int, ...]:
    nodes = entry.get("nodes") if isinstance(entry, dict) else None
    if not isinstance(nodes, list) or set(map(type, nodes)) - {int}:
        raise FormatError(f'an entry of "{key}" has no list "nodes" of whole numbers')
    return tuple(nodes)
