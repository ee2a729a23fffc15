"""Finds attention of few queries over many keys, and replaces it by its parts.

Queries are few where their scores are no more than the elements of keys and values, and keys are
at least twice as many: then scores are cheap to write down, and to reduce results costs less than
to move the cache. Softmax is attention where a product with values reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule
from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.graph_writer import GraphWriter, replaced
from partitioner.rewrites.keys import aten, onnx

Writer = aten.AtenWriter | onnx.OnnxWriter

#: Element types that sums of exponentials are taken in; others are cast to the first.
WIDE = ("float32", "float64")
#: Keys a query at least.
LEAST_KEYS = 2
#: Nodes between a softmax and the product that reads it at most, and elements of their other
#: operands: shapes, numbers.
_MOST_BETWEEN, _SMALL = 8, 16
#: Attributes of ONNX's Attention that have a form in parts.
_ONNX = frozenset({"is_causal", "scale", "q_num_heads", "kv_num_heads", "softmax_precision"})
#: First opset in which Softmax has one axis.
_ONE_AXIS = 13


def keys_in_parts(graph: Graph) -> Graph:
    """The graph with attention of few queries in parts; itself if it has none or is of training."""
    kinds = {node.name: kind for node in graph.nodes if (kind := _writer(graph, node))}

    def write(writer: GraphWriter, node: Node) -> None:
        _write(kinds[node.name](writer, node))

    return replaced(graph, dict.fromkeys(kinds, write))


def has_few_queries(graph: Graph) -> bool:
    """Tell whether a graph has attention that `keys_in_parts` replaces."""
    return any(_writer(graph, node) for node in graph.nodes)


def weighs_values(graph: Graph, weights: str) -> bool:
    """Tell whether a product reads a softmax, or what is its copy, as in attention."""
    return any(True for _ in _values(graph, weights, _MOST_BETWEEN))


def _writer(graph: Graph, node: Node) -> type[Writer] | None:
    """The writer of a node that is replaced; None if it stays."""
    if graph.backward:
        return None
    if node.op == aten.ATTENTION:
        return aten.AtenWriter if _is_attention(graph, node) else None
    if node.op == onnx.ATTENTION:
        return onnx.OnnxWriter if _is_onnx_attention(graph, node) else None
    if node.op in aten.AtenWriter.SOFTMAX:
        return aten.AtenWriter if _is_softmax(graph, node) else None
    if node.op in onnx.OnnxWriter.SOFTMAX and graph.opsets.get("", 1) >= _ONE_AXIS:
        is_wide = graph.types[node.inputs[0]].dtype in WIDE
        return onnx.OnnxWriter if is_wide and _is_softmax(graph, node) else None
    return None


def _are_few(rows: int, keys: int, scores: int, cached: int) -> bool:
    return rows > 0 and keys >= LEAST_KEYS * rows and scores <= cached


def _is_attention(graph: Graph, node: Node) -> bool:
    """Attention without a log-sum-exp that is read; a causal mask starts at the first key."""
    if node.attrs.get("is_causal") or node.outputs[1]:
        return False
    query, key, value = (graph.types[name] for name in node.inputs[:3])
    scores = math.prod(query.shape[:3]) * key.shape[2]
    return _are_few(query.shape[2], key.shape[2], scores, key.numel + value.numel)


def _is_onnx_attention(graph: Graph, node: Node) -> bool:
    """Attention of a wide type without bounds of scores, windows, or scores as a result."""
    rule = rule_of(graph, node)
    tensors = [graph.types[name] for name in node.inputs[:3]]
    given = {name for name, attr in node.attrs.items() if attr}
    extra = any(node.inputs[7:]) or any(node.outputs[3:]) or not given <= _ONNX
    if not isinstance(rule, Rule) or extra or any(t.dtype not in WIDE for t in tensors):
        return False
    mask = graph.types[node.inputs[3]].shape if len(node.inputs) > 3 and node.inputs[3] else None
    past = graph.types[node.inputs[4]].shape if len(node.inputs) > 4 and node.inputs[4] else None
    batch = tensors[0].shape[0]
    heads, rows = _size(rule, "h") * _size(rule, "r"), _size(rule, "q")
    keys = _size(rule, "k") + (past[2] if past else 0)
    if mask and mask[-1] != keys:  # keys behind the mask's last are hidden
        return False
    cached = batch * _size(rule, "h") * keys * (_size(rule, "d") + _size(rule, "v"))
    return _are_few(rows, keys, batch * heads * rows * keys, cached)


def _size(rule: Rule, name: str) -> int:
    return rule.factors[name].size if name in rule.factors else 1


def _is_softmax(graph: Graph, node: Node) -> bool:
    """A softmax over the last dim that a product with as many values reads."""
    scores = graph.types[node.inputs[0]]
    axis = node.attrs.get("dim", node.attrs.get("axis", -1))
    if scores.rank < 2 or axis not in (-1, scores.rank - 1):
        return False
    rows, keys = scores.shape[-2:]
    return any(
        _are_few(rows, keys, scores.numel, values)
        for values in _values(graph, node.outputs[0], _MOST_BETWEEN)
    )


def _values(graph: Graph, weights: str, most: int) -> Iterator[int]:
    """Elements of the tensors that are multiplied by these weights, or by what is their copy."""
    for node in graph.consumers.get(weights, ()):
        rule = rule_of(graph, node)
        if not isinstance(rule, Rule):
            continue
        others = [graph.types[v].numel for v in node.reads if v != weights]
        if rule.is_product:
            yield from others
        elif most and max(others, default=0) <= _SMALL and len(node.writes) == 1:
            yield from _values(graph, node.writes[0], most - 1)


def _write(w: Writer) -> None:
    """Write the nodes that reduce over keys in place of a softmax or attention.

    Scores are ``... query key``: queries and keys are the last two dims.
    """
    node = w.node
    if node.op in w.SOFTMAX:
        # Rows that see no key have NaN, or zeros if keys may be hidden.
        scores, may_hide = node.inputs[0], w.SOFTMAX[node.op]
        scores = w.cast(scores, _wide(w.type(scores).dtype))
        weights, sums = _weights(w, scores, may_hide=may_hide)
        _quotient(w, weights, w.at_least(sums, 1.0) if may_hide else sums, node.outputs[0])
    elif isinstance(w, aten.AtenWriter):
        query, key, value, mask = node.inputs
        _attention(w, query, key, value, mask, made=node.outputs[0])
    else:
        packed = w.type(node.inputs[0]).rank == 3
        query, key, value, mask = w.cached()
        if not packed:
            _attention(w, query, key, value, mask, made=node.outputs[0])
            return
        batch, heads, rows, _ = w.type(query).shape
        width = w.type(value).shape[-1]
        result = w.type(query).with_shape((batch, heads, rows, width))
        by_head = w.writer.value(f"{node.name}/keys/result", result)
        _attention(w, query, key, value, mask, made=by_head)
        w.reshaped(w.permuted(by_head, (0, 2, 1, 3)), (batch, rows, heads * width), node.outputs[0])


def _quotient(w: Writer, a: str, b: str, made: str) -> None:
    dtype = w.type(made).dtype
    if dtype == w.type(a).dtype:
        w.add(w.QUOTIENT, [a, b], made=made)
    else:
        w.cast(w.add(w.QUOTIENT, [a, b]), dtype, made)


def _attention(w: Writer, query: str, key: str, value: str, mask: str, *, made: str) -> None:
    """Write attention of operands ``batch heads position channel`` as a value.

    Each head of keys and values serves a group of consecutive heads of queries, which are its
    rows: so the heads of the cache are not copied. Rows that see no key give zeros. A mask
    broadcasts to (batch, heads, queries, keys); "" is none.
    """
    batch, heads, rows, channels = w.type(query).shape
    wide, kv = _wide(w.type(query).dtype), w.type(key).shape[1]
    scale = w.node.attrs.get("scale")
    factor = float(scale) if isinstance(scale, int | float) else w.default_scale(channels)
    query, key, value = (w.cast(x, wide) for x in (query, key, value))
    by_head, by_kv = (batch, heads, rows), (batch, kv, heads // kv * rows)
    query = _of_rows(w, w.scaled(query, factor), by_kv)
    scores = _product(w, query, w.permuted(key, (0, 1, 3, 2)))
    if mask:
        scores = w.hidden(_of_rows(w, scores, by_head), mask)
    weights, sums = _weights(w, scores, may_hide=bool(mask))
    result = _product(w, _of_rows(w, weights, by_kv), value)
    # behind the product, so that both are there before either is reduced and read
    sums = w.at_least(sums, 1.0) if mask else sums
    result, sums = _of_rows(w, result, by_head), _of_rows(w, sums, by_head)
    _quotient(w, result, sums, made)


def _weights(w: Writer, scores: str, *, may_hide: bool) -> tuple[str, str]:
    """Exponentials of the scores less their largest, and their sums.

    The largest score of a row that sees a key adds 1 to the sum: a sum below 1 is of a row that
    sees none.
    """
    largest = w.over_keys(w.LARGEST, scores)
    if may_hide:
        lowest = np.finfo(numpy_dtype(w.type(scores).dtype)).min
        largest = w.at_least(largest, float(lowest))
    weights = w.add(w.EXPONENTIAL, [w.add(w.DIFFERENCE, [scores, largest])])
    return weights, w.over_keys(w.TOTAL, weights)


def _product(w: Writer, a: str, b: str) -> str:
    return w.add(w.PRODUCT, [a, b], (*w.type(a).shape[:-1], w.type(b).shape[-1]))


def _of_rows(w: Writer, x: str, rows: Sequence[int]) -> str:
    """The tensor with these dims before its last."""
    shape = w.type(x).shape
    return x if shape[:-1] == tuple(rows) else w.reshaped(x, (*rows, shape[-1]))


def _wide(dtype: str) -> str:
    """The element type in which a softmax of scores of this type is computed."""
    return dtype if dtype in WIDE else WIDE[0]
