"""A plan that is changed node by node, with its loads and bytes kept up to date.

The state counts how many sites trigger each item, so that a move costs as much as the node has
edges, whatever the size of the graph.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from partitioner.solver.problem import Item, Problem, clique_positions

Sparse = tuple[tuple[int, float], ...]  #: (device, seconds), zeros left out.
#: (first device, after the last, first position, after the last, bytes); positions are cliques.
Block = tuple[int, int, int, int, float]
#: Items of an edge by the choice of a node and that of the other node; None is forbidden.
Table = tuple[tuple[tuple[int, ...] | None, ...], ...]


@dataclass(frozen=True)
class Tables:
    """A problem laid out for moves."""

    problem: Problem
    load: tuple[tuple[Sparse, ...], ...]  #: Of each choice of each node.
    near: tuple[tuple[tuple[int, Table], ...], ...]  #: For each node its edges: other node, items.
    hold_items: tuple[tuple[tuple[int, ...], ...], ...]  #: Of each choice of each node.
    item_load: tuple[Sparse, ...]
    blocks: tuple[tuple[Block, ...], ...]  #: The bytes of each item.
    positions: int  #: Positions of the order that count: the maximal cliques of the intervals.


def tables(problem: Problem) -> Tables:
    """Lay a problem out."""
    near: list[list[tuple[int, Table]]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        table = tuple(
            tuple(
                None if (o, i) in edge.forbidden else edge.items.get((o, i), ())
                for i in edge.in_class
            )
            for o in edge.out_class
        )
        near[edge.u].append((edge.v, table))
        near[edge.v].append((edge.u, tuple(zip(*table, strict=True))))
    cliques = clique_positions((item.first, item.last) for item in problem.items if any(item.bytes))
    hold_items: list[list[tuple[int, ...]]] = [[()] * len(choices) for choices in problem.nodes]
    for hold in problem.holds:
        both = zip(hold_items[hold.node], hold.items, strict=True)
        hold_items[hold.node] = [a + b for a, b in both]
    return Tables(
        problem,
        tuple(tuple(_sparse(choice.load_s) for choice in choices) for choices in problem.nodes),
        tuple(map(tuple, near)),
        tuple(map(tuple, hold_items)),
        tuple(_sparse(item.load_s) for item in problem.items),
        tuple(_blocks(item, cliques) for item in problem.items),
        len(cliques),
    )


def _blocks(item: Item, cliques: Sequence[int]) -> tuple[Block, ...]:
    start, stop = bisect_left(cliques, item.first), bisect_right(cliques, item.last)
    blocks = []
    device = 0
    for size, devices in groupby(item.bytes):
        count = len(list(devices))
        if size:
            blocks.append((device, device + count, start, stop, size))
        device += count
    return tuple(blocks)


def _sparse(vector: Sequence[float]) -> Sparse:
    return tuple((index, value) for index, value in enumerate(vector) if value)


class State:
    """A plan with its loads and, if they matter, its bytes."""

    def __init__(self, data: Tables, chosen: Sequence[int], *, bytes_matter: bool) -> None:
        problem = data.problem
        self.data = data
        self.chosen = list(chosen)
        self.load = [0.0] * problem.devices
        self.count = [0] * len(problem.items)
        self.live_bytes = np.zeros((problem.devices, data.positions)) if bytes_matter else None
        for node, choice in enumerate(chosen):
            self._load(data.load[node][choice], 1)
            self._trigger(data.hold_items[node][choice])
            for other, table in data.near[node]:
                if other > node:
                    self._trigger(table[choice][chosen[other]] or ())

    def allowed(self, node: int, choice: int) -> bool:
        """Test whether no edge forbids the choice beside the others'."""
        chosen = self.chosen
        for other, table in self.data.near[node]:
            if table[choice][chosen[other]] is None:
                return False
        return True

    def move(self, node: int, choice: int) -> None:
        """Let a node take another choice."""
        old = self.chosen[node]
        data = self.data
        self._load(data.load[node][old], -1)
        self._load(data.load[node][choice], 1)
        for other, table in data.near[node]:
            at = self.chosen[other]
            before, after = table[old][at], table[choice][at]
            if before != after:
                self._trigger(after or ())
                self._release(before or ())
        if data.hold_items[node][old] != data.hold_items[node][choice]:
            self._trigger(data.hold_items[node][choice])
            self._release(data.hold_items[node][old])
        self.chosen[node] = choice

    def _load(self, load: Sparse, sign: int) -> None:
        for device, seconds in load:
            self.load[device] += sign * seconds

    def _trigger(self, items: Sequence[int]) -> None:
        for item in items:
            if not self.count[item]:
                self._load(self.data.item_load[item], 1)
                self._hold(item, 1)
            self.count[item] += 1

    def _release(self, items: Sequence[int]) -> None:
        for item in items:
            self.count[item] -= 1
            if not self.count[item]:
                self._load(self.data.item_load[item], -1)
                self._hold(item, -1)

    def _hold(self, index: int, sign: int) -> None:
        if self.live_bytes is not None:
            for first, last, start, stop, size in self.data.blocks[index]:
                self.live_bytes[first:last, start:stop] += sign * size

    def excess_bytes(self) -> float:
        """Count by how much the worst device is over its limit; 0 if bytes do not matter."""
        if self.live_bytes is None:
            return 0.0
        over = [p - top for p, top in zip(self.peaks(), self.data.problem.limit_bytes, strict=True)]
        return max(0.0, *over)

    def peaks(self) -> list[float]:
        """The most bytes on each device; 0 if bytes do not matter."""
        if self.live_bytes is None:
            return [0.0] * len(self.load)
        peaks: list[float] = self.live_bytes.max(axis=1, initial=0.0).tolist()
        return peaks
