"""Softmax and attention in parts, in PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

from partitioner.ir.graph import Node
from partitioner.ir.types import TensorType
from partitioner.rewrites.keys.writer import Ops, Writer

ATTENTION = "partitioner::attention"
#: Whether a row that sees nothing has zeros as its softmax, by operator.
SOFTMAX = {"aten::_softmax": False, "aten::_safe_softmax": True}


class AtenWriter(Writer):
    """Nodes of PyTorch's operators."""

    ops = Ops("aten::matmul", "aten::sub.Tensor", "aten::exp", "aten::div.Tensor")

    def write(self) -> None:
        """Write the nodes."""
        node = self.node
        if node.op in SOFTMAX:
            self.softmax(node.inputs[0], node.outputs[0], may_hide=SOFTMAX[node.op])
            return
        query, key, value, mask = node.inputs
        self.attention(query, key, value, mask, scale=_scale(self, node), made=node.outputs[0])

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("aten::mul.Tensor", [x, ""], self.type(x), other=factor)

    def reshaped(self, x: str, shape: Sequence[int], made: str = "") -> str:
        """The elements in another shape."""
        result = self.type(x).with_shape(shape)
        return self.add("aten::reshape", [x], result, made, shape=tuple(shape))

    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""
        shape = self.type(x).shape
        result = TensorType.of(self.type(x).dtype, [shape[i] for i in order])
        return self.add("aten::permute", [x], result, dims=tuple(order))

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask of flags is false."""
        result = self.type(scores)
        if self.type(mask).dtype != "bool":
            added = self.cast(mask, result.dtype)
            return self.add("aten::add.Tensor", [scores, added], result)
        out = self.add("aten::logical_not", [mask], self.type(mask))
        return self.add("aten::masked_fill.Scalar", [scores, out], result, value=float("-inf"))

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("aten::clamp", [x], self.type(x), min=number)

    def largest(self, x: str) -> str:
        """The maximum over the last dim, which becomes 1."""
        return self.add("aten::amax", [x], self.reduced(x), dim=(-1,), keepdim=True)

    def total(self, x: str) -> str:
        """The sum over the last dim, which becomes 1."""
        return self.add("aten::sum.dim_IntList", [x], self.reduced(x), dim=(-1,), keepdim=True)

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The elements in another type; the value itself if it has that type and needs no name."""
        if self.type(x).dtype == dtype and not made:
            return x
        result = TensorType.of(dtype, self.type(x).shape)
        return self.add("aten::_to_copy", [x], result, made, dtype=dtype)


def _scale(writer: Writer, node: Node) -> float:
    scale = node.attrs.get("scale")
    if isinstance(scale, int | float):
        return float(scale)
    return 1 / math.sqrt(writer.type(node.inputs[0]).shape[-1])
