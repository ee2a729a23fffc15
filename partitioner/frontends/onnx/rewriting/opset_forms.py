"""Nodes in forms that onnxscript's folding keeps, and folded nodes in those of the model's opset.

A MatMulNBits has a row of scales and zero points for each column of its product; older ones have
them flat, which cannot be cut along the blocks of a row: a row would be a piece of its own.

Its folding writes CastLike as Cast without the attributes that say how to round. It writes Squeeze,
Unsqueeze, Split and Constant as the newest opsets have them, in a model of any opset, and names
their results after operands, so that two may have one name. It follows sizes through a Reshape to a
matrix as if that were a vector, and drops dims of parts of one element whose sizes are a vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir
from onnx_ir.traversal import RecursiveGraphIterator

from partitioner.frontends.onnx.reading.bodies import made
from partitioner.frontends.onnx.reading.names import fresh

#: First opset in which these take an operand instead of the attribute of this name.
_OPERANDS = {"Split": (13, "split"), "Squeeze": (13, "axes"), "Unsqueeze": (13, "axes")}
#: First opset of Split's `num_outputs`; without it, there is an equal part for each result.
_NUM_OUTPUTS = 18
#: First opset of Constant's `value_int` and its likes.
_PLAIN_CONSTANTS = 12
#: An operator that folding does not know.
_HIDDEN = "ReshapeToMatrix"
_PLAIN = {"value_int", "value_ints", "value_float", "value_floats"}


def state_forms(model: onnx_ir.Model) -> None:
    """Write each CastLike, in place, as the Cast that it is, with all its attributes.

    A SplitToSequence has no `keepdims` then where its vector of sizes overrules that.
    """
    for node in RecursiveGraphIterator(model.graph):
        second = node.inputs[1] if len(node.inputs) > 1 and not node.domain else None
        if second is None:
            continue
        if node.op_type == "CastLike" and second.dtype is not None:
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes["to"] = onnx_ir.AttrInt64("to", second.dtype.value)
        elif node.op_type == "SplitToSequence" and _is_vector(second):
            node.attributes.pop("keepdims", None)


def put_in_rows(graph: onnx_ir.Graph) -> None:
    """Give each MatMulNBits, in place, its constant scales and zero points in rows."""
    taken = {value.name for value in made(graph)}
    for node in list(graph):
        columns = node.attributes.get("N")
        if (node.domain, node.op_type) != ("com.microsoft", "MatMulNBits") or columns is None:
            continue
        for index in range(2, min(len(node.inputs), 4)):
            flat = node.inputs[index]
            tensor = None if flat is None else flat.const_value
            if tensor is None or len(tensor.shape) != 1 or tensor.size % columns.as_int():
                continue
            shape = onnx_ir.Shape([columns.as_int(), tensor.size // columns.as_int()])
            name = fresh(f"{tensor.name}_in_rows", taken)
            rows = onnx_ir.val(name, const_value=_in_shape(tensor, shape))
            graph.register_initializer(rows)
            node.replace_input_with(index, rows)


def _in_shape(tensor: onnx_ir.TensorProtocol, shape: onnx_ir.Shape) -> onnx_ir.LazyTensor:
    sizes = shape.numpy()
    return onnx_ir.LazyTensor(
        lambda: onnx_ir.Tensor(tensor.numpy().reshape(sizes), dtype=tensor.dtype),
        dtype=tensor.dtype,
        shape=shape,
    )


@contextmanager
def matrices_unseen(model: onnx_ir.Model) -> Iterator[None]:
    """Let folding take the Reshapes of integers to other than vectors for an unknown operator."""
    hidden = [
        node
        for node in RecursiveGraphIterator(model.graph)
        if node.op_type == "Reshape"
        and not node.domain
        and node.outputs[0].dtype == onnx_ir.DataType.INT64
        and not _is_vector(node.outputs[0])
    ]
    for node in hidden:
        node.op_type = _HIDDEN
    try:
        yield
    finally:
        for node in hidden:
            node.op_type = "Reshape"


def _is_vector(value: onnx_ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 1


def use_own_forms(model: onnx_ir.Model) -> None:
    """Rewrite, in place, nodes of newer forms than the model's opset has, and repeated names."""
    opset = model.graph.opset_imports.get("", 0)
    for node in RecursiveGraphIterator(model.graph):
        if not node.domain:
            _use_attribute(node, opset)
            if node.op_type == "Split" and opset < _NUM_OUTPUTS:
                node.attributes.pop("num_outputs", None)
            if node.op_type == "Constant" and opset < _PLAIN_CONSTANTS:
                for name in _PLAIN & set(node.attributes):
                    tensor = onnx_ir.convenience.get_const_tensor(node.outputs[0])
                    assert tensor is not None
                    del node.attributes[name]
                    node.attributes["value"] = onnx_ir.AttrTensor("value", tensor)
    _rename_repeated(model.graph)


def _use_attribute(node: onnx_ir.Node, opset: int) -> None:
    first, name = _OPERANDS.get(node.op_type, (0, ""))
    if opset >= first or len(node.inputs) < 2 or node.inputs[1] is None:
        return
    tensor = onnx_ir.convenience.get_const_tensor(node.inputs[1])
    if tensor is None:
        return  # no valid model has it, and folding writes constants only
    values = [int(value) for value in tensor.numpy().reshape(-1)]
    node.attributes[name] = onnx_ir.AttrInt64s(name, values)
    node.resize_inputs(1)


def _rename_repeated(graph: onnx_ir.Graph) -> None:
    """Give each result a name of its own; the first keeps the name."""
    taken: set[str | None] = {*graph.initializers, *(value.name for value in graph.inputs)}
    repeated = []
    for node in graph:
        for value in node.outputs:
            if value.name and value.name in taken:
                repeated.append(value)
            taken.add(value.name)
    for value in repeated:
        value.name = fresh(value.name or "", taken)
