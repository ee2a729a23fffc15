"""Runs of nodes that could be stretches in blocks: their bytes and seconds, by number of blocks.

A run is a contiguous part of the graph's order. Its bytes depend on the run alone: what lives at
its borders is whole, whatever the rest of the model does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.compute import kernel_seconds, node_seconds
from partitioner.cost_model.memory import safe_lifetimes, usage_curves
from partitioner.cost_model.schedule import LOAD_BYTES_PER_S, Schedule, schedule
from partitioner.ir.blocks import Chunk, Stretch
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.ops.pieces import is_of_torch
from partitioner.ir.plan import place
from partitioner.ir.rule import Rule
from partitioner.ir.types import dense_bytes
from partitioner.strategies.stretch_layout import BlockError, StretchLayout, lay_out

#: Numbers of parts of a dim that are tried, and of each of two dims.
PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SQUARE_PARTS = (2, 3, 4, 6, 8)
#: Of more blocks in a dim than this, those inside are priced as one.
ALL_PRICED = 3


@dataclass(frozen=True)
class Option:
    """A run of nodes in blocks, or as one block.

    Attributes:
        start: Position of its first node.
        stop: Position behind its last node.
        chunks: The dims that are cut.
        activation_bytes: Most bytes of tensors while it runs, without head-room.
        constant_bytes: Most bytes of constants that one block reads.
        staying_bytes: Of the constants of its nodes that run once, before the blocks.
        seconds: Of all blocks, with the loading of their constants.
    """

    start: int
    stop: int
    chunks: tuple[Chunk, ...]
    activation_bytes: int
    constant_bytes: int
    staying_bytes: int
    seconds: float

    def stretch(self, graph: Graph) -> Stretch:
        """The stretch of the graph."""
        first, last = graph.nodes[self.start].name, graph.nodes[self.stop - 1].name
        return Stretch(first, last, self.chunks)


@dataclass
class Runs:
    """The runs of a graph's nodes on one device.

    Attributes:
        graph: The graph, of inference.
        cluster: The cluster; its first device runs the graph.
    """

    graph: Graph
    cluster: Cluster
    _clusters: dict[int, Cluster] = field(default_factory=dict)

    @cached_property
    def _parts_are_views(self) -> bool:
        """Whether a part of a value is its memory, and no copy."""
        return is_of_torch(self.graph)

    @cached_property
    def whole(self) -> Schedule:
        """The graph as it is, on one device."""
        mesh, rules = DeviceMesh.single(0), rules_of(self.graph)
        placed = []
        for node in self.graph.nodes:
            rule = rules[node.name]
            placed.append(place(self.graph, node, mesh, {}, rule if isinstance(rule, Rule) else None))
        return schedule(self.graph, placed, self.cluster)

    @cached_property
    def seconds(self) -> Sequence[float]:
        """Seconds of each node as a whole."""
        return [task.devices.get(0, 0.0) for task in self.whole.tasks]

    @cached_property
    def activation_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of tensors at each node of the graph as a whole, without head-room."""
        curves = usage_curves(self.whole, safe_lifetimes(self.whole))
        return curves.get(0, np.zeros(len(self.graph.nodes), np.int64))

    @cached_property
    def constants(self) -> Sequence[frozenset[str]]:
        """Constants that each node reads."""
        return [
            frozenset(value for value in node.reads if value in self.graph.constants)
            for node in self.graph.nodes
        ]

    def constant_bytes(self, start: int, stop: int) -> int:
        """Bytes of the constants that a run reads."""
        names = frozenset().union(*self.constants[start:stop])
        return sum(self.graph.types[name].nbytes for name in names)

    @cached_property
    def _lives(self) -> tuple[npt.NDArray[np.int64], ...]:
        """First and last position, bytes, and whether it is an input, of each tensor."""
        inputs = set(self.graph.inputs)
        rows = [
            (life.first, life.last, life.nbytes, life.value in inputs)
            for life in safe_lifetimes(self.whole)
        ]
        return tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes of what a run reads or leaves as it is, while it runs and when it ends."""
        first, last, nbytes, fed = self._lives
        there = (first < start) | ((fed == 1) & (first < stop))
        return (
            int(nbytes[there & (last >= start)].sum()),
            int(nbytes[there & (last >= stop)].sum()),
        )

    def handed_bytes(self, start: int, stop: int) -> int:
        """Bytes that a run makes and that are read behind it."""
        first, last, nbytes, fed = self._lives
        made = (first >= start) & (first < stop) & (fed == 0)
        return int(nbytes[made & (last >= stop)].sum())

    def as_one(self, start: int, stop: int) -> Option:
        """The run as one block, not cut."""
        constants = self.constant_bytes(start, stop)
        seconds = sum(self.seconds[start:stop]) + constants / LOAD_BYTES_PER_S
        most = int(self.activation_bytes[start:stop].max())
        return Option(start, stop, (), most, constants, 0, seconds)

    def cut(self, start: int, stop: int, most_bytes: int, enough_bytes: int) -> Iterator[Option]:
        """The run in blocks, in dims and numbers, the fewest blocks of each dim first.

        Args:
            start: Position of its first node.
            stop: Position behind its last node.
            most_bytes: Options of more bytes of tensors are left out.
            enough_bytes: Once so few of tensors are held, more blocks are not tried.
        """
        inside, after = self.around(start, stop)
        if max(inside, after) + self.handed_bytes(start, stop) > most_bytes:
            return
        peak = int(self.activation_bytes[start:stop].max())
        least = max(2, (peak - inside) // max(1, most_bytes - inside) // 2)
        known: set[tuple[str, ...]] = set()
        by_value: dict[str, list[int]] = {}
        for value, dim in self._seeds(start, stop):
            options = self._along(start, stop, ((value, dim),), PARTS, least, known, enough_bytes)
            for option in options:
                if dim not in by_value.setdefault(value, []):
                    by_value[value].append(dim)
                if option.activation_bytes <= most_bytes:
                    yield option
        for value, dims in by_value.items():
            if len(dims) > 1:
                pair = tuple((value, dim) for dim in dims[-2:])
                for option in self._along(start, stop, pair, SQUARE_PARTS, 2, set(), enough_bytes):
                    if option.activation_bytes <= most_bytes:
                        yield option

    def _along(
        self,
        start: int,
        stop: int,
        dims: Sequence[tuple[str, int]],
        counts: Sequence[int],
        least: int,
        known: set[tuple[str, ...]],
        enough_bytes: int,
    ) -> Iterator[Option]:
        """The run with these dims in so many parts each; nothing if it cuts loops that are known.

        Loops that it cuts become known. More parts are not tried once few enough bytes are held, of
        constants too where more parts hold fewer.
        """
        size = min(self.graph.types[value].shape[dim] for value, dim in dims)
        is_first, constants = True, self.constant_bytes(start, stop)
        for parts in counts:
            if not min(least, size) <= parts <= size:
                continue
            chunks = tuple(Chunk(value, dim, parts) for value, dim in dims)
            option = Option(start, stop, chunks, 0, 0, 0, 0.0)
            try:
                layout = lay_out(self.graph, option.stretch(self.graph))
            except BlockError:
                return
            edges = {self.graph.nodes[at].name for at in (start, stop - 1)}
            if edges.intersection(node.name for node in layout.once):
                return  # as a shorter run
            if is_first:
                key = tuple(f"{p.node.name} {' '.join(p.layouts)}" for p in layout.placed)
                if key in known:
                    return
                known.add(key)
                is_first = False
            priced = self._priced(option, layout)
            yield priced
            shrinks = priced.constant_bytes < constants
            constants = priced.constant_bytes
            if priced.activation_bytes <= enough_bytes and (
                constants <= enough_bytes // 4 or not shrinks
            ):
                return

    def _seeds(self, start: int, stop: int) -> Iterator[tuple[str, int]]:
        """Dims that a cut may begin with: of what the last node makes, and of the first."""
        for position in dict.fromkeys((stop - 1, start)):
            for value in self.graph.nodes[position].writes[:1]:
                for dim, size in enumerate(self.graph.types[value].shape):
                    if size > 1:
                        yield value, dim

    def _priced(self, option: Option, layout: StretchLayout) -> Option:
        inside, after = self.around(option.start, option.stop)
        handed = {
            value: self._bytes(value, Sharding.replicate(at.shape), layout.mesh, {})
            for value, at in layout.handed.items()
        }
        once = sum(self.graph.types[v].nbytes for node in layout.once for v in node.writes)
        most = constants = loaded = 0
        seconds, gathered = 0.0, 0
        summed = sum(n for v, n in handed.items() if layout.handed[v].partial)
        for device, point, times in _representatives(layout.mesh):
            peak, part, held, moved_s = self._block(layout, point)
            most = max(most, gathered + (times - 1) * (part - summed) + peak)
            gathered = max(summed, gathered + times * (part - summed))
            constants, loaded = max(constants, held), loaded + times * held
            seconds += times * (moved_s + self._seconds(layout, device))
        joining = after + sum(handed.values()) + max(handed.values(), default=0)
        joining += 2 * summed
        seconds += sum(map(self._moved_s, handed.values()))
        seconds += sum(self.seconds[self.graph.order[node.name]] for node in layout.once)
        if not is_of_torch(self.graph):
            seconds += loaded / LOAD_BYTES_PER_S
        return replace(
            option,
            activation_bytes=max(inside + once + most, joining + once),
            constant_bytes=constants,
            staying_bytes=sum(
                self.graph.types[name].nbytes
                for node in layout.once
                for name in self.constants[self.graph.order[node.name]]
            ),
            seconds=seconds,
        )

    def _seconds(self, layout: StretchLayout, block: int) -> float:
        """Seconds of the nodes of a block."""
        count = layout.mesh.size()
        if count not in self._clusters:
            device, level = self.cluster.devices[0], self.cluster.levels[0]
            self._clusters[count] = replace(
                self.cluster, devices=(device,) * count, levels=(replace(level, size=count),)
            )
        cluster = self._clusters[count]
        return sum(node_seconds(self.graph, p, cluster, (block,))[block] for p in layout.placed)

    def _moved_s(self, nbytes: int) -> float:
        return kernel_seconds(0.0, 2 * nbytes, "float32", self.cluster.devices[0])

    def _bytes(
        self, value: str, at: Sharding, mesh: DeviceMesh, point: Mapping[str, int]
    ) -> int:
        numel = int(np.prod(at.local_shape(mesh, point), dtype=np.int64)) if at.axes else 0
        type_ = self.graph.types[value]
        return dense_bytes(numel, type_.dtype) if at.axes else type_.nbytes

    def _block(
        self, layout: StretchLayout, point: Mapping[str, int]
    ) -> tuple[int, int, int, float]:
        """Of a block: most bytes that it makes, bytes handed on, of constants, seconds of parts."""
        writes: list[tuple[object, int]] = []
        reads: list[tuple[object, ...]] = []
        constants: dict[object, int] = {}
        root: dict[object, object] = {}
        moved_s = 0.0
        parts: set[object] = set()

        def piece(value: str, wanted: Sharding, held: Sharding | None) -> object:
            nonlocal moved_s
            box = tuple(dim.pieces(layout.mesh, point) for dim in wanted.dims)
            if held is None:
                is_all = wanted.is_replicated
            else:
                is_all = box == tuple(dim.pieces(layout.mesh, point) for dim in held.dims)
            if is_all or self._parts_are_views:
                return root.get(value, value)
            key = value, box
            if key not in parts:
                parts.add(key)
                nbytes = self._bytes(value, wanted, layout.mesh, point)
                writes.append((key, nbytes))
                reads.append((root.get(value, value),))
                moved_s += self._moved_s(nbytes)
            return key

        for placed in layout.placed:
            used = []
            for value, at in placed.operands():
                if value in self.graph.constants:
                    box = tuple(dim.pieces(layout.mesh, point) for dim in at.sharding.dims)
                    nbytes = self._bytes(value, at.sharding, layout.mesh, point)
                    constants[value, box] = nbytes
                else:
                    used.append(piece(value, at.sharding, layout.made.get(value)))
            row = row_of(placed.node)
            for value, at in placed.results():
                if row is not None and row.view and used:
                    root[value] = used[0]
                    nbytes = 0
                else:
                    nbytes = self._bytes(value, at.sharding, layout.mesh, point)
                writes.append((value, nbytes))
                reads.append(tuple(used))
        handed = {
            piece(value, at.without_partial(), layout.made[value])
            for value, at in layout.handed.items()
        }
        last = {key: index for index, keys in enumerate(reads) for key in keys}
        last |= dict.fromkeys(handed, len(writes))
        sizes, live, most = dict(writes), 0, 0
        ends: dict[int, int] = {}
        for index, (key, nbytes) in enumerate(writes):
            live += nbytes
            most = max(most, live)
            end = max(index, last.get(key, index))
            ends[end] = ends.get(end, 0) + nbytes
            live -= ends.pop(index, 0)
        return most, sum(sizes.get(key, 0) for key in handed), sum(constants.values()), moved_s


def _representatives(mesh: DeviceMesh) -> Iterator[tuple[int, Mapping[str, int], int]]:
    """Blocks that stand for all, with how many they stand for: those at borders for themselves."""
    weights = []
    for _, size in mesh.axes:
        inner = {size // 2: size - 2} if size > ALL_PRICED else dict.fromkeys(range(1, size - 1), 1)
        weights.append({0: 1, **inner, size - 1: 1})
    for device, point in mesh.coords():
        counts = [of.get(point[axis], 0) for of, axis in zip(weights, mesh.names, strict=True)]
        if all(counts):
            yield device, point, math.prod(counts)
