"""Values that enter a segment, in the layout that its convolutions compute in.

ONNX Runtime keeps values in a blocked layout from one convolution to the next, and computes a sum
and an activation in the kernel of the convolution before. It does so only where all operands of
the sum are blocked. A segment's input is not, unless another segment of the rank hands it over
blocked (see `joined`). So a residual block at its begin falls apart, and with it all further ones,
because the sum's result is not blocked either. A pooling over one element copies the input into the
blocked layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from onnx import NodeProto, helper

from partitioner.backends.onnx.files.header import DOMAIN
from partitioner.ir.types import TensorType

#: Operators of several operands that are blocked if all of these are.
_JOINING = frozenset({"Add", "Sum", "Concat"})
#: Operators whose results may be blocked.
_BLOCKED = _JOINING | {"AveragePool", "BatchNormalization", "Conv", "MaxPool", "Relu"}
#: Operators that may be computed on blocked operands.
MAY_BE_BLOCKED = _BLOCKED | {
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
BLOCKS = (8, 16)


def with_blocked_inputs(
    nodes: Sequence[NodeProto],
    inputs: Collection[str],
    types: Mapping[str, TensorType],
    blocked: Collection[str] = (),
) -> Iterator[NodeProto]:
    """The nodes, with a copy of each input that is joined with blocked values.

    Args:
        nodes: Of a segment, in order.
        inputs: Its inputs in the plain layout.
        types: Of the inputs, at least.
        blocked: Values that are blocked already.
    """
    makers = {name: node.op_type for node in nodes for name in node.output}
    convolved = {name for node in nodes if node.op_type == "Conv" for name in node.output}
    images = {name for name in inputs if convolved and is_image(types[name], min(BLOCKS))}
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
            changed = NodeProto()
            changed.CopyFrom(node)
            changed.input[:] = [copied.get(name, name) for name in node.input]
            yield changed
        else:
            yield node


def is_image(type_: TensorType, block: int) -> bool:
    """Test whether a value is a batch of images whose channels fill blocks of so many."""
    return type_.dtype == "float32" and len(type_.shape) == 4 and type_.shape[1] % block == 0
