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
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import (
    Arguments,
    Rewriter,
    args_of,
    arguments_of,
    calls,
    graph_modules,
    indices_of,
    is_shaped,
    is_tensor,
    rewrite_nodes,
    through,
    value,
)

_aten = torch.ops.aten

_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default}
_GROUPED = {"transformers::grouped_mm_fallback", "aten::_grouped_mm"}


@dataclass(frozen=True)
class _Product:
    rows: fx.Node  #: (rows, k).
    weights: fx.Node  #: (experts, n, k), or (experts, k, n) if `transposed`.
    transposed: bool
    ids: fx.Node  #: The expert of each row: (tokens, chosen), before rows were sorted.
    permutation: fx.Node | None  #: Of sorted rows: which row lies where.
    bias: fx.Node | None = None  #: (experts, n), of which each row gets that of its expert.
    biased: fx.Node | None = None  #: The node that adds it.


def replace_experts(module: fx.GraphModule, *, training: bool) -> int:
    """Replace layers of experts in place, and count them; `training` keeps what gradients need."""
    return rewrite_nodes(module, lambda node: _replace(node, training))


@dataclass(frozen=True)
class _Rows:
    """A row for each choice of each token, (tokens x chosen, channels)."""

    node: fx.Node
    tokens: int
    chosen: int
    channels: int
    permutation: fx.Node | None  #: The order in which they are sorted by expert.


@dataclass(frozen=True)
class _Layer:
    x: fx.Node
    weights: fx.Node
    up: _Product
    down: _Product
    activation: str
    gated: bool


def _replace(last: fx.Node, training: bool) -> bool:
    rows = _summed(last)
    layer = None if rows is None else _layer(rows)
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
    write.give(write.call(operator.getitem, results, 0))
    for one in (layer.up, layer.down):
        if one.biased is not None:  # a write to the product, which would keep it
            one.biased.target = _aten.add.Tensor
    return True


def _summed(last: fx.Node) -> _Rows | None:
    if not calls(last, _aten.sum.dim_IntList) or not is_tensor(last):
        return None
    summed = arguments_of(last)
    split = through(summed["self"])
    if not calls(split, *_RESHAPES) or value(split).dim() != 3 or summed["keepdim"]:
        return None
    if [dim % 3 for dim in summed["dim"] or ()] != [1]:
        return None
    rows, permutation = through(args_of(split)[0]), None
    if calls(rows, _aten.index.Tensor) and len(args_of(rows)[1]) == 1:
        permutation = _inverted(through(args_of(rows)[1][0]))
        if permutation is None:
            return None
        rows = through(args_of(rows)[0])
    tokens, chosen, channels = value(split).shape
    same = is_tensor(rows) and value(rows).shape == (tokens * chosen, channels)
    return _Rows(rows, tokens, chosen, channels, permutation) if same else None


def _layer(rows: _Rows) -> _Layer | None:
    scaled = _scaled(rows)
    if scaled is None:
        return None
    down, weights = scaled
    inner = _activation(through(down.rows), lambda node: _product(node) is not None)
    if inner is None:
        return None
    before, activation, gated = inner
    up = _product(before)
    if up is None or (up.bias is None) != (down.bias is None):
        return None
    if up.permutation is not rows.permutation or up.ids is not down.ids:
        return None
    x = _tokens(through(up.rows), rows.chosen, rows.permutation)
    if x is None or not is_shaped(x, rows.tokens, rows.channels):
        return None
    width = value(down.rows).shape[1]
    fits = is_shaped(up.ids, rows.tokens, rows.chosen) and is_shaped(
        before, value(up.rows).shape[0], 2 * width if gated else width
    )
    return _Layer(x, weights, up, down, activation, gated) if fits else None


def _either_way(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """The first two operands of a call, seen through copies, and in the other order."""
    one, other = map(through, args_of(node)[:2])
    yield from ((one, other), (other, one))


def _scaled(rows: _Rows) -> tuple[_Product, fx.Node] | None:
    for results, column in _either_way(rows.node) if calls(rows.node, _aten.mul.Tensor) else ():
        down, weights = _product(results), _weights(column, rows)
        if down is not None and weights is not None and down.permutation is rows.permutation:
            return down, weights
    return None


def _typed_alike(last: fx.Node, layer: _Layer) -> bool:
    """Tell whether all but the weights of choices, and so the results, are of one float type."""
    x, weights = value(layer.x), value(layer.weights)
    both = layer.up, layer.down
    operands = [*(one.weights for one in both), *(one.bias for one in both if one.bias is not None)]
    if any(value(operand).dtype != x.dtype for operand in operands):
        return False
    are_floats = x.is_floating_point() and weights.is_floating_point()
    return are_floats and value(last).dtype == torch.promote_types(x.dtype, weights.dtype)


def _product(node: fx.Node) -> _Product | None:
    if not calls(node, _aten.add.Tensor, _aten.add_.Tensor):
        return _batched(node) or _grouped(node)
    for result, column in _either_way(node) if node.kwargs.get("alpha", 1) == 1 else ():
        if isinstance(result, fx.Node) and len(result.users) == 1:
            product = _batched(result) or _grouped(result)
            bias = None if product is None else _bias(column, product)
            if product is not None and bias is not None:
                return replace(product, bias=bias, biased=node)
    return None


def _bias(rows: Any, product: _Product) -> fx.Node | None:
    """The matrix of which rows are gathered by the experts of a product's rows."""
    if not calls(rows, _aten.index.Tensor) or len(args_of(rows)[1]) != 1:
        return None
    bias, ids = args_of(rows)[0], through(args_of(rows)[1][0])
    size, columns, others = value(product.weights).shape
    columns = others if product.transposed else columns
    if product.permutation is None:
        are_own = isinstance(ids, fx.Node) and _flattened(ids) is product.ids
    else:
        source = args_of(product.permutation)[0]
        are_own = calls(ids, operator.getitem) and args_of(ids) == (source, 0)
    is_matrix = isinstance(bias, fx.Node) and is_shaped(bias, size, columns)
    return bias if are_own and is_matrix else None


def _batched(node: fx.Node) -> _Product | None:
    """``squeeze(bmm(weights[ids], unsqueeze(rows)))``, either operand first."""
    if not calls(node, _aten.squeeze.dim, *_RESHAPES) or not is_tensor(node):
        return None
    product = through(args_of(node)[0])
    if not calls(product, _aten.bmm.default):
        return None
    operands = [through(operand) for operand in args_of(product)]
    for index, transposed in ((0, False), (1, True)):
        gathered, column = operands[index], operands[1 - index]
        dim = 1 if transposed else 2  # the one of size 1, of three
        if not calls(gathered, _aten.index.Tensor) or not calls(column, _aten.unsqueeze.default):
            continue
        weights, places = args_of(gathered)
        if len(places) != 1 or args_of(column)[1] % 3 != dim or value(gathered).dim() != 3:
            continue
        ids = _flattened(through(places[0]))
        rows, size = value(gathered).shape[0], value(gathered).shape[3 - dim]
        if ids is not None and is_shaped(node, rows, size):
            return _Product(through(args_of(column)[0]), weights, transposed, ids, None)
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
    permutation = _sorted_by(offsets, value(weights).shape[0])
    if permutation is None or value(weights).dim() != 3 or value(rows).dim() != 2:
        return None
    ids = _flattened(through(args_of(args_of(permutation)[0])[0]))
    if ids is None:
        return None
    if calls(weights, _aten.transpose.int) and {d % 3 for d in args_of(weights)[1:]} == {1, 2}:
        return _Product(through(rows), args_of(weights)[0], False, ids, permutation)
    return _Product(through(rows), weights, True, ids, permutation)


def _sorted_by(offsets: fx.Node, experts: int) -> fx.Node | None:
    """The order in which rows lie whose experts end at these offsets."""
    ends = through(offsets)
    if not calls(ends, _aten.cumsum.default) or value(ends).shape != (experts,):
        return None
    counts = through(args_of(ends)[0])
    if not calls(counts, _aten.histc.default):
        return None
    given = arguments_of(counts)
    if (given["bins"], given["min"], given["max"]) != (experts, 0, experts - 1):
        return None
    ids = through(args_of(counts)[0], casts=True)
    if not calls(ids, operator.getitem) or args_of(ids)[1] != 0:
        return None
    sort = args_of(ids)[0]
    if not calls(sort, _aten.sort.default, _aten.sort.stable) or value(ids).dim() != 1:
        return None
    if arguments_of(sort)["descending"]:
        return None
    return next((user for user in sort.users if args_of(user)[1] == 1), None)


def _inverted(node: fx.Node) -> fx.Node | None:
    """The order of which a node is the inverse: ``inverse[order] = arange(n)``, or argsort."""
    if calls(node, _aten.argsort.default, _aten.argsort.stable):
        given = arguments_of(node)
        return None if given["descending"] else through(given["self"])
    if not calls(node, _aten.index_put_.default, _aten.index_put.default):
        return None
    given = arguments_of(node)
    indices, numbers = given["indices"], through(given["values"])
    if calls(numbers, _aten.arange.default):
        counts_up = len(args_of(numbers)) == 1
    else:
        counts_up = calls(numbers, _aten.arange.start, _aten.arange.start_step) and (
            args_of(numbers)[0] == 0 and args_of(numbers)[2:] in ((), (1,))
        )
    if len(indices) != 1 or given["accumulate"] or not counts_up:
        return None
    inverse: fx.Node = through(indices[0])
    return inverse


def _weights(column: fx.Node, rows: _Rows) -> fx.Node | None:
    """The weights of choices, (tokens, chosen), from a column of them, a row each."""
    if not is_shaped(column, rows.tokens * rows.chosen, 1):
        return None
    if not calls(column, _aten.unsqueeze.default, *_RESHAPES):
        return None
    row = through(args_of(column)[0])
    if rows.permutation is not None:
        if not calls(row, _aten.index.Tensor) or indices_of(row) != [rows.permutation]:
            return None
        row = through(args_of(row)[0])
    weights = _flattened(row)
    fits = weights is not None and is_shaped(weights, rows.tokens, rows.chosen)
    return weights if fits else None


def _tokens(rows: fx.Node, chosen: int, permutation: fx.Node | None) -> fx.Node | None:
    """The tokens, of which each row is one: in turn, or in the order of their experts."""
    if permutation is None:
        repeated = calls(rows, _aten.repeat_interleave.self_int)
        given = arguments_of(rows) if repeated else {}
        same = repeated and (given["repeats"], given["dim"]) == (chosen, 0)
        return args_of(rows)[0] if same else None
    if not calls(rows, _aten.index.Tensor) or len(args_of(rows)[1]) != 1:
        return None
    token = through(args_of(rows)[1][0])
    divides = calls(token, _aten.floor_divide.default) or (
        calls(token, _aten.div.Tensor_mode) and token.kwargs.get("rounding_mode") == "floor"
    )
    if not divides or through(args_of(token)[0]) is not permutation or args_of(token)[1] != chosen:
        return None
    tokens: fx.Node = args_of(rows)[0]
    return tokens


def _flattened(node: fx.Node) -> fx.Node | None:
    """The matrix whose elements in order a vector is."""
    if not calls(node, *_RESHAPES, _aten.flatten.using_ints) or value(node).dim() != 1:
        return None
    matrix = through(args_of(node)[0])
    return matrix if value(matrix).dim() == 2 else None


def replace_lookups(module: fx.GraphModule) -> None:
    """Replace rows gathered of weights of experts, and of their biases, by embeddings."""
    for part in graph_modules(module):
        found = [node for node in part.graph.nodes if _looks_up(node)]
        chosen = {indices_of(node)[0] for node in found if value(args_of(node)[0]).dim() > 2}
        found = [node for node in found if indices_of(node)[0] in chosen]
        counted: dict[tuple[fx.Node, int], fx.Node] = {}  # ids from the begin on, made once
        for node in found:
            write, (matrix, (ids,)) = Rewriter(node), args_of(node)
            size, shape = value(matrix).shape[0], list(value(node).shape)
            if value(matrix).dim() > 2:
                matrix = write.call(_aten.reshape.default, matrix, [size, -1])
            if (ids, size) not in counted:
                from_end = write.call(_aten.lt.Scalar, ids, 0)
                moved = write.call(_aten.add.Tensor, ids, size)
                counted[ids, size] = write.call(_aten.where.self, from_end, moved, ids)
            rows = write.call(_aten.embedding.default, matrix, counted[ids, size])
            write.give(write.call(_aten.reshape.default, rows, shape))
        if found:
            part.recompile()


def _looks_up(node: fx.Node) -> bool:
    if not calls(node, _aten.index.Tensor) or len(args_of(node)[1]) != 1 or not is_tensor(node):
        return False
    table, (ids,) = args_of(node)[0], indices_of(node)
    source = through(table, casts=True)
    return (
        source.name.startswith("p_")
        and source.op == "placeholder"
        and value(table).dim() > 1
        and value(table).is_floating_point()
        and 0 not in value(table).shape
        and ids is not None
        and value(ids).dtype == torch.int64
    )


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


#: The programs that have a name: one function of the columns, or of half of them times the others.
_NAMED = re.compile(
    r"(?P<plain>relu|silu|gelu(-tanh)?) %0"
    r"|part %0 0 2; (?P<first>relu|silu|gelu(-tanh)?) %1; part %0 1 2; mul %2 %3"
    r"|part %0 1 2; part %0 0 2; (?P<second>relu|silu|gelu(-tanh)?) %2; mul %1 %3"
)


def _activation(node: Any, is_begin: Callable[[fx.Node], bool]) -> tuple[fx.Node, str, bool] | None:
    """(what it is applied to, its name or the program of its steps, whether it is gated)."""
    if not isinstance(node, fx.Node) or not is_tensor(node) or value(node).dim() != 2:
        return None
    steps: list[str] = []
    places: dict[fx.Node, str] = {}
    begin = _written(node, steps, places, tuple(value(node).shape), is_begin)
    if begin is None or not steps:
        return None
    width, columns = value(node).shape[1], value(begin).shape[1]
    if columns not in (width, 2 * width):
        return None
    program = "; ".join(steps)
    named = _NAMED.fullmatch(program)
    name = named and (named["plain"] or named["first"] or named["second"])
    return begin, name or program, columns == 2 * width


def _written(
    node: fx.Node,
    steps: list[str],
    places: dict[fx.Node, str],
    shape: tuple[int, ...],
    is_begin: Callable[[fx.Node], bool],
) -> fx.Node | None:
    """Write the steps that give a node; return the one node they begin with, or None."""
    if node in places:
        return next(iter(places))
    if is_begin(node):
        if places:
            return None  # another one
        places[node] = "%0"
        return node
    step = _step(node)
    if step is None or not is_shaped(node, *shape):
        return None
    operands, begin = [], None
    for operand in step[1]:
        if not isinstance(operand, fx.Node):
            operands.append(repr(operand))
            continue
        operand = through(operand)
        begin = _written(operand, steps, places, shape, is_begin)
        if begin is None:
            return None
        operands.append(places[operand])
    if begin is None:
        return None
    if step[0] == "clamp":
        places[node] = _clamped(operands, steps)
        return begin
    steps.append(" ".join((step[0], *operands)))
    places[node] = f"%{len(steps)}"
    return begin


def _clamped(operands: list[str], steps: list[str]) -> str:
    """Write the steps of a clamp by one bound or both; returns the last one's place."""
    source, *bounds = operands
    for name, bound in zip(("clamp_min", "clamp_max"), bounds, strict=True):
        if bound != repr(None):
            steps.append(f"{name} {source} {bound}")
            source = f"%{len(steps)}"
    return source


def _step(node: fx.Node) -> tuple[str, tuple[Any, ...]] | None:
    if calls(node, operator.getitem):
        chunk, place = args_of(node)
        if not isinstance(chunk, fx.Node) or not _halves(chunk):
            return None
        return "part", (args_of(chunk)[0], place, 2)
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
    if calls(node, _aten.gelu.default):
        return {"none": "gelu", "tanh": "gelu-tanh"}[arguments_of(node)["approximate"]]
    target: Any = node.target if isinstance(node, fx.Node) else None
    return _ACTIVATIONS.get(target, "")


def _halves(node: fx.Node) -> bool:
    """Tell whether it cuts the last dim in two equal parts."""
    if not calls(node, _aten.chunk.default, _aten.split.Tensor):
        return False
    parts, dim = list(arguments_of(node).values())[1:3]
    columns = value(args_of(node)[0]).shape[-1]
    half = 2 if calls(node, _aten.chunk.default) else columns // 2
    return columns % 2 == 0 and dim % 2 == 1 and parts == half
