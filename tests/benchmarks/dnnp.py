"""Placement quality on msr-fiddle/dnn-partitioning instances: cost, bound, gap, seconds.

    python tests/benchmarks/dnnp.py FOLDER_OR_FILE... [--time-limit 10]

Model (theirs): load of an accelerator = its nodes' times + each value that comes in once + each
value that goes out once. Ours charges a value that goes out once a target accelerator; the
difference is a value read on two others. The figure printed as `theirs` is their load of our plan.
Nodes of one colour class are placed together: they become one node here.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from partitioner.solver import Choice, Edge, Hold, Item, Problem, evaluate_choices, solve


@dataclass(frozen=True)
class Instance:
    """Merged nodes in a topological order.

    Attributes:
        devices: Accelerators.
        limit: Bytes of each.
        seconds: Of each merged node.
        size: Bytes of each merged node.
        values: (producer, cost, readers) of each value that leaves its node.
    """

    devices: int
    limit: float
    seconds: tuple[float, ...]
    size: tuple[float, ...]
    values: tuple[tuple[int, float, tuple[int, ...]], ...]


def read(path: Path) -> Instance:
    """Read one of their files, merging colour classes and then cycles of merged nodes."""
    data = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    colour = {i: node.get("colorClass") or f"free {i}" for i, node in nodes.items()}
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted(set(map(str, colour.values()))))
    for edge in data["edges"]:
        ends = str(colour[edge["sourceId"]]), str(colour[edge["destId"]])
        if ends[0] != ends[1]:
            graph.add_edge(*ends)
    position = {name: index for index, name in enumerate(_order(graph))}
    place = {i: position[str(c)] for i, c in colour.items()}
    seconds, size = [0.0] * len(position), [0.0] * len(position)
    for i, node in nodes.items():
        seconds[place[i]] += node["fpgaLatency"]
        size[place[i]] += node.get("size", 0.0)
    readers: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = {}
    for edge in data["edges"]:
        source = edge["sourceId"]
        cost[source] = edge["cost"]
        if place[edge["destId"]] != place[source]:
            readers[source].add(place[edge["destId"]])
    values = tuple((place[i], cost[i], tuple(sorted(own))) for i, own in readers.items())
    return Instance(data["maxFPGAs"], data["maxSizePerFPGA"], tuple(seconds), tuple(size), values)


def _order(graph: "nx.DiGraph[str]") -> list[str]:
    """Topological where it can be (training graphs merged by colour have cycles)."""
    whole = nx.condensation(graph)
    return [
        name
        for part in nx.topological_sort(whole)
        for name in sorted(whole.nodes[part]["members"], key=lambda n: (len(n), n))
    ]


def problem(instance: Instance) -> Problem:
    """Their instance as ours; an edge against the order is turned round, the cost is the same."""
    count, devices = len(instance.seconds), instance.devices

    def one(device: int, value: float) -> tuple[float, ...]:
        return tuple(value if d == device else 0.0 for d in range(devices))

    items = [
        Item(one(0, 0.0), one(d, size), 0, count - 1)
        for size in instance.size
        for d in range(devices)
    ]
    holds = [Hold(v, tuple((v * devices + d,) for d in range(devices))) for v in range(count)]
    everywhere = tuple(range(devices))
    edges = []
    for node, cost, readers in instance.values:
        sent = {}
        for a in everywhere:
            for b in everywhere:
                if a != b:
                    load = tuple(x + y for x, y in zip(one(a, cost), one(b, cost), strict=True))
                    items.append(Item(load, one(0, 0.0), 0, 0))
                    sent[(a, b)] = (len(items) - 1,)
        back = {(b, a): paid for (a, b), paid in sent.items()}
        for reader in readers:
            forward = node < reader
            u, v = (node, reader) if forward else (reader, node)
            edges.append(Edge(u, v, everywhere, everywhere, sent if forward else back))
    nodes = tuple(
        tuple(Choice(one(d, seconds), d, str(d)) for d in range(devices))
        for seconds in instance.seconds
    )
    names = tuple(map(str, range(count)))
    return Problem(
        devices,
        (instance.limit,) * devices,
        nodes,
        names,
        tuple(edges),
        tuple(holds),
        tuple(items),
        (everywhere,),
    )


def theirs(instance: Instance, chosen: tuple[int, ...]) -> float:
    """Their largest load of a plan."""
    load = [0.0] * instance.devices
    for seconds, device in zip(instance.seconds, chosen, strict=True):
        load[device] += seconds
    for node, cost, readers in instance.values:
        targets = {chosen[reader] for reader in readers} - {chosen[node]}
        for device in [*targets, *([chosen[node]] if targets else [])]:
            load[device] += cost
    return max(load)


HEADER = (
    f"{'instance':34} {'nodes':>6} {'cost':>10} {'theirs':>10} {'bound':>10} {'gap':>7} {'s':>6}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--time-limit", type=float, default=10.0)
    options = parser.parse_args()
    files = [f for p in options.paths for f in (sorted(p.glob("*.json")) if p.is_dir() else [p])]
    print(HEADER)
    for path in files:
        instance = read(path)
        asked = problem(instance)
        start = time.perf_counter()
        found = solve(asked, time_limit_s=options.time_limit)
        spent = time.perf_counter() - start
        assert math.isclose(found.cost, evaluate_choices(asked, found.chosen).step_s)
        costs = found.cost, theirs(instance, found.chosen), found.bound
        figures = " ".join(f"{cost:10.4f}" for cost in costs)
        print(f"{path.stem:34} {len(asked.nodes):6} {figures} {found.gap:7.2%} {spent:6.2f}")


if __name__ == "__main__":
    main()
