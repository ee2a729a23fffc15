"""The graph of one of several equal micro-batches, made from the graph of the whole batch.

M micro-batches are M devices that share the batch and never communicate (`same_in_parts`). The
batch is cut over a mesh of M devices, each node takes its operands as they lie, and what one of the
devices runs is the graph of a micro-batch: sizes and constants that depend on the batch become
local as they do on a device of a plan. So there is such a graph only where the outputs of the
micro-batches are proven to be parts of those of the whole batch; else the first node that stands
against it is named.

What no sample changes lies whole on all devices. Where a node wants a part of it, as of a constant
that was expanded to the batch, the part is taken if it is the same for all micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from partitioner.ir.errors import OptionError
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import LayoutError, Sharding, followed
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.local_node import local_op
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.table import LocalOp
from partitioner.ir.plan import PlacedNode, place
from partitioner.ir.program import BatchParts
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType
from partitioner.rewrites.graph_writer import GraphWriter, elements
from partitioner.rewrites.same_in_parts import AXIS, CombinesError, cut_along, taken

#: Most micro-batches of a step: schedules and proofs list each.
MOST_MICRO_BATCHES = 4096


class MicroBatch(NamedTuple):
    """A micro-batch: one of several equal parts of a model's batch."""

    graph: Graph  #: Its graph.
    parts: BatchParts  #: Its part, and those of the others, in the whole batch.


def batch_size(graph: Graph) -> int:
    """The batch's size, dim 0 of the first input that has one; OptionError of none or of 0."""
    name = _first_input(graph)
    size = graph.types[name].shape[0]
    if not size:
        raise OptionError(f"micro_batches: dim 0 of the first input {name!r} has no elements")
    return size


def same_size(graph: Graph) -> tuple[str, ...]:
    """The inputs whose dim 0 may be the batch: the first one with dims, and those as long as it.

    Where that one has a symbol for the batch, others must have the same.
    """
    first = graph.types[_first_input(graph)].dims[0]
    heads = {name: graph.types[name].dims[:1] for name in graph.inputs}
    return tuple(
        name
        for name, head in heads.items()
        if head and (head[0] == first if first.symbol else head[0].size == first.size)
    )


def even_parts(batch: int) -> tuple[int, ...]:
    """All numbers of equal parts of so many samples that are planned, ascending, from 1 on."""
    most = min(batch, MOST_MICRO_BATCHES)
    return tuple(count for count in range(1, most + 1) if batch % count == 0)


def micro_batch_graph(graph: Graph, count: int) -> MicroBatch:
    """The graph of one of `count` equal micro-batches of the batch of a graph of inference."""
    batch = batch_size(graph)
    counts = even_parts(batch)
    if count not in counts:
        raise OptionError(
            f"micro_batches={count}: the batch of {batch} (dim 0 of "
            f"{_first_input(graph)!r}) has no {count} equal parts: give one of "
            f"{', '.join(map(str, counts))}"
        )
    ends = {name: graph.output_names.get(name, name) for name in (*graph.inputs, *graph.outputs)}
    types = {user: graph.types[name] for name, user in ends.items()}
    if count == 1:
        return MicroBatch(graph, BatchParts(1, types, {}))
    for name in sorted(graph.bounded):
        raise OptionError(
            f"micro_batches={count}: the size of output {name!r} depends on data, so that results "
            "of micro-batches have no place in it"
        )
    refusal: OptionError | None = None
    names, longest = same_size(graph), _first_input(graph)
    others = [name for name in names if name != longest]
    # Another input may be as long as the batch by chance, as one of as many features: each of them
    # is left out in turn, then all.
    splits = [names, *(tuple(n for n in names if n != left_out) for left_out in others)]
    if len(others) > 1:
        splits.append((longest,))
    for split in splits:
        try:
            with followed():
                return _Cutter(graph, count, GraphWriter(source=graph)).run(types, ends, split)
        except OptionError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _first_input(graph: Graph) -> str:
    for name in graph.inputs:
        if graph.types[name].rank:
            return name
    raise OptionError("micro_batches: no input of the model has dims, so there is no batch")


@dataclass
class _Cutter:
    """Lays the graph out over the micro-batches and takes the part of the first one."""

    whole: Graph
    count: int
    writer: GraphWriter
    at: dict[str, Sharding] = field(default_factory=dict)  #: How each value lies.
    #: Names in the part of values that lie whole elsewhere, by value and layout.
    parts: dict[tuple[str, Sharding], str] = field(default_factory=dict)

    def run(
        self, types: Mapping[str, TensorType], ends: Mapping[str, str], split: Collection[str]
    ) -> MicroBatch:
        """Cut the graph along the inputs `split`; `ends` are users' names, by which `types` are."""
        for name in (*self.whole.inputs, *self.whole.constants):
            shape = self.whole.types[name].shape
            self._declare(name, name, cut_along(self.mesh, shape, 0) if name in split else None)
        for node in self.whole.nodes:
            self._node(node)
        regions = {
            user: tuple(self._region_of(self.at[name], index) for index in range(self.count))
            for name, user in ends.items()
            if self.at[name].axes
        }
        return MicroBatch(self.writer.graph(), BatchParts(self.count, types, regions))

    @cached_property
    def mesh(self) -> DeviceMesh:
        return DeviceMesh.line(self.count, AXIS)

    def _declare(self, name: str, value: str, at: Sharding | None) -> None:
        """Give a value of the whole graph, as it lies, a name in the part."""
        type_ = self.whole.types[value]
        at = at or Sharding.replicate(type_.shape)
        if name == value:
            self.at[name] = at
        self.writer.types[name] = at.local_type(type_, self.mesh, {AXIS: 0})

    def _refusal(self, node: Node, why: str) -> OptionError:
        return OptionError(
            f"micro_batches={self.count}: {node.name!r} ({node.op}) {why}, so that the outputs of "
            "micro-batches are not proven to be those of the batch: leave micro_batches out"
        )

    def _node(self, node: Node) -> None:
        if all(self.at[value].is_replicated for value in node.reads):
            self.writer.nodes.append(node)
            for value in node.writes:
                self._declare(value, value, None)
            return
        rule = rule_of(self.whole, node)
        if not isinstance(rule, Rule):
            raise self._refusal(node, f"may combine the samples of a batch: {rule}")
        if any(self.at[value].axes for value in node.captures):
            raise self._refusal(node, "reads samples inside its subgraph")
        operands = [self.at[value] if value else None for value in node.inputs]
        try:
            layouts = taken(rule, zip(rule.operands, operands, strict=True), self.mesh)
            placed = place(self.whole, node, self.mesh, layouts, rule)
        except (LayoutError, CombinesError):
            raise self._refusal(node, "combines the samples of a batch") from None
        self._place(placed)

    def _place(self, placed: PlacedNode, named: Mapping[str, str] | None = None) -> None:
        """Add a node under a layout; `named` are names of its results where it is there again."""
        node = placed.node
        names = named or {value: value for value in node.writes}
        for _, at in placed.results():
            if at.sharding.partial:
                raise self._refusal(node, "combines the samples of a batch")
            if not at.sharding.is_replicated and not all(d.is_equal for d in at.sharding.dims):
                raise self._refusal(node, "gives micro-batches parts of unequal sizes")
        operands = tuple(
            "" if at is None else self._operand(node, value, at.sharding)
            for value, at in zip((*node.inputs, *node.captures), placed.ins, strict=True)
        )
        for value, at in placed.results():
            self._declare(names[value], value, at.sharding)
        if row_of(node).where:
            first, *rest = (local_op(self.whole, placed, {AXIS: i}) for i in range(self.count))
            if any(_form(other) != _form(first) for other in rest):
                raise self._refusal(node, "differs from one micro-batch to the next")
        # Names of their own, since a plan may make the node local once more.
        self.writer.local(placed, {AXIS: 0}, operands, names, "part", stays=named is None)

    def _operand(self, node: Node, value: str, at: Sharding) -> str:
        if self.at[value] == at:
            return value
        if self.at[value].axes or at.partial:
            raise self._refusal(node, "combines the samples of a batch")
        if (value, at) not in self.parts:
            if value in self.whole.constants:
                array = self.whole.constants[value].load()
                regions = [self._region_of(at, index) for index in range(self.count)]
                if len({elements(array, region).tobytes() for region in regions}) > 1:
                    why = f"reads other elements of the constant {value!r} in each"
                    raise self._refusal(node, why)
                type_ = at.local_type(self.whole.types[value], self.mesh, {AXIS: 0})
                self.parts[value, at] = self.writer.constant_part(value, regions[0], type_)
            elif value in self.whole.producers:
                self.parts[value, at] = self._part_of_result(node, value, at)
            else:
                raise self._refusal(
                    node, f"reads a part of the input {value!r}, whose dim 0 is not the batch"
                )
        return self.parts[value, at]

    def _part_of_result(self, node: Node, value: str, at: Sharding) -> str:
        """Add the node again, as it makes that part: it reads parts that are the same for all."""
        producer = self.whole.producers[value]
        rule = rule_of(self.whole, producer)
        refusal = self._refusal(node, f"reads other elements of {value!r} in each")
        slot = producer.outputs.index(value)
        dims = rule.results[slot] if isinstance(rule, Rule) else None
        if dims is None or any(self.at[read].axes for read in producer.reads):
            raise refusal
        assert isinstance(rule, Rule)
        try:
            layouts = taken(rule, [(dims, at)], self.mesh)
            placed = place(self.whole, producer, self.mesh, layouts, rule)
        except (LayoutError, CombinesError):
            raise refusal from None
        made = placed.outs[slot]
        if made is None or made.sharding != at:
            raise refusal
        names = {other: self.writer.free(f"{other}.part") for other in producer.writes}
        self._place(placed, names)
        return names[value]

    def _region_of(self, at: Sharding, index: int) -> Region:
        point = {AXIS: index}
        return tuple(dim.pieces(self.mesh, point) for dim in at.dims)


def _form(op: LocalOp) -> object:
    """Equal for local nodes that compute the same."""

    def plain(values: Mapping[str, object]) -> object:
        return {
            name: (x.dtype, x.shape, x.tobytes()) if isinstance(x, np.ndarray) else x
            for name, x in values.items()
        }

    nodes = [(replace(node, attrs={}), plain(node.attrs)) for node in op.nodes]
    return nodes, op.types, plain(op.constants)
