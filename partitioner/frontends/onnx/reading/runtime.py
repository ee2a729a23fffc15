"""What ONNX Runtime knows of its own operators: that it has them, and the types of their results.

ONNX has no schema of these operators, and `onnx_shape_inference` is wrong on some. A session of one
node with its operands as inputs says the types of its results; it computes nothing. Where ONNX
Runtime does not infer them, as for most operators of classical machine learning, it computes the
node on zeros, unless sizes may depend on what the elements are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper
from onnx_ir import serde

if TYPE_CHECKING:
    import onnxruntime as ort

#: Domains of classical machine learning, where no size depends on elements, and of ONNX Runtime,
#: where sizes are in integers, except of these results.
_CLASSICAL, _MICROSOFT = "ai.onnx.ml", "com.microsoft"
_DEPEND_ON_DATA = frozenset({"RemovePadding", "Tokenizer", "Unique"})
#: Most bytes of the operands, or the result if that may be larger, of a node that is run.
_MAX_BYTES = 2**26
#: Largest constant operand that inference is told of, in elements: sizes, axes, scales.
MAX_OPERAND = 1024
#: First opset of Unsqueeze's `axes` as an operand.
_AXES_INPUT = 13
#: Opset of ONNX's own operators where the model does not import them, and an IR version of it.
_OWN_OPSET, _IR_VERSION = 21, 10

#: Element types by ONNX Runtime's names.
_ELEMENTS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}

#: Element type and sizes of a tensor.
_Type = tuple[int, tuple[int, ...]]


@cache
def runtime_operators() -> Mapping[tuple[str, str], int]:
    """First version of the operators that ONNX Runtime comes with, by domain and name."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    first: dict[tuple[str, str], int] = {}
    for schema in get_all_operator_schema():
        key = (schema.domain, schema.name)
        first[key] = min(schema.since_version, first.get(key, schema.since_version))
    return first


@cache
def runtime_domains() -> Mapping[str, int]:
    """The newest version of each domain of ONNX Runtime, which a model without an import has."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    newest: dict[str, int] = {}
    for schema in get_all_operator_schema():
        newest[schema.domain] = max(schema.since_version, newest.get(schema.domain, 1))
    return newest


def infer_by_runtime(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Mapping[str, TypeProto]:
    """Types of a node's results as ONNX Runtime infers them; none where it cannot tell.

    The node has no bodies, and its operands have static types.
    """
    if (node.domain, node.op_type) not in runtime_operators():
        return {}
    names = [value.name for value in node.outputs if value.name]
    told = node.outputs[:1] if shares_buffer(node) else node.outputs
    types = _types(_alone(node, opsets).SerializeToString(deterministic=True), runs=_may_run(node))
    return {
        name: helper.make_tensor_type_proto(*type_)
        for name, type_ in zip(names, types, strict=False)
        if type_ is not None and name in {value.name for value in told}
    }


def shares_buffer(node: onnx_ir.Node) -> bool:
    """Tell whether present keys of a GroupQueryAttention may lie in the buffer of past ones.

    They are as many as the longer of that and `total_sequence_length`, if the latter is constant.
    """
    if node.domain != _MICROSOFT or node.op_type != "GroupQueryAttention":
        return False
    past, total = (node.inputs[i] if i < len(node.inputs) else None for i in (3, 6))
    return past is not None and total is not None and total.const_value is None


def _may_run(node: onnx_ir.Node) -> bool:
    """Tell whether a node can be computed on zeros, and the sizes of its results are then right."""
    operands = [value for value in node.inputs if value is not None]
    size = sum(8 * math.prod(_type_of(value)[1]) for value in operands)
    if node.domain == _MICROSOFT and node.op_type not in _DEPEND_ON_DATA:
        return size * math.prod(map(_growth, operands)) <= _MAX_BYTES
    return node.domain == _CLASSICAL and size <= _MAX_BYTES


def _growth(value: onnx_ir.Value) -> int:
    """The most times by which the integers of an operand may make a result larger: pads, sizes."""
    most = _MAX_BYTES + 1  # what is not known, and all that is as large
    tensor = value.const_value
    if value.dtype is not None and value.dtype.is_floating_point():
        return 1
    if tensor is None or tensor.size > MAX_OPERAND:
        return most
    return min(most, math.prod(1 + abs(int(number)) for number in tensor.numpy().reshape(-1)))


def _type_of(value: onnx_ir.Value) -> _Type:
    assert value.shape is not None and value.dtype is not None  # noqa: PT018
    return value.dtype.value, value.shape.numpy()


def _alone(node: onnx_ir.Node, opsets: Mapping[str, int]) -> ModelProto:
    """A model of one node; results get a first dim: ONNX Runtime says ``[]`` of unknown ranks."""
    operands: dict[onnx_ir.Value, str] = {}
    for value in node.inputs:
        if value is not None:
            operands.setdefault(value, f"x{len(operands)}")
    inputs, constants = [], []
    for value, name in operands.items():
        tensor = value.const_value
        if tensor is not None and tensor.size <= MAX_OPERAND:
            constants.append(serde.serialize_tensor(tensor))
            constants[-1].name = name
        else:
            inputs.append(helper.make_tensor_value_info(name, *_type_of(value)))
    proto = serde.serialize_node(node)
    proto.name, proto.doc_string = "", ""
    del proto.metadata_props[:]
    proto.input[:] = ["" if value is None else operands[value] for value in node.inputs]
    proto.output[:] = [f"y{i}" if v.name else "" for i, v in enumerate(node.outputs)]
    results = [name for name in proto.output if name]
    opset = opsets.get("", _OWN_OPSET)
    nodes = [proto]
    for name in results:
        if opset < _AXES_INPUT:
            nodes.append(helper.make_node("Unsqueeze", [name], [f"{name}_in_one"], axes=[0]))
        else:
            nodes.append(helper.make_node("Unsqueeze", [name, "axes"], [f"{name}_in_one"]))
    if opset >= _AXES_INPUT:
        constants.append(helper.make_tensor("axes", TensorProto.INT64, [1], [0]))
    outputs = [ValueInfoProto(name=f"{name}_in_one") for name in results]
    graph = helper.make_graph(nodes, "alone", inputs, outputs, constants)
    imports = {"": opset, node.domain: opsets.get(node.domain, opset if not node.domain else 1)}
    versions = [helper.make_opsetid(*entry) for entry in imports.items()]
    return helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)


def plain_session(model: bytes) -> ort.InferenceSession:
    """A session of a model as it is, on one thread; what it refuses is not logged."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=4096)
def _types(model: bytes, *, runs: bool) -> tuple[_Type | None, ...]:
    """Types of the outputs of a model of one node, less their first dim; () if it does not load."""
    import onnxruntime as ort

    try:
        session = plain_session(model)
        types: list[_Type | None] = [
            (_ELEMENTS[value.type], tuple(value.shape[1:]))
            if value.type in _ELEMENTS
            and value.shape
            and all(isinstance(size, int) for size in value.shape)
            else None
            for value in session.get_outputs()
        ]
        if None in types and runs:
            feeds = {}
            for value in session.get_inputs():
                dtype = helper.tensor_dtype_to_np_dtype(_ELEMENTS[value.type])
                zeros = np.zeros(value.shape, dtype)
                feeds[value.name] = ort.OrtValue.ortvalue_from_numpy(zeros)
            types = [
                (value.element_type(), tuple(value.shape()[1:]))
                for value in session.run_with_ort_values(None, feeds)
            ]
    except Exception:  # noqa: BLE001 - not valid, or no kernel on a CPU: others say so
        return ()
    return tuple(types)
