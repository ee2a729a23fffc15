"""Values of nodes whose operands are all constant, which ONNX Runtime computes.

ONNX Runtime runs the model and the ranks, so no other implementation of an operator may say what a
constant is: ONNX's reference evaluator differs from it in pooling, in Resize, in the last bits of a
Range. A node that ONNX Runtime refuses stays as it is.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType, convenience, serde
from onnx_ir.traversal import RecursiveGraphIterator

from partitioner.frontends.onnx.reading.runtime import plain_session

if TYPE_CHECKING:
    import onnxruntime

#: Most nodes of a session: the time to make one grows faster than they do.
_MOST_NODES = 256
#: In `meta` of a node that ONNX Runtime does not compute.
_REFUSED = "partitioner.refused"
#: Operators whose time and memory are bounded by the sizes of their operands and results. Not
#: among them are those whose attributes make them work longer (windows, samples), and those whose
#: operands are weights in all but name (convolutions, recurrent layers).
_EVALUATED = frozenset((
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh",
    "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu",
    "Clip", "Compress", "Concat", "ConstantOfShape", "Cos", "Cosh", "CumSum", "Div", "Elu", "Equal",
    "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND",
    "Gelu", "Gemm", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max",
    "Mean", "Min", "Mish", "Mod", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "PRelu", "Pad",
    "Pow", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu",
    "Reshape", "Round", "ScatterElements", "ScatterND", "Selu", "Shape", "Sigmoid", "Sign", "Sin",
    "Sinh", "Size", "Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub",
    "Sum", "Tan", "Tanh", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu", "Unique",
    "Unsqueeze", "Where", "Xor",
))  # fmt: skip
#: ONNX Runtime computes a chain of nodes without kernels of these in float32 and rounds at its end:
#: the value of one of its nodes, or of a Cast before it, would round once more.
_IN_CHAINS = (DataType.BFLOAT16, DataType.FLOAT16)
_SIGNED = (DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64)


def evaluate_constants(
    model: onnx_ir.Model, may_grow: Callable[[onnx_ir.Node], bool]
) -> Iterator[tuple[onnx_ir.Node, Mapping[onnx_ir.Value, onnx_ir.TensorProtocol]]]:
    """Compute the nodes of a model, also those in bodies, whose operands are all constant.

    Yields:
        Each node that was computed, with those of its results that other nodes read: they must be
        put in place before the next are asked for.
    """
    while True:
        batch: list[onnx_ir.Node] = []
        made: set[onnx_ir.Value] = set()
        for node in RecursiveGraphIterator(model.graph):
            if not _is_evaluated(node) or not _is_constant(node, made) or _may_end(node, made):
                continue
            if may_grow(node):
                batch.append(node)
                made.update(node.outputs)
            if len(batch) == _MOST_NODES:
                break
        if not batch:
            return
        yield from _evaluated(batch, model.graph.opset_imports.get("", 1))


def _is_evaluated(node: onnx_ir.Node) -> bool:
    if node.domain or node.op_type not in _EVALUATED or _REFUSED in node.meta:
        return False
    results = [value for value in node.outputs if value.name]
    if any(
        v.is_graph_output() or v.dtype in (None, DataType.STRING) or v.dtype.bitwidth < 8
        for v in results
    ):
        return False
    if any(value is not None and value.dtype in _IN_CHAINS for value in (*node.inputs, *results)):
        return False
    return any(value.uses() for value in results)


def _is_constant(node: onnx_ir.Node, made: set[onnx_ir.Value]) -> bool:
    return all(
        value is None or value in made or _tensor(value) is not None for value in node.inputs
    )


def _tensor(value: onnx_ir.Value) -> onnx_ir.TensorProtocol | None:
    tensor = None if value.is_graph_input() else convenience.get_const_tensor(value)
    return None if tensor is None or tensor.dtype == DataType.STRING else tensor


def _may_end(node: onnx_ir.Node, made: set[onnx_ir.Value]) -> bool:
    """Tell whether ONNX Runtime may end the process: at the least integer divided by -1."""
    if node.op_type not in ("Div", "Mod") or len(node.inputs) != 2:
        return False
    dividend, divisor = node.inputs
    if dividend is None or divisor is None or divisor.dtype not in _SIGNED:
        return False
    if dividend in made or divisor in made:
        return True  # it is asked again when they are known
    a, b = _tensor(dividend), _tensor(divisor)
    assert a is not None
    assert b is not None
    low = np.iinfo(b.dtype.numpy()).min
    return bool((b.numpy() == -1).any() and (a.numpy() == low).any())


def _evaluated(
    nodes: Sequence[onnx_ir.Node], opset: int
) -> Iterator[tuple[onnx_ir.Node, Mapping[onnx_ir.Value, onnx_ir.TensorProtocol]]]:
    """Compute nodes in one session; where one is refused, in two, down to that node."""
    made: set[onnx_ir.Value] = set()
    kept = []
    for node in nodes:
        if _is_constant(node, made):
            kept.append(node)
            made.update(node.outputs)
    if not kept:
        return
    model, read = _model(kept, opset)
    results: Sequence[onnxruntime.OrtValue] | None = None
    with suppress(Exception):  # what is refused stays, and is told of when the model runs
        results = plain_session(model.SerializeToString()).run_with_ort_values(list(read), {})
    if results is not None:
        tensors = {v: _kept(v, one) for v, one in zip(read.values(), results, strict=True)}
        for node in reversed(kept):
            yield node, {value: tensors[value] for value in node.outputs if value in tensors}
    elif len(kept) == 1:
        kept[0].meta[_REFUSED] = True
    else:
        half = len(kept) // 2
        yield from _evaluated(kept[:half], opset)
        yield from _evaluated(kept[half:], opset)


def _model(
    nodes: Sequence[onnx_ir.Node], opset: int
) -> tuple[onnx.ModelProto, Mapping[str, onnx_ir.Value]]:
    """A model of constants, and the results that others than these nodes read, by name."""
    own, fresh = set(nodes), map("v{}".format, itertools.count())
    made: dict[onnx_ir.Value, str] = {}
    held: dict[tuple[onnx_ir.Value, bool], str] = {}
    tensors, protos, read = [], [], dict[str, onnx_ir.Value]()
    for node in nodes:
        proto = serde.serialize_node(node)
        for index, value in enumerate(node.inputs):
            if value is None or value in made:
                proto.input[index] = "" if value is None else made[value]
                continue
            # Of a Range, ONNX Runtime refuses vectors of one element where they are constant.
            key = (value, node.op_type == "Range")
            if key not in held:
                held[key] = next(fresh)
                tensor = _tensor(value)
                assert tensor is not None
                tensors.append(serde.serialize_tensor(tensor))
                tensors[-1].name = held[key]
                if node.op_type == "Range":
                    del tensors[-1].dims[:]
            proto.input[index] = held[key]
        for index, value in enumerate(node.outputs):
            if value.name:
                made[value] = proto.output[index] = next(fresh)
                if any(user not in own for user, _ in value.uses()):
                    read[made[value]] = value
        protos.append(proto)
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in read]
    graph = onnx.helper.make_graph(protos, "constants", [], outputs, tensors)
    imports = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10), read


def _kept(value: onnx_ir.Value, result: onnxruntime.OrtValue) -> onnx_ir.TensorProtocol:
    """A copy of a result, also of a type that NumPy has not."""
    assert value.dtype is not None
    shape, plain = tuple(result.shape()), value.dtype.numpy()
    size = int(np.prod(shape, dtype=np.int64)) * plain.itemsize
    array = np.frombuffer(ctypes.string_at(result.data_ptr(), size), plain).reshape(shape)
    return onnx_ir.Tensor(array, dtype=value.dtype, name=value.name)
