"""ONNX Runtime's attention ops: MultiHeadAttention and GroupQueryAttention."""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.attention import Parts, heads_of, local_heads, rule_of_parts
from partitioner.ir.ops.table import OpaqueError, OpRow, OpView, Shape
from partitioner.ir.rule import Rule


def multi_head(view: OpView) -> Rule:
    """MultiHeadAttention of separate 3-D queries, keys and values.

    Operands: query, key, value, bias, key padding mask, scores' bias, past key, past value.

    Raises:
        OpaqueError: Packed or cached operands, or more operands than these.
    """
    if any(view.type(i) is None or len(view.shape(i)) != 3 for i in range(3)):
        raise OpaqueError("query, key and value are not three 3-D operands")
    if [name for name in view.node.inputs[8:] if name]:
        raise OpaqueError("a cache that is updated in place")
    query, key, value = (view.shape(index) for index in range(3))
    heads, past = view.int_attr("num_heads", 0), view.type(6)
    total = key[1] + (past.shape[2] if past is not None else 0)
    inner, ordered = (query[1], query[2] // heads), bool(view.int_attr("unidirectional", 0))
    parts = Parts(heads_of(heads, heads), inner, key[1], total, value[2] // heads, ordered)
    scores = view.type(5)
    operands: list[list[str] | None] = [
        *(parts.packed("query"), parts.packed("key"), parts.packed("value")),
        *([_joined(parts)], _padding(view), parts.mask(scores.shape if scores else None)),
        *(parts.split("past_key"), parts.split("past_value")),
    ]
    present = [parts.split(name) for name in ("present_key", "present_value", "scores")]
    return rule_of_parts(view, parts, operands, [parts.packed("result"), *present])


def _joined(parts: Parts) -> str:
    """Queries, keys and values, or their biases, one after the other in a dim."""
    d, v, heads = parts.query[1], parts.values, parts.heads
    return f"{heads.query(d)} + {heads.key(d)} + {heads.value(v)}"


def _padding(view: OpView) -> list[str] | None:
    held = view.type(4)
    if held is None:
        return None
    if held.rank == 1 and held.shape[0] != view.shape(0)[0]:
        raise OpaqueError("key_padding_mask holds cumulated lengths")
    return [["b"], ["b", "m"], ["b", "q", "m"]][held.rank - 1]


def group_query(view: OpView) -> Rule:
    """GroupQueryAttention (always causal): separate or packed query, key and value.

    Operands: query, key, value, past key, past value, last places, longest length, cos, sin,
    places, scores' bias.

    Raises:
        OpaqueError: Quantised caches, sinks, or local attributes without a test.
    """
    if any(view.node.inputs[11:]):
        raise OpaqueError("head_sink or quantised caches")
    heads = heads_of(view.int_attr("num_heads", 0), view.int_attr("kv_num_heads", 0))
    query, packed = view.shape(0), view.type(1) is None
    count = heads.kv * heads.group
    channels = query[2] // (count + 2 * heads.kv if packed else count)
    total = view.out_shape(1)[2]
    parts = Parts(heads, (query[1], channels), query[1], total, channels, ordered=True)
    first = ["b", "q", _joined(parts)] if packed else parts.packed("query")
    cache = {"k": "q"}  # keys come with their queries
    key, value = ([cache.get(name, name) for name in parts.packed(n)] for n in ("key", "value"))
    operands: list[list[str] | None] = [
        *(first, key, value, _past(view, parts, "d"), _past(view, parts, "v"), ["b"], None),
        *(None, None, ["b", "q"] if _shape_or(view, 9)[:1] == query[:1] else None),
        parts.mask(_shape_or(view, 10) or None),
    ]
    present = [parts.split(name) for name in ("present_key", "present_value", "scores")]
    return rule_of_parts(view, parts, operands, [parts.packed("result"), *present])


def _past(view: OpView, parts: Parts, channels: str) -> list[str]:
    """A cache may have room for more places than it holds: its length is a factor of its own."""
    room = _shape_or(view, 3)[2:3] == (parts.total,)
    return ["b", parts.heads.key(), "t" if room else "p", channels]


def _shape_or(view: OpView, index: int) -> Shape:
    held = view.type(index)
    return held.shape if held is not None else ()


ROWS: Mapping[str, OpRow] = {
    "com.microsoft::GroupQueryAttention": OpRow(group_query, local_heads),
    "com.microsoft::MultiHeadAttention": OpRow(multi_head, local_heads),
}
