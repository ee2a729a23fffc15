"""The nodes of softmax and attention in parts, in PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from partitioner.rewrites.node_writer import KeysWriter

ATTENTION = "partitioner::attention"


class AtenWriter(KeysWriter):
    """Nodes of PyTorch's operators."""

    PRODUCT, DIFFERENCE = "aten::matmul", "aten::sub.Tensor"
    EXPONENTIAL, QUOTIENT = "aten::exp", "aten::div.Tensor"
    LARGEST, TOTAL = "aten::amax", "aten::sum.dim_IntList"
    #: Whether a row that sees nothing has zeros as its softmax, by operator.
    SOFTMAX: ClassVar = {"aten::_softmax": False, "aten::_safe_softmax": True}

    def default_scale(self, channels: int) -> float:
        """The factor of scores that the node does not state."""
        return 1 / math.sqrt(channels)

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("aten::mul.Tensor", [x, ""], attrs={"other": factor})

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """The elements in another shape."""
        return self.add("aten::reshape", [x], shape, attrs={"shape": tuple(shape)})

    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""
        shape = [self.type(x).shape[i] for i in order]
        return self.add("aten::permute", [x], shape, attrs={"dims": tuple(order)})

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask of flags is false."""
        shape, dtype = self.type(scores).shape, self.type(scores).dtype
        if self.type(mask).dtype != "bool":
            return self.add("aten::add.Tensor", [scores, self.cast(mask, dtype)], shape)
        out = self.add("aten::logical_not", [mask])
        masked, nothing = "aten::masked_fill.Scalar", float("-inf")
        return self.add(masked, [scores, out], shape, "", dtype, {"value": nothing})

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("aten::clamp", [x], attrs={"min": number})

    def over_keys(self, op: str, x: str) -> str:
        """A reduction over the last dim, which becomes 1."""
        shape = (*self.type(x).shape[:-1], 1)
        return self.add(op, [x], shape, attrs={"dim": (-1,), "keepdim": True})

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The elements in another type; the value itself if it has that type and needs no name."""
        if self.type(x).dtype == dtype and not made:
            return x
        return self.add("aten::_to_copy", [x], None, made, dtype, {"dtype": dtype})
