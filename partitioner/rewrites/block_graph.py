"""The graph of a model whose stretches run in blocks, made from the graph of the whole model.

Each node of a stretch is there once for each block, as a device of a plan would run it on its part;
blocks follow each other in the order of the graph. A block takes its parts of the stretch's
operands, and the stretch's results are joined when the last block is done, or added up as the
blocks go. What plans, prices, lowers and runs a graph needs to know nothing of blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from partitioner.ir.blocks import Blocks
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Constant, Graph, Node, needed
from partitioner.ir.layout import Interval, Placement, Sharding
from partitioner.ir.local_node import local_op, renamed
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import LocalOp
from partitioner.ir.ops.pieces import added, joined, part_of
from partitioner.ir.plan import PlacedNode
from partitioner.ir.types import TensorType, numpy_dtype
from partitioner.rewrites.block_recompute import computing_again
from partitioner.rewrites.free_names import free_name
from partitioner.rewrites.stretch_layout import BlockError, StretchLayout, lay_out, span_of

_Box = tuple[Interval, ...]  # one interval of each dim


@dataclass(frozen=True)
class BlockGraph:
    """A graph in which stretches run in blocks.

    Attributes:
        graph: The graph.
        positions: Position of each node or, of those of a stretch that is cut, of its first node,
            in the whole graph (in training, in that with what stretches compute again); by name.
        numbers: Number of the block in its stretch, of the nodes of the blocks of cut stretches.
    """

    graph: Graph
    positions: Mapping[str, int]
    numbers: Mapping[str, int]


def block_graph(graph: Graph, blocks: Blocks) -> Graph:
    """The graph in which stretches run in blocks.

    Raises:
        BlockError: A stretch cannot run so, or two overlap.
    """
    return traced_blocks(graph, blocks).graph


def traced_blocks(graph: Graph, blocks: Blocks) -> BlockGraph:
    """The graph in which stretches run in blocks, and where its nodes are from.

    Raises:
        BlockError: As `block_graph`.
    """
    writer = _Writer(*computing_again(graph, blocks))
    return BlockGraph(writer.run(), writer.positions, writer.numbers)


@dataclass
class _Writer:
    whole: Graph
    blocks: Blocks
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Constant] = field(default_factory=dict)
    cut_constants: dict[tuple[str, Region], str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    block_of: dict[str, int] = field(default_factory=dict)
    backward: set[str] = field(default_factory=set)
    positions: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)  # in their stretch
    count: int = 0  # of blocks so far

    def run(self) -> Graph:
        whole = self.whole
        if whole.optional:
            raise BlockError("blocks: a graph with offers does not run in blocks")
        self.types.update(whole.types)
        self.constants.update(whole.constants)
        self.taken = {*whole.types, *whole.by_name}
        self.positions.update(whole.order)
        self.backward.update(whole.backward)
        at = 0
        for stretch in self.blocks.stretches:
            first, last = span_of(whole, stretch)
            if first < at:
                raise BlockError(f"blocks: {stretch.first!r} is in two stretches")
            self.nodes += whole.nodes[at:first]
            if stretch.chunks:
                layout, begin = lay_out(whole, stretch), len(self.nodes)
                self.nodes += layout.once
                self._stretch(layout)
                self.nodes += layout.after
                new = [node.name for node in self.nodes[begin:]]
                self.positions.update(dict.fromkeys(new, first))
                if stretch.first in whole.backward:
                    self.backward.update(new)
            else:
                self.nodes += whole.nodes[first : last + 1]
                self._end_block(first - last - 1)
            at = last + 1
        self.nodes += whole.nodes[at:]
        self.nodes = needed(self.nodes, whole.outputs)
        read = {value for node in self.nodes for value in node.reads}
        made = {value for node in self.nodes for value in node.writes}
        constants = {name: c for name, c in self.constants.items() if name in read}
        kept = {*whole.inputs, *constants, *made}
        return replace(
            whole,
            nodes=tuple(self.nodes),
            types={name: type_ for name, type_ in self.types.items() if name in kept},
            constants=constants,
            backward=frozenset(self.backward & {node.name for node in self.nodes}),
            twins={},
            blocks={n.name: self.block_of[n.name] for n in self.nodes if n.name in self.block_of},
        )

    def _stretch(self, layout: StretchLayout) -> None:
        joins = {value: _Join(self, value, at, layout.mesh) for value, at in layout.handed.items()}
        for index, (_, point) in enumerate(layout.mesh.coords()):
            start, handed = len(self.nodes), {}
            names = self._block(layout, index, point)
            for value, at in layout.handed.items():
                wanted = _box(at, layout.mesh, point)
                held = _box(layout.made[value], layout.mesh, point)
                handed[value] = self._piece(names[value], held, wanted, {})
            self.numbers.update((node.name, index) for node in self.nodes[start:])
            self._end_block(start)
            for value, part in handed.items():
                joins[value].put(part)

    def _end_block(self, start: int) -> None:
        """Note that the nodes from here on are a block."""
        self.block_of.update((node.name, self.count) for node in self.nodes[start:])
        self.count += 1

    def _block(self, layout: StretchLayout, index: int, point: Mapping[str, int]) -> dict[str, str]:
        """Add the nodes of a block; returns the names of what it makes."""
        names: dict[str, str] = {}
        pieces: dict[tuple[str, _Box], str] = {}
        for placed in layout.placed:
            node = placed.node
            slots = tuple(
                "" if at is None else self._operand(value, at, layout, index, point, names, pieces)
                for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True)
            )
            for value, at in placed.results():
                name = names[value] = self.free(f"{value}.block{index}")
                self.types[name] = at.sharding.local_type(self.whole.types[value], at.mesh, point)
            self._add_local(placed, point, slots, names, index)
        return names

    def _add_local(
        self,
        placed: PlacedNode,
        point: Mapping[str, int],
        slots: tuple[str, ...],
        names: Mapping[str, str],
        index: int,
    ) -> None:
        node = placed.node
        local = local_op(self.whole, placed, point)
        added = {name: self.free(f"{name}.block{index}") for name in _new(local)}
        results = {value: names[value] for value in node.writes} | added
        self._note(local, results)
        for step in local.nodes:
            operands = (*node.inputs, *node.captures)
            made = renamed(step, operands, slots, results)
            self.nodes.append(replace(made, name=self.free(f"{step.name}.block{index}")))

    def _note(self, local: LocalOp, names: Mapping[str, str]) -> None:
        for name, array in local.constants.items():
            constant = Constant.of(np.asarray(array))
            self.constants[names[name]] = constant
            self.types[names[name]] = constant.type
        self.types.update({names[name]: type_ for name, type_ in local.types.items()})

    def _operand(
        self,
        value: str,
        at: Placement,
        layout: StretchLayout,
        index: int,
        point: Mapping[str, int],
        names: Mapping[str, str],
        pieces: dict[tuple[str, _Box], str],
    ) -> str:
        """The name of a block's part of an operand."""
        wanted = _box(at.sharding, at.mesh, point)
        type_ = at.sharding.local_type(self.whole.types[value], at.mesh, point)
        if any(point[axis] for axis, _ in at.sharding.partial):  # an addend counts in one block
            return self._zeros(value, type_)
        if value in names:
            held = _box(layout.made[value], layout.mesh, point)
            return self._piece(names[value], held, wanted, pieces)
        whole = tuple((0, size) for size in self.whole.types[value].shape)
        if value in self.whole.constants and wanted != whole:
            return self._constant(value, wanted, type_)
        return self._piece(value, whole, wanted, pieces, f"{value}.block{index}")

    def _piece(
        self,
        name: str,
        held: _Box,
        wanted: _Box,
        pieces: dict[tuple[str, _Box], str],
        called: str = "",
    ) -> str:
        """The name of a part of a value that lies in this block."""
        cuts = {
            dim: (start - first, length)
            for dim, ((first, size), (start, length)) in enumerate(zip(held, wanted, strict=True))
            if (first, size) != (start, length)
        }
        if not cuts:
            return name
        if (name, wanted) not in pieces:
            part = pieces[name, wanted] = self.free(f"{called or name}.part")
            type_ = self.types[name]
            self.types[part] = type_.with_shape(tuple(length for _, length in wanted))
            self._add(part_of(self.whole, name, type_, cuts, part))
        return pieces[name, wanted]

    def _add(self, local: LocalOp) -> None:
        """Add nodes under the names that they have."""
        self._note(local, {name: name for name in _new(local)})
        self.taken.update(_new(local))
        self.nodes += local.nodes

    def _constant(self, value: str, wanted: _Box, type_: TensorType) -> str:
        region = tuple((interval,) for interval in wanted)
        if (value, region) not in self.cut_constants:
            name = self.cut_constants[value, region] = self.free(f"{value}.part")
            constant = self.whole.constants[value]
            load = partial(_cut, constant, wanted)
            self.constants[name] = replace(constant, type=type_, load=load)
            self.types[name] = type_
        return self.cut_constants[value, region]

    def _zeros(self, value: str, type_: TensorType) -> str:
        key = value, (((-1, type_.numel),),)
        if key not in self.cut_constants:
            name = self.cut_constants[key] = self.free(f"{value}.zeros")
            self.constants[name] = Constant(type_, partial(_zeros, type_), weight=True)
            self.types[name] = type_
        return self.cut_constants[key]

    def join(self, node: Node, type_: TensorType) -> None:
        """Add a node that joins parts, and its result."""
        self.types[node.outputs[0]] = type_
        self.nodes.append(replace(node, name=self.free(f"{node.name}.joined")))

    def free(self, name: str) -> str:
        """The name, or with a number that makes it free; it is then taken."""
        return free_name(name, self.taken)


@dataclass
class _Join:
    """Joins the parts of a value: those along the last axis of the blocks first, then outwards."""

    writer: _Writer
    value: str
    at: Sharding
    mesh: DeviceMesh
    parts: dict[str, list[str]] = field(default_factory=dict)  # not joined yet, by axis
    count: int = 0

    def put(self, part: str) -> None:
        """Take the part of the next block."""
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
        is_last = self.count == self.mesh.size() and axis == self.mesh.names[0]
        name = self.value if is_last else writer.free(f"{self.value}.until{self.count}")
        type_ = writer.types[parts[0]]
        if is_sum:
            writer.join(added(writer.whole, parts[0], parts[1], name), type_)
            return name
        dim = next(i for i, layout in enumerate(self.at.dims) if axis in layout.axes)
        shape = list(type_.shape)
        shape[dim] = sum(writer.types[part].shape[dim] for part in parts)
        whole = writer.whole.types[self.value]
        writer.join(joined(writer.whole, parts, dim, name), whole.with_shape(shape))
        return name


def _new(local: LocalOp) -> Iterator[str]:
    """Names of the constants and temporaries of local nodes."""
    return itertools.chain(local.constants, local.types)


def _box(at: Sharding, mesh: DeviceMesh, point: Mapping[str, int]) -> _Box:
    """The interval of each dim that a block has; the dims are in one piece."""
    box = []
    for dim in at.dims:
        pieces = dim.pieces(mesh, point)
        if len(pieces) != 1:
            raise BlockError(f"blocks: a dim in {len(pieces)} pieces, {dim}")
        box.append(pieces[0])
    return tuple(box)


def _cut(constant: Constant, box: _Box) -> np.ndarray:
    index = tuple(slice(start, start + length) for start, length in box)
    return np.ascontiguousarray(constant.load()[index])


def _zeros(type_: TensorType) -> np.ndarray:
    return np.zeros(type_.shape, numpy_dtype(type_.dtype))
