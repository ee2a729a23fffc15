"""The graph of a model whose stretches run in blocks, made from the graph of the whole model.

Each node of a stretch is there once for each block, as a device of a plan would run it on its part;
blocks follow each other in the order of the graph. A block takes its parts of the stretch's
operands, and the stretch's results are joined when the last block is done, or added up as the
blocks go. What plans, prices, lowers and runs a graph needs to know nothing of blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from partitioner.ir.exchange import Region
from partitioner.ir.graph import Constant, Graph
from partitioner.ir.layout import Interval, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.pieces import added, joined
from partitioner.ir.pieces.blocks import Blocks
from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.rewrites.block_recompute import computing_again
from partitioner.rewrites.graph_writer import GraphWriter
from partitioner.rewrites.stretch_layout import BlockError, StretchLayout, lay_out, span_of

_Box = tuple[Interval, ...]  # one interval of each dim


@dataclass(frozen=True)
class BlockGraph:
    """A graph in which stretches run in blocks."""

    graph: Graph
    #: Position of each node or, of those of a stretch that is cut, of its first node, in the whole
    #: graph (in training, in that with what stretches compute again); by name.
    positions: Mapping[str, int]
    #: Number of the block in its stretch, of the nodes of the blocks of cut stretches.
    numbers: Mapping[str, int]
    #: The nodes and values of blocks that each node and value of the whole graph is in, by name.
    copies: Mapping[str, tuple[str, ...]]


def block_graph(graph: Graph, blocks: Blocks) -> Graph:
    """The graph in which stretches run in blocks; BlockError if one cannot, or two overlap."""
    return traced_blocks(graph, blocks).graph


def traced_blocks(graph: Graph, blocks: Blocks) -> BlockGraph:
    """Make the graph of `block_graph`, with where its nodes are from."""
    whole, stretches = computing_again(graph, blocks)
    writer = _BlockWriter(whole, stretches, GraphWriter(source=whole))
    cut = writer.run()
    copies = defaultdict[str, list[str]](list)
    for name, origin in writer.origins.items():
        copies[origin].append(name)
    by_name = {name: tuple(names) for name, names in copies.items()}
    return BlockGraph(cut, writer.positions, writer.numbers, by_name)


@dataclass
class _BlockWriter:
    whole: Graph
    blocks: Blocks
    writer: GraphWriter
    cut_constants: dict[tuple[str, Region], str] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # in their stretch
    origins: dict[str, str] = field(default_factory=dict)  # of copies
    count: int = 0  # of blocks so far

    def run(self) -> Graph:
        whole, nodes = self.whole, self.writer.nodes
        if whole.optional:
            raise BlockError("blocks: a graph with offers does not run in blocks")
        self.positions.update(whole.order)
        at = 0
        for stretch in self.blocks.stretches:
            first, last = span_of(whole, stretch)

            nodes += whole.nodes[at:first]
            if stretch.chunks:
                layout, begin = lay_out(whole, stretch), len(nodes)
                nodes += layout.once
                self._stretch(layout)
                nodes += layout.after
                new = [node.name for node in nodes[begin:]]
                self.positions.update(dict.fromkeys(new, first))
                if stretch.first in whole.backward:
                    self.writer.backward.update(new)
            else:
                nodes += whole.nodes[first : last + 1]
                self._end_block(first - last - 1)
            at = last + 1
        nodes += whole.nodes[at:]
        self.writer.twins = self._twins()
        return self.writer.graph()

    def _twins(self) -> dict[str, str]:
        """The forward node of each backward one: of copies that of the same block, else the first.

        Stages are cut in the order of the forward pass, and backward nodes go with their twins.
        """
        copies = defaultdict[str, dict[int | None, str]](dict)
        for node in self.writer.nodes:
            origin = self.origins.get(node.name, node.name)
            copies[origin].setdefault(self.numbers.get(node.name), node.name)
        twins = {}
        for node in self.writer.nodes:
            twin = self.whole.twins.get(self.origins.get(node.name, node.name))
            if of := copies.get(twin or ""):
                number = self.numbers.get(node.name)
                twins[node.name] = of.get(number) or next(iter(of.values()))
        return twins

    def _stretch(self, layout: StretchLayout) -> None:
        joins = {
            value: _Join(self.writer, value, at, layout.mesh) for value, at in layout.handed.items()
        }
        nodes = self.writer.nodes
        for index, (_, point) in enumerate(layout.mesh.coords()):
            start, handed = len(nodes), {}
            names = self._block(layout, index, point)
            for value, at in layout.handed.items():
                wanted = _box(at, layout.mesh, point)
                held = _box(layout.made[value], layout.mesh, point)
                handed[value] = self._piece(names[value], held, wanted, names[value])
                self.origins.setdefault(handed[value], value)
            self.numbers.update((node.name, index) for node in nodes[start:])
            self._end_block(start)
            for value, part in handed.items():
                joins[value].put(part)

    def _end_block(self, start: int) -> None:
        new = (node.name for node in self.writer.nodes[start:])
        self.writer.blocks.update(dict.fromkeys(new, self.count))
        self.count += 1

    def _block(self, layout: StretchLayout, index: int, point: Mapping[str, int]) -> dict[str, str]:
        names: dict[str, str] = {}
        pieces: dict[tuple[str, _Box], str] = {}
        suffix = f"block{index}"

        def operand(value: str, at: Placement) -> str:
            wanted, whole = _box(at.sharding, at.mesh, point), self.whole.types[value]
            type_ = at.sharding.local_type(whole, at.mesh, point)
            if any(point[axis] for axis, _ in at.sharding.partial):  # it counts in one block
                return self._zeros(value, type_)
            name, held = names.get(value, value), tuple((0, n) for n in whole.shape)
            if value in names:
                held = _box(layout.made[value], layout.mesh, point)
            elif value in self.whole.constants and wanted != held:
                region = tuple((interval,) for interval in wanted)
                if (value, region) not in self.cut_constants:
                    part = self.writer.constant_part(value, region, type_)
                    self.cut_constants[value, region] = part
                    self.origins[part] = value
                return self.cut_constants[value, region]
            if (name, wanted) not in pieces:
                called = name if value in names else f"{value}.{suffix}"
                pieces[name, wanted] = self._piece(name, held, wanted, called)
                if pieces[name, wanted] != value:
                    self.origins.setdefault(pieces[name, wanted], value)
            return pieces[name, wanted]

        for placed in layout.placed:
            node = placed.node
            operands = tuple(
                "" if at is None else operand(value, at)
                for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True)
            )
            for value, at in placed.results():
                type_ = at.sharding.local_type(self.whole.types[value], at.mesh, point)
                names[value] = self.writer.value(f"{value}.{suffix}", type_)
                self.origins[names[value]] = value
            before = len(self.writer.nodes)
            self.writer.local(placed, point, operands, names, suffix)
            new = (one.name for one in self.writer.nodes[before:])
            self.origins.update(dict.fromkeys(new, node.name))
        return names

    def _piece(self, name: str, held: _Box, wanted: _Box, called: str) -> str:
        """The name of a part of a value that lies in this block."""
        cuts = {
            dim: (start - first, length)
            for dim, ((first, size), (start, length)) in enumerate(zip(held, wanted, strict=True))
            if (first, size) != (start, length)
        }
        return self.writer.part(name, cuts, f"{called}.part") if cuts else name

    def _zeros(self, value: str, type_: TensorType) -> str:
        key = value, (((-1, type_.numel),),)
        if key not in self.cut_constants:
            load = partial(np.zeros, type_.shape, numpy_dtype(type_.dtype))
            zeros = Constant(type_, load, weight=True)
            self.cut_constants[key] = self.writer.constant(f"{value}.zeros", zeros)
        return self.cut_constants[key]


@dataclass
class _Join:
    """Joins the parts of a value: those along the last axis of the blocks first, then outwards."""

    writer: GraphWriter
    value: str
    at: Sharding
    mesh: DeviceMesh
    parts: dict[str, list[str]] = field(default_factory=dict)  # not joined yet, by axis
    count: int = 0

    def put(self, part: str) -> None:
        self.count += 1
        inner = 1
        for axis, size in reversed(self.mesh.axes):
            inner *= size
            waiting = self.parts.setdefault(axis, [])
            waiting.append(part)
            is_row = self.count % inner == 0
            is_sum = any(axis == one for one, _ in self.at.partial)
            if len(waiting) > 1 and (is_row or is_sum):
                waiting[:] = [self._joined(axis, waiting, is_sum)]
            if not is_row:
                return
            (part,) = waiting
            waiting.clear()

    def _joined(self, axis: str, parts: list[str], is_sum: bool) -> str:
        writer = self.writer
        type_ = writer.types[parts[0]]
        dim = 0
        if not is_sum:
            dim = next(i for i, layout in enumerate(self.at.dims) if axis in layout.axes)
            shape = list(type_.shape)
            shape[dim] = sum(writer.types[part].shape[dim] for part in parts)
            type_ = writer.source.types[self.value].with_shape(shape)
        is_last = self.count == self.mesh.size() and axis == self.mesh.names[0]
        name = self.value if is_last else writer.value(f"{self.value}.until{self.count}", type_)
        one, *others = parts
        node = (
            added(writer.source, one, others[0], name)
            if is_sum
            else joined(writer.source, parts, dim, name)
        )
        writer.add_node(node, "joined")
        return name


def _box(at: Sharding, mesh: DeviceMesh, point: Mapping[str, int]) -> _Box:
    """The interval of each dim that a block has; the dims are in one piece."""
    box = []
    for dim in at.dims:
        pieces = dim.pieces(mesh, point)
        if len(pieces) != 1:
            raise BlockError(f"blocks: a dim in {len(pieces)} pieces, {dim}")
        box.append(pieces[0])
    return tuple(box)
