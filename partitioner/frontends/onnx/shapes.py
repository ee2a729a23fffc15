"""Static shapes for every value: inference and folding in turn until nothing moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

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
        where: What error messages call the model.

    Raises:
        FrontendError: A contradiction in the shapes, or a tensor whose shape stays dynamic.
    """
    declared = _forget_declared(model.graph)
    for _ in range(_MAX_TURNS):
        _infer(model, where)
        found = infer_by_schema(model.graph)
        _check_declared(model.graph, declared, where)
        found = _fill_declared(model.graph, declared, symbols) or found
        if not fold(model) and not found:
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


def _computed(
    graph: onnx_ir.Graph, declared: Shapes
) -> Iterator[tuple[onnx_ir.Node, onnx_ir.Value]]:
    for node in graph:
        for value in node.outputs:
            if value.name in declared:
                yield node, value


def _check_declared(graph: onnx_ir.Graph, declared: Shapes, where: str) -> None:
    for node, value in _computed(graph, declared):
        found, said = declared_dims(value), declared[value.name or ""]
        if found is not None and not agree(found, said):
            raise FrontendError(
                f"{where}: tensor {value.name!r} of node {node.name!r} ({node.op_type}) is "
                f"declared {text(said)} but works out as {text(found)}; "
                "correct or remove its declaration"
            )


def _fill_declared(graph: onnx_ir.Graph, declared: Shapes, symbols: Mapping[str, int]) -> bool:
    """Take declared dims where inference found none (custom ops); True if any was taken."""
    filled = False
    for _, value in _computed(graph, declared):
        said = declared[value.name or ""]
        found = declared_dims(value) or (None,) * len(said)
        dims = [
            dim if isinstance(dim, int) else evaluate(other, symbols)
            for dim, other in zip(found, said, strict=True)
        ]
        if any(isinstance(new, int) and new != old for new, old in zip(dims, found, strict=True)):
            value.shape = onnx_ir.Shape(
                [new if new is not None else old for new, old in zip(dims, found, strict=True)]
            )
            filled = True
    return filled


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
