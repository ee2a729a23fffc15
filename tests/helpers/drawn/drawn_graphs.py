"""Random ONNX graphs of most operators that have rows, and plans of them run on all ranks.

A graph grows node by node. Each new node is run by ONNX Runtime on the values that its operands
have, and kept if ONNX Runtime runs it to finite values, so that every drawn graph runs.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

import partitioner
from helpers.onnx_files import onnx_models
from helpers.plans.whole_plans import candidates, random_plan
from partitioner.api.compiled.base import Compiled
from partitioner.api.lowering import lower
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.running.simulator import run_lockstep
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.onnx.load import Traced, load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan, resolve

Array = onnx_models.Array
Draw = Callable[["Graph"], None]

MESHES: Sequence[dict[str, int]] = (
    {"a": 2},
    {"a": 3},
    {"a": 5},
    {"a": 2, "b": 2},
    {"a": 2, "b": 3},
)
OPSETS = (13, 17, 18, 20, 22)
#: Largest magnitude and number of elements of a value: rounding stays small, and runs short.
MOST, LARGEST = 1e3, 20_000
#: Largest error against the whole model, relative to the largest magnitude.
TOLERANCE = 2e-4


class CannotDrawError(Exception):
    """A node that the values so far do not allow, or that ONNX Runtime does not run."""


#: What ONNX Runtime raises at a node that it does not run.
_REFUSED = (
    *(state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented),
    *(state.RuntimeException, RuntimeError, ValueError),
)


@dataclass
class Graph:
    """A graph that grows, with a value for each tensor.

    Attributes:
        rng: Draws everything.
        opset: Its operator set.
        nodes: Its nodes so far.
        values: The tensors that later nodes may read.
        inputs: Names of its inputs.
        constants: Its initializers.
        used: Names that a node reads.
    """

    rng: random.Random
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def random(self, shape: Sequence[int], low: float = -2, high: float = 2) -> Array:
        """Floats of a shape."""
        draws = np.random.default_rng(self.rng.randrange(2**32))
        return draws.uniform(low, high, shape).astype(np.float32)

    def integers(self, shape: Sequence[int], low: int, high: int, dtype: str = "int64") -> Array:
        """Integers from `low` up to `high`, excluded."""
        draws = np.random.default_rng(self.rng.randrange(2**32))
        return draws.integers(low, high, shape).astype(dtype)

    def constant(self, array: Array | Sequence[int], dtype: str = "int64") -> str:
        """The name of a new initializer, or of one of the same shape that is there: floats only."""
        data = np.asarray(array, None if isinstance(array, np.ndarray | np.generic) else dtype)
        for name, known in self.constants.items():
            is_like = known.dtype == data.dtype == np.float32 and known.shape == data.shape
            if is_like and data.size > 1 and self.rng.random() < 0.3:
                return name  # a shared weight
        name = f"c{len(self.constants)}"
        self.constants[name] = data
        return name

    def some(self, dtype: str = "float32", ranks: Sequence[int] = (1, 2, 3, 4, 5)) -> str:
        """A value of an element type and one of these ranks, more often a late one."""
        fit = [n for n, x in self.values.items() if x.dtype == dtype and x.ndim in ranks]
        if not fit:
            raise CannotDrawError
        late = fit[-4:]
        return self.rng.choice(late if self.rng.random() < 0.7 else fit)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value or constant."""
        return (self.values[name] if name in self.values else self.constants[name]).shape

    def add(self, op: str, inputs: Sequence[str], outputs: int = 1, **attrs: Any) -> list[str]:
        """Run a node and keep it.

        Raises:
            CannotDrawError: ONNX Runtime refuses it, or its results are too large or not finite.
        """
        domain, _, kind = op.rpartition("::")
        names = [f"v{len(self.nodes)}_{index}" for index in range(outputs)]
        node = helper.make_node(kind, inputs, names, f"n{len(self.nodes)}_{kind}", domain=domain)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in attrs.items())
        made = self._run(node, [name for name in inputs if name])
        for array in made:
            if array.size == 0 or array.size > LARGEST or array.ndim > 6:
                raise CannotDrawError
            if array.dtype.kind == "f" and not np.abs(array).max() < MOST:
                raise CannotDrawError
        self.nodes.append(node)
        self.used.update(inputs)
        self.values.update(zip(names, made, strict=True))
        return names

    def _run(self, node: onnx.NodeProto, reads: Sequence[str]) -> list[Array]:
        known = {**self.values, **self.constants}
        feeds = {name: known[name] for name in dict.fromkeys(reads)}
        graph = helper.make_graph(
            [node],
            "one",
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
                )
                for name, x in feeds.items()
                if name not in self.constants
            ],
            [onnx.ValueInfoProto(name=name) for name in node.output],
            [numpy_helper.from_array(feeds[n], n) for n in feeds if n in self.constants],
        )
        try:
            return run_whole(self.proto_of(graph), {n: feeds[n] for n in feeds if n in self.values})
        except _REFUSED as error:
            raise CannotDrawError(str(error)) from error

    def proto_of(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        """A model of the graph."""
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def model(self) -> onnx.ModelProto:
        """The graph as a model: outputs are all that nothing reads, and some others."""
        made = [name for node in self.nodes for name in node.output]
        outputs = [n for n in made if n not in self.used or self.rng.random() < 0.1]
        infos = [
            [
                helper.make_tensor_value_info(
                    name, helper.np_dtype_to_tensor_dtype(self.values[name].dtype), shape
                )
                for name, shape in pairs
            ]
            for pairs in (
                [(name, self.values[name].shape) for name in self.inputs if name in self.used],
                [(name, [None] * self.values[name].ndim) for name in outputs],
            )
        ]
        tensors = [numpy_helper.from_array(x, n) for n, x in self.constants.items()]
        weights = [tensor for tensor in tensors if tensor.name in self.used]
        return self.proto_of(helper.make_graph(self.nodes, "drawn", *infos, weights))


def run_whole(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """Results of a model by ONNX Runtime without optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    data = model.SerializeToString()
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    results: list[Array] = session.run(None, feeds)
    return results


UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh"),
    *("Elu", "Erf", "Exp", "Floor", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log"),
    *("Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin"),
    *("Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu", "Gelu"),
    *("com.microsoft::Gelu", "com.microsoft::QuickGelu", "com.microsoft::FastGelu"),
)


def unary(g: Graph) -> None:
    """A function of one operand, which may be applied to a shift of it."""
    x = g.some()
    op = g.rng.choice(UNARY)
    if op in ("Log", "Sqrt", "Reciprocal", "Acosh"):
        (x,) = g.add("Abs", [x])
        (x,) = g.add("Add", [x, g.constant(np.float32(1.5))])
    elif op in ("Acos", "Asin", "Atanh", "Tan"):
        (x,) = g.add("Sigmoid", [x])
        (x,) = g.add("Mul", [x, g.constant(np.float32(0.9))])
    g.add(op, [x])


def clip(g: Graph) -> None:
    """Bounds, one or both."""
    low, high = g.constant(np.float32(-0.7)), g.constant(np.float32(0.9))
    g.add("Clip", [g.some(), *g.rng.choice(([low], ["", high], [low, high]))])


def _other(g: Graph, x: str, dtype: str = "float32") -> str:
    """A value that broadcasts with `x`, or a constant of a part of its dims."""
    shape = g.shape(x)
    if g.rng.random() < 0.4:
        fit = [
            name
            for name, value in g.values.items()
            if value.dtype == dtype and _broadcasts(shape, value.shape)
        ]
        if fit:
            return g.rng.choice(fit)
    part = shape[g.rng.randint(0, len(shape)) :]
    part = tuple(size if g.rng.random() < 0.7 else 1 for size in part)
    if dtype == "bool":
        return g.constant(g.integers(part, 0, 2).astype(bool))
    return g.constant(g.random(part) if dtype == "float32" else g.integers(part, 1, 8, dtype))


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def binary(g: Graph) -> None:
    """Arithmetic of two operands or more, with broadcasting."""
    x = g.some()
    op = g.rng.choice(
        ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Mod", "PRelu", "Pow")
    )
    y = _other(g, x)
    if op in ("Div", "Mod"):
        (y,) = g.add("Exp", [g.add("Tanh", [y])[0]])
    if op in ("Max", "Min", "Sum", "Mean"):
        operands = [x, y, _other(g, x)][: g.rng.randint(1, 3)]
        g.rng.shuffle(operands)
        g.add(op, operands)
    elif op == "Pow":
        (x,) = g.add("Sigmoid", [x])
        g.add(op, [x, g.constant(np.float32(g.rng.choice((0.5, 2, 3))))])
    elif op == "Mod":
        g.add(op, [x, y], fmod=1)
    elif op == "PRelu":  # the slope broadcasts to the operand
        g.add(op, [x, g.constant(g.random(g.shape(x)[g.rng.randint(0, len(g.shape(x))) :]))])
    else:
        g.add(op, [x, y] if g.rng.random() < 0.7 else [y, x])


def choose(g: Graph) -> None:
    """Comparisons, logic, and a choice by them."""
    x = g.some()
    y = _other(g, x)
    (flag,) = g.add(g.rng.choice(("Greater", "Less", "GreaterOrEqual", "LessOrEqual")), [x, y])
    if g.rng.random() < 0.5:
        other = _other(g, flag, "bool")
        (flag,) = g.add(g.rng.choice(("And", "Or", "Xor", "Equal")), [flag, other])
    if g.rng.random() < 0.3:
        (flag,) = g.add("Not", [flag])
    if g.rng.random() < 0.7:
        g.add("Where", [flag, x, _other(g, x)])
    else:
        g.add("Cast", [flag], to=1)


def whole_numbers(g: Graph) -> None:
    """Integers out of floats, their arithmetic, and floats again."""
    dtype = g.rng.choice(("int64", "int32"))
    to = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    (x,) = g.add("Cast", [g.add("Mul", [g.some(), g.constant(np.float32(7.3))])[0]], to=to)
    for _ in range(g.rng.randint(1, 2)):
        op = g.rng.choice(("Add", "Sub", "Mul", "Mod", "Max", "Min", "Neg", "Abs", "Sign"))
        y = _other(g, x, dtype)
        if op == "Mod" and (y not in g.constants or not g.constants[y].all()):
            continue
        (x,) = g.add(op, [x] if op in ("Neg", "Abs", "Sign") else [x, y])
    if g.rng.random() < 0.8:
        (x,) = g.add("Cast", [x], to=1)
        g.add("Mul", [x, g.constant(np.float32(0.05))])


def product(g: Graph) -> None:
    """Products of matrices, with a constant or with another value."""
    x = g.some(ranks=(1, 2, 3, 4))
    shape = g.shape(x)
    n = g.rng.randint(1, 9)
    scale = 1 / math.sqrt(max(shape[-1], 1))
    kind = g.rng.choice(("matmul", "batched", "gemm", "self", "einsum", "fused", "vector"))
    if kind == "matmul":
        g.add("MatMul", [x, g.constant(g.random((shape[-1], n)) * np.float32(scale))])
    elif kind == "vector":
        g.add("MatMul", [x, g.constant(g.random(shape[-1:]) * np.float32(scale))])
    elif kind == "batched" and len(shape) >= 3:
        batch = tuple(size if g.rng.random() < 0.6 else 1 for size in shape[:-2])
        g.add("MatMul", [x, g.constant(g.random((*batch, shape[-1], n)) * np.float32(scale))])
    elif kind == "self" and len(shape) >= 2:
        perm = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        (y,) = g.add("Transpose", [x], perm=perm)
        (z,) = g.add("MatMul", g.rng.choice(([x, y], [y, x])))
        g.add("Tanh", [g.add("Mul", [z, g.constant(np.float32(0.1))])[0]])
    elif kind == "gemm" and len(shape) == 2:
        _gemm(g, x, n, scale)
    elif kind == "einsum" and len(shape) in (2, 3):
        letters = "abc"[: len(shape)]
        weight = g.constant(g.random((shape[-1], n)) * np.float32(scale))
        result = list(letters[:-1] + "z")
        g.rng.shuffle(result)
        g.add("Einsum", [x, weight], equation=f"{letters},{letters[-1]}z->{''.join(result)}")
    elif kind == "fused" and len(shape) >= 2:
        flip = g.rng.random() < 0.5
        size = (n, shape[-1]) if flip else (shape[-1], n)
        weight = g.constant(g.random(size) * np.float32(scale))
        g.add("com.microsoft::FusedMatMul", [x, weight], transB=int(flip), alpha=0.5)
    else:
        raise CannotDrawError


def _gemm(g: Graph, x: str, n: int, scale: float) -> None:
    flip_a, flip_b = g.rng.randint(0, 1), g.rng.randint(0, 1)
    m, k = g.shape(x)[:: -1 if flip_a else 1]
    weight = g.constant(g.random((n, k) if flip_b else (k, n)) * np.float32(scale))
    bias = g.rng.choice((None, (n,), (1, n), (m, 1), (m, n), ()))
    operands = [x, weight, *([] if bias is None else [g.constant(g.random(bias))])]
    g.add("Gemm", operands, transA=flip_a, transB=flip_b, alpha=0.7, beta=g.rng.choice((1.0, 0.5)))


def _windows(g: Graph, space: int, *, most: int = 4) -> dict[str, Any]:
    """Attributes of a window over `space` dims."""
    rng = g.rng
    attrs: dict[str, Any] = {"kernel_shape": [rng.randint(1, most) for _ in range(space)]}
    if rng.random() < 0.7:
        attrs["strides"] = [rng.randint(1, 3) for _ in range(space)]
    if rng.random() < 0.4:
        attrs["dilations"] = [rng.randint(1, 3) for _ in range(space)]
    if rng.random() < 0.4:
        attrs["auto_pad"] = rng.choice(("SAME_UPPER", "SAME_LOWER", "VALID"))
    elif rng.random() < 0.7:
        attrs["pads"] = [rng.randint(0, 2) for _ in range(2 * space)]
    return attrs


def convolution(g: Graph) -> None:
    """Convolutions in groups or not, also transposed ones, over one to three dims."""
    x = g.some(ranks=(3, 4, 5))
    channels, space = g.shape(x)[1], len(g.shape(x)) - 2
    attrs = _windows(g, space)
    group = g.rng.choice([d for d in range(1, channels + 1) if channels % d == 0])
    kernel, each = attrs["kernel_shape"], g.rng.randint(1, 3)
    scale = np.float32(1 / math.sqrt(channels // group * math.prod(kernel)))
    attrs |= {"group": group} if group > 1 else {}
    if g.rng.random() < 0.6:
        made = each * group
        weight = g.random((made, channels // group, *kernel)) * scale
        op = "Conv"
    else:
        made = each * group
        weight = g.random((channels, each, *kernel)) * scale
        op = "ConvTranspose"
        if g.rng.random() < 0.3:
            attrs["output_padding"] = [g.rng.randint(0, 1) for _ in kernel]
    bias = [g.constant(g.random((made,)))] if g.rng.random() < 0.6 else []
    g.add(op, [x, g.constant(weight), *bias], **attrs)


def pool(g: Graph) -> None:
    """Pools, also global ones."""
    x = g.some(ranks=(3, 4, 5))
    space = len(g.shape(x)) - 2
    op = g.rng.choice(
        ("MaxPool", "AveragePool", "LpPool", "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
    )
    if op.startswith("Global"):
        g.add(op, [x])
        return
    attrs = _windows(g, space)
    if op == "AveragePool":
        attrs["count_include_pad"] = g.rng.randint(0, 1)
        if g.opset < 19:
            attrs.pop("dilations", None)
    if op == "LpPool" and g.opset < 18:
        attrs.pop("dilations", None)
    elif g.rng.random() < 0.4:
        attrs["ceil_mode"] = 1
    if op == "MaxPool" and g.rng.random() < 0.1:
        _, places = g.add(op, [x], 2, **attrs)
        g.add("Cast", [places], to=1)
        return
    g.add(op, [x], **attrs)


def resize(g: Graph) -> None:
    """Images of other sizes."""
    x = g.some(ranks=(3, 4))
    shape = g.shape(x)
    mode = g.rng.choice(("nearest", "linear", "cubic"))
    how = g.rng.choice(("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"))
    attrs: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": how}
    if mode == "nearest":
        attrs["nearest_mode"] = g.rng.choice(("floor", "ceil", "round_prefer_floor"))
    if g.rng.random() < 0.5:
        factors = [1.0, 1.0, *(g.rng.choice((1.0, 2.0, 0.5, 1.5, 3.0)) for _ in shape[2:])]
        g.add("Resize", [x, "", g.constant(np.array(factors, np.float32))], **attrs)
    else:
        sizes = [*shape[:2], *(g.rng.randint(1, 2 * size) for size in shape[2:])]
        g.add("Resize", [x, "", "", g.constant(sizes)], **attrs)


def samples(g: Graph) -> None:
    """Samples of an image at a grid, and regions of it."""
    x = g.some(ranks=(4,))
    batch = g.shape(x)[0]
    if g.rng.random() < 0.5 and g.opset >= 16:
        grid = g.random((batch, g.rng.randint(1, 5), g.rng.randint(1, 5), 2), -1.1, 1.1)
        mode = g.rng.choice(("nearest", "bilinear" if g.opset < 20 else "linear"))
        padding = g.rng.choice(("zeros", "border", "reflection"))
        g.add("GridSample", [x, g.constant(grid)], mode=mode, padding_mode=padding)
        return
    count = g.rng.randint(1, 5)
    corners = g.random((count, 2), 0, 2)
    boxes = np.concatenate([corners, corners + g.random((count, 2), 1, 4)], axis=1)
    rows = g.constant(g.integers((count,), 0, batch))
    g.add("RoiAlign", [x, g.constant(boxes), rows], output_height=2, output_width=3)


def normalization(g: Graph) -> None:
    """Normalizations over channels, groups, the last dims or windows."""
    x = g.some(ranks=(2, 3, 4))
    shape = g.shape(x)
    channels = shape[1]
    ops = ["BatchNormalization", "InstanceNormalization", "LpNormalization", "LRN", "skip"]
    ops += ["MeanVarianceNormalization", *(["LayerNormalization"] if g.opset >= 17 else [])]
    op = g.rng.choice([*ops, *(["GroupNormalization"] if g.opset >= 21 else [])])
    one, two = (g.constant(g.random((channels,), 0.5, 1.5)) for _ in range(2))
    if op == "BatchNormalization":
        moments = [g.constant(g.random((channels,), 0.5, 1.5)) for _ in range(2)]
        g.add(op, [x, one, two, *moments])
    elif op == "InstanceNormalization":
        g.add(op, [x, one, two])
    elif op == "LayerNormalization":
        axis = g.rng.randint(1, len(shape) - 1)
        sizes = shape[axis:]
        scale = [g.constant(g.random(sizes)) for _ in range(g.rng.randint(1, 2))]
        g.add(op, [x, *scale], axis=g.rng.choice((axis, axis - len(shape))))
    elif op == "GroupNormalization":
        groups = g.rng.choice([d for d in range(1, channels + 1) if channels % d == 0])
        g.add(op, [x, one, two], num_groups=groups)
    elif op == "LpNormalization":
        g.add(op, [x], axis=g.rng.randrange(len(shape)), p=g.rng.randint(1, 2))
    elif op == "LRN":
        g.add(op, [x], size=g.rng.randint(1, 5), alpha=0.1)
    elif op == "MeanVarianceNormalization":
        axes = sorted(g.rng.sample(range(len(shape)), g.rng.randint(1, len(shape))))
        g.add(op, [x], axes=axes)
    else:
        scale = [g.constant(g.random(shape[-1:])) for _ in range(2)]
        op = "com.microsoft::SkipLayerNormalization"
        g.add(op, [x, g.add("Tanh", [x])[0], *scale])


REDUCTIONS = (
    *("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
)


def reduction(g: Graph) -> None:
    """Reductions over some dims or all."""
    x = g.some()
    rank = len(g.shape(x))
    op = g.rng.choice(REDUCTIONS)
    if op == "ReduceLogSum":
        (x,) = g.add("Exp", [g.add("Tanh", [x])[0]])
    axes = g.rng.sample(range(rank), g.rng.randint(1, rank))
    axes = [axis - rank if g.rng.random() < 0.3 else axis for axis in axes]
    attrs: dict[str, Any] = {"keepdims": g.rng.choice((0, 1, 1))}
    if g.rng.random() < 0.1:
        g.add(op, [x], **attrs)
    elif op == "ReduceSum" or g.opset >= 18:
        g.add(op, [x, g.constant(axes)], **attrs)
    else:
        g.add(op, [x], axes=axes, **attrs)


def along_a_dim(g: Graph) -> None:
    """Softmax, running sums, places of extremes and the largest elements along a dim."""
    x = g.some()
    rank = len(g.shape(x))
    dim = g.rng.randrange(rank)
    axis = dim - rank if g.rng.random() < 0.5 else dim
    op = g.rng.choice(("Softmax", "LogSoftmax", "Hardmax", "CumSum", "ArgMax", "ArgMin", "TopK"))
    if op == "CumSum":
        place = g.constant(np.array(axis, np.int64))
        g.add(op, [x, place], exclusive=g.rng.randint(0, 1), reverse=g.rng.randint(0, 1))
    elif op.startswith("Arg"):
        last = g.rng.randint(0, 1)
        (y,) = g.add(op, [x], axis=axis, keepdims=g.rng.randint(0, 1), select_last_index=last)
        g.add("Cast", [y], to=1)
    elif op == "TopK":
        count = g.constant([g.rng.randint(1, g.shape(x)[dim])])
        g.add(op, [x, count], 2, axis=axis, largest=g.rng.randint(0, 1))
    else:
        g.add(op, [x], axis=axis)


def movement(g: Graph) -> None:
    """Elements that move: other shapes, parts, and copies."""
    g.rng.choice(MOVES)(g, g.some(g.rng.choice(("float32", "float32", "float32", "int64"))))


def _reshape(g: Graph, x: str) -> None:
    shape = list(g.shape(x))
    kind = g.rng.choice(("merge", "split", "flatten", "fresh"))
    if kind == "flatten":
        g.add("Flatten", [x], axis=g.rng.randint(-len(shape), len(shape)))
        return
    if kind == "merge" and len(shape) > 1:
        dim = g.rng.randrange(len(shape) - 1)
        shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    elif kind == "split":
        dim = g.rng.randrange(len(shape))
        part = g.rng.choice([d for d in range(1, shape[dim] + 1) if shape[dim] % d == 0])
        shape[dim : dim + 1] = [part, shape[dim] // part]
    else:
        size, shape = math.prod(shape), []
        while len(shape) < 3:
            part = g.rng.choice([d for d in range(1, size + 1) if size % d == 0])
            shape, size = [*shape, part], size // part
        shape.append(size)
    if g.rng.random() < 0.4:
        shape[g.rng.randrange(len(shape))] = -1
    if g.rng.random() < 0.2 and shape[0] == g.shape(x)[0]:
        shape[0] = 0
    g.add("Reshape", [x, g.constant(shape)])


def _transpose(g: Graph, x: str) -> None:
    perm = list(range(len(g.shape(x))))
    g.rng.shuffle(perm)
    g.add("Transpose", [x], perm=perm)


def _squeeze(g: Graph, x: str) -> None:
    ones = [dim for dim, size in enumerate(g.shape(x)) if size == 1]
    if ones and g.rng.random() < 0.6:
        g.add("Squeeze", [x, g.constant(g.rng.sample(ones, g.rng.randint(1, len(ones))))])
        return
    rank = len(g.shape(x)) + 1
    g.add("Unsqueeze", [x, g.constant([g.rng.randint(-rank, rank - 1)])])


def _slice(g: Graph, x: str) -> None:
    shape = g.shape(x)
    axes = g.rng.sample(range(len(shape)), g.rng.randint(1, len(shape)))
    starts, ends, steps = [], [], []
    for axis in axes:
        size, step = shape[axis], g.rng.choice((1, 1, 1, 2, 3, -1, -2))
        low = g.rng.randrange(size)
        high = g.rng.randint(low + 1, size)
        if step > 0:
            start, end = low, g.rng.choice((high, 2**40 if high == size else high))
        else:
            start, end = high - 1, (low - 1 if low else -size - 5)
        if start > 0 and g.rng.random() < 0.3:
            start -= size
        starts, ends, steps = [*starts, start], [*ends, end], [*steps, step]
    named = [axis - len(shape) if g.rng.random() < 0.3 else axis for axis in axes]
    g.add("Slice", [x, *map(g.constant, (starts, ends, named, steps))])


def _concat(g: Graph, x: str) -> None:
    shape, dtype = g.shape(x), g.values[x].dtype
    axis = g.rng.randrange(len(shape))
    fit = [
        name
        for name, value in g.values.items()
        if value.dtype == dtype
        and value.ndim == len(shape)
        and all(
            a == b for d, (a, b) in enumerate(zip(shape, value.shape, strict=True)) if d != axis
        )
    ]
    g.add("Concat", [x, *(g.rng.choice(fit) for _ in range(g.rng.randint(1, 2)))], axis=axis)


def _split(g: Graph, x: str) -> None:
    shape = g.shape(x)
    axis = g.rng.randrange(len(shape))
    if shape[axis] < 2:
        raise CannotDrawError
    first = g.rng.randint(1, shape[axis] - 1)
    sizes = [first, shape[axis] - first]
    g.add("Split", [x, g.constant(sizes)], 2, axis=g.rng.choice((axis, axis - len(shape))))


def _expand(g: Graph, x: str) -> None:
    shape = [g.rng.randint(2, 4) if size == 1 else size for size in g.shape(x)]
    if g.rng.random() < 0.3:
        shape = [g.rng.randint(1, 3), *shape]
    g.add("Expand", [x, g.constant(shape)])


def _tile(g: Graph, x: str) -> None:
    g.add("Tile", [x, g.constant([g.rng.choice((1, 1, 2, 3)) for _ in g.shape(x)])])


def _pad(g: Graph, x: str) -> None:
    rank = len(g.shape(x))
    mode = g.rng.choice(("constant", "constant", "edge", "reflect"))
    pads = [g.rng.choice((0, 0, 1, 2, -1)) for _ in range(2 * rank)]
    if mode != "constant":
        pads = [max(pad, 0) for pad in pads]
    value = [g.constant(np.array(0.5, g.values[x].dtype))] if g.rng.random() < 0.5 else []
    g.add("Pad", [x, g.constant(pads), *value], mode=mode)


def _blocks(g: Graph, x: str) -> None:
    if len(g.shape(x)) != 4:
        raise CannotDrawError
    if g.rng.random() < 0.5:
        g.add("DepthToSpace", [x], blocksize=2, mode=g.rng.choice(("DCR", "CRD")))
    else:
        g.add("SpaceToDepth", [x], blocksize=2)


def _trilu(g: Graph, x: str) -> None:
    if len(g.shape(x)) < 2:
        raise CannotDrawError
    offset = [g.constant(np.array(g.rng.randint(-2, 2)))] if g.rng.random() < 0.6 else []
    g.add("Trilu", [x, *offset], upper=g.rng.randint(0, 1))


def _reverse(g: Graph, x: str) -> None:
    shape = g.shape(x)
    if len(shape) < 2:
        raise CannotDrawError
    time = g.rng.randint(0, 1)
    lengths = g.integers((shape[1 - time],), 1, shape[time] + 1)
    g.add("ReverseSequence", [x, g.constant(lengths)], time_axis=time, batch_axis=1 - time)


def _crop(g: Graph, x: str) -> None:
    rank = len(g.shape(x))
    axes = g.rng.sample(range(rank), g.rng.randint(1, rank))
    sizes = [g.rng.randint(1, g.shape(x)[axis] + 3) for axis in axes]
    g.add("CenterCropPad", [x, g.constant(sizes)], axes=axes)


MOVES: Sequence[Callable[[Graph, str], None]] = (
    *(_reshape, _reshape, _transpose, _squeeze, _slice, _slice, _concat, _split, _expand, _tile),
    *(_pad, _blocks, _trilu, _reverse, _crop),
)


def indexing(g: Graph) -> None:
    """Elements by index, and elements put at indices."""
    x = g.some()
    shape = g.shape(x)
    dim = g.rng.randrange(len(shape))
    size = shape[dim]
    axis = dim - len(shape) if g.rng.random() < 0.3 else dim
    op = g.rng.choice(
        ("Gather", "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "OneHot")
    )
    if op == "Gather":
        places = g.rng.choice(((), (3,), (2, 3)))
        g.add(op, [x, g.constant(g.integers(places, -size, size))], axis=axis)
    elif op == "GatherElements":
        part = [
            g.rng.randint(1, s) if d != dim else g.rng.randint(1, 4) for d, s in enumerate(shape)
        ]
        g.add(op, [x, g.constant(g.integers(part, -size, size))], axis=axis)
    elif op == "GatherND":
        batch = g.rng.randint(0, min(1, len(shape) - 1))
        depth = g.rng.randint(1, len(shape) - batch)
        bounds = shape[batch : batch + depth]
        rows = np.stack([g.integers((*shape[:batch], 4), -s, s) for s in bounds], axis=-1)
        g.add(op, [x, g.constant(rows)], batch_dims=batch)
    elif op == "ScatterElements":
        part = [g.rng.randint(1, s) for s in shape]
        order = np.argsort(g.random((*part[:dim], size, *part[dim + 1 :])), axis=dim)
        places = np.take(order, range(part[dim]), axis=dim)
        how = {"reduction": g.rng.choice(("none", "add", "mul"))} if g.opset >= 16 else {}
        data = g.constant(g.random(part))
        g.add(op, [x, g.constant(places.astype(np.int64)), data], axis=axis, **how)
    elif op == "ScatterND":
        rows = np.array(g.rng.sample(range(shape[0]), g.rng.randint(1, shape[0])))[:, None]
        how = {"reduction": g.rng.choice(("none", "add", "mul"))} if g.opset >= 16 else {}
        data = g.constant(g.random((len(rows), *shape[1:])))
        g.add(op, [x, g.constant(rows), data], **how)
    else:
        (y,) = g.add("ArgMax", [x], axis=dim, keepdims=0)
        values = g.constant(np.array([0.5, 2], np.float32))
        g.add("OneHot", [y, g.constant(np.array(size)), values], axis=g.rng.choice((-1, 0)))


def quantization(g: Graph) -> None:
    """Steps of a quantization, by tensor or by channel, and integer products."""
    x = g.some(ranks=(1, 2, 3, 4))
    shape = g.shape(x)
    dtype = g.rng.choice(("uint8", "int8"))
    axis = g.rng.randrange(len(shape))
    sizes = (shape[axis],) if g.rng.random() < 0.5 else ()
    scale = g.constant(g.random(sizes, 0.02, 0.07))
    zero = g.constant(g.integers(sizes, 1, 9, dtype))
    where = {"axis": axis} if sizes else {}
    (q,) = g.add("QuantizeLinear", [x, scale, zero], **where)
    if sizes or len(shape) < 2 or g.rng.random() < 0.5:
        g.add("DequantizeLinear", [q, scale, zero], **where)
        return
    n = g.rng.randint(1, 6)
    weight = g.constant(g.integers((shape[-1], n), 0, 9, dtype))
    if g.rng.random() < 0.5:
        (y,) = g.add("MatMulInteger", [q, weight, zero])
        g.add("Mul", [g.add("Cast", [y], to=1)[0], g.constant(np.float32(0.002))])
        return
    fine = g.constant(np.float32(0.05))
    (y,) = g.add("QLinearMatMul", [q, scale, zero, weight, fine, zero, scale, zero])
    g.add("DequantizeLinear", [y, scale, zero])


def attention(g: Graph) -> None:
    """Attention by one node, or by its products."""
    x = g.some(ranks=(3,))
    batch, length, width = g.shape(x)
    heads = g.rng.choice([d for d in range(1, width + 1) if width % d == 0])
    keys = g.add("Tanh", [x])[0]
    if g.rng.random() < 0.5:
        g.add("com.microsoft::MultiHeadAttention", [x, keys, x], num_heads=heads)
        return
    by_head = g.constant([0, 0, heads, -1])
    parts = [
        g.add("Transpose", [g.add("Reshape", [of, by_head])[0]], perm=perm)[0]
        for of, perm in ((x, [0, 2, 1, 3]), (keys, [0, 2, 3, 1]), (x, [0, 2, 1, 3]))
    ]
    (scores,) = g.add("Softmax", g.add("MatMul", parts[:2]), axis=-1)
    (mixed,) = g.add("Transpose", g.add("MatMul", [scores, parts[2]]), perm=[0, 2, 1, 3])
    g.add("Reshape", [mixed, g.constant([batch, length, width])])


def shapes(g: Graph) -> None:
    """Sizes of a value that make another value."""
    x = g.some()
    (size,) = g.add("Shape", [x])
    value = numpy_helper.from_array(np.array([0.5], np.float32))
    (y,) = g.add("ConstantOfShape", [size], value=value)
    g.add("Add", [x, y])


DRAWS: Sequence[Draw] = (
    *(unary, unary, binary, binary, choose, whole_numbers, clip, product, product, convolution),
    *(convolution, pool, pool, pool, resize, samples, normalization, normalization, reduction),
    *(reduction, along_a_dim, along_a_dim, movement, movement, movement, movement, indexing),
    *(indexing, quantization, attention, shapes),
)
SHAPES: Sequence[Callable[[random.Random], tuple[int, ...]]] = (
    lambda r: (r.randint(1, 4), r.randint(1, 8), r.randint(3, 13), r.randint(3, 13)),
    lambda r: (r.randint(1, 3), r.randint(1, 6), r.randint(5, 17)),
    lambda r: (r.randint(1, 7), r.randint(2, 12)),
    lambda r: (r.randint(1, 2), r.randint(1, 4), r.randint(3, 6), r.randint(3, 6), r.randint(3, 6)),
)


def drawn_graph(seed: int) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """A model of 3 to 12 draws that ONNX Runtime runs, and inputs for it."""
    for turn in itertools.count():
        g = _grown(random.Random(f"graph {seed} {turn}"))
        model = g.model()
        feeds = {name: g.values[name] for name in g.inputs if name in g.used}
        try:  # as a whole: sizes that nodes infer from each other may not be those that they have
            run_whole(model, feeds)
        except _REFUSED:
            continue
        return model, feeds
    raise AssertionError("a count does not end")


def _grown(rng: random.Random) -> Graph:
    g = Graph(rng, rng.choice(OPSETS))
    for index in range(rng.randint(1, 3)):
        name = f"x{index}"
        g.inputs.append(name)
        g.values[name] = g.random(rng.choice(SHAPES)(rng))
    left = rng.randint(3, 12)
    for _ in range(200):
        try:
            rng.choice(DRAWS)(g)
        except CannotDrawError:
            continue
        left -= 1
        if not left:
            break
    return g


@dataclass(frozen=True)
class Ran:
    """A plan of a drawn graph after its ranks ran.

    Attributes:
        how: The way to the plan, in words.
        cut: Nodes that it cuts.
        fault: What is wrong in words; nothing if the ranks compute what the whole model does.
        refused: Whether the planner refused the graph in a line.
    """

    how: str
    cut: int = 0
    fault: str = ""
    refused: bool = False


def ran_plans(seed: int, count: int = 3) -> list[Ran]:
    """Plans of the graph of a seed: one that is searched, and others with a random cut a node."""
    model, feeds = drawn_graph(seed)
    rng = random.Random(f"plans {seed}")
    axes = rng.choice(MESHES)
    expected, allowed = whole_and_allowed(model, feeds)
    ran = [_searched(model, feeds, expected, allowed, axes, rng)]
    try:
        traced = load_onnx(model)
        mesh = DeviceMesh.of(axes)
        groups = [mesh, DeviceMesh.of({"a": 2}, (*rng.sample(mesh.devices, 2),))]
        offered = candidates(traced.graph, groups if rng.random() < 0.5 else groups[:1])
        draws = np.random.default_rng(seed)
        for _ in range(count - 1):
            plan, _ = random_plan(traced.graph, offered, draws)
            ran.append(_at_random(traced, plan, feeds, expected, allowed, mesh))
    except PartitionerError as error:
        ran.append(Ran("load", refused=True, fault="" if _is_line(error) else str(error)))
    return ran


def whole_and_allowed(
    model: onnx.ModelProto, feeds: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, float]]:
    """Results of the whole model, and the error that its own rounding allows each of them.

    The rounding is what changes when the inputs change in their last bit. Results that follow a
    place of one of several values that are equal but for rounding may be any.
    """
    names = [value.name for value in model.graph.output]
    whole = dict(zip(names, run_whole(model, feeds), strict=True))
    noise = dict.fromkeys(names, 0.0)
    for end in (np.inf, -np.inf):
        nudged = {name: np.nextafter(x, x.dtype.type(end)) for name, x in feeds.items()}
        for name, array in zip(names, run_whole(model, nudged), strict=True):
            noise[name] = max(noise[name], _error(array, whole[name]))
    allowed = {name: max(TOLERANCE, 20 * of) for name, of in noise.items()}
    return whole, {**allowed, **dict.fromkeys(_after_ties(model, feeds) & {*names}, math.inf)}


def _after_ties(model: onnx.ModelProto, feeds: dict[str, Array]) -> set[str]:
    """Values that depend on the place of an extreme that another element comes close to."""
    nodes = [node for node in model.graph.node if node.op_type in ("ArgMax", "ArgMin")]
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    known = {value.name for value in model.graph.output}
    operands = dict.fromkeys(node.input[0] for node in nodes)
    ends = [helper.make_empty_tensor_value_info(x) for x in operands if x not in {*known, *feeds}]
    shown.graph.output.extend(ends)
    names = [value.name for value in shown.graph.output]
    values = dict(zip(names, run_whole(shown, feeds), strict=True)) | feeds if nodes else {}
    after: set[str] = set()
    for node in nodes:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        x = values[node.input[0]].astype(np.float64)
        x = np.sort(x if node.op_type == "ArgMax" else -x, axis)
        if x.shape[axis] > 1:
            first, second = (np.take(x, -place, axis) for place in (1, 2))
            if np.any((first != second) & (first - second < TOLERANCE * np.abs(first))):
                after.update(node.output)
    for node in model.graph.node:
        if after.intersection(node.input):
            after.update(node.output)
    return after


def _error(ours: Array, whole: Array) -> float:
    """Largest difference relative to the largest magnitude; of integers the share that differs."""
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return math.inf
    if whole.dtype.kind != "f":
        return float(np.mean(ours != whole))
    a, b = ours.astype(np.float64), whole.astype(np.float64)
    gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
    return float(np.max(gap, initial=0) / max(np.abs(b).max(initial=0), 1e-6))


def _fault(outputs: dict[str, Array], expected: dict[str, Array], allowed: dict[str, float]) -> str:
    wrong = {name: _error(outputs[name], x) for name, x in expected.items()}
    return ", ".join(f"{name} {of:.2g}" for name, of in wrong.items() if not of <= allowed[name])


def _searched(
    model: onnx.ModelProto,
    feeds: dict[str, Array],
    expected: dict[str, Array],
    allowed: dict[str, float],
    axes: dict[str, int],
    rng: random.Random,
) -> Ran:
    size = math.prod(axes.values())
    options: dict[str, Any] = rng.choice(
        (
            {},
            {"strategy": "intra", "cluster": "ideal"},
            {"strategy": "intra", "cluster": "ideal", "mesh": axes},
            {"strategy": "inter", "cluster": "ideal"},
            {"parallel": "spatial", "cluster": "ideal"},
            {"parallel": "tp", "cluster": "ideal"},
        )
    )
    how = f"compile on {axes} {options}"
    try:
        compiled = partitioner.compile(model, devices=size, time_limit_s=1, **options)
    except PartitionerError as error:
        return Ran(how, refused=True, fault="" if _is_line(error) else str(error))
    assert isinstance(compiled, Compiled)
    cut = sum(1 for node in compiled.plan.nodes.values() if node.cuts)
    try:
        models = emit_models(compiled.programs, compiled.graph)
        outputs = run_lockstep(models, feeds, optimization="disable")
    except Exception as error:  # noqa: BLE001 - what the search looks for
        return Ran(how, cut, f"fails: {type(error).__name__}: {error}")
    return Ran(how, cut, _fault(outputs, expected, allowed))


def _at_random(
    traced: Traced,
    plan: Plan,
    feeds: dict[str, Array],
    expected: dict[str, Array],
    allowed: dict[str, float],
    mesh: DeviceMesh,
) -> Ran:
    graph, size = traced.graph, mesh.size()
    cuts = {name: node.cuts for name, node in plan.nodes.items() if node.cuts}
    how = f"random on {mesh}"
    try:
        tasks = schedule(graph, resolve(graph, plan), resolve_cluster(None, size))
        models = emit_models(lower(graph, tasks, size), graph)
        outputs = run_lockstep(models, feeds, optimization="disable")
    except Exception as error:  # noqa: BLE001 - what the search looks for
        return Ran(how, len(cuts), f"fails: {type(error).__name__}: {error}")
    by_model = dict(zip(expected, (outputs[name] for name in graph.outputs), strict=True))
    return Ran(how, len(cuts), _fault(by_model, expected, allowed))


def _is_line(error: Exception) -> bool:
    return "\n" not in str(error)


@dataclass
class Counts:
    """How the plans of many graphs ended.

    Attributes:
        graphs: Number of graphs.
        ends: Number of plans by end: equal, refused, wrong, fails.
        cut: Nodes that the plans cut.
        faults: A line for each plan that is wrong or fails.
    """

    graphs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, seed: int, ran: Sequence[Ran]) -> None:
        """Count the plans of a graph."""
        self.graphs += 1
        for plan in ran:
            self.cut += plan.cut
            end = "fails" if plan.fault.startswith("fails") else "wrong" if plan.fault else "equal"
            self.ends["refused" if plan.refused and not plan.fault else end] += 1
            if plan.fault:
                self.faults.append(f"{seed}: {plan.how}, {plan.cut} nodes cut: {plan.fault}")

    def __str__(self) -> str:
        plans = self.ends.total() - self.ends["refused"]
        ends = ", ".join(f"{self.ends[end]:,} {end}" for end in ("equal", "wrong", "fails"))
        refused = self.ends["refused"]
        return (
            f"{self.graphs:,} graphs, {plans:,} plans with {self.cut:,} cut nodes: {ends}; "
            f"{refused:,} requests refused in a line"
        )
