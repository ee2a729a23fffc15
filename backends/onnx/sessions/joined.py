"""Segments of a rank that hand images to each other: one graph to optimize, and its pieces.

ONNX Runtime computes convolutions in a blocked layout, and gives what leaves a session in the plain
one. So segments between which images pass are optimized together. The images are outputs of the
joined graph, so no kernel computes across a border, but kernels of later segments read the images
blocked, as they were made. The optimized graph is cut at the borders again into a piece for each
segment, and the images cross blocked.

A piece reads and makes the values that its segment does, under their names. A blocked image has the
type of the plain one, because its channels fill blocks.

A sum and an activation are computed in the kernel of the convolution before, but only where all
operands of the sum are blocked. A segment's input is not, unless another segment hands it over
blocked. So a residual block at its begin falls apart, and with it all further ones, because the
sum's result is not blocked either. A pooling over one element copies the input into the blocked
layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from partitioner.backends.onnx.files.messages import DOMAIN, attribute_graphs, value_info
from partitioner.backends.onnx.files.steps import RankModel, Segment
from partitioner.ir.types import TensorType

#: Operators of several operands that are blocked if all of these are.
_JOINING = frozenset({"Add", "Sum", "Concat"})
#: Operators whose results may be blocked.
_BLOCKED = _JOINING | {"AveragePool", "BatchNormalization", "Conv", "MaxPool", "Relu"}
#: Operators that may be computed on blocked operands.
_MAY_BE_BLOCKED = _BLOCKED | {
    "Clip",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "LeakyRelu",
    "Mul",
    "Resize",
    "Sigmoid",
    "Tanh",
    "Upsample",
}
#: Prefix of the names of copies.
_COPY = f"{DOMAIN}.blocked"
#: Channels are in blocks of so many, which the processor decides.
_BLOCKS = (8, 16)


@dataclass(frozen=True)
class Group:
    """Segments of a rank that are optimized together."""

    model: RankModel  #: The rank.
    segments: Mapping[int, Segment]  #: By the index of their step, in order.
    #: Values to cross borders blocked: one segment makes each, only others read it.
    images: frozenset[str]

    def joined(self) -> ModelProto:
        """All segments as one model; large constants still refer to the rank's weight file.

        Every segment has inputs of its own for what is no image. So nothing but images and
        constants connects the segments for ONNX Runtime.
        """
        graph = GraphProto(name=f"rank{self.model.rank}")
        constants: dict[str, None] = {}
        for index, segment in self.segments.items():
            own = self.own_inputs(index)
            types = {inner: self.model.types[name] for name, inner in own.items()}
            nodes = tuple(_renamed(segment.nodes, own))
            graph.node.extend(with_blocked_inputs(nodes, types, types, self.images))
            graph.input.extend(value_info(name, type_) for name, type_ in types.items())
            graph.output.extend(map(self.model.output_info, segment.writes))
            constants |= dict.fromkeys(segment.constants)
        graph.initializer.extend(self.model.constants[name] for name in constants)
        return self.model.around(graph)

    def own_inputs(self, index: int) -> Mapping[str, str]:
        """Names in the joined graph of a segment's inputs that are no images."""
        inputs = self.segments[index].reads
        return {name: f"{DOMAIN}.{index}.{name}" for name in inputs if name not in self.images}


def groups_of(
    model: RankModel, steps: Iterable[int], plain: Collection[str] = ()
) -> Iterator[Group]:
    """The groups of a rank's segments.

    Two segments are in one if an image passes from one to the other that no other step reads, whose
    channels fill blocks of either size, and that is made, and read, by an operator that may be
    blocked. A group has a convolution. Blocks and plain segments are in none, and segments with
    nodes that have bodies neither: ONNX Runtime cannot read what it writes of those. Values in
    `plain` do not cross borders blocked.
    """
    segments = {index: segment for index in steps if _may_join(segment := model.segment(index))}
    readers: dict[str, set[int]] = defaultdict(set)
    for index, step in enumerate(model.steps):
        for name in step.reads:
            readers[name].add(index)
    kept = {*plain, *model.keep, *(output.value for output in model.header.outputs)}
    links = {
        name: frozenset((index, *readers[name]))
        for index, segment in segments.items()
        for name in segment.writes
        if name not in kept
        and readers[name] <= segments.keys()
        and _is_image(model.types[name], max(_BLOCKS))
        and _may_be_blocked(segment, name)
        and any(_may_be_blocked(segments[reader], name) for reader in readers[name])
    }
    linked: nx.Graph[int] = nx.Graph()
    for link in links.values():
        nx.add_path(linked, link)
    for indices in nx.connected_components(linked):
        if any(node.op_type == "Conv" for index in indices for node in segments[index].nodes):
            joined = {index: segments[index] for index in sorted(indices)}
            images = frozenset(name for name, link in links.items() if link <= indices)
            yield Group(model, joined, images)


def _may_join(segment: Segment) -> bool:
    attributes = [attribute for node in segment.nodes for attribute in node.attribute]
    has_bodies = any(map(attribute_graphs, attributes))
    return segment.block is None and not segment.plain and not has_bodies


def _may_be_blocked(segment: Segment, value: str) -> bool:
    return any(
        node.op_type in _MAY_BE_BLOCKED and (value in node.output or value in node.input)
        for node in segment.nodes
    )


@dataclass(frozen=True)
class Optimized:
    """The joined graph of a group as ONNX Runtime runs it."""

    group: Group  #: The segments.
    proto: ModelProto  #: The graph; pieces refer to its weights.

    @cached_property
    def plain(self) -> frozenset[str]:
        """The images that cannot cross blocked.

        Such an image is made or read in the plain layout. All images are, if a piece would have to
        read what its segment does not, because an optimization has computed across a border.
        """
        plain = self.group.images - self._blocked.keys()
        for index, segment in self.group.segments.items():
            images = self.group.images.intersection(segment.reads)
            ends = {*self.group.own_inputs(index).values(), *images}
            ends |= {self._blocked[name] for name in images & self._blocked.keys()}
            _, reached = self._behind(segment.writes, ends)
            if not reached <= ends | self._constants.keys():
                return self.group.images
            plain |= {name for name in images if self._blocked.get(name) not in reached}
        return plain

    def pieces(self) -> Mapping[int, ModelProto]:
        """A piece for each segment, if no image is plain."""
        assert not self.plain
        return {index: self._piece(index) for index in self.group.segments}

    def _piece(self, index: int) -> ModelProto:
        segment, types = self.group.segments[index], self.group.model.types
        own = self.group.own_inputs(index)
        images = [n for n in (*segment.reads, *segment.writes) if n in self.group.images]
        blocked = {name: self._blocked[name] for name in images}
        ends = {*own.values(), *(blocked[name] for name in segment.reads if name in blocked)}
        nodes, reached = self._behind([blocked.get(n, n) for n in segment.writes], ends)
        names = {inner: name for name, inner in own.items()}
        for name, inner in blocked.items():
            names |= {inner: name, name: f"{DOMAIN}.plain.{name}"}
        graph = GraphProto(name=self.proto.graph.name, node=_renamed(nodes, names))
        graph.input.extend(value_info(name, types[name]) for name in segment.reads)
        graph.output.extend(map(self.group.model.output_info, segment.writes))
        graph.initializer.extend(self._constants[name] for name in sorted(reached - ends))
        version, opsets = self.proto.ir_version, self.proto.opset_import
        return ModelProto(ir_version=version, graph=graph, opset_import=opsets)

    @cached_property
    def _makers(self) -> Mapping[str, int]:
        nodes = enumerate(self.proto.graph.node)
        return {name: at for at, node in nodes for name in node.output if name}

    @cached_property
    def _constants(self) -> Mapping[str, TensorProto]:
        return {tensor.name: tensor for tensor in self.proto.graph.initializer}

    @cached_property
    def _blocked(self) -> Mapping[str, str]:
        """The name of the blocked form of each image that is made in it."""
        return {
            node.output[0]: node.input[0]
            for node in self.proto.graph.node
            if node.op_type == "ReorderOutput"
            and node.output[0] in self.group.images
            and not any(entry.name == "channels_last" and entry.i for entry in node.attribute)
        }

    def _behind(
        self, outputs: Iterable[str], ends: Collection[str]
    ) -> tuple[Sequence[NodeProto], frozenset[str]]:
        """The nodes, in order, that compute values from `ends`, and all that these start from."""
        found: set[int] = set()
        reached: set[str] = set()
        waiting = list(outputs)
        while waiting:
            name = waiting.pop()
            at = None if name in ends else self._makers.get(name)
            if at is None:
                reached.add(name)
            elif at not in found:
                found.add(at)
                waiting += [name for name in self.proto.graph.node[at].input if name]
        return [self.proto.graph.node[at] for at in sorted(found)], frozenset(reached)


def _renamed(nodes: Iterable[NodeProto], names: Mapping[str, str]) -> Iterator[NodeProto]:
    for node in nodes:
        renamed = NodeProto()
        renamed.CopyFrom(node)
        renamed.input[:] = [names.get(name, name) for name in node.input]
        renamed.output[:] = [names.get(name, name) for name in node.output]
        yield renamed


def with_blocked_inputs(
    nodes: Sequence[NodeProto],
    inputs: Collection[str],
    types: Mapping[str, TensorType],
    blocked: Collection[str] = (),
) -> Iterator[NodeProto]:
    """The nodes of a segment, with copies of plain inputs that are joined with blocked values."""
    makers = {name: node.op_type for node in nodes for name in node.output}
    convolved = {name for node in nodes if node.op_type == "Conv" for name in node.output}
    images = {name for name in inputs if convolved and _is_image(types[name], min(_BLOCKS))}
    copied = {
        name: f"{_COPY}.{name}"
        for node in nodes
        if node.op_type in _JOINING
        and all(
            name in images or name in blocked or makers.get(name) in _BLOCKED for name in node.input
        )
        for name in node.input
        if name in images
    }
    for name, copy in copied.items():
        yield helper.make_node("AveragePool", [name], [copy], name=copy, kernel_shape=[1, 1])
    for node in nodes:
        if node.op_type in _BLOCKED and not copied.keys().isdisjoint(node.input):
            yield from _renamed([node], copied)
        else:
            yield node


def _is_image(type_: TensorType, block: int) -> bool:
    """Test whether a value is a batch of images whose channels fill blocks of so many."""
    return type_.dtype == "float32" and len(type_.shape) == 4 and type_.shape[1] % block == 0
