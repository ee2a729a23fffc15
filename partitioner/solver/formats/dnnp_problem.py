"""Between instances of msr-fiddle/dnn-partitioning and the problem that the solver takes.

The format cannot state all of a problem. Written instead is:

- One accelerator for all: where a node's seconds or bytes differ by device, the largest.
- A sender pays for a value once, not once a device that it sends to.
- Memory is a plain sum: a node's size is all that it holds by itself (weights, fed inputs, the
  values it makes), as if nothing were freed and nothing shared; received copies count nothing.
- No node can be pinned to a device: nodes that may run on one device only, the same, share a
  colour class.

A node that makes several values gets an empty node of its colour for each of them, since in the
format all edges that leave a node carry one value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partitioner.solver.formats.dnnp import Instance
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem


def to_problem(instance: Instance) -> Problem:
    """The problem of an instance: a choice is a device that can run the node."""
    accelerators, devices = instance.accelerators, instance.accelerators + instance.cpus
    items: list[Item] = []

    def on(device: int, value: float) -> tuple[float, ...]:
        return tuple(value if d == device else 0.0 for d in range(devices))

    def item(device: int, load_s: float, size_bytes: float) -> tuple[int, ...]:
        """Adds an item of an accelerator; CPUs pay no transfer and have no limit."""
        if device >= accelerators:
            return ()
        last = len(instance.members) - 1
        items.append(Item(on(device, load_s), on(device, size_bytes), 0, last))
        return (len(items) - 1,)

    def choice(node: int, device: int) -> Choice:
        by_node = instance.accelerator_s if device < accelerators else instance.cpu_s
        return Choice(on(device, by_node[node]), device)

    homes = [_homes(instance, seconds) for seconds in instance.accelerator_s]
    nodes = tuple(tuple(choice(node, d) for d in home) for node, home in enumerate(homes))
    holds = tuple(
        Hold(node, tuple(item(d, 0.0, size) for d in homes[node]))
        for node, size in enumerate(instance.size_bytes)
        if size
    )
    edges = []
    for value in instance.values:
        leaves = [item(d, value.cost_s, 0.0) for d in range(devices)]
        arrives = [item(d, value.cost_s, 0.0) for d in range(devices)]
        sent = {
            (a, b): leaves[a] + arrives[b] for a, b in itertools.permutations(range(devices), 2)
        }
        turned = {(b, a): paid for (a, b), paid in sent.items()}
        for reader in value.readers:
            u, v = sorted((value.producer, reader))
            paid = sent if u == value.producer else turned
            edges.append(Edge(u, v, tuple(homes[u]), tuple(homes[v]), paid))
    return Problem(
        devices=devices,
        limit_bytes=(instance.limit_bytes,) * accelerators + (math.inf,) * instance.cpus,
        nodes=nodes,
        names=tuple("+".join(map(str, group)) for group in instance.members),
        edges=tuple(edges),
        holds=holds,
        items=tuple(items),
        interchangeable=(tuple(range(accelerators)), tuple(range(accelerators, devices))),
    )


def _homes(instance: Instance, accelerator_s: float) -> range:
    """The devices that can run a node of so many seconds on an accelerator."""
    first = instance.accelerators if math.isinf(accelerator_s) else 0
    return range(first, instance.accelerators + instance.cpus)


def to_solution(instance: Instance, chosen: Sequence[int]) -> dict[str, list[dict[str, list[int]]]]:
    """The plan of one choice a node of `to_problem`, as the authors' programs print it."""
    devices: list[list[int]] = [[] for _ in range(instance.accelerators + instance.cpus)]
    for group, seconds, choice in zip(
        instance.members, instance.accelerator_s, chosen, strict=True
    ):
        devices[_homes(instance, seconds)[choice]] += group
    entries = [{"nodes": sorted(nodes)} for nodes in devices]
    return {"fpgas": entries[: instance.accelerators], "cpus": entries[instance.accelerators :]}


@dataclass(frozen=True)
class PlacementFile:
    """A problem file's content."""

    data: dict[str, Any]  #: The JSON content; ids of the problem's nodes are their positions.
    uneven: int  #: Costs and sizes of nodes and values that differ by device.
    figures: int  #: How many costs and sizes there are.
    pinned: int  #: Nodes that may run on one device only.


def to_file(problem: Problem) -> PlacementFile:
    """The file of a problem whose groups are single devices; its units are seconds and bytes."""
    nodes: list[dict[str, Any]] = []
    edges: list[dict[str, Any]] = []
    differs: list[bool] = []

    def largest(values: Sequence[float]) -> float:
        most = max(values, default=0.0)
        differs.append(min(values, default=0.0) != most)
        return most

    def add_node(colour: int | None, seconds: float, size: float) -> int:
        nodes.append(
            {
                "id": len(nodes),
                "fpgaLatency": seconds,
                "cpuLatency": seconds,
                "size": size,
                "colorClass": colour,
                "isBackwardNode": 0,
                "supportedOnFpga": 1,
            }
        )
        return len(nodes) - 1

    values = _values_by_producer(problem)
    held = [[0.0] * len(choices) for choices in problem.nodes]
    for hold in problem.holds:
        for choice, items in enumerate(hold.items):
            held[hold.node][choice] += math.fsum(max(problem.items[item].bytes) for item in items)
    sizes = [largest(sizes) for sizes in held]
    homes = [{choice.group for choice in choices} for choices in problem.nodes]
    pins = [min(home) if len(home) == 1 and problem.devices > 1 else None for home in homes]
    colours = [  # after those of the devices, one for each node of several values
        (problem.devices + node if len(values[node]) > 1 else None) if pin is None else pin
        for node, pin in enumerate(pins)
    ]
    for colour, choices, size in zip(colours, problem.nodes, sizes, strict=True):
        add_node(colour, largest([max(choice.load_s) for choice in choices]), size)
    for node, colour in enumerate(colours):
        for value in values[node]:
            source = node
            if len(values[node]) > 1:
                source = add_node(colour, 0.0, 0.0)
                edges.append({"sourceId": node, "destId": source, "cost": 0.0})
            # seconds of moving a value, of the busier end, for each pair of devices
            moves = {paid for edge in value for paid in edge.items.values() if paid}
            loads = [[problem.items[item].load_s for item in paid] for paid in sorted(moves)]
            cost = largest([max(map(math.fsum, zip(*by_item, strict=True))) for by_item in loads])
            readers = sorted({edge.v for edge in value})
            edges += [{"sourceId": source, "destId": reader, "cost": cost} for reader in readers]
    limit = min(problem.limit_bytes)
    data = {
        "maxFPGAs": problem.devices,
        "maxCPUs": 0,
        # without a limit: what no plan exceeds
        "maxSizePerFPGA": limit if math.isfinite(limit) else math.fsum(sizes),
        "nodes": nodes,
        "edges": edges,
    }
    return PlacementFile(data, sum(differs), len(differs), sum(pin is not None for pin in pins))


def _values_by_producer(problem: Problem) -> list[list[list[Edge]]]:
    """List for each node the edges of each value that it makes: they trigger the same items."""
    values: list[list[tuple[set[int], list[Edge]]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        items = {item for paid in edge.items.values() for item in paid}
        edges: list[Edge] = []
        others = []
        for known, value in values[edge.u]:
            if known & items or not (known or items):
                items, edges = items | known, edges + value
            else:
                others.append((known, value))
        values[edge.u] = [*others, (items, [*edges, edge])]
    return [[edges for _, edges in by_node] for by_node in values]
