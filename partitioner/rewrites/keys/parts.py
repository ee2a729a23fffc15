"""Finds attention of few queries over many keys, and replaces it by its parts.

Queries are few where their scores are no more than the elements of keys and values, and keys are
at least twice as many: then scores are cheap to write down, and to reduce results costs less than
to move the cache. Softmax is attention where a product with values reads it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule
from partitioner.rewrites.graph_writer import GraphWriter, replaced
from partitioner.rewrites.keys import aten, onnx
from partitioner.rewrites.keys.naming import WIDE
from partitioner.rewrites.keys.writer import write

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

    def write_parts(writer: GraphWriter, node: Node) -> None:
        write(kinds[node.name](writer, node))

    return replaced(graph, dict.fromkeys(kinds, write_parts))


def has_few_queries(graph: Graph) -> bool:
    """Tell whether a graph has attention that `keys_in_parts` replaces."""
    return any(_writer(graph, node) for node in graph.nodes)


def weighs_values(graph: Graph, weights: str) -> bool:
    """Tell whether a product reads a softmax, or what is its copy, as in attention."""
    return any(True for _ in _values(graph, weights, _MOST_BETWEEN))


def _writer(graph: Graph, node: Node) -> type[aten.AtenWriter | onnx.OnnxWriter] | None:
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
    """Tell whether queries, with so many scores over a cache of so many elements, are few."""
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
