"""Checks of single nodes of a model whose shapes are static: ONNX's own, and the op table's.

Faults of operands have sentences of their own: ONNX Runtime finds them too, when it opens or runs
the model; here they come at planning, in one line that names the node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import onnx
import onnx_ir
from onnx import TypeProto
from onnx_ir import serde

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.reading.bodies import bodies
from partitioner.frontends.onnx.reading.border import border, reason
from partitioner.frontends.onnx.reading.runtime import MAX_OPERAND, infer_by_runtime
from partitioner.ir.graph import Graph
from partitioner.ir.ops import rule_of

#: Bytes of all tensors of a graph. Sums of them, over many devices, must fit 64 bits.
_MAX_BYTES = 2**56
#: Most dims of a tensor: NumPy's limit.
MAX_RANK = 64
#: Ops with indices: the operand that holds them; they count along `axis` of operand 0.
_INDICES = {"Gather": 1, "GatherElements": 1, "Scatter": 1, "ScatterElements": 1}
#: Convolutions, which have no kernel for windows that fit nowhere: the operand of the weight.
_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
#: Operators of ONNX that count their hidden elements in an attribute.
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
#: Normalisations over the dims from `axis` on.
_NORMS = frozenset({"LayerNormalization", "RMSNormalization"})


def is_static(value: onnx_ir.Value) -> bool:
    """Test whether element type and all sizes are known."""
    return value.dtype is not None and value.shape is not None and value.shape.is_static()


def infer_by_schema(node: onnx_ir.Node, opsets: Mapping[str, int]) -> Mapping[str, TypeProto]:
    """Types of a node's results by ONNX's own inference; none where it cannot tell.

    What ONNX has no schema of, ONNX Runtime infers. If the node is not valid on its operands, there
    is an InferenceError.
    """
    inputs, opset = [value for value in node.inputs if value is not None], opsets.get(node.domain)
    if opset is None or not all(map(is_static, inputs)) or next(bodies(node), None) is not None:
        return {}
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return infer_by_runtime(node, opsets)
    if node.op_type == "Einsum" and not node.domain:
        equation = node.attributes.get_string("equation", "")
        terms = re.sub(r"->|\.\.\.|[A-Za-z, ]", "", equation)
        if terms or equation.count("->") > 1:  # signs at which ONNX's own inference does not end
            raise onnx.shape_inference.InferenceError(f"equation {equation!r} is not one of Einsum")
    try:
        types: Mapping[str, TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema,
            serde.serialize_node(node),
            {value.name or "": serde.serialize_value(value).type for value in inputs},
            {
                value.name or "": serde.serialize_tensor(value.const_value)
                for value in inputs
                if value.const_value is not None and value.const_value.size <= MAX_OPERAND
            },
        )
    except onnx.checker.ValidationError:  # folding wrote a form of another opset
        return {}
    tensors = [type_.tensor_type for type_ in types.values()]
    is_known = all(
        tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
        for tensor in tensors
    )
    return types if is_known or not node.domain else {**types, **infer_by_runtime(node, opsets)}


def check_by_schema(node: onnx_ir.Node, opsets: Mapping[str, int], where: str) -> None:
    """Refuse, by names of model and node, a node that ONNX's inference and ONNX Runtime refuse."""
    try:
        infer_by_schema(node, opsets)
    except onnx.shape_inference.InferenceError as error:
        raise FrontendError(
            f"{where}: node {node.name!r} ({node.op_type}) is not valid: {reason(error)}"
        ) from error


def check_rules(graph: Graph, where: str) -> None:
    """Refuse, by name, a node that its row of the op table cannot be, or a graph that is huge."""
    total = 0
    for name, type_ in graph.types.items():
        if type_.rank > MAX_RANK:
            raise FrontendError(
                f"{where}: tensor {name!r} has {type_.rank} dims; at most {MAX_RANK} are supported"
            )
        total += type_.nbytes
        if total > _MAX_BYTES:
            raise FrontendError(
                f"{where}: tensor {name!r} ({type_}) brings the model's tensors to {total:,} bytes,"
                f" over {_MAX_BYTES:,}; give smaller sizes"
            )
    for node in graph.nodes:
        with border(f"{where}: node {node.name!r} ({node.op})"):
            rule_of(graph, node)


def check_operands(node: onnx_ir.Node, opset: int | None, where: str) -> None:
    """Refuse a node of an imported domain whose operands, of static types, do not suit it."""
    if node.domain or opset is None or not all(v is None or is_static(v) for v in node.inputs):
        return
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return
    what = f"{where}: node {node.name!r} ({node.op_type})"
    _check_types(node, schema, what)
    _check_indices(node, what)
    _check_convolution(node, what)
    _check_norm(node, what)
    size = node.attributes.get_int("hidden_size", None)
    if node.op_type in _RECURRENT and (size is None or size < 1):
        shown = "missing" if size is None else size
        raise FrontendError(f"{what}: attribute 'hidden_size' is {shown}; it must be at least 1")


def _check_types(node: onnx_ir.Node, schema: onnx.defs.OpSchema, what: str) -> None:
    """Each operand has a type that the operator takes, and those of one type variable agree."""
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    bound: dict[str, tuple[str, int]] = {}
    for index, value in enumerate(node.inputs):
        formal = schema.inputs[min(index, len(schema.inputs) - 1)] if schema.inputs else None
        if value is None or value.dtype is None or formal is None:
            continue
        name, dtype = formal.type_str, f"tensor({value.dtype.name.lower()})"
        types = allowed.get(name, [name])
        if dtype not in types:
            raise FrontendError(
                f"{what}: operand {index} ({value.name!r}) is {dtype}, but the operator takes "
                f"{', '.join(sorted(types))}"
            )
        if not formal.is_homogeneous:
            continue
        first, place = bound.setdefault(name, (dtype, index))
        if first != dtype:
            raise FrontendError(
                f"{what}: operands {place} and {index} ({value.name!r}) are {first} and {dtype}; "
                "they must be of one type (put a Cast before one)"
            )


def _check_indices(node: onnx_ir.Node, what: str) -> None:
    index = _INDICES.get(node.op_type)
    if index is None or len(node.inputs) <= index:
        return
    data, indices = node.inputs[0], node.inputs[index]
    if data is None or data.shape is None or indices is None or indices.const_value is None:
        return
    sizes, dim = data.shape.numpy(), node.attributes.get_int("axis", 0)
    if not -len(sizes) <= dim < len(sizes) or not indices.const_value.size:
        return  # the first is found by inference
    values = indices.const_value.numpy()
    low, high, size = int(values.min()), int(values.max()), sizes[dim]
    if low < -size or high >= size:
        raise FrontendError(
            f"{what}: index {high if high >= size else low} in {indices.name!r} is out of range "
            f"for dim {dim} of {data.name!r}, which has {size} elements"
        )


def _check_convolution(node: onnx_ir.Node, what: str) -> None:
    if node.op_type not in _WEIGHTS:
        return
    shapes = [() if v is None or v.shape is None else v.shape.numpy() for v in node.inputs]
    x, weight = shapes[0], shapes[_WEIGHTS[node.op_type]]
    group = node.attributes.get_int("group", 1)
    if group < 1 or len(x) < 3 or len(weight) != len(x) or 0 in (*x, *weight):
        return  # found by inference, or nothing to compute
    if x[1] != weight[1] * group:
        raise FrontendError(
            f"{what}: its input has {x[1]} channels, but its weight of shape {list(weight)} in "
            f"{group} group{'s' * (group != 1)} takes {weight[1] * group}"
        )
    result = node.outputs[0].shape
    if result is not None and min(result.numpy()[2:]) < 1:
        raise FrontendError(
            f"{what}: its kernel is larger than its input of shape {list(x)}, padding included"
        )


def _check_norm(node: onnx_ir.Node, what: str) -> None:
    x = node.inputs[0] if node.op_type in _NORMS else None
    if x is None or x.shape is None:
        return
    shape, axis = x.shape.numpy(), node.attributes.get_int("axis", -1)
    if not -len(shape) <= axis < len(shape):
        raise FrontendError(f"{what}: axis {axis} is not a dim of its operand {list(shape)}")
    for value in node.inputs[1:3]:
        sizes = () if value is None or value.shape is None else value.shape.numpy()
        pairs = zip(sizes[::-1], shape[::-1], strict=False)
        if len(sizes) > len(shape) or any(size not in (1, whole) for size, whole in pairs):
            assert value is not None
            raise FrontendError(
                f"{what}: operand {value.name!r} of shape {list(sizes)} does not broadcast to the "
                f"normalised dims {list(shape[axis:])}"
            )
