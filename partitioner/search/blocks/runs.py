"""Runs of nodes that could be stretches in blocks: their bytes and seconds, by number of blocks.

A run is a contiguous part of the graph's order. Its bytes depend on the run alone: what lives at
its borders is whole, whatever the rest of the model does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.lifetimes import (
    Curve,
    safe_lifetimes,
    without_headroom,
)
from partitioner.cost_model.memory.lives import StepLives
from partitioner.cost_model.memory.torch_kernels import scratch_bytes
from partitioner.cost_model.prices.compute import kernel_seconds, node_seconds
from partitioner.cost_model.schedule.task_list import LOAD_BYTES_PER_S, Schedule, schedule
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rules_of
from partitioner.ir.pieces.blocks import Chunk, Stretch
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.rule import Rule
from partitioner.ir.types import dense_bytes
from partitioner.rewrites.stretch_layout import BlockError, StretchLayout, lay_out

#: Numbers of parts of a dim that are tried, and of each of two dims.
PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
SQUARE_PARTS = (2, 3, 4, 6, 8)
#: Of more blocks in a dim than this, those inside are priced as one.
ALL_PRICED = 3


@dataclass(frozen=True)
class Option:
    """A run of nodes in blocks, or as one block."""

    start: int  #: Position of its first node.
    stop: int  #: Position behind its last node.
    chunks: tuple[Chunk, ...]  #: The dims that are cut.
    activation_bytes: int  #: Most bytes of tensors while it runs, without head-room.
    constant_bytes: int  #: Most bytes of constants that one block reads.
    staying_bytes: int  #: Of the constants of its nodes that run once, in no block.
    seconds: float  #: Of all blocks, with the loading of their constants.

    def stretch(self, graph: Graph) -> Stretch:
        """The stretch of the graph."""
        first, last = graph.nodes[self.start].name, graph.nodes[self.stop - 1].name
        return Stretch(first, last, self.chunks)


@dataclass
class Runs:
    """The runs of a graph's nodes on one device."""

    graph: Graph
    cluster: Cluster  #: The cluster; its first device runs the graph, whatever its memory.
    #: Bytes that one of a constant counts as: on devices that share values, which count as whole.
    constants_weigh: float = 1.0
    _clusters: dict[int, Cluster] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Schedule:
        """The graph as it is, on one device."""
        mesh, rules = DeviceMesh.single(0), rules_of(self.graph)
        placed = []
        for node in self.graph.nodes:
            rule = rules[node.name]
            known = rule if isinstance(rule, Rule) else None
            placed.append(place(self.graph, node, mesh, {}, known))
        return schedule(self.graph, placed, self.cluster)

    @cached_property
    def seconds(self) -> Sequence[float]:
        """Seconds of each node as a whole."""
        return [task.devices.get(0, 0.0) for task in self.whole.tasks]

    @cached_property
    def activation_bytes(self) -> npt.NDArray[np.int64]:
        """Bytes of tensors at each node of the graph as a whole, without head-room.

        They are more where head-room does not cover what a kernel takes for itself.
        """
        live = self.lives.inside(len(self.graph.nodes), self.lives.device == 0)
        return np.maximum(live, without_headroom(live + self.scratch))

    @cached_property
    def scratch(self) -> Curve:
        """Bytes that the kernel of each node of the graph as a whole takes for itself."""
        point = dict(DeviceMesh.single(0).coords())[0]
        some = (task.placed for task in self.whole.tasks)
        taken = [0 if p is None else self.kernel_bytes(p, point) for p in some]
        return np.array(taken, np.int64)

    def kernel_bytes(self, placed: PlacedNode, point: Mapping[str, int]) -> int:
        """Bytes that the kernel of a node takes for itself."""
        is_gpu = self.cluster.devices[0].is_gpu
        return 0 if is_gpu else scratch_bytes(self.graph, placed, point)

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
        return self._weighed(sum(self.graph.types[name].nbytes for name in names))

    def _weighed(self, constants: int) -> int:
        return round(self.constants_weigh * constants)

    @cached_property
    def lives(self) -> StepLives:
        """The tensors of the graph as a whole."""
        return StepLives.of(self.whole, safe_lifetimes(self.whole))

    @cached_property
    def _fed(self) -> npt.NDArray[np.bool_]:
        inputs = set(self.graph.inputs)
        return np.array([life.value in inputs for life in self.lives.tensors], np.bool_)

    @cached_property
    def turn(self) -> int:
        """Position of the first node of the backward pass."""
        nodes, backward = self.graph.nodes, self.graph.backward
        return next((at for at, node in enumerate(nodes) if node.name in backward), len(nodes))

    @cached_property
    def apart(self) -> npt.NDArray[np.bool_]:
        """Tell which tensors all parts of a training graph hold: inputs, gradients and outputs."""
        is_left = self.lives.last >= len(self.graph.nodes) - 1
        return np.asarray(self._fed | (is_left & (self.lives.first >= self.turn)))

    def across(self, position: int, made_from: int) -> int:
        """Bytes of a part's own that live across a position, made at a position or behind it."""
        lives = self.lives
        own = ~self.apart & (lives.first >= made_from)
        return int(lives.nbytes[own & (lives.first < position) & (lives.last >= position)].sum())

    def most(self, spans: Sequence[tuple[int, int]], made_from: int) -> int:
        """Most bytes of a part's own while nodes of these spans run, as of `activation_bytes`."""
        own = ~self.apart & (self.lives.first >= made_from)
        live = self.lives.inside(len(self.graph.nodes), own)
        live = np.maximum(live, without_headroom(live + self.scratch))
        return max(
            (int(live[start:stop].max()) for start, stop in spans if start < stop), default=0
        )

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Bytes of what a run reads or leaves as it is, while it runs and when it ends."""
        lives = self.lives
        there = (lives.first < start) | (self._fed & (lives.first < stop))
        while_, after = (lives.nbytes[there & (lives.last >= at)].sum() for at in (start, stop))
        return int(while_), int(after)

    def largest_at(self, start: int) -> int:
        """Bytes of the largest tensor that lives across a position."""
        across = (self.lives.first < start) & (self.lives.last >= start)
        return int(self.lives.nbytes[across].max(initial=0))

    def handed_bytes(self, start: int, stop: int) -> int:
        """Bytes that a run makes and that are read behind it."""
        lives = self.lives
        made = (lives.first >= start) & (lives.first < stop) & ~self._fed
        return int(lives.nbytes[made & (lives.last >= stop)].sum())

    def as_one(self, start: int, stop: int) -> Option:
        """The run as one block, not cut."""
        constants = self.constant_bytes(start, stop)
        seconds = sum(self.seconds[start:stop]) + constants / LOAD_BYTES_PER_S
        most = int(self.activation_bytes[start:stop].max())
        return Option(start, stop, (), most, constants, 0, seconds)

    def cut(self, start: int, stop: int, most_bytes: int, enough_bytes: int) -> Iterator[Option]:
        """The run in blocks, in dims and numbers, the fewest blocks of each dim first.

        Options of more than `most_bytes` of tensors are left out; once as few as `enough_bytes` are
        held, more blocks are not tried.
        """
        inside, after = self.around(start, stop)
        if max(inside, after) + self.handed_bytes(start, stop) > most_bytes:
            return
        peak = int(self.activation_bytes[start:stop].max())
        # A part of a tensor is no smaller than its share.
        least = max(2, -(-(peak - inside) // max(1, most_bytes - inside)))
        known: set[tuple[str, ...]] = set()
        by_value: dict[str, list[int]] = {}
        for value, dim in self._seeds(start, stop):
            chunked = ((value, dim),)
            for option in self._along(
                start, stop, chunked, PARTS, least, known, most_bytes, enough_bytes
            ):
                if dim not in by_value.setdefault(value, []):
                    by_value[value].append(dim)
                if option.activation_bytes <= most_bytes:
                    yield option
        for value, dims in by_value.items():
            if len(dims) > 1:
                pair = tuple((value, dim) for dim in dims[-2:])
                root = max(2, math.isqrt(least - 1) + 1)
                for option in self._along(
                    start, stop, pair, SQUARE_PARTS, root, set(), most_bytes, enough_bytes
                ):
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
        most_bytes: int,
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
            layout = self._layout(option)
            if layout is None:
                return
            cut = tuple(f"{p.node.name} {' '.join(p.layouts)}" for p in layout.placed)
            if is_first and cut in known:
                return
            known.add(cut)
            is_first = False
            priced = self.priced(option, layout, most_bytes)
            yield priced
            shrinks = priced.constant_bytes < constants
            constants = priced.constant_bytes
            if priced.activation_bytes <= enough_bytes and (
                constants <= enough_bytes // 4 or not shrinks
            ):
                return

    def _layout(self, option: Option) -> StretchLayout | None:
        """The run in these blocks; None if it cannot run so, or is a shorter run in them."""
        with suppress(BlockError):
            layout = lay_out(self.graph, option.stretch(self.graph))
            edges = {self.graph.nodes[at].name for at in (option.start, option.stop - 1)}
            if edges.isdisjoint(node.name for node in (*layout.once, *layout.after)):
                return layout
        return None

    def _seeds(self, start: int, stop: int) -> Iterator[tuple[str, int]]:
        """Dims that a cut may begin with: of what the last node makes, and of the first."""
        for position in dict.fromkeys((stop - 1, start)):
            for value in self.graph.nodes[position].writes[:1]:
                for dim, size in enumerate(self.graph.types[value].shape):
                    if size > 1:
                        yield value, dim

    def priced(self, option: Option, layout: StretchLayout, most_bytes: int) -> Option:
        """The option with its bytes and, if these are no more than `most_bytes`, its seconds."""
        inside, after = self.around(option.start, option.stop)
        handed = {value: self.graph.types[value].nbytes for value in layout.handed}
        once = sum(map(self._made_bytes, (*layout.once, *layout.after)))
        inner = {axis: size // 2 for axis, size in layout.mesh.axes}
        inside_block = _Tally(self.graph, layout, inner, self.kernel_bytes).count()
        least = inside + inside_block.peak
        if least > most_bytes:
            return replace(option, activation_bytes=least)
        most = constants = loaded = 0
        seconds, gathered = 0.0, 0
        summed = sum(n for v, n in handed.items() if layout.handed[v].partial)
        some = list(_representatives(layout.mesh, alike=bool(self.graph.backward)))
        for _, point, times in some:
            held = inside_block
            if point != inner:
                held = _Tally(self.graph, layout, point, self.kernel_bytes).count()
            most = max(most, gathered + (times - 1) * (held.handed - summed) + held.peak)
            gathered = max(summed, gathered + times * (held.handed - summed))
            constants = max(constants, held.constants)
            loaded += times * held.constants
            seconds += times * sum(map(self._moved_s, held.copied))
        joining = after + sum(handed.values()) + max(handed.values(), default=0)
        joining += 2 * summed
        activations = max(inside + once + most, joining + once)
        if activations <= most_bytes:
            for device, _, times in some:
                seconds += times * self._seconds(layout, device)
        seconds += sum(map(self._moved_s, handed.values()))
        around = (*layout.once, *layout.after)
        seconds += sum(self.seconds[self.graph.order[node.name]] for node in around)
        if executor_of(self.graph).loads_blocks:
            seconds += loaded / LOAD_BYTES_PER_S
        return replace(
            option,
            activation_bytes=activations,
            constant_bytes=self._weighed(constants),
            staying_bytes=self._weighed(
                sum(
                    self.graph.types[name].nbytes
                    for node in around
                    for name in self.constants[self.graph.order[node.name]]
                )
            ),
            seconds=seconds,
        )

    def _made_bytes(self, node: Node) -> int:
        row = row_of(node)
        if row.view or row.stored:
            return 0
        return sum(self.graph.types[value].nbytes for value in node.writes)

    def _seconds(self, layout: StretchLayout, block: int) -> float:
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


@dataclass(frozen=True)
class _Held:
    peak: int  #: Most bytes of what it makes.
    handed: int  #: Of what it hands on.
    constants: int  #: Of the constants that it reads.
    copied: tuple[int, ...]  #: Of each part that it copies of a value.


@dataclass
class _Tally:
    """Goes through the nodes of a block and notes what is written and read, in order."""

    graph: Graph
    layout: StretchLayout
    point: Mapping[str, int]
    kernel_bytes: Callable[[PlacedNode, Mapping[str, int]], int]
    writes: list[tuple[object, int]] = field(default_factory=list)
    scratch: dict[int, int] = field(default_factory=dict)  # of kernels, by their last write
    reads: list[tuple[object, ...]] = field(default_factory=list)
    root: dict[object, object] = field(default_factory=dict)  # of views
    copies: dict[object, int] = field(default_factory=dict)
    constants: dict[object, int] = field(default_factory=dict)

    def count(self) -> _Held:
        for placed in self.layout.placed:
            self._node(placed)
        handed = {
            self._read(value, at, self.layout.made[value])
            for value, at in self.layout.handed.items()
        }
        last: dict[object, int] = {key: at for at, keys in enumerate(self.reads) for key in keys}
        last |= dict.fromkeys(handed, len(self.writes))
        ends: dict[int, int] = defaultdict(int)
        live = peak = 0
        for index, (key, nbytes) in enumerate(self.writes):
            live += nbytes
            peak = max(peak, live, without_headroom(live + self.scratch.get(index, 0)))
            ends[max(index, last.get(key, index))] += nbytes
            live -= ends.pop(index, 0)
        sizes = dict(self.writes)
        return _Held(
            peak,
            sum(sizes.get(key, 0) for key in handed),
            sum(self.constants.values()),
            tuple(self.copies.values()),
        )

    def _node(self, placed: PlacedNode) -> None:
        used = []
        for value, at in placed.operands():
            if value in self.graph.constants:
                self.constants[value, self._box(at.sharding)] = self._bytes(value, at.sharding)
            else:
                used.append(self._read(value, at.sharding, self.layout.made.get(value)))
        is_view = row_of(placed.node).view and bool(used)
        for value, at in placed.results():
            if is_view:
                self.root[value] = used[0]
            self.writes.append((value, 0 if is_view else self._bytes(value, at.sharding)))
            self.reads.append(tuple(used))
        taken = self.kernel_bytes(placed, self.point)
        if taken:
            self.scratch[len(self.writes) - 1] = taken

    def _read(self, value: str, wanted: Sharding, held: Sharding | None) -> object:
        """The tensor that is read: the value, or a copy of a part of what the block has of it."""
        root = self.root.get(value, value)
        box = self._box(wanted)
        is_all = wanted.is_replicated if held is None else box == self._box(held)
        if is_all or not executor_of(self.graph).copies_parts:
            return root
        key = value, box
        if key not in self.copies:
            self.copies[key] = self._bytes(value, wanted)
            self.writes.append((key, self.copies[key]))
            self.reads.append((root,))
        return key

    def _box(self, at: Sharding) -> object:
        return tuple(dim.pieces(self.layout.mesh, self.point) for dim in at.dims)

    def _bytes(self, value: str, at: Sharding) -> int:
        type_ = self.graph.types[value]
        if not at.axes:
            return type_.nbytes
        shape = at.local_shape(self.layout.mesh, self.point)
        return dense_bytes(math.prod(shape), type_.dtype)


def _representatives(
    mesh: DeviceMesh, *, alike: bool
) -> Iterator[tuple[int, Mapping[str, int], int]]:
    """Blocks that stand for all, with how many they stand for: those at borders for themselves.

    If all count as alike, one inside stands for them, whose halo is the largest: a search in
    training prices each round of each part.
    """
    weights = []
    for _, size in mesh.axes:
        inner = {size // 2: size - 2} if size > ALL_PRICED else dict.fromkeys(range(1, size - 1), 1)
        weights.append({size // 2: size} if alike else {0: 1, **inner, size - 1: 1})
    for device, point in mesh.coords():
        counts = [of.get(point[axis], 0) for of, axis in zip(weights, mesh.names, strict=True)]
        if all(counts):
            yield device, point, math.prod(counts)
