"""Static shapes for every value: inference and folding in turn until nothing moves.

onnx_shape_inference infers; where it knows no rule, ONNX's own inference does, node by node: it
knows the forms of old opsets (Slice with attributes, Upsample-7, TopK-1, Resize-10, Sum-6).

What results whose size depends on data lead to has no shape before the model runs, so it cannot be
cut, and no buffer can be made for it that another device fills. Behind bounds that the user gives,
all of it becomes the body of one node, an If whose condition is true, which runs whole on one
device. Nothing inside needs a shape. The types of its results, which are outputs of the model, are
bounds: those which the user's bound leads to. They are found on a copy of the model, because the
model itself must not be simplified by them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir
from onnx_ir import serde
from onnx_shape_inference import infer_symbolic_shapes

from partitioner.frontends.errors import FrontendError, one_line
from partitioner.frontends.onnx.inferring.check_nodes import (
    check_by_schema,
    check_operands,
    infer_by_schema,
    is_static,
)
from partitioner.frontends.onnx.inferring.corrections import correct_inference
from partitioner.frontends.onnx.inferring.dims import Declared, agree, declared_dims, evaluate, text
from partitioner.frontends.onnx.inferring.window_counts import state_pads
from partitioner.frontends.onnx.reading.bodies import captured, made
from partitioner.frontends.onnx.reading.border import reason
from partitioner.frontends.onnx.reading.names import fresh
from partitioner.frontends.onnx.reading.runtime import shares_buffer
from partitioner.frontends.onnx.rewriting.fold import (
    Growth,
    fold,
    lift_constants,
    merge_equal,
    put_in_rows,
    remove_identities,
)
from partitioner.ir.ops.onnx.elementwise import FUNCTIONS

#: Turns of inference and folding; each must find something. Real exports take two or three.
_MAX_TURNS = 64

#: Ops whose result has the shape of the operand, where they have one operand.
_UNARY = frozenset(FUNCTIONS) - {"BitCast"}

#: Operators whose results have a size that depends on data.
DEPEND_ON_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})

Shapes = Mapping[str, tuple[Declared, ...]]


def make_static(
    model: onnx_ir.Model,
    symbols: Mapping[str, int],
    where: str,
    given: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    bounded: Collection[onnx_ir.Value] = (),
) -> tuple[str, ...]:
    """Infer and simplify in place until every value of the graph has a static shape.

    Args:
        model: Its graph inputs have static shapes, its functions are inlined.
        symbols: Sizes of the inputs' symbols; they also close dims that the model declares.
        where: The model's name in error messages.
        given: Shapes that the user gives of results of nodes, by name.
        bounded: Results whose size depends on data: neither they nor what they lead to must have
            static shapes.

    Returns:
        A note on each wrong declaration (the inferred shape is taken) and each assumed shape.
    """
    correct_inference()
    put_in_rows(model.graph)
    declared, growth = _forget_declared(model.graph), Growth()
    stale, shared = dict[str, str](), dict[str, str]()
    for _ in range(_MAX_TURNS):
        try:
            infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
        except ValueError as error:  # also ShapeInferenceError and OpUsageError
            what = one_line(error) + ("" if error.__cause__ is None else f": {reason(error)}")
            raise FrontendError(f"{where}: shapes do not fit: {what}") from error
        changed = _infer_by_schema(model.graph)
        for node, value, inferred in _contradicted(model.graph, given):
            raise FrontendError(
                f"{where}: --shape {value}={','.join(map(str, given[value]))}: node {node.name!r} "
                f"({node.op_type}) makes it {text(inferred)}"
            )
        for node, value, inferred in _contradicted(model.graph, declared):
            stale[value] = (
                f"tensor {value!r} of node {node.name!r} ({node.op_type}) is declared "
                f"{text(declared[value])} but works out as {text(inferred)}, which is taken"
            )
        right = {name: dims for name, dims in declared.items() if name not in stale}
        stated: Shapes = {**right, **given}
        changed = _apply_declared(model.graph, stated, symbols) or changed
        changed = _infer_operands(model.graph) or changed
        if not fold(model, growth) and not changed:
            assumed = _share_buffers(model.graph)
            shared |= assumed
            if not assumed:
                break
    lift_constants(model)
    remove_identities(model)
    merge_equal(model)
    _check_loops(model.graph, where)
    dynamic = frozenset(_behind(model.graph, bounded))
    for node in model.graph:
        state_pads(node)
        opset = model.graph.opset_imports.get(node.domain)
        check_operands(node, opset, where)
        check_by_schema(node, model.graph.opset_imports, where)
        for result in node.outputs:
            if result.name and node not in dynamic:
                _check_static(node, result, where)
    return (*stale.values(), *shared.values())


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


def _infer_by_schema(graph: onnx_ir.Graph) -> bool:
    """Fill in missing result types, in place and in order; True if any was inferred."""
    inferred = False
    for node in graph:
        unknown = [value for value in node.outputs if value.name and not is_static(value)]
        if not unknown:
            continue
        try:
            types = infer_by_schema(node, graph.opset_imports)
        except onnx.shape_inference.InferenceError:
            continue  # stays dynamic, and is then refused by name
        for value in unknown:
            proto = types.get(value.name or "")
            shape = None if proto is None else serde.deserialize_type_proto_for_shape(proto)
            is_tensor = proto is not None and proto.HasField("tensor_type")
            if proto is not None and is_tensor and shape is not None and shape.is_static():
                value.shape = shape
                value.type = serde.deserialize_type_proto_for_type(proto)
                inferred = True
    return inferred


def _contradicted(
    graph: onnx_ir.Graph, shapes: Shapes
) -> Iterator[tuple[onnx_ir.Node, str, tuple[Declared, ...]]]:
    """The results of nodes that have other shapes than these, by name, and what was inferred."""
    for node in graph:
        for value in node.outputs:
            dims, stated = declared_dims(value), shapes.get(value.name or "")
            if dims is not None and stated is not None and not agree(dims, stated):
                yield node, value.name or "", dims


def _apply_declared(graph: onnx_ir.Graph, declared: Shapes, symbols: Mapping[str, int]) -> bool:
    """Take declared dims where inference found none (custom ops); True if any was taken."""
    changed = False
    for node in graph:
        for value in node.outputs:
            stated, inferred = declared.get(value.name or ""), declared_dims(value)
            if stated is None:
                continue
            if inferred is None:
                inferred = (None,) * len(stated)
            pairs = zip(inferred, stated, strict=True)
            sizes = [a if isinstance(a, int) else evaluate(b, symbols) for a, b in pairs]
            dims = [a if size is None else size for a, size in zip(inferred, sizes, strict=True)]
            if dims != list(inferred):
                value.shape = onnx_ir.Shape(dims)
                changed = True
    return changed


def _share_buffers(graph: onnx_ir.Graph) -> Mapping[str, str]:
    """Take present keys and values of unknown length to lie in the past ones' buffer; notes."""
    notes: dict[str, str] = {}
    for node in graph:
        past = node.inputs[3] if shares_buffer(node) else None
        if past is None or past.shape is None or not is_static(past):
            continue
        for value in node.outputs[1:3]:
            if value.name and not is_static(value) and past.shape[2]:
                value.shape = past.shape
                notes[str(node.name)] = (
                    f"node {node.name!r} ({node.op_type}) is taken to keep its keys in the "
                    f"{past.shape[2]} places of the past ones; pass --shape {value.name}=... if "
                    "there are more"
                )
    return notes


def _infer_operands(graph: onnx_ir.Graph) -> bool:
    """Give operands of elementwise ops of one operand their result's shape; True if any got one."""
    changed = False
    for node in reversed(graph):
        operand = node.inputs[0] if len(node.inputs) == 1 else None
        if node.domain or node.op_type not in _UNARY or operand is None or is_static(operand):
            continue
        result, known = declared_dims(node.outputs[0]), declared_dims(operand)
        is_told = result is not None and all(isinstance(size, int) for size in result)
        if result is not None and is_told and (known is None or agree(known, result)):
            operand.shape = onnx_ir.Shape(result)
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
            f"pass --shape {value.name}=..., declare its shape in the model (graph.value_info), or "
            "make what it depends on constant"
        )


def _check_loops(graph: onnx_ir.Graph, where: str) -> None:
    """Refuse loops, at any depth, whose shapes are not those of the first iteration."""
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        if node.domain or node.op_type not in ("Loop", "Scan"):
            continue
        what = f"{where}: node {node.name!r} ({node.op_type})"
        body = node.attributes["body"].as_graph()
        if node.op_type == "Loop":
            _check_carried(zip(body.inputs[2:], body.outputs[1:], strict=False), what)
            for value in node.outputs[len(body.inputs) - 2 :]:
                is_read = value.uses() or value.is_graph_output()
                if is_read and not _runs_to_its_count(node, body):
                    raise FrontendError(
                        f"{what} stacks {value.name!r} over as many iterations as its condition "
                        "allows, which depends on data; only loops with a constant condition are "
                        "supported"
                    )
        else:
            states = len(node.inputs) - node.attributes["num_scan_inputs"].as_int()
            _check_carried(zip(body.inputs[:states], body.outputs[:states], strict=True), what)


def _check_carried(pairs: Iterable[tuple[onnx_ir.Value, onnx_ir.Value]], what: str) -> None:
    for before, after in pairs:
        old, new = declared_dims(before), declared_dims(after)
        if old is not None and new is not None and not agree(new, old):
            raise FrontendError(
                f"{what} carries {before.name!r} of shape {text(old)} into an iteration and "
                f"{text(new)} out of it; only loops that keep their shapes are supported"
            )


def _runs_to_its_count(node: onnx_ir.Node, body: onnx_ir.Graph) -> bool:
    """Test whether the condition is true at the start and handed on unchanged."""

    def is_true(value: onnx_ir.Value) -> bool:
        return value.const_value is not None and bool(value.const_value.numpy().all())

    start = node.inputs[1] if len(node.inputs) > 1 else None
    if start is not None and not is_true(start):
        return False
    value: onnx_ir.Value | None = body.outputs[0]
    while value is not None and value is not body.inputs[1] and not is_true(value):
        producer = value.producer()
        identity = producer is not None and producer.op_type == "Identity" and not producer.domain
        value = producer.inputs[0] if producer is not None and identity else None
    return value is not None


def bounded_values(graph: onnx_ir.Graph, given: Collection[str]) -> tuple[onnx_ir.Value, ...]:
    """Pick the results with a given shape whose size depends on data."""
    return tuple(
        value
        for node in graph
        if node.op_type in DEPEND_ON_DATA and not node.domain
        for value in node.outputs
        if value.name in given
    )


def _behind(graph: onnx_ir.Graph, bounded: Collection[onnx_ir.Value]) -> tuple[onnx_ir.Node, ...]:
    """The nodes that make these results, and all that read what those lead to, in order."""
    reached: set[onnx_ir.Value] = set()
    nodes = []
    for node in graph:
        reads = (value for value in (*node.inputs, *captured(node)) if value is not None)
        if not reached.isdisjoint(reads) or any(value in bounded for value in node.outputs):
            reached.update(node.outputs)
            nodes.append(node)
    return tuple(nodes)


def keep_together(
    graph: onnx_ir.Graph, bounded: Collection[onnx_ir.Value], bounds: Sequence[onnx_ir.Value]
) -> tuple[str, tuple[str, ...]]:
    """Make the nodes behind the bounded results one node, in place.

    `bounds` are the graph's outputs in the copy in which the results have the user's bounds.

    Returns:
        Its name, and a note; "" and none if no such node is left.
    """
    nodes = _behind(graph, bounded)
    if not nodes:
        return "", ()
    taken = {value.name for value in made(graph)}
    names = ", ".join(sorted({repr(value.name) for value in bounded}))
    inner = {i: value for i, value in enumerate(graph.outputs) if value.producer() in nodes}
    graph.remove(nodes)
    results = []
    for index, value in inner.items():
        type_, shape = bounds[index].type, bounds[index].shape
        assert shape is not None
        bound = onnx_ir.Shape(shape.numpy())
        results.append(onnx_ir.Value(name=value.name, type=type_, shape=bound))
        value.name, value.type = fresh(f"{value.name}_inside", taken), type_
        graph.outputs[index] = results[-1]
    then = onnx_ir.Graph([], list(inner.values()), nodes=nodes, name="behind_bounds")
    true = onnx_ir.tensor(np.array(1, np.bool_), name=fresh("behind_bounds_condition", taken))
    condition = onnx_ir.val(true.name, const_value=true)
    graph.register_initializer(condition)
    branches = {"then_branch": then, "else_branch": _never(results)}
    attributes = [onnx_ir.AttrGraph(name, branch) for name, branch in branches.items()]
    name = fresh("behind_bounds", {node.name for node in graph})
    graph.append(onnx_ir.Node("", "If", [condition], attributes, outputs=results, name=name))
    note = (
        f"sizes behind {names} depend on data: what follows stays together on one device as node "
        f"{name!r}; memory and time are counted for the shapes that --shape gives"
    )
    return name, (note,)


def _never(results: Collection[onnx_ir.Value]) -> onnx_ir.Graph:
    """The branch that never runs: results without elements, of the same types."""
    empty = []
    for index, value in enumerate(results):
        assert value.dtype is not None and value.shape is not None  # noqa: PT018
        array = np.zeros([0] * len(value.shape), value.dtype.numpy())
        node = onnx_ir.node("Constant", [], {"value": onnx_ir.tensor(array, value.dtype)})
        node.outputs[0].name = f"behind_bounds_none_{index}"
        empty.append(node)
    return onnx_ir.Graph([], [node.outputs[0] for node in empty], nodes=empty, name="never")
