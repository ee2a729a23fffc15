"""Random models that compute with sizes: of shapes, of constants and of an input."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper

from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.constant_models import run_node

#: Number of each element type in ONNX.
TYPES = {"int64": 7, "int32": 6, "int8": 3, "uint8": 2, "bool": 9, "float32": 1}
OPS = (
    *("Add", "Sub", "Mul", "Div", "Max", "Min", "Mod", "Equal", "Less"),
    *("Cast", "Cast", "Concat", "Concat", "Gather", "Gather", "Identity", "Neg", "Abs"),
    *("Reshape", "Reshape", "Slice", "Slice", "Split", "Squeeze", "Unsqueeze", "Unsqueeze"),
    *("Where", "Floor", "Ceil", "ReduceProd", "Range", "ConstantOfShape", "Expand", "Size"),
)
MOST_ELEMENTS = 64


class Drawn:
    """A model in the making, with the value of everything that it computes.

    Attributes:
        proto: The model: an Identity behind each node makes an output.
        inputs: Its inputs.
        values: What ONNX Runtime says of each output.
    """

    def __init__(self, seed: int, count: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._weights: dict[str, om.Array] = {}
        x = np.zeros(self._rng.integers(1, 6, self._rng.integers(1, 5)), np.float32)
        self.inputs: dict[str, om.Array] = {"x": x, "d": self._rng.integers(1, 5, 2)}
        self._all: dict[str, om.Array] = {"d": self.inputs["d"]}
        self._computed: list[str] = []
        self._of_data = {"d"}
        self._put("Shape", ["x"], {})
        while len(self._computed) < count:
            op = OPS[self._rng.integers(len(OPS))]
            names, attributes = self._operands(op)
            self._put(op, names, attributes)
        self.values = [self._all[name] for name in self._computed]
        behind = [helper.make_node("Identity", [n], [f"{n}_out"]) for n in self._computed]
        self.proto = om.model(
            [*self._nodes, *behind],
            {name: (a.dtype.name, a.shape) for name, a in self.inputs.items()},
            {f"{n}_out": (self._all[n].dtype.name, None) for n in self._computed},
            self._weights,
        )

    def _put(self, op: str, names: list[str], attributes: dict[str, Any]) -> None:
        """Add a node, unless ONNX Runtime refuses it."""
        results = [f"n{len(self._nodes)}_{k}" for k in range(2 if op == "Split" else 1)]
        node = helper.make_node(op, names, results, f"n{len(self._nodes)}", **attributes)
        known = {**self.inputs, **self._all, **self._weights}
        operands = {name: known[name] for name in names if name}
        if op == "ReduceProd" and not operands[names[0]].size:
            return  # whose shape ONNX and ONNX Runtime do not agree on
        if op in ("Div", "Mod") and -1 in operands[names[1]]:
            return  # at the least integer the process may end
        of_data = op != "Size" and not self._of_data.isdisjoint(names)
        if of_data and op in ("ConstantOfShape", "Expand", "Range"):
            return  # no static shape
        if op == "Range" and any(array.ndim for array in operands.values()):
            return  # ONNX Runtime takes vectors where it does not know that they are
        made = run_node(node, operands)
        if made is not None and max(array.size for array in made) <= MOST_ELEMENTS:
            self._nodes.append(node)
            self._all.update(zip(results, made, strict=True))
            self._computed += results
            self._of_data.update(results if of_data else ())

    def _operands(self, op: str) -> tuple[list[str], dict[str, Any]]:
        a = self._any()
        array, rng = self._all.get(a, self._weights.get(a)), self._rng
        assert array is not None
        axis = int(rng.integers(-max(array.ndim, 1), max(array.ndim, 1)))
        if op in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mod", "Equal", "Less"):
            return [a, self._any(array.dtype)], {}
        if op == "Cast":
            return [a], {"to": list(TYPES.values())[rng.integers(len(TYPES))]}
        if op == "Concat":
            others = [self._any(array.dtype) for _ in range(rng.integers(3))]
            return [a, *others], {"axis": axis}
        if op == "Gather":
            shape = [(), (1,), (2,), (2, 2)][rng.integers(4)]
            return [a, self._constant(rng.integers(-3, 3, shape))], {"axis": axis}
        if op == "Reshape":
            shapes = [[-1], [1, -1], [-1, 1], [2, -1], [], [array.size]]
            return [a, self._constant(np.array(shapes[rng.integers(len(shapes))], np.int64))], {}
        if op == "Slice":
            bounds = [np.array([rng.integers(-4, 5)]) for _ in range(2)]
            steps = np.array([(-2, -1, 1, 2)[rng.integers(4)]])
            return [a, *map(self._constant, (*bounds, np.array([axis]), steps))], {}
        if op == "Split":
            return [a], {"axis": axis}
        if op in ("Squeeze", "Unsqueeze"):
            return [a, self._constant(np.array([axis]))], {}
        return self._others(op, a, array.dtype, axis)

    def _others(
        self, op: str, a: str, dtype: np.dtype[Any], axis: int
    ) -> tuple[list[str], dict[str, Any]]:
        if op == "Where":
            return [self._any(np.dtype(bool)), a, self._any(dtype)], {}
        if op == "ReduceProd":
            return [a], {"keepdims": int(self._rng.integers(2)), "axes": [axis]}
        if op == "Range":
            return [a, self._any(dtype), self._any(dtype)], {}
        return ([a, self._any(np.dtype(np.int64))] if op == "Expand" else [a]), {}

    def _any(self, dtype: np.dtype[Any] | None = None) -> str:
        """A value of a type, computed ones first."""
        names = [n for n, array in self._all.items() if dtype in (None, array.dtype)]
        if names and self._rng.random() < 0.8:
            return names[self._rng.integers(len(names))]
        shape = [(), (1,), (2,)][self._rng.integers(3)]
        return self._constant(self._rng.integers(-2, 300, shape).astype(dtype or np.int64))

    def _constant(self, array: om.Array) -> str:
        name = f"c{len(self._weights)}"
        self._weights[name] = array
        return name


def drawn(count: int, nodes: int = 14) -> Iterator[Drawn]:
    """Models of fixed seeds."""
    for seed in range(count):
        yield Drawn(seed, nodes)
