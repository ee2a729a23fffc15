"""A placement problem in the format of msr-fiddle/dnn-partitioning (see `dnnp`).

What the format cannot say, and what is written instead:

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from partitioner.solver.problem import Edge, Problem


@dataclass(frozen=True)
class Placement:
    """A problem file's content.

    Attributes:
        data: The JSON content; ids of the problem's nodes are their positions.
        uneven: Costs and sizes of nodes and values that differ by device.
        figures: How many there are.
        pinned: Nodes that may run on one device only.
    """

    data: dict[str, Any]
    uneven: int
    figures: int
    pinned: int


def to_file(problem: Problem) -> Placement:
    """The content of a problem's file; seconds and bytes are its units.

    Args:
        problem: One whose groups are single devices.
    """
    return _Writer(problem).run()


class _Writer:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.made = [_values(own) for own in _by_producer(problem)]
        self.nodes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.ranges: list[tuple[float, float]] = []

    def run(self) -> Placement:
        problem = self.problem
        sizes = self._sizes()
        homes = [{choice.group for choice in choices} for choices in problem.nodes]
        pinned = [next(iter(own)) if len(own) == 1 else None for own in homes]
        colours = self._colours(pinned if problem.devices > 1 else [None] * len(pinned))
        for node, choices in enumerate(problem.nodes):
            self._node(colours[node], self._largest([max(c.load_s) for c in choices]), sizes[node])
        for node in range(len(problem.nodes)):
            self._write_values(node, colours[node])
        data = {
            "maxFPGAs": problem.devices,
            "maxCPUs": 0,
            "maxSizePerFPGA": self._limit(sizes),
            "nodes": self.nodes,
            "edges": self.edges,
        }
        uneven = sum(least != most for least, most in self.ranges)
        alone = sum(home is not None for home in pinned) if problem.devices > 1 else 0
        return Placement(data, uneven, len(self.ranges), alone)

    def _largest(self, values: Sequence[float]) -> float:
        least, most = min(values, default=0.0), max(values, default=0.0)
        self.ranges.append((least, most))
        return most

    def _sizes(self) -> list[float]:
        held: list[list[float]] = [[0.0] * len(choices) for choices in self.problem.nodes]
        for hold in self.problem.holds:
            for choice, items in enumerate(hold.items):
                sizes = (max(self.problem.items[item].bytes) for item in items)
                held[hold.node][choice] += math.fsum(sizes)
        return [self._largest(own) for own in held]

    def _limit(self, sizes: Sequence[float]) -> float:
        """The smallest limit; what no plan exceeds where there is none."""
        limit = min(self.problem.limit_bytes)
        return limit if math.isfinite(limit) else math.fsum(sizes)

    def _colours(self, pinned: Sequence[int | None]) -> list[int | None]:
        """A class for each device that nodes are pinned to, and for each node of several values."""
        first = self.problem.devices
        return [
            (first + node if len(self.made[node]) > 1 else None) if home is None else home
            for node, home in enumerate(pinned)
        ]

    def _write_values(self, node: int, colour: int | None) -> None:
        made = self.made[node]
        for edges in made:
            source = node
            if len(made) > 1:
                source = self._node(colour, 0.0, 0.0)
                self._edge(node, source, 0.0)
            cost = self._cost(edges)
            for reader in sorted({edge.v for edge in edges}):
                self._edge(source, reader, cost)

    def _cost(self, edges: Sequence[Edge]) -> float:
        """Seconds of moving a value: of the busier end, between the two devices farthest apart."""
        moves = {paid for edge in edges for pair, paid in edge.items.items() if paid}
        loads = [[self.problem.items[item].load_s for item in paid] for paid in sorted(moves)]
        return self._largest([max(map(math.fsum, zip(*own, strict=True))) for own in loads])

    def _node(self, colour: int | None, seconds: float, size: float) -> int:
        self.nodes.append(
            {
                "id": len(self.nodes),
                "fpgaLatency": seconds,
                "cpuLatency": seconds,
                "size": size,
                "colorClass": colour,
                "isBackwardNode": 0,
                "supportedOnFpga": 1,
            }
        )
        return len(self.nodes) - 1

    def _edge(self, source: int, target: int, cost: float) -> None:
        self.edges.append({"sourceId": source, "destId": target, "cost": cost})


def _by_producer(problem: Problem) -> list[list[Edge]]:
    edges: list[list[Edge]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        edges[edge.u].append(edge)
    return edges


def _values(edges: Sequence[Edge]) -> list[list[Edge]]:
    """The edges of each value that a node makes: those that can trigger the same items."""
    values: list[tuple[set[int], list[Edge]]] = []
    for edge in edges:
        items = {item for paid in edge.items.values() for item in paid}
        same = [value for value in values if value[0] & items or not (value[0] or items)]
        others = [value for value in values if not any(value is own for own in same)]
        merged = items.union(*(known for known, _ in same))
        values = [*others, (merged, [*(e for _, own in same for e in own), edge])]
    return [own for _, own in values]
