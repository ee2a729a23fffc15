"""From instances of msr-fiddle/dnn-partitioning to the problem that the solver takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
