"""Layouts of images in ONNX Runtime's sessions of segments.

ONNX Runtime computes convolutions in a blocked layout, and gives what leaves a session in the plain
one. A sum and an activation are computed in the kernel of the convolution before, but only where
all operands of the sum are blocked. A segment's input is not. So a residual block at its begin
falls apart, and with it all further ones, because the sum's result is not blocked either. A pooling
over one element copies the input into the blocked layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from onnx import NodeProto, helper

from partitioner.backends.onnx.files.messages import DOMAIN
from partitioner.ir.types import TensorType

#: Operators of several operands that are blocked if all of these are.
_JOINING = frozenset({"Add", "Sum", "Concat"})
#: Operators whose results may be blocked.
_BLOCKED = _JOINING | {"AveragePool", "BatchNormalization", "Conv", "MaxPool", "Relu"}
#: Prefix of the names of copies.
_COPY = f"{DOMAIN}.blocked"
#: Channels are in blocks of at least so many, which the processor decides.
_BLOCK = 8


def with_blocked_inputs(
    nodes: Sequence[NodeProto],
    inputs: Collection[str],
    types: Mapping[str, TensorType],
) -> Iterator[NodeProto]:
    """The nodes of a segment, with copies of plain inputs that are joined with blocked values."""
    makers = {name: node.op_type for node in nodes for name in node.output}
    convolved = {name for node in nodes if node.op_type == "Conv" for name in node.output}
    images = {name for name in inputs if convolved and _is_image(types[name])}
    copied = {
        name: f"{_COPY}.{name}"
        for node in nodes
        if node.op_type in _JOINING
        and all(name in images or makers.get(name) in _BLOCKED for name in node.input)
        for name in node.input
        if name in images
    }
    for name, copy in copied.items():
        yield helper.make_node("AveragePool", [name], [copy], name=copy, kernel_shape=[1, 1])
    for node in nodes:
        if node.op_type in _BLOCKED and not copied.keys().isdisjoint(node.input):
            renamed = NodeProto()
            renamed.CopyFrom(node)
            renamed.input[:] = [copied.get(name, name) for name in node.input]
            yield renamed
        else:
            yield node


def _is_image(type_: TensorType) -> bool:
    """Test whether a value is a batch of images whose channels fill blocks."""
    return type_.dtype == "float32" and len(type_.shape) == 4 and type_.shape[1] % _BLOCK == 0
