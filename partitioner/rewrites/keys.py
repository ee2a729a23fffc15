"""Attention of few queries over many keys, in parts that can be cut along the keys.

A decoder's step has one query, or a few, and a cache of many keys and values. One node of
attention, or of softmax, cannot be cut along the keys: it needs the maximum and the sum over all of
them. Here it is a product, a maximum, the exponentials of the differences, their sum, a product and
a quotient. Each of these has a rule of its own. Where keys are cut, the maximum, the sum and the
product with the values are partial: tensors of the size of the queries are reduced, and the cache
stays where it lies. (This is the online softmax of flash decoding, a part a device.)

Queries are few where their scores are no more than the elements of keys and values, and keys are
at least twice as many: then scores are cheap to write down, and to reduce results costs less than
to move the cache. Softmax is attention where a product with values reads it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule
from partitioner.ir.types import numpy_dtype
from partitioner.rewrites.graph_writer import GraphWriter, NodeWriter, PartWriter, replaced

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
    if node.op == AtenWriter.ATTENTION:
        return AtenWriter if _is_attention(graph, node) else None
    if node.op == OnnxWriter.ATTENTION:
        return OnnxWriter if _is_onnx_attention(graph, node) else None
    if node.op in AtenWriter.SOFTMAX:
        return AtenWriter if _is_softmax(graph, node) else None
    if node.op in OnnxWriter.SOFTMAX and graph.opsets.get("", 1) >= _ONE_AXIS:
        is_wide = graph.types[node.inputs[0]].dtype in WIDE
        return OnnxWriter if is_wide and _is_softmax(graph, node) else None
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


@dataclass
class KeysWriter(NodeWriter):
    """Writes parts of attention: its nodes and constants have numbers for names."""

    PERMUTATION: ClassVar[tuple[str, str]]  #: An operator, and its attribute.
    written: Iterator[int] = field(default_factory=itertools.count)
    constants: Iterator[int] = field(default_factory=itertools.count)

    def _node_name(self, _: str) -> str:
        return f"{self.node.name}/keys/{next(self.written)}"

    def _constant_name(self, _: str) -> str:
        return f"{self.node.name}/keys/constant{next(self.constants)}"

    def permuted(self, x: str, order: Sequence[int]) -> str:
        """The dims in another order."""
        op, attribute = self.PERMUTATION
        shape = [self.type(x).shape[i] for i in order]
        return self.add(op, [x], shape, attrs={attribute: tuple(order)})


class AtenWriter(KeysWriter):
    """Writes nodes of PyTorch's operators."""

    ATTENTION = "partitioner::attention"
    PRODUCT, DIFFERENCE = "aten::matmul", "aten::sub.Tensor"
    EXPONENTIAL, QUOTIENT = "aten::exp", "aten::div.Tensor"
    LARGEST, TOTAL = "aten::amax", "aten::sum.dim_IntList"
    PERMUTATION = "aten::permute", "dims"
    #: Whether a row that sees nothing has zeros as its softmax, by operator.
    SOFTMAX: ClassVar = {"aten::_softmax": False, "aten::_safe_softmax": True}

    def default_scale(self, channels: int) -> float:
        """The factor of scores that the node does not state."""
        return 1 / math.sqrt(channels)

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("aten::mul.Tensor", [x, ""], attrs={"other": factor})

    def reshaped(self, x: str, shape: Sequence[int]) -> str:
        """The elements in another shape."""
        return self.add("aten::reshape", [x], shape, attrs={"shape": tuple(shape)})

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask of flags is false."""
        shape, dtype = self.type(scores).shape, self.type(scores).dtype
        if self.type(mask).dtype != "bool":
            return self.add("aten::add.Tensor", [scores, self.cast(mask, dtype)], shape)
        out = self.add("aten::logical_not", [mask])
        masked, nothing = "aten::masked_fill.Scalar", float("-inf")
        return self.add(masked, [scores, out], shape, "", dtype, {"value": nothing})

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("aten::clamp", [x], attrs={"min": number})

    def over_keys(self, op: str, x: str) -> str:
        """A reduction over the last dim, which becomes 1."""
        shape = (*self.type(x).shape[:-1], 1)
        return self.add(op, [x], shape, attrs={"dim": (-1,), "keepdim": True})

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The elements in another type; the value itself if it has that type and needs no name."""
        if self.type(x).dtype == dtype and not made:
            return x
        return self.add("aten::_to_copy", [x], None, made, dtype, {"dtype": dtype})


class OnnxWriter(KeysWriter, PartWriter):
    """Writes nodes of ONNX's operators, in the forms of the graph's opset."""

    ATTENTION = "Attention"
    PRODUCT, DIFFERENCE, EXPONENTIAL, QUOTIENT = "MatMul", "Sub", "Exp", "Div"
    LARGEST, TOTAL = "ReduceMax", "ReduceSum"
    PERMUTATION = "Transpose", "perm"
    SOFTMAX: ClassVar = {"Softmax": False}

    def cached(self) -> tuple[str, str, str, str]:
        """The queries, all keys and values by heads, and the mask."""
        operands = (*self.node.inputs, *[""] * 7)[:7]
        query, key, value, mask, past_key, past_value, lengths = operands
        if self.type(query).rank == 3:
            query = self._by_heads(query, "q_num_heads")
            key, value = (self._by_heads(x, "kv_num_heads") for x in (key, value))
        _, present_key, present_value = (*self.node.outputs, "", "")[:3]
        before = self.type(past_key).shape[2] if past_key else 0
        keys = self._joined(past_key, key, present_key)
        values = self._joined(past_value, value, present_value)
        return query, keys, values, self._seen(query, keys, mask, before=before, lengths=lengths)

    def _by_heads(self, x: str, count: str) -> str:
        """``batch position (heads channel) -> batch heads position channel``."""
        batch, rows, width = self.type(x).shape
        heads = self.node.attrs[count]
        assert isinstance(heads, int)
        return self.permuted(self.reshaped(x, (batch, rows, heads, width // heads)), (0, 2, 1, 3))

    def _joined(self, past: str, x: str, present: str) -> str:
        """Past keys or values with those of the step, which may be a result."""
        if not past:
            return self.add("Identity", [x], made=present) if present else x
        batch, heads, before, width = self.type(past).shape
        shape = (batch, heads, before + self.type(x).shape[2], width)
        return self.add("Concat", [past, x], shape, present, attrs={"axis": 2})

    def _seen(self, query: str, keys: str, mask: str, *, before: int, lengths: str) -> str:
        """The mask that hides keys behind a sequence's length, and those that come after a query.

        Queries are the last of the keys: those before them are the past ones or, where lengths are
        given, all others of a sequence.
        """
        rows, count = self.type(query).shape[2], self.type(keys).shape[2]
        is_causal = bool(self.node.attrs.get("is_causal"))
        row = np.arange(rows)[:, None] if is_causal else np.zeros((1, 1), np.int64)
        if lengths:
            least = np.arange(count) - row + (rows - 1 if is_causal else 0)
            size = self.reshaped(lengths, (self.type(query).shape[0], 1, 1, 1))
            places = self.constant("places", least.astype(np.int64))
            seen = self.add("Less", [places, size], dtype="bool")
        elif is_causal and not (flags := np.arange(count) <= row + before).all():
            seen = self.constant("seen", flags)
        else:
            return mask
        if not mask:
            return seen
        if self.type(mask).dtype == "bool":
            return self.add("And", [mask, seen])
        return self.add("Where", [seen, mask, self.number("hidden", -np.inf, mask)])

    def default_scale(self, channels: int) -> float:
        """The factor of scores that the node does not state."""
        return float(channels**-0.5)

    def scaled(self, x: str, factor: float) -> str:
        """``x * factor``."""
        return self.add("Mul", [x, self.number("factor", factor, x)])

    def hidden(self, scores: str, mask: str) -> str:
        """Scores plus a mask of numbers, or minus infinity where a mask hides a key.

        A mask of flags hides it where it is false, and one of numbers where it is the lowest of its
        type. The text of the operator says so of minus infinity alone, but ONNX Runtime hides both,
        and exporters write the lowest number.
        """
        nothing, shape = self.number("hidden", -np.inf, scores), self.type(scores).shape
        if self.type(mask).dtype == "bool":
            return self.add("Where", [mask, scores, nothing], shape)
        least = float(np.finfo(numpy_dtype(self.type(mask).dtype)).min)
        lowest = self.number("lowest", least, mask)
        is_hidden = self.add("LessOrEqual", [mask, lowest], dtype="bool")
        mask = self.add("Where", [is_hidden, nothing, mask])
        return self.add("Add", [scores, mask], shape)

    def at_least(self, x: str, number: float) -> str:
        """The larger of each element and a number."""
        return self.add("Max", [x, self.number("least", number, x)])

    def over_keys(self, op: str, x: str) -> str:
        """A reduction over the last dim, which becomes 1."""
        return self.reduced(op, x, [self.type(x).rank - 1])

    def cast(self, x: str, dtype: str, made: str = "") -> str:
        """The value itself: other types keep the operator."""
        assert self.type(x).dtype == dtype
        assert not made
        return x


Writer = AtenWriter | OnnxWriter


def _write(w: Writer) -> None:
    """Write a softmax or attention as nodes that reduce over keys; scores are ``... query key``."""
    node = w.node
    if node.op in w.SOFTMAX:
        # Rows that see no key have NaN, or zeros if keys may be hidden.
        scores, may_hide = node.inputs[0], w.SOFTMAX[node.op]
        scores = w.cast(scores, _wide(w.type(scores).dtype))
        weights, sums = _weights(w, scores, may_hide=may_hide)
        _quotient(w, weights, w.at_least(sums, 1.0) if may_hide else sums, node.outputs[0])
    elif isinstance(w, AtenWriter):
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
    """Exponentials of scores less their largest, and sums: below 1 where a row sees no key."""
    largest = w.over_keys(w.LARGEST, scores)
    if may_hide:
        lowest = np.finfo(numpy_dtype(w.type(scores).dtype)).min
        largest = w.at_least(largest, float(lowest))
    weights = w.add(w.EXPONENTIAL, [w.add(w.DIFFERENCE, [scores, largest])])
    return weights, w.over_keys(w.TOTAL, weights)


def _product(w: Writer, a: str, b: str) -> str:
    return w.add(w.PRODUCT, [a, b], (*w.type(a).shape[:-1], w.type(b).shape[-1]))


def _of_rows(w: Writer, x: str, rows: Sequence[int]) -> str:
    shape = w.type(x).shape
    return x if shape[:-1] == tuple(rows) else w.reshaped(x, (*rows, shape[-1]))


def _wide(dtype: str) -> str:
    """The element type in which a softmax of scores of this type is computed."""
    return dtype if dtype in WIDE else WIDE[0]
