"""Writes a changed graph: nodes that stay, new ones under free names, and no more than is read."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from partitioner.ir.exchange import Region, nested
from partitioner.ir.graph import Attr, Constant, Graph, Node, needed
from partitioner.ir.layout import Interval
from partitioner.ir.nodes.local_node import localized
from partitioner.ir.ops import inherit_rules, row_of
from partitioner.ir.ops.onnx.reduction import SUM_AXES_INPUT
from partitioner.ir.ops.pieces import part_of
from partitioner.ir.ops.table import LocalOp, OpView
from partitioner.ir.plan import PlacedNode
from partitioner.ir.types import TensorType, numpy_dtype

#: First opset in which all reductions take their axes as an operand.
_AXES_INPUT = 18


@dataclass(kw_only=True)
class GraphWriter:
    """A graph that is written from a source, with its fields and all names that are taken.

    `mark` stands between a name and the number that makes it free.
    """

    source: Graph
    mark: str = "."
    nodes: list[Node] = field(default_factory=list)
    types: dict[str, TensorType] = field(init=False)
    constants: dict[str, Constant] = field(init=False)
    modules: dict[str, str] = field(init=False)
    twins: dict[str, str] = field(init=False)
    backward: set[str] = field(init=False)
    blocks: dict[str, int] = field(init=False)
    taken: set[str] = field(init=False)

    def __post_init__(self) -> None:
        source = self.source
        self.types, self.constants = dict(source.types), dict(source.constants)
        self.modules, self.twins = dict(source.modules), dict(source.twins)
        self.backward, self.blocks = set(source.backward), dict(source.blocks)
        self.taken = {*source.types, *source.by_name}

    def free(self, name: str) -> str:
        """The name, or with a number that makes it free; it is then taken."""
        free, number = name, 0
        while free in self.taken:
            number += 1
            free = f"{name}{self.mark}{number}"
        self.taken.add(free)
        return free

    def value(self, name: str, type_: TensorType) -> str:
        """Declare a new value; returns its name."""
        free = self.free(name)
        self.types[free] = type_
        return free

    def constant(self, name: str, constant: Constant) -> str:
        """Declare a new constant; returns its name."""
        free = self.value(name, constant.type)
        self.constants[free] = constant
        return free

    def constant_part(self, value: str, region: Region, type_: TensorType) -> str:
        """Declare a region of a constant of the source, which is read when it is needed."""
        constant = self.source.constants[value]
        load = partial(_loaded_part, constant, region)
        name, outer = constant.part or (value, None)
        part = name, region if outer is None else nested(outer, region)
        return self.constant(f"{value}.part", replace(constant, type=type_, load=load, part=part))

    def add(
        self,
        name: str,
        op: str,
        reads: Sequence[str],
        types: Sequence[TensorType] = (),
        made: Sequence[str] = (),
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[str, ...]:
        """Add a new node; returns its results: those given, or new values of these types."""
        free = self.free(name)
        made = tuple(made) or tuple(self.value(f"{free}:{i}", t) for i, t in enumerate(types))
        self.nodes.append(Node(free, op, tuple(reads), made, attrs or {}))
        return made

    def again(self, node: Node, names: dict[str, str], suffix: str = "again") -> Node:
        """A copy of a node that reads values by `names`, which gets the names of its results."""
        copies = {value: self.copied(value, suffix) for value in node.writes}
        copy = replace(
            reading(node, names),
            name=self.free(f"{node.name}/again"),
            outputs=tuple(copies.get(value, "") for value in node.outputs),
        )
        names.update(copies)
        self.twins[copy.name] = self.twins.get(node.name, node.name)
        return copy

    def copied(self, value: str, suffix: str) -> str:
        """Declare a new value of the type of another one; returns its name."""
        return self.value(f"{value}.{suffix}", self.types[value])

    def instead(self, node: Node, write: Callable[[GraphWriter, Node], object]) -> None:
        """Write new nodes in the place of one: they have its module, its pass and its twin.

        A node that the old one is the twin of has the first new one as its twin.
        """
        before = len(self.nodes)
        write(self, node)
        new = [one.name for one in self.nodes[before:]]
        for facts in (self.modules, self.twins):
            if node.name in facts:
                facts.update(dict.fromkeys(new, facts[node.name]))
        if node.name in self.backward:
            self.backward.update(new)
        elif node.name in self.twins.values():
            self.twins = {k: new[0] if v == node.name else v for k, v in self.twins.items()}

    def part(self, value: str, cuts: Mapping[int, Interval], name: str) -> str:
        """Add nodes that take an interval of some dims of a value; returns their result."""
        type_ = self.types[value]
        shape = [cuts[dim][1] if dim in cuts else size for dim, size in enumerate(type_.shape)]
        part = self.value(name, type_.with_shape(shape))
        local = part_of(self.source, value, type_, cuts, part)
        self.taken.update(local.constants, local.types)
        self._note(local)
        self.nodes += local.nodes
        return part

    def local(
        self,
        placed: PlacedNode,
        point: Mapping[str, int],
        operands: Sequence[str],
        results: Mapping[str, str],
        suffix: str,
        *,
        stays: bool = False,
    ) -> None:
        """Add what the device at a mesh coordinate runs in place of a node.

        It reads the parts `operands`, inputs and captures in order, and makes `results`, by value.
        New names end in `suffix`, but for that of the node if it `stays`.
        """

        def free(name: str) -> str:
            return self.free(f"{name}.{suffix}")

        local = localized(self.source, placed, point, operands, results, free)
        self._note(local)

        for step in local.nodes:
            if stays and step.name == placed.node.name:
                self.nodes.append(step)
            else:
                self.add_node(step, suffix)

    def add_node(self, node: Node, suffix: str) -> None:
        """Add a node under its name with a suffix."""
        self.nodes.append(replace(node, name=self.free(f"{node.name}.{suffix}")))

    def _note(self, local: LocalOp) -> None:
        for name, array in local.constants.items():
            self.constants[name] = Constant.of(np.asarray(array))
            self.types[name] = self.constants[name].type
        self.types.update(local.types)

    def graph(self, roots: Container[str] | None = None, **changes: Any) -> Graph:
        """The graph that was written, with other fields changed, without what nothing reads.

        The nodes named in `roots` stay, by default those of the source that nothing reads there.
        """
        source = self.source
        if roots is None:
            roots = source.by_name.keys() - {n.name for n in needed(source.nodes, source.outputs)}
        nodes = needed(self.nodes, changes.get("outputs", source.outputs), roots)
        names = {node.name for node in nodes}
        backward = self.backward & names
        read = {value for node in nodes for value in node.reads}
        made = {value for node in nodes for value in node.writes}
        constants = {value: c for value, c in self.constants.items() if value in read}
        kept = {*changes.get("inputs", source.inputs), *constants, *made}
        written = {
            "nodes": tuple(nodes),
            "types": {value: type_ for value, type_ in self.types.items() if value in kept},
            "constants": constants,
            "backward": frozenset(backward),
            "optional": source.optional & names,
            "twins": {name: twin for name, twin in self.twins.items() if name in backward},
            "modules": {name: module for name, module in self.modules.items() if name in names},
            "blocks": {name: block for name, block in self.blocks.items() if name in names},
        }
        return replace(source, **{**written, **changes})


def replaced(
    graph: Graph, writes: Mapping[str, Callable[[GraphWriter, Node], object]], mark: str = "."
) -> Graph:
    """The graph with what is written in the place of some nodes, by name; itself without any."""
    if not writes:
        return graph
    writer = GraphWriter(source=graph, mark=mark)
    for node in graph.nodes:
        if node.name in writes:
            writer.instead(node, writes[node.name])
        else:
            writer.nodes.append(node)
    return writer.graph()


def chosen(graph: Graph, present: Container[str]) -> Graph:
    """The graph that a plan is for: with these optional nodes, without those that nothing reads.

    A node that takes either of two operands reads the last one that is computed. If a node that is
    left out is read, there is an IRError.
    """
    writer, made = GraphWriter(source=graph), {*graph.inputs, *graph.constants}
    for node in graph.nodes:
        if node.name not in graph.optional or node.name in present:
            computed = [v for v in node.inputs if v in made] if row_of(node).either else []
            if computed:
                node = replace(node, inputs=tuple(computed[-1:]))
            writer.nodes.append(node)
            made.update(node.writes)
    settled = writer.graph(graph.by_name.keys() - graph.optional, optional=frozenset())
    inherit_rules(settled, graph)
    return settled


def reading(node: Node, names: Mapping[str, str], stays: Container[str] = ()) -> Node:
    """The node with its operands renamed, but for those that stay."""
    if not any(value in names for value in node.reads):
        return node

    def name(value: str) -> str:
        return value if value in stays else names.get(value, value)

    inputs, captures = tuple(map(name, node.inputs)), tuple(map(name, node.captures))
    return replace(node, inputs=inputs, captures=captures)


def elements(array: np.ndarray, region: Region) -> np.ndarray:
    """The elements of a region of a tensor."""
    if all(len(dim) == 1 for dim in region):
        return array[tuple(slice(start, start + length) for ((start, length),) in region)]
    empty = [np.arange(0)]
    intervals = ([np.arange(s, s + n) for s, n in dim] or empty for dim in region)
    return array[np.ix_(*map(np.concatenate, intervals))]


def _loaded_part(constant: Constant, region: Region) -> np.ndarray:
    return np.ascontiguousarray(elements(constant.load(), region))


@dataclass
class NodeWriter:
    """Writes nodes, with their constants, in the place of a node."""

    writer: GraphWriter
    node: Node

    def _node_name(self, op: str) -> str:
        return f"{self.node.name}/{op}"

    def _constant_name(self, name: str) -> str:
        return f"{self.node.name}/{name}"

    def add(
        self,
        op: str,
        reads: Sequence[str],
        shape: Sequence[int] | None = None,
        made: str = "",
        dtype: str = "",
        attrs: Mapping[str, Attr] | None = None,
    ) -> str:
        """Write a node; returns its result: `made`, if it is one of the replaced node.

        An absent operand is "". A `shape` of None is that of the broadcast operands, a `dtype` of
        "" that of the last one.
        """
        types = [self.type(value) for value in reads if value]
        if shape is None:
            shape = np.broadcast_shapes(*(tensor.shape for tensor in types))
        result = replace(types[0].with_shape(shape), dtype=dtype or types[-1].dtype)
        given = [made] if made else ()
        (value,) = self.writer.add(self._node_name(op), op, reads, [result], given, attrs)
        return value

    def number(self, name: str, number: float, like: str) -> str:
        """A number as a constant of the element type of a value."""
        return self.constant(name, np.array(number, numpy_dtype(self.type(like).dtype)))

    def constant(self, name: str, array: np.ndarray) -> str:
        """A new constant."""
        return self.writer.constant(self._constant_name(name), Constant.of(array))

    def type(self, value: str) -> TensorType:
        """The type of a value of the graph, or of one that was written."""
        return self.writer.types[value]


@dataclass
class PartWriter(NodeWriter):
    """Writes nodes of ONNX."""

    @property
    def graph(self) -> Graph:
        """The graph that has the node."""
        return self.writer.source

    @property
    def view(self) -> OpView:
        """The node as its rule sees it."""
        return OpView(self.node, self.graph)

    @property
    def operand(self) -> str:
        """First operand of the node."""
        return self.node.inputs[0]

    @property
    def result(self) -> str:
        """First result of the node."""
        return self.node.outputs[0]

    def reduced(self, op: str, x: str, dims: Iterable[int], *, keepdims: int = 1) -> str:
        """Write a reduction over these dims, which become 1 or are left out."""
        axes, data = tuple(dims), self.type(x)
        kept = [1 if dim in axes else size for dim, size in enumerate(data.shape)]
        shape = kept if keepdims else [s for dim, s in enumerate(kept) if dim not in axes]
        first = SUM_AXES_INPUT if op == "ReduceSum" else _AXES_INPUT
        if self.graph.opsets[""] < first:
            return self.add(op, [x], shape, attrs={"axes": axes, "keepdims": keepdims})
        listed = self.constant("axes", np.array(axes, np.int64))
        return self.add(op, [x, listed], shape, "", data.dtype, {"keepdims": keepdims})

    def reshaped(self, x: str, shape: Sequence[int], made: str = "") -> str:
        """Write the elements in another shape."""
        sizes = self.constant("shape", np.array(shape, np.int64))
        return self.add("Reshape", [x, sizes], shape, made, self.type(x).dtype)


class Form(NamedTuple):
    """How nodes of one operator are written in parts."""

    divides: Callable[[Graph, Node], bool]  #: Whether a node of a graph has a form in parts.
    write: Callable[[PartWriter], object]  #: Writes it.


def in_parts(graph: Graph, forms: Mapping[str, Form]) -> Graph:
    """The graph with the nodes of these operators in parts; itself if none has such a form."""

    def write(writer: GraphWriter, node: Node) -> None:
        forms[node.op].write(PartWriter(writer, node))

    divided = [n.name for n in graph.nodes if n.op in forms and forms[n.op].divides(graph, n)]
    return replaced(graph, dict.fromkeys(divided, write), mark="_")
