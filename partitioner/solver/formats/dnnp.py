"""Placement instances of msr-fiddle/dnn-partitioning: their meaning, their reader, their referee.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino: "Efficient Algorithms for Device
Placement of DNN Graph Operators", NeurIPS 2020. A file is JSON:

    {"maxFPGAs": k, "maxCPUs": l, "maxSizePerFPGA": bytes,
     "nodes": [{"id", "fpgaLatency", "cpuLatency", "size", "colorClass", "isBackwardNode",
                "supportedOnFpga"}, ...],
     "edges": [{"sourceId", "destId", "cost"}, ...]}

An accelerator's load is its nodes' `fpgaLatency`, the cost of each value that comes in, and the
cost of each value that goes out, once however many devices read it. A CPU's load is its nodes'
`cpuLatency`; it pays no transfer. The largest load counts (throughput). Nodes of one
`colorClass` (null is a class of its own) go together, so they are one node here. Merged nodes
are in the order of the forward pass; an edge against it is turned, which costs the same.
Seconds are the file's unit of time. The referee prices solutions from the file alone: it knows
neither the search nor the problem that the file becomes for it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from partitioner.solver.formats.json_files import (
    FormatError,
    as_object,
    by_id,
    count,
    edges,
    number,
)


@dataclass(frozen=True)
class Value:
    """A value that one merged node makes and others read."""

    producer: int  #: Merged node that makes it.
    cost_s: float  #: Seconds of moving it on or off an accelerator.
    readers: tuple[int, ...]  #: Merged nodes that read it, ascending, without the producer.


@dataclass(frozen=True)
class Instance:
    """A file's content. Devices are its accelerators, then its CPUs."""

    accelerators: int
    cpus: int
    limit_bytes: float  #: Memory of an accelerator.
    #: Ids in the file of each merged node; merged nodes are in a topological order of the forward
    #: pass and the reversed backward pass, but for cycles.
    members: tuple[tuple[int, ...], ...]
    #: Seconds of each merged node on an accelerator; infinite if unsupported.
    accelerator_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  #: Seconds of each merged node on a CPU.
    size_bytes: tuple[float, ...]  #: Of each merged node.
    values: tuple[Value, ...]  #: Values that merged nodes read from each other.


def parse(data: Any) -> Instance:
    """An instance from JSON content."""
    top = as_object(data, "the file")
    cpus = count(top, "maxCPUs")
    accelerators = count(top, "maxFPGAs")
    if not accelerators + cpus:
        raise FormatError("maxFPGAs and maxCPUs are both 0: there is no device")
    nodes = _nodes(top)
    cost, readers = _edges(top, nodes)
    colours: dict[object, list[int]] = {}
    for name, node in nodes.items():
        colour = node.get("colorClass")
        colours.setdefault(("alone", name) if colour is None else colour, []).append(name)
    groups = list(colours.values())
    group_of = {name: index for index, group in enumerate(groups) for name in group}
    backward = {name: bool(node.get("isBackwardNode")) for name, node in nodes.items()}
    order = _topological(
        len(groups),
        {  # in the direction of the forward pass: edges of the backward pass are turned
            (group_of[v], group_of[u]) if backward[u] else (group_of[u], group_of[v])
            for u, targets in readers.items()
            for v in targets
            if backward[u] == backward[v] and group_of[u] != group_of[v]
        },
    )
    position = {group: place for place, group in enumerate(order)}
    members = tuple(tuple(groups[group]) for group in order)
    limit_bytes = number(top, "maxSizePerFPGA", "the file")

    def summed(seconds: Mapping[int, float]) -> tuple[float, ...]:
        return tuple(math.fsum(seconds[name] for name in group) for group in members)

    fields = ("fpgaLatency", "cpuLatency", "size")
    accelerator_s, cpu_s, size_bytes = (
        {name: number(node, key, f"node {name}") for name, node in nodes.items()} for key in fields
    )
    accelerator_s |= {name: math.inf for name, node in nodes.items() if not node["supportedOnFpga"]}
    place = {name: position[group_of[name]] for name in nodes}
    values = []
    for name, targets in sorted(readers.items(), key=lambda entry: (place[entry[0]], entry[0])):
        away = sorted({place[target] for target in targets} - {place[name]})
        if away and cost[name]:
            values.append(Value(place[name], cost[name], tuple(away)))
    instance = Instance(
        accelerators,
        cpus,
        limit_bytes,
        members,
        summed(accelerator_s),
        summed(cpu_s),
        summed(size_bytes),
        tuple(values),
    )
    for group, seconds in zip(members, instance.accelerator_s, strict=True):
        if math.isinf(seconds) and not cpus:
            raise FormatError(
                f"node {group[0]} or one of its colour needs a CPU, and there is none"
            )
    return instance


def _nodes(top: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    nodes = by_id(top)
    for name, node in nodes.items():
        if node.get("supportedOnFpga") not in (0, 1):
            raise FormatError(
                f"'supportedOnFpga' of node {name} is {node.get('supportedOnFpga')!r}, not 0 or 1"
            )
        if not isinstance(node.get("colorClass"), int | str | None):
            raise FormatError(f"'colorClass' of node {name} is {node['colorClass']!r}")
    return {name: {"size": 0.0, **node} for name, node in nodes.items()}


def _edges(
    top: Mapping[str, Any], nodes: Mapping[int, Mapping[str, Any]]
) -> tuple[dict[int, float], dict[int, set[int]]]:
    """Cost of each node's value, and the nodes that read it."""
    cost: dict[int, float] = {}
    readers: dict[int, set[int]] = defaultdict(set)
    for u, v, edge in edges(top, nodes):
        paid = number(edge, "cost", f"the edge from {u} to {v}")
        if cost.setdefault(u, paid) != paid:
            raise FormatError(
                f"edges from node {u} cost {cost[u]:g} and {paid:g}: one value leaves"
            )
        readers[u].add(v)
    return cost, readers


def _topological(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """An order along the arcs, smallest first; a cycle is entered at its smallest node."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for u, v in arcs:
        after[u].append(v)
        waiting[v] += 1
    ready = [node for node in range(count) if not waiting[node]]
    left = dict.fromkeys(range(count))
    order: list[int] = []
    while left:
        node = heapq.heappop(ready) if ready else next(iter(left))
        if node not in left:
            continue
        del left[node]
        order.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, other)
    return order


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
    # nodes, and on accelerators each value once for leaving and once for coming
    terms: dict[Place, list[float]] = {place: [] for place in home}
    for node, place in enumerate(home):
        terms[place].append((instance.cpu_s if place[0] else instance.accelerator_s)[node])
    for value in instance.values:
        producer = home[value.producer]
        away = {home[reader] for reader in value.readers} - {producer}
        for place in (producer, *away) if away else ():
            if place[0] == 0:
                terms[place].append(value.cost_s)
    largest_s = max(map(math.fsum, terms.values()))
    return SplitOutcome(largest_s, max(held, default=0.0), next(over, ""))


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
    for name, devices, most in zip(SIDES, *sides, strict=True):
        used = sum(map(bool, devices))
        if used > most:
            yield f"{used} {name}s are used, the problem has {most}"
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


def parse_split(data: Any) -> Split:
    """A solution from JSON content: `{"fpgas": [{"nodes": [ids]}, ...], "cpus": [...]}`."""
    if not isinstance(data, dict) or not all(isinstance(data.get(key), list) for key in _KEYS):
        raise FormatError('not an object with the lists "fpgas" and "cpus"')
    by_key: dict[str, list[Any]] = {
        key: [e.get("nodes") if isinstance(e, dict) else None for e in data[key]] for key in _KEYS
    }
    for key, nodes in ((key, nodes) for key, lists in by_key.items() for nodes in lists):
        if not isinstance(nodes, list) or set(map(type, nodes)) - {int}:
            raise FormatError(f'an entry of "{key}" has no list "nodes" of whole numbers')
    fpgas, cpus = (tuple(tuple(nodes) for nodes in by_key[key]) for key in _KEYS)
    return Split(fpgas, cpus)
