"""Static shapes for every value: inference and folding in turn until nothing moves."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir
from onnx_shape_inference import infer_symbolic_shapes

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.dims import Declared, agree, declared_dims, evaluate, text
from partitioner.frontends.onnx.fold import fold, lift_constants, merge_equal, remove_noise
from partitioner.frontends.onnx.loops import check_loops
from partitioner.frontends.onnx.schema import infer_by_schema

#: Turns of inference and folding; each must find something. Real exports take two or three.
_MAX_TURNS = 64

Shapes = Mapping[str, tuple[Declared, ...]]


def make_static(model: onnx_ir.Model, symbols: Mapping[str, int], where: str) -> None:
    """Infer and simplify in place until every value of the graph has a static shape.

    Args:
        model: Its graph inputs have static shapes, its functions are inlined.
        symbols: Sizes of the inputs' symbols; they also close dims that the model declares.
        where: The model's name in error messages.

    Raises:
        FrontendError: A contradiction in the shapes, or a tensor whose shape stays dynamic.
    """
    declared = _forget_declared(model.graph)
    for _ in range(_MAX_TURNS):
        _infer(model, where)
        changed = infer_by_schema(model.graph)
        changed = _apply_declared(model.graph, declared, symbols, where) or changed
        if not fold(model) and not changed:
            break
    lift_constants(model)
    remove_noise(model)
    merge_equal(model)
    check_loops(model.graph, where)
    for node in model.graph:
        for value in node.outputs:
            if value.name:
                _check_static(node, value, where)


def _forget_declared(graph: onnx_ir.Graph) -> dict[str, tuple[Declared, ...]]:
    """Take the declared shapes of computed values out, so that inference speaks for itself."""
    declared: dict[str, tuple[Declared, ...]] = {}
    for node in graph:
        for value in node.outputs:
            dims = declared_dims(value)
            if value.name and dims is not None:
                declared[value.name] = dims
                value.shape = None
    return declared


def _infer(model: onnx_ir.Model, where: str) -> None:
    try:
        infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
    except ValueError as error:  # also ShapeInferenceError and OpUsageError
        raise FrontendError(f"{where}: shapes do not fit: {one_line(error)}") from error


def _apply_declared(
    graph: onnx_ir.Graph, declared: Shapes, symbols: Mapping[str, int], where: str
) -> bool:
    """Take declared dims where inference found none (custom ops); True if any was taken.

    Raises:
        FrontendError: A declared shape contradicts the inferred one.
    """
    changed = False
    for node in graph:
        for value in node.outputs:
            said, inferred = declared.get(value.name or ""), declared_dims(value)
            if said is None:
                continue
            if inferred is None:
                inferred = (None,) * len(said)
            elif not agree(inferred, said):
                raise FrontendError(
                    f"{where}: tensor {value.name!r} of node {node.name!r} ({node.op_type}) is "
                    f"declared {text(said)} but works out as {text(inferred)}; "
                    "correct or remove its declaration"
                )
            pairs = zip(inferred, said, strict=True)
            sizes = [a if isinstance(a, int) else evaluate(b, symbols) for a, b in pairs]
            dims = [a if size is None else size for a, size in zip(inferred, sizes, strict=True)]
            if dims != list(inferred):
                value.shape = onnx_ir.Shape(dims)
                changed = True
    return changed


def _check_static(node: onnx_ir.Node, value: onnx_ir.Value, where: str) -> None:
    dims = declared_dims(value)
    what = f"{where}: tensor {value.name!r} of node {node.name!r} ({node.op_type})"
    if value.type is not None and not isinstance(value.type, onnx_ir.TensorType):
        raise FrontendError(f"{what} is a {type(value.type).__name__}; only tensors are supported")
    if value.dtype is None:
        raise FrontendError(
            f"{what} has no known element type; declare it in the model (graph.value_info)"
        )
    if dims is None or not all(isinstance(dim, int) for dim in dims):
        shown = "no known shape" if dims is None else f"shape {text(dims)}"
        raise FrontendError(
            f"{what} has {shown}, which is not static: it depends on data, or the op is not known; "
            "declare its shape in the model (graph.value_info), or make what it depends on constant"
        )
