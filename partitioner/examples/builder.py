"""A graph under construction, for the examples that are written by hand."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

IR_VERSION = 10  # what ONNX Runtime has long read; onnx stamps a newer one by default
OPSET = 20


class ExampleError(ValueError):
    """An example that cannot be built: unknown name, impossible option."""


class Builder:
    """Collects nodes and weights of a graph; each method returns the name of its value."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, onnx.TensorProto] = {}

    def op(self, op_type: str, *inputs: str, name: str, **attributes: Any) -> str:
        """Add a node whose only output has the node's name, unique in the graph."""
        self._nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def weight(self, name: str, *shape: int, gain: float = 1.0, fan_in: int | None = None) -> str:
        """Add a normal float32 weight of standard deviation gain / sqrt(fan_in).

        `fan_in` defaults to the first dim, as in x @ w with w of (in, out).
        """
        deviation = np.float32(gain / sqrt(fan_in or shape[0]))
        return self.constant(name, self._random.standard_normal(shape, np.float32) * deviation)

    def near(self, name: str, *shape: int, centre: float) -> str:
        """Add a float32 weight uniform in centre - 0.1 .. centre + 0.1."""
        uniform = self._random.random(shape, np.float32)
        return self.constant(name, np.float32(centre - 0.1) + np.float32(0.2) * uniform)

    def constant(self, name: str, value: NDArray[np.generic]) -> str:
        """Add an initializer once; a second call of the same name must carry the same value."""
        self._weights.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def ints(self, *values: int) -> str:
        """Add (once) an int64 vector, the operand of Reshape, Slice, Unsqueeze and others."""
        name = "const_" + "_".join(str(value).replace("-", "m") for value in values)
        return self.constant(name, np.array(values, np.int64))

    def scalar(self, value: float) -> str:
        """Add (once) a float32 scalar."""
        return self.constant(f"const_{value}", np.array(value, np.float32))

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.ModelProto:
        """The model that was built, of this module's opset and IR version."""
        graph = helper.make_graph(
            self._nodes, name, inputs, outputs, initializer=list(self._weights.values())
        )
        return helper.make_model(
            graph,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
            producer_name="partitioner.examples",
        )


def floats(name: str, *shape: int) -> onnx.ValueInfoProto:
    """A float32 graph input or output."""
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
