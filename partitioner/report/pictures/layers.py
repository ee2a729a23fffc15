"""Positions of boxes: layers from top to bottom, few crossings, no edge through a box.

Sugiyama's method in short: layers are topological generations; an edge over several layers gets
a waypoint in each; barycentre sweeps order the layers; then every item moves towards its
neighbours as far as its layer allows. Long stacks of layers continue in further columns.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import networkx as nx

Item = Hashable  #: A node, or a waypoint (edge, layer).
Point = tuple[float, float]

_SWEEPS = 12
_WAYPOINT = 0.16  #: Width of a waypoint, in boxes.
_GUTTER = 0.35  #: Between columns, in boxes.
_MAX_COLUMNS = 8
_CENTRE = 0.3  #: Weight of the middle line, against 2 of a neighbour.
_MAX_WIDE = 6  #: Boxes side by side; wider generations take several layers.


@dataclass(frozen=True)
class Layout:
    """Positions: x to the right, in boxes; y down, in layers."""

    at: Mapping[Item, Point]  #: Centre of each node.
    #: Points of each edge from its source's centre to its target's.
    routes: Mapping[tuple[Item, Item], tuple[Point, ...]]
    width: float  #: Of everything, in boxes.
    rows: int  #: Layers in the longest column.


def arrange(graph: nx.DiGraph, shape: float) -> Layout:
    """Positions for a graph without cycles, of about `shape` rows for each box of width."""
    grid = _Grid.of(graph).swept()
    x = grid.centres()
    counts = range(1, min(len(grid.layers), _MAX_COLUMNS) + 1)
    columns = min(
        (_Columns.of(grid, x, count) for count in counts),
        key=lambda columns: abs(math.log(columns.rows / (columns.width * shape))),
    )
    at = {node: columns.spot(grid.depth[node], x[node]) for node in grid.graph}
    routes = {
        edge: tuple(columns.route([(grid.depth[item], x[item]) for item in chain]))
        for edge, chain in grid.chains.items()
    }
    return Layout(at, routes, columns.width, columns.rows)


def _layers(graph: nx.DiGraph) -> list[list[Item]]:
    """Generations of at most `_MAX_WIDE` nodes; sources stand right above their first reader."""
    order = {node: index for index, node in enumerate(graph)}
    depth: dict[Item, int] = {}
    for index, generation in enumerate(nx.topological_generations(graph)):
        depth.update(dict.fromkeys(generation, index))
    for node in reversed(list(nx.topological_sort(graph))):
        readers = [depth[reader] for reader in graph.successors(node)]
        if readers and not graph.in_degree(node):
            depth[node] = min(readers) - 1
    rows: dict[int, list[Item]] = defaultdict(list)
    for node in sorted(depth, key=lambda node: order[node]):
        rows[depth[node]].append(node)
    return [
        row[start : start + _MAX_WIDE]
        for _, row in sorted(rows.items())
        for start in range(0, len(row), _MAX_WIDE)
    ]


@dataclass(frozen=True)
class _Grid:
    """Layers of boxes and waypoints, and the neighbours of each."""

    graph: nx.DiGraph
    layers: Sequence[Sequence[Item]]  #: Items of each layer, from left to right.
    chains: Mapping[tuple[Item, Item], tuple[Item, ...]]  #: Each edge as items, one a layer.
    up: Mapping[Item, Sequence[Item]]  #: Neighbours of each item in the layer above.
    down: Mapping[Item, Sequence[Item]]  #: The same in the layer below.

    @classmethod
    def of(cls, graph: nx.DiGraph) -> _Grid:
        layers = _layers(graph)
        depth = {node: index for index, row in enumerate(layers) for node in row}
        chains: dict[tuple[Item, Item], tuple[Item, ...]] = {}
        up: dict[Item, list[Item]] = defaultdict(list)
        down: dict[Item, list[Item]] = defaultdict(list)
        for edge in graph.edges:
            first, last = depth[edge[0]], depth[edge[1]]
            for layer in range(first + 1, last):
                layers[layer].append((edge, layer))
            waypoints = ((edge, layer) for layer in range(first + 1, last))
            chains[edge] = edge[0], *waypoints, edge[1]
            for above, below in itertools.pairwise(chains[edge]):
                down[above].append(below)
                up[below].append(above)
        return cls(graph, layers, chains, up, down)

    @cached_property
    def depth(self) -> Mapping[Item, int]:
        return {item: index for index, row in enumerate(self.layers) for item in row}

    def swept(self) -> _Grid:
        """The same with its layers ordered by the mean place of the neighbours, down and up."""
        layers = [list(row) for row in self.layers]
        best = self._crossings(layers), self.layers
        for turn in range(_SWEEPS):
            toward = self.up if turn % 2 == 0 else self.down
            for row in layers if turn % 2 == 0 else layers[::-1]:
                # By the mean place of the neighbours, 0 .. 1 in their layer.
                place = {
                    item: (i + 0.5) / len(items) for items in layers for i, item in enumerate(items)
                }
                means = {
                    item: sum(place[n] for n in near) / len(near)
                    for item in row
                    for near in (toward.get(item) or [item],)
                }
                row.sort(key=means.__getitem__)
            crossings = self._crossings(layers)
            if crossings < best[0]:
                best = crossings, [list(row) for row in layers]
        return replace(self, layers=best[1])

    def _crossings(self, layers: Sequence[Sequence[Item]]) -> int:
        place = {item: index for row in layers for index, item in enumerate(row)}
        total = 0
        for row in layers:
            ends = sorted((place[a], place[b]) for a in row for b in self.down.get(a, ()))
            total += sum(a[1] > b[1] for a, b in itertools.combinations(ends, 2))
        return total

    def width(self, item: Item) -> float:
        return 1.0 if item in self.graph else _WAYPOINT

    def centres(self) -> dict[Item, float]:
        """Centres, in boxes: near the mean of the neighbours, in order and without overlap."""
        x: dict[Item, float] = {}
        for row in self.layers:
            x.update(self._spread(row, [0.0] * len(row)))
        for turn in range(4 * _SWEEPS):
            for row in self.layers if turn % 2 == 0 else self.layers[::-1]:
                x.update(self._spread(row, [self._pull(item, x) for item in row]))
        return x

    def _pull(self, item: Item, x: Mapping[Item, float]) -> float:
        near = [*self.up.get(item, ()), *self.down.get(item, ())]
        if not near:
            return x[item]
        # Large between two boxes and within a long edge, to keep these straight.
        weights = [(4.0, 0.4, 2.0)[(item in self.graph) + (n in self.graph)] for n in near]
        pull = sum(w * x[n] for w, n in zip(weights, near, strict=True))
        return pull / (sum(weights) + _CENTRE)

    def _spread(self, row: Sequence[Item], wanted: Sequence[float]) -> dict[Item, float]:
        """The nearest centres in order and distance (least squares: pool adjacent violators)."""
        offsets, reach = [], 0.0
        for index, item in enumerate(row):
            gap = (self.width(row[index - 1]) + self.width(item)) / 2 + 0.12 if index else 0.0
            reach += gap
            offsets.append(reach)
        blocks: list[tuple[float, int]] = []  # (mean of wanted - offset, items)
        for target, offset in zip(wanted, offsets, strict=True):
            blocks.append((target - offset, 1))
            while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
                (mean, count), (last, more) = blocks[-2], blocks[-1]
                blocks[-2:] = [((mean * count + last * more) / (count + more), count + more)]
        starts = [mean for mean, count in blocks for _ in range(count)]
        return {i: s + o for i, s, o in zip(row, starts, offsets, strict=True)}


@dataclass(frozen=True)
class _Columns:
    """The stack of layers cut into columns of `rows` layers, each as wide as it needs to be."""

    rows: int
    lefts: tuple[float, ...]  #: In the picture, of each column.
    firsts: tuple[float, ...]  #: The same in the stack.
    width: float

    @classmethod
    def of(cls, grid: _Grid, x: Mapping[Item, float], count: int) -> _Columns:
        rows = math.ceil(len(grid.layers) / count)
        lefts, firsts, reach = [], [], 0.0
        for start in range(0, len(grid.layers), rows):
            items = [item for row in grid.layers[start : start + rows] for item in row]
            firsts.append(min(x[item] - grid.width(item) / 2 for item in items))
            lefts.append(reach)
            reach += max(x[item] + grid.width(item) / 2 for item in items) - firsts[-1] + _GUTTER
        return cls(rows, tuple(lefts), tuple(firsts), reach - _GUTTER)

    def spot(self, depth: int, x: float) -> Point:
        column, row = divmod(depth, self.rows)
        return x - self.firsts[column] + self.lefts[column], float(row)

    def route(self, stops: Sequence[tuple[int, float]]) -> Iterator[Point]:
        """Through (layer, x) stops; from a column's foot to the next one's head in a gutter."""
        for index, (depth, x) in enumerate(stops):
            here = self.spot(depth, x)
            if index and depth % self.rows == 0:
                before = self.spot(*stops[index - 1])
                left = self.lefts[depth // self.rows]
                # Its start gives it a place of its own in the gutter.
                inside = (before[0] - self.lefts[depth // self.rows - 1]) / left
                gutter = left - _GUTTER * (0.15 + 0.6 * inside)
                low, high = self.rows - 0.5 + 0.25 * inside, -0.75 + 0.25 * inside
                yield from ((before[0], low), (gutter, low), (gutter, high), (here[0], high))
            yield here
