"""Random models of nested If, Loop and Scan, whose bodies hold weights in all ways there are."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from helpers.onnx_files import onnx_models as om

WIDTH = 16  #: A weight of WIDTH x WIDTH floats is large enough to be lifted.
DEPTH = 3
_F32 = ("float32", [2, WIDTH])


class DrawnBodies:
    """A model in the making.

    Attributes:
        proto: The model.
        inputs: Its inputs.
        weight_bytes: Bytes of all large weights.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._count = 0
        self.weight_bytes = 0
        self._outer = {"outer": self._weight()}
        nodes, last = self._nodes("x", 0, self._outer)
        nodes.append(helper.make_node("Relu", [last], ["y"]))
        rng = self._rng
        self.inputs = {
            "x": rng.standard_normal((2, WIDTH)).astype(np.float32),
            "rows": rng.standard_normal((3, 2, WIDTH)).astype(np.float32),
            "flag": np.array(bool(rng.integers(2))),
        }
        inputs = {name: (a.dtype.name, a.shape) for name, a in self.inputs.items()}
        weights = {**self._outer, "three": np.array(3), "yes": np.array(True)}
        self.proto = om.model(nodes, inputs, {"y": _F32}, weights)

    def _weight(self) -> om.Array:
        array = self._rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / WIDTH
        self.weight_bytes += array.nbytes
        return array

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _nodes(
        self, first: str, depth: int, weights: dict[str, om.Array]
    ) -> tuple[list[onnx.NodeProto], str]:
        """Some nodes that begin with a value, and the last result; they put in their weights."""
        nodes: list[onnx.NodeProto] = []
        for _ in range(self._rng.integers(1, 4)):
            name, kind = self._name(), self._rng.integers(7)
            if kind < 2:  # in all bodies of a depth by the same name
                if f"w{depth}" not in weights:
                    weights[f"w{depth}"] = self._weight()
                nodes.append(helper.make_node("MatMul", [first, f"w{depth}"], [name]))
            elif kind == 2:
                tensor = numpy_helper.from_array(self._weight())
                nodes.append(helper.make_node("Constant", [], [f"{name}_c"], value=tensor))
                nodes.append(helper.make_node("MatMul", [first, f"{name}_c"], [name]))
            elif kind == 3:
                nodes.append(helper.make_node("MatMul", [first, "outer"], [name]))
            elif kind == 4:
                weights[f"{name}_b"] = np.ones(WIDTH, np.float32)
                nodes.append(helper.make_node("Add", [first, f"{name}_b"], [name]))
            elif depth == DEPTH:
                nodes.append(helper.make_node("Tanh", [first], [name]))
            else:
                nodes.append(self._control(first, name, depth + 1))
            first = name
        return nodes, first

    def _control(self, first: str, name: str, depth: int) -> onnx.NodeProto:
        kind = self._rng.integers(3)
        if kind == 0:
            branches = [self._branch(first, depth) for _ in range(2)]
            return helper.make_node(
                "If", ["flag"], [name], then_branch=branches[0], else_branch=branches[1]
            )
        state, condition = self._name(), self._name()
        weights: dict[str, om.Array] = {}
        nodes, last = self._nodes(state, depth, weights)
        if kind == 1:
            go, step = self._name(), self._name()
            nodes.append(helper.make_node("Identity", [condition], [go]))
            inputs = {step: ("int64", []), condition: ("bool", []), state: _F32}
            body = om.body(nodes, inputs, {go: ("bool", []), last: _F32}, weights)
            return helper.make_node("Loop", ["three", "yes", first], [name], body=body)
        row, after = self._name(), self._name()
        nodes.append(helper.make_node("Add", [last, row], [after]))
        body = om.body(nodes, {state: _F32, row: _F32}, {after: _F32}, weights)
        return helper.make_node("Scan", [first, "rows"], [name], body=body, num_scan_inputs=1)

    def _branch(self, first: str, depth: int) -> onnx.GraphProto:
        """A branch, of which some return a weight as it is."""
        if self._rng.random() < 0.2:
            array = self._rng.standard_normal((2, WIDTH * 8)).astype(np.float32)[:, :WIDTH]
            name = self._name()
            tensor = numpy_helper.from_array(np.ascontiguousarray(array))
            constant = helper.make_node("Constant", [], [name], value=tensor)
            return om.body([constant], {}, {name: _F32})
        weights: dict[str, om.Array] = {}
        nodes, last = self._nodes(first, depth, weights)
        return om.body(nodes, {}, {last: _F32}, weights)


def drawn_bodies(count: int) -> Iterator[DrawnBodies]:
    """Models of fixed seeds."""
    for seed in range(count):
        yield DrawnBodies(seed)
