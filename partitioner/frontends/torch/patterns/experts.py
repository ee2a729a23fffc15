"""Finds layers of experts in an exported graph by their structure, and makes each one node.

Two forms are known, whatever the model is called. Both give each token's row to the experts that a
router chose, and sum up what these give, each times a weight:

    batched    weights of experts are gathered by row: ``bmm(up[ids], rows)``
    grouped    rows are sorted by expert: ``grouped_mm(rows[order], up, offsets)``, and back again

Behind each product a bias may be added, gathered by row. Between the two stands an activation,
which may be gated: one that has a name, or a program of steps on columns
(`backends.torch.operators.activations`). Weights of choices may have a type of their own. Layers
with other steps, or with other types that differ, stay as they are, but for weights and biases that
are gathered by row: they are embedding tables, whose rows may be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import (
    Arguments,
    Rewriter,
    arguments_of,
    graph_modules,
    value,
)

_aten = torch.ops.aten

#: Operators that give their operand itself, or a copy of it.
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.detach.default,
    _aten.to.dtype,
    _aten._to_copy.default,
}
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_GROUPED = {"transformers::grouped_mm_fallback", "aten::_grouped_mm"}
#: Steps of programs by operator: of one operand, and of two.
_UNARY = {
    _aten.exp.default: "exp",
    _aten.neg.default: "neg",
    _aten.sigmoid.default: "sigmoid",
    _aten.tanh.default: "tanh",
}
_BINARY = {
    _aten.add.Tensor: "add",
    _aten.div.Tensor: "div",
    _aten.mul.Tensor: "mul",
    _aten.sub.Tensor: "sub",
}
_ACTIVATIONS = {_aten.relu.default: "relu", _aten.silu.default: "silu"}


@dataclass(frozen=True)
class _Product:
    """A product of each row with the weights of its expert."""

    rows: fx.Node  #: (rows, k).
    weights: fx.Node  #: (experts, n, k), or (experts, k, n) if `transposed`.
    transposed: bool
    ids: fx.Node  #: The expert of each row: (tokens, chosen), before rows were sorted.
    order: fx.Node | None  #: The order of sorted rows.
    bias: fx.Node | None = None  #: (experts, n), of which each row gets that of its expert.
    biased: fx.Node | None = None  #: The node that adds it.


def replace_experts(module: fx.GraphModule, *, training: bool) -> int:
    """Replace layers of experts in place.

    Args:
        module: The exported graph.
        training: Whether what the gradients need is kept.

    Returns:
        How many layers were replaced.
    """
    total = 0
    for part in graph_modules(module):
        count = sum(_replace(node, training) for node in list(part.graph.nodes))
        if count:
            part.recompile()
        total += count
    return total


def replace_lookups(module: fx.GraphModule) -> int:
    """Replace rows that are gathered of weights of experts by embeddings of them, in place.

    Weights are parameters of three or more dims; biases, with two, are gathered by the same ids.

    Returns:
        How many were replaced.
    """
    total = 0
    for part in graph_modules(module):
        found = [node for node in part.graph.nodes if _looks_up(node)]
        chosen = {_indices(node)[0] for node in found if value(_args(node)[0]).dim() > 2}
        found = [node for node in found if _indices(node)[0] in chosen]
        counted: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in found:
            _embed(node, counted)
        if found:
            part.recompile()
        total += len(found)
    return total


def _looks_up(node: fx.Node) -> bool:
    """Tell whether a node gathers rows of a parameter by ids that are computed."""
    if not _calls(node, _aten.index.Tensor) or len(_args(node)[1]) != 1 or not _is_tensor(node):
        return False
    table, (ids,) = _args(node)[0], _indices(node)
    return (
        _through(table, casts=True).name.startswith("p_")
        and _through(table, casts=True).op == "placeholder"
        and value(table).dim() > 1
        and value(table).is_floating_point()
        and 0 not in value(table).shape
        and ids is not None
        and value(ids).dtype == torch.int64
    )


def _embed(node: fx.Node, counted: dict[tuple[fx.Node, int], fx.Node]) -> None:
    """Replace a lookup by one of a matrix, with ids that count from the begin, made once."""
    write, (table, (ids,)) = Rewriter(node), _args(node)
    size, shape = value(table).shape[0], list(value(node).shape)
    matrix = table
    if value(table).dim() > 2:
        matrix = write.call(_aten.reshape.default, table, [size, -1])
    if (ids, size) not in counted:
        from_end = write.call(_aten.lt.Scalar, ids, 0)
        moved = write.call(_aten.add.Tensor, ids, size)
        counted[ids, size] = write.call(_aten.where.self, from_end, moved, ids)
    found = write.call(_aten.embedding.default, matrix, counted[ids, size])
    call = write.call(_aten.reshape.default, found, shape)
    node.target, node.args, node.kwargs = call.target, call.args, call.kwargs
    node.meta["val"] = call.meta["val"]
    node.graph.erase_node(call)


@dataclass(frozen=True)
class _Rows:
    """A row for each choice of each token, (tokens x chosen, channels)."""

    node: fx.Node
    tokens: int
    chosen: int
    channels: int
    order: fx.Node | None  #: The order in which they are sorted by expert.


@dataclass(frozen=True)
class _Layer:
    """A layer of experts."""

    x: fx.Node
    weights: fx.Node
    up: _Product
    down: _Product
    activation: str
    gated: bool


def _replace(last: fx.Node, training: bool) -> bool:
    """Replace the layer of experts that ends with a node, if there is one."""
    rows = _summed(last)
    layer = _layer(rows) if rows is not None else None
    if layer is None or not _typed_alike(last, layer):
        return False
    write = Rewriter(last)
    operands = [
        write.call(_aten.transpose.int, one.weights, 1, 2) if one.transposed else one.weights
        for one in (layer.up, layer.down)
    ]
    biases = [one.bias for one in (layer.up, layer.down) if one.bias is not None]
    size = value(layer.up.weights).shape[0]
    settings = (layer.activation, layer.gated, training, size, [0], [size])
    operators = torch.ops.partitioner
    target = operators.experts_biased.default if biases else operators.experts.default
    results = write.call(
        target, layer.x, layer.up.ids, layer.weights, *operands, *biases, *settings
    )
    call = write.call(operator.getitem, results, 0)
    last.target, last.args, last.kwargs = call.target, call.args, call.kwargs
    last.meta["val"] = call.meta["val"]
    last.graph.erase_node(call)
    for one in (layer.up, layer.down):
        if one.biased is not None:  # a write to the product, which would keep it
            one.biased.target = _aten.add.Tensor
    return True


def _summed(last: fx.Node) -> _Rows | None:
    """The rows that a node sums up for each token."""
    if not _calls(last, _aten.sum.dim_IntList) or not _is_tensor(last):
        return None
    summed = arguments_of(last)
    split = _through(summed["self"])
    if not _calls(split, *_RESHAPES) or value(split).dim() != 3 or summed["keepdim"]:
        return None
    if [dim % 3 for dim in summed["dim"] or ()] != [1]:
        return None
    rows, order = _through(_args(split)[0]), None
    if _calls(rows, _aten.index.Tensor) and len(_args(rows)[1]) == 1:
        order = _inverted(_through(_args(rows)[1][0]))
        if order is None:
            return None
        rows = _through(_args(rows)[0])
    tokens, chosen, channels = value(split).shape
    same = _is_tensor(rows) and value(rows).shape == (tokens * chosen, channels)
    return _Rows(rows, tokens, chosen, channels, order) if same else None


def _layer(rows: _Rows) -> _Layer | None:
    """The layer that gives these rows, each times its weight."""
    scaled = _scaled(rows)
    if scaled is None:
        return None
    down, weights = scaled
    inner = _activation(_through(down.rows))
    up = _product(inner[0]) if inner is not None else None
    if inner is None or up is None:
        inner = _program(_through(down.rows))
        up = _product(inner[0]) if inner is not None else None
    if inner is None or up is None or (up.bias is None) != (down.bias is None):
        return None
    before, activation, gated = inner
    if up.order is not rows.order or up.ids is not down.ids:
        return None
    x = _tokens(_through(up.rows), rows.chosen, rows.order)
    if x is None or not _shaped(x, rows.tokens, rows.channels):
        return None
    width = value(down.rows).shape[1]
    fits = _shaped(up.ids, rows.tokens, rows.chosen) and _shaped(
        before, value(up.rows).shape[0], 2 * width if gated else width
    )
    return _Layer(x, weights, up, down, activation, gated) if fits else None


def _scaled(rows: _Rows) -> tuple[_Product, fx.Node] | None:
    """The product that gives rows, and the weight of each."""
    if not _calls(rows.node, _aten.mul.Tensor):
        return None
    for results, column in (_args(rows.node)[:2], reversed(_args(rows.node)[:2])):
        down, weights = _product(_through(results)), _weights(_through(column), rows)
        if down is not None and weights is not None and down.order is rows.order:
            return down, weights
    return None


def _typed_alike(last: fx.Node, layer: _Layer) -> bool:
    """Tell whether the layer computes in one type of floats, but for its weights of choices.

    Its results are then of the type of both.
    """
    x, weights = value(layer.x), value(layer.weights)
    both = layer.up, layer.down
    operands = [*(one.weights for one in both), *(one.bias for one in both if one.bias is not None)]
    if any(value(operand).dtype != x.dtype for operand in operands):
        return False
    are_floats = x.is_floating_point() and weights.is_floating_point()
    return are_floats and value(last).dtype == torch.promote_types(x.dtype, weights.dtype)


def _product(node: fx.Node) -> _Product | None:
    """The product that a node is, with the bias that is added to it."""
    if not _calls(node, _aten.add.Tensor, _aten.add_.Tensor):
        return _batched(node) or _grouped(node)
    for result, column in (_args(node)[:2], reversed(_args(node)[:2])):
        result = _through(result)
        if not isinstance(result, fx.Node) or node.kwargs.get("alpha", 1) != 1:
            continue
        if len(result.users) > 1:
            continue
        product = _batched(result) or _grouped(result)
        bias = _bias(_through(column), product) if product is not None else None
        if product is not None and bias is not None:
            return replace(product, bias=bias, biased=node)
    return None


def _bias(rows: Any, product: _Product) -> fx.Node | None:
    """The matrix of which rows are gathered by the experts of a product's rows."""
    if not _calls(rows, _aten.index.Tensor) or len(_args(rows)[1]) != 1:
        return None
    bias, ids = _args(rows)[0], _through(_args(rows)[1][0])
    size, columns, others = value(product.weights).shape
    columns = others if product.transposed else columns
    if product.order is None:
        are_own = isinstance(ids, fx.Node) and _flattened(ids) is product.ids
    else:
        are_own = _calls(ids, operator.getitem) and _args(ids) == (_args(product.order)[0], 0)
    is_matrix = isinstance(bias, fx.Node) and _shaped(bias, size, columns)
    return bias if are_own and is_matrix else None


def _batched(node: fx.Node) -> _Product | None:
    """``squeeze(bmm(weights[ids], unsqueeze(rows)))``, either operand first."""
    if not _calls(node, _aten.squeeze.dim, *_RESHAPES) or not _is_tensor(node):
        return None
    product = _through(_args(node)[0])
    if not _calls(product, _aten.bmm.default):
        return None
    operands = [_through(operand) for operand in _args(product)]
    for index, transposed in ((0, False), (1, True)):
        gathered, column = operands[index], operands[1 - index]
        dim = 1 if transposed else 2  # the one of size 1
        if not _calls(gathered, _aten.index.Tensor) or not _calls(column, _aten.unsqueeze.default):
            continue
        rank = 3
        places = _args(gathered)[1]
        if len(places) != 1 or _args(column)[1] % rank != dim or value(gathered).dim() != rank:
            continue
        size = value(gathered).shape[2 if transposed else 1]
        if not _shaped(node, value(gathered).shape[0], size):
            continue
        ids = _flattened(_through(places[0]))
        if ids is not None:
            return _Product(_through(_args(column)[0]), _args(gathered)[0], transposed, ids, None)
    return None


def _grouped(node: fx.Node) -> _Product | None:
    """``grouped_mm(rows, weights, cumsum(histc(sorted ids)))``."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target._schema.name not in _GROUPED:
        return None
    args = arguments_of(node)
    rows, weights, offsets = list(args.values())[:3]
    if any(args[name] is not None for name in ("bias", "out_dtype") if name in args):
        return None
    order = _sorted_by(offsets, value(weights).shape[0])
    if order is None or value(weights).dim() != 3 or value(rows).dim() != 2:
        return None
    ids = _flattened(_through(_args(_args(order)[0])[0]))
    if ids is None:
        return None
    if _calls(weights, _aten.transpose.int) and {d % 3 for d in _args(weights)[1:]} == {1, 2}:
        return _Product(_through(rows), _args(weights)[0], False, ids, order)
    return _Product(_through(rows), weights, True, ids, order)


def _sorted_by(offsets: fx.Node, experts: int) -> fx.Node | None:
    """The order in which rows lie whose experts end at these offsets."""
    ends = _through(offsets)
    if not _calls(ends, _aten.cumsum.default) or value(ends).shape != (experts,):
        return None
    counts = _through(_args(ends)[0])
    if not _calls(counts, _aten.histc.default):
        return None
    given = arguments_of(counts)
    if (given["bins"], given["min"], given["max"]) != (experts, 0, experts - 1):
        return None
    ids = _through(_args(counts)[0], casts=True)
    if not _calls(ids, operator.getitem) or _args(ids)[1] != 0:
        return None
    sort = _args(ids)[0]
    if not _calls(sort, _aten.sort.default, _aten.sort.stable) or value(ids).dim() != 1:
        return None
    if arguments_of(sort)["descending"]:
        return None
    return next((user for user in sort.users if _args(user)[1] == 1), None)


def _inverted(node: fx.Node) -> fx.Node | None:
    """The order of which a node is the inverse: ``inverse[order] = arange(n)``, or argsort."""
    if _calls(node, _aten.argsort.default, _aten.argsort.stable):
        given = arguments_of(node)
        return None if given["descending"] else _through(given["self"])
    if not _calls(node, _aten.index_put_.default, _aten.index_put.default):
        return None
    given = arguments_of(node)
    order, numbers = given["indices"], _through(given["values"])
    if len(order) != 1 or given["accumulate"] or not _counts_up(numbers):
        return None
    inverse: fx.Node = _through(order[0])
    return inverse


def _counts_up(node: fx.Node) -> bool:
    """Tell whether it is 0, 1, 2 and so on."""
    if _calls(node, _aten.arange.default):
        return len(_args(node)) == 1
    counts = _calls(node, _aten.arange.start, _aten.arange.start_step)
    return counts and _args(node)[0] == 0 and _args(node)[2:] in ((), (1,))


def _weights(column: fx.Node, rows: _Rows) -> fx.Node | None:
    """The weights of choices, (tokens, chosen), from a column of them, a row each."""
    if not _shaped(column, rows.tokens * rows.chosen, 1):
        return None
    if not _calls(column, _aten.unsqueeze.default, *_RESHAPES):
        return None
    row = _through(_args(column)[0])
    if rows.order is not None:
        if not _calls(row, _aten.index.Tensor) or _indices(row) != [rows.order]:
            return None
        row = _through(_args(row)[0])
    weights = _flattened(row)
    fits = weights is not None and _shaped(weights, rows.tokens, rows.chosen)
    return weights if fits else None


def _tokens(rows: fx.Node, chosen: int, order: fx.Node | None) -> fx.Node | None:
    """The tokens, of which each row is one: in turn, or in the order of their experts."""
    if order is None:
        repeated = _calls(rows, _aten.repeat_interleave.self_int)
        given = arguments_of(rows) if repeated else {}
        same = repeated and (given["repeats"], given["dim"]) == (chosen, 0)
        return _args(rows)[0] if same else None
    if not _calls(rows, _aten.index.Tensor) or len(_args(rows)[1]) != 1:
        return None
    token = _through(_args(rows)[1][0])
    divides = _calls(token, _aten.floor_divide.default) or (
        _calls(token, _aten.div.Tensor_mode) and token.kwargs.get("rounding_mode") == "floor"
    )
    if not divides or _through(_args(token)[0]) is not order or _args(token)[1] != chosen:
        return None
    tokens: fx.Node = _args(rows)[0]
    return tokens


def _activation(node: fx.Node) -> tuple[fx.Node, str, bool] | None:
    """(what it is applied to, its name, whether it is gated)."""
    if not _calls(node, _aten.mul.Tensor):
        name = _named(node)
        return (_through(_args(node)[0]), name, False) if name else None
    for act, other in (_args(node)[:2], reversed(_args(node)[:2])):
        act, other = _through(act), _through(other)
        if not (name := _named(act)):
            continue
        halves = _through(_args(act)[0]), other
        if not all(_calls(half, operator.getitem) for half in halves):
            continue
        (chunk, first), (same, second) = (_args(half) for half in halves)
        if chunk is same and (first, second) == (0, 1) and _halves(chunk):
            return _through(_args(chunk)[0]), name, True
    return None


def _program(node: Any) -> tuple[fx.Node, str, bool] | None:
    """As `_activation`, of other steps on columns: its name is a program."""
    if not isinstance(node, fx.Node) or not _is_tensor(node) or value(node).dim() != 2:
        return None
    steps: list[str] = []
    places: dict[fx.Node, str] = {}
    begin = _written(node, steps, places, tuple(value(node).shape))
    if begin is None or not steps:
        return None
    width, columns = value(node).shape[1], value(begin).shape[1]
    if columns not in (width, 2 * width):
        return None
    return begin, "; ".join(steps), columns == 2 * width


def _written(
    node: fx.Node, steps: list[str], places: dict[fx.Node, str], shape: tuple[int, ...]
) -> fx.Node | None:
    """Write the steps that give a node, and return the product that they begin with.

    None if there is another operator or operand, or they begin with several products.
    """
    if node in places:
        return next(iter(places))
    if _product(node) is not None:
        if places:
            return None  # another one
        places[node] = "%0"
        return node
    step = _step(node)
    if step is None or not _shaped(node, *shape):
        return None
    operands, begin = [], None
    for operand in step[1]:
        if not isinstance(operand, fx.Node):
            operands.append(repr(operand))
            continue
        source = _through(operand)
        begin = _written(source, steps, places, shape)
        if begin is None:
            return None
        operands.append(places[source])
    if begin is None:
        return None
    if step[0] == "clamp":
        return _clamped(node, operands, steps, places)
    steps.append(" ".join((step[0], *operands)))
    places[node] = f"%{len(steps)}"
    return begin


def _clamped(
    node: fx.Node, operands: list[str], steps: list[str], places: dict[fx.Node, str]
) -> fx.Node:
    """Write the steps of a clamp by one bound or both."""
    source, *bounds = operands
    for name, bound in zip(("clamp_min", "clamp_max"), bounds, strict=True):
        if bound != repr(None):
            steps.append(f"{name} {source} {bound}")
            source = f"%{len(steps)}"
    places[node] = source
    return next(iter(places))


def _step(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    """The name of the step that a node is, and its operands: nodes and numbers."""
    if _calls(node, operator.getitem):
        chunk, place = _args(node)
        if not isinstance(chunk, fx.Node) or not _halves(chunk):
            return None
        return "part", (_args(chunk)[0], place, 2)
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    given = arguments_of(node)
    if node.target is _aten.slice.Tensor:
        return _sliced(given)
    if _named(node):
        return _named(node), (given["self"],)
    if node.target in _BINARY:
        both = given["self"], given["other"]
        return (_BINARY[node.target], both) if given.get("alpha", 1) == 1 else None
    if node.target in (_aten.clamp.default, _aten.clamp_.default):
        return "clamp", (given["self"], given["min"], given["max"])
    if node.target is _aten.pow.Tensor_Scalar:
        return "pow", (given["self"], given["exponent"])
    if node.target is _aten.square.default:
        return "pow", (given["self"], 2)
    return (_UNARY[node.target], (given["self"],)) if node.target in _UNARY else None


def _sliced(given: Arguments) -> tuple[str, tuple[Any, ...]] | None:
    """A slice of columns as a step: every second one, or a half."""
    x, start, end, step = given["self"], given["start"] or 0, given["end"], given["step"]
    rank, columns = value(x).dim(), value(x).shape[-1]
    end = columns if end is None else min(end, columns)
    if given["dim"] % rank != rank - 1 or start < 0 or columns % 2:
        return None
    if step == 2 and start in (0, 1) and end == columns:
        return "every", (x, start, 2)
    is_half = step == 1 and end - start == columns // 2 and start in (0, columns // 2)
    return ("part", (x, int(start > 0), 2)) if is_half else None


def _named(node: Any) -> str:
    """The name of an activation; "" of others."""
    if _calls(node, _aten.gelu.default):
        return {"none": "gelu", "tanh": "gelu-tanh"}[arguments_of(node)["approximate"]]
    target: Any = node.target if isinstance(node, fx.Node) else None
    return _ACTIVATIONS.get(target, "")


def _halves(node: fx.Node) -> bool:
    """Tell whether it cuts the last dim in two equal parts."""
    if not _calls(node, _aten.chunk.default, _aten.split.Tensor):
        return False
    (whole, parts, dim), shape = list(arguments_of(node).values())[:3], value(_args(node)[0]).shape
    del whole
    equal = shape[-1] % 2 == 0
    return (
        equal
        and dim % 2 == 1
        and parts == (2 if _calls(node, _aten.chunk.default) else shape[-1] // 2)
    )


def _flattened(node: fx.Node) -> fx.Node | None:
    """The matrix whose elements in order a vector is."""
    if not _calls(node, *_RESHAPES, _aten.flatten.using_ints) or value(node).dim() != 1:
        return None
    matrix = _through(_args(node)[0])
    return matrix if value(matrix).dim() == 2 else None


def _through(node: Any, *, casts: bool = False) -> Any:
    """The node that gives a value, seen through copies, and if `casts` through other types.

    Not through what cuts a float off from its gradient, which the layer's own would go past.
    """
    while isinstance(node, fx.Node) and _calls(node, *_SAME):
        source = _args(node)[0]
        if not casts and value(source).dtype != value(node).dtype:
            break
        if _calls(node, _aten.detach.default) and value(node).is_floating_point():
            break
        node = source
    return node


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _indices(node: fx.Node) -> list[Any]:
    return [_through(index) for index in _args(node)[1]]


def _shaped(node: fx.Node, *shape: int) -> bool:
    return _is_tensor(node) and tuple(value(node).shape) == shape


def _is_tensor(node: fx.Node) -> bool:
    """Tell whether it is a tensor of known sizes."""
    tensor = node.meta.get("val")
    return isinstance(tensor, torch.Tensor) and all(isinstance(n, int) for n in tensor.shape)


def _calls(node: Any, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets
