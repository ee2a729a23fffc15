"""Simplifications that leave every result as it was: constants folded, inactive nodes removed.

All functions here change an onnx_ir model in place, which is how onnx_ir passes work.

onnxscript's folding simplifies, in forms that need corrections. It writes CastLike as Cast without
the attributes that say how to round. It writes Squeeze, Unsqueeze, Split and Constant as the newest
opsets have them, in a model of any opset, and names their results after operands, so that two may
have one name. It follows sizes through a Reshape to a matrix as if that were a vector, and drops
dims of parts of one element whose sizes are a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir
from onnx_ir import convenience
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    LiftConstantsToInitializersPass,
)
from onnx_ir.traversal import RecursiveGraphIterator
from onnxscript.optimizer import fold_constants_ir

from partitioner.frontends.onnx.reading.bodies import bodies, made
from partitioner.frontends.onnx.reading.names import fresh, last_present
from partitioner.frontends.onnx.rewriting.evaluate import evaluate_constants
from partitioner.ir.errors import IRError
from partitioner.ir.ops.onnx.factories import RANDOM

#: Most bytes by which folding may make the constants of a model larger, all together. ONNX's light
#: models, which leave weights out, need up to 548 MiB.
MAX_GROWN_BYTES = 2**30
#: Largest constant computed element by element, and the largest operand read for it, in elements.
MAX_COMPUTED = 512 * 512
MAX_OPERAND = 8192

#: Ops whose result size depends on data but never exceeds (rank x) their operand's.
_BOUNDED = frozenset({"Compress", "NonZero", "Unique"})
#: Ops that only re-arrange the elements of operand 0.
_VIEWS = frozenset(
    {"ConstantOfShape", "Expand", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
#: Ops that ONNX Runtime runs without any of their last optional results (see `names`).
_INDEPENDENT = frozenset((
    "Dropout", "GRU", "LSTM", "LayerNormalization", "MaxPool", "RNN", "SoftmaxCrossEntropyLoss",
    "Unique",
))  # fmt: skip
#: First opset in which an attribute, not the number of results, tells BatchNormalization's mode.
_NORM_MODE = 14
#: First opset in which these take an operand instead of the attribute of this name.
_OPERANDS = {"Split": (13, "split"), "Squeeze": (13, "axes"), "Unsqueeze": (13, "axes")}
#: First opset of Split's `num_outputs`; without it, there is an equal part for each result.
_NUM_OUTPUTS = 18
#: First opset of Constant's `value_int` and its likes.
_PLAIN_CONSTANTS = 12
#: An operator that folding does not know.
_HIDDEN = "ReshapeToMatrix"
#: Attribute that keeps equal nodes apart for a moment.
_APART = "partitioner.apart"
_PLAIN = {"value_int", "value_ints", "value_float", "value_floats"}


@dataclass
class Growth:
    """The bytes by which folding may still make the constants of a model larger."""

    left: int = MAX_GROWN_BYTES

    def takes(self, grown: int) -> bool:
        """Take the bytes by which a constant grows from what is left; False if they do not fit."""
        if grown > self.left:
            return False
        self.left -= max(grown, 0)
        return True


def fold(model: onnx_ir.Model, growth: Growth) -> bool:
    """Fold what inferred shapes allow; True if anything changed, so that more may be inferred."""
    changed = _fold_each(model.graph, _known)
    changed = _fold_each(model.graph, partial(_view, growth)) or changed
    _state_forms(model)
    changed = _fold_computed(model, growth) or changed
    try:  # it simplifies; what it computes is not ONNX Runtime's
        with _matrices_unseen(model):
            result = fold_constants_ir(
                model, onnx_shape_inference=False, should_fold=lambda _: False
            )
    except RuntimeError:
        _refuse_unknown_splits(model.graph)
        raise
    _use_own_forms(model)
    _remove_unused(model)
    return bool(result.modified) or changed


def _refuse_unknown_splits(graph: onnx_ir.Graph) -> None:
    """Name the SplitToSequence on which folding fails: it takes sizes of pieces for constants."""
    for node in RecursiveGraphIterator(graph):  # the border names the node
        sizes = node.inputs[1] if _is(node, "SplitToSequence") and len(node.inputs) > 1 else None
        if sizes is not None and convenience.get_const_tensor(sizes) is None:
            raise IRError(
                f"the sizes {sizes.name!r} of its pieces are computed at run time; make them "
                "constant"
            )


def merge_equal(model: onnx_ir.Model) -> None:
    """Compute equal subexpressions once, but for scalars made of constants.

    A device that reads such a scalar makes it sooner than it gets it from another one. There are
    some in float16, in which constants are not computed beforehand (see `evaluate`).
    """
    if not any(node.op_type in RANDOM for node in model.graph):
        scalars = [node for node in model.graph if _is_scalar_of_constants(node)]
        for index, node in enumerate(scalars):  # equal no more
            node.attributes.add(onnx_ir.AttrInt64(_APART, index))
        CommonSubexpressionEliminationPass()(model)
        for node in scalars:
            del node.attributes[_APART]
        _remove_unused(model)


def _is_scalar_of_constants(node: onnx_ir.Node) -> bool:
    operands = [value for value in node.inputs if value is not None]
    return (
        bool(operands)
        and all(convenience.get_const_tensor(value) is not None for value in operands)
        and all(_numel(value) == 1 for value in node.outputs)
    )


def remove_identities(model: onnx_ir.Model) -> None:
    """Remove Dropout that is off, and Identity where the names of outputs permit."""
    opset = model.graph.opset_imports.get("", 0)
    for node in list(model.graph):
        if _is(node, "Dropout") and _is_off(node, opset):
            old, new = node.outputs[0], onnx_ir.node("Identity", node.inputs[:1], name=node.name)
            (result,) = new.outputs
            result.name, result.shape, result.type = old.name, old.shape, old.type
            model.graph.insert_before(node, new)
            convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)
    for node in list(model.graph):
        if _is(node, "Identity"):
            _remove_identity(node)


def _remove_unused(model: onnx_ir.Model) -> None:
    """Remove nodes and initializers that nobody reads, in place; no other result loses its name."""
    graph = model.graph
    _remove_nodes(graph, graph.opset_imports.get("", 0))
    kept = {*graph.inputs, *graph.outputs}
    for name, value in list(graph.initializers.items()):
        if not value.uses() and value not in kept:
            del graph.initializers[name]


def settle_outputs(graph: onnx_ir.Graph, names: tuple[str, ...]) -> None:
    """Make each output a node's own result under the name that it must have."""
    taken = {*names, *(value.name for value in made(graph))}
    for index, (value, name) in enumerate(zip(list(graph.outputs), names, strict=True)):
        producer = value.producer()
        if producer is None or _is(producer, "Constant") or value in graph.outputs[:index]:
            if value.name == name:
                value.name = fresh(f"{name}_constant", taken)
            node = onnx_ir.node("Identity", [value], name=f"Identity_{name}")
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        graph.outputs[index].name = name


def lift_constants(model: onnx_ir.Model) -> None:
    """Make the results of Constant nodes initializers."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def _is(node: onnx_ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _fold_computed(model: onnx_ir.Model, growth: Growth) -> bool:
    changed = False
    for node, results in evaluate_constants(model, lambda node: _may_grow(node, growth)):
        graph = node.graph
        assert isinstance(graph, onnx_ir.Graph)
        constants = [onnx_ir.val(v.name, const_value=tensor) for v, tensor in results.items()]
        for value, constant in zip(results, constants, strict=True):
            convenience.replace_all_uses_with(value, constant)
        graph.remove(node, safe=True)
        for constant in constants:
            graph.register_initializer(constant)
        changed = True
    return changed


def _may_grow(node: onnx_ir.Node, growth: Growth) -> bool:
    """Tell whether the results of a node of constants, and its operands, are small enough."""
    operands = [_numel(value) for value in node.inputs if value is not None]
    if any(size is None or size > MAX_OPERAND for size in operands):
        return False
    if node.op_type in _BOUNDED:
        return True
    sizes = [_numel(value) for value in node.outputs]
    if any(size is None or size > MAX_COMPUTED for size in sizes):
        return False
    grown = 8 * sum(size or 0 for size in sizes)  # of at most 8 bytes an element
    return grown <= 8 * MAX_OPERAND or growth.takes(grown)


def _numel(value: onnx_ir.Value) -> int | None:
    if value.shape is None or not value.shape.is_static():
        return None
    return math.prod(value.shape.numpy())


def _fold_each(
    graph: onnx_ir.Graph, value: Callable[[onnx_ir.Node], onnx_ir.TensorProtocol | None]
) -> bool:
    """Put an initializer of the same name in place of each node whose one result has a value."""
    changed = False
    for node in list(graph):
        tensor = value(node)
        if tensor is not None:
            old = node.outputs[0]
            new = onnx_ir.val(old.name, const_value=tensor)
            convenience.replace_all_uses_with(old, new)
            graph.remove(node, safe=True)
            graph.register_initializer(new)
            changed = True
    return changed


def _known(node: onnx_ir.Node) -> onnx_ir.TensorProtocol | None:
    """The result of a node that shape inference knows by content (Shape and what follows)."""
    if len(node.outputs) != 1 or _is(node, "Constant") or node.outputs[0].is_graph_output():
        return None
    return node.outputs[0].const_value


def _view(growth: Growth, node: onnx_ir.Node) -> onnx_ir.LazyTensor | None:
    """The result of a re-arranging op as a view of its constant operand; None if it must stay."""
    if node.domain or node.op_type not in _VIEWS:
        return None
    result, source = node.outputs[0], node.inputs[0]
    if source is None or result.shape is None or result.is_graph_output():
        return None
    tensor, numel = source.const_value, _numel(result)
    if tensor is None or numel is None:
        return None
    if any(value is None or value.const_value is None for value in node.inputs):
        return None
    dtype = tensor.dtype if node.op_type != "ConstantOfShape" else _fill(node).dtype
    if dtype == onnx_ir.DataType.STRING:
        return None
    if tensor.size > MAX_OPERAND and len(source.uses()) > 1:
        return None  # a second copy of a weight that others read as it is
    if not growth.takes((numel - tensor.size) * dtype.bitwidth // 8):
        return None
    shape = result.shape.numpy()
    return _lazy(_arranger(node, tensor, shape), dtype, shape)


def _arranger(
    node: onnx_ir.Node, tensor: onnx_ir.TensorProtocol, shape: tuple[int, ...]
) -> Callable[[], np.ndarray]:
    if node.op_type == "ConstantOfShape":
        fill = _fill(node).numpy().reshape(())
        return lambda: np.broadcast_to(fill, shape)
    if node.op_type == "Expand":
        return lambda: np.broadcast_to(tensor.numpy(), shape)
    if node.op_type == "Transpose":
        attribute = node.attributes.get("perm")
        perm = None if attribute is None else tuple(attribute.as_ints())
        return lambda: tensor.numpy().transpose(perm)
    return partial(_reshaped, tensor, shape)


def _reshaped(tensor: onnx_ir.TensorProtocol, shape: tuple[int, ...]) -> np.ndarray:
    return tensor.numpy().reshape(shape)


def _lazy(
    arrange: Callable[[], np.ndarray], dtype: onnx_ir.DataType, shape: tuple[int, ...]
) -> onnx_ir.LazyTensor:
    return onnx_ir.LazyTensor(
        lambda: onnx_ir.Tensor(arrange(), dtype=dtype), dtype=dtype, shape=onnx_ir.Shape(shape)
    )


def _fill(node: onnx_ir.Node) -> onnx_ir.TensorProtocol:
    value = node.attributes.get("value")
    return onnx_ir.tensor(np.zeros(1, np.float32)) if value is None else value.as_tensor()


def _is_off(node: onnx_ir.Node, opset: int) -> bool:
    """Test whether a Dropout only passes its operand on (opset 7 to 11 know nothing else)."""
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        return False
    mode = node.inputs[2] if opset >= 12 and len(node.inputs) > 2 else None
    if mode is None:
        return True
    return mode.const_value is not None and not mode.const_value.numpy().any()


def _remove_identity(node: onnx_ir.Node) -> None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None or node.graph is None:
        return
    if result.is_graph_output():
        producer = source.producer()
        if producer is None or producer.graph is not node.graph or source.is_graph_output():
            return
        source.name = result.name
    convenience.replace_all_uses_with(result, source, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)


def _remove_nodes(graph: onnx_ir.Graph, opset: int) -> None:
    outputs = frozenset(graph.outputs)
    for node in reversed(graph):
        if not any(_is_read(value, outputs) for value in node.outputs):
            graph.remove(node, safe=True)
            continue
        node.resize_inputs(last_present(value is not None for value in node.inputs))
        if node.domain == "" and _independent(node, opset):
            node.resize_outputs(last_present(_is_read(value, outputs) for value in node.outputs))
        for body in bodies(node):
            _remove_nodes(body, opset)


def _is_read(value: onnx_ir.Value, outputs: frozenset[onnx_ir.Value]) -> bool:
    return bool(value.uses()) or value in outputs


def _independent(node: onnx_ir.Node, opset: int) -> bool:
    if node.op_type != "BatchNormalization":
        return node.op_type in _INDEPENDENT
    mode = node.attributes.get("training_mode")
    return opset >= _NORM_MODE and (mode is None or mode.as_int() == 0)


def _state_forms(model: onnx_ir.Model) -> None:
    """Write each CastLike, in place, as the Cast that it is, with all its attributes."""
    for node in RecursiveGraphIterator(model.graph):
        second = node.inputs[1] if len(node.inputs) > 1 and not node.domain else None
        if second is None:
            continue
        if node.op_type == "CastLike" and second.dtype is not None:
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes["to"] = onnx_ir.AttrInt64("to", second.dtype.value)
        elif node.op_type == "SplitToSequence" and _is_vector(second):
            node.attributes.pop("keepdims", None)  # the sizes overrule it


def put_in_rows(graph: onnx_ir.Graph) -> None:
    """Give each MatMulNBits, in place, a row of scales a column, which can be cut along blocks."""
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
            shape = columns.as_int(), tensor.size // columns.as_int()
            in_rows = _lazy(partial(_reshaped, tensor, shape), tensor.dtype, shape)
            rows = onnx_ir.val(fresh(f"{tensor.name}_in_rows", taken), const_value=in_rows)
            graph.register_initializer(rows)
            node.replace_input_with(index, rows)


@contextmanager
def _matrices_unseen(model: onnx_ir.Model) -> Iterator[None]:
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


def _use_own_forms(model: onnx_ir.Model) -> None:
    """Rewrite, in place, nodes of newer forms than the model's opset has, and repeated names."""
    opset = model.graph.opset_imports.get("", 0)
    for node in RecursiveGraphIterator(model.graph):
        if not node.domain:
            _use_attribute(node, opset)
            if node.op_type == "Split" and opset < _NUM_OUTPUTS:
                node.attributes.pop("num_outputs", None)
            if node.op_type == "Constant" and opset < _PLAIN_CONSTANTS:
                for name in _PLAIN & set(node.attributes):
                    tensor = convenience.get_const_tensor(node.outputs[0])
                    assert tensor is not None
                    del node.attributes[name]
                    node.attributes["value"] = onnx_ir.AttrTensor("value", tensor)
    graph = model.graph
    taken: set[str | None] = {*graph.initializers, *(value.name for value in graph.inputs)}
    repeated = []  # the first keeps the name
    for node in graph:
        for value in node.outputs:
            if value.name and value.name in taken:
                repeated.append(value)
            taken.add(value.name)
    for value in repeated:
        value.name = fresh(value.name or "", taken)


def _use_attribute(node: onnx_ir.Node, opset: int) -> None:
    first, name = _OPERANDS.get(node.op_type, (0, ""))
    if opset >= first or len(node.inputs) < 2 or node.inputs[1] is None:
        return
    tensor = convenience.get_const_tensor(node.inputs[1])
    if tensor is None:
        return  # no valid model has it, and folding writes constants only
    values = [int(value) for value in tensor.numpy().reshape(-1)]
    node.attributes[name] = onnx_ir.AttrInt64s(name, values)
    node.resize_inputs(1)
