"""Attention and rotary embeddings of ONNX and of ONNX Runtime.

A causal mask starts at the first query. A device with some of the rows of a causal Attention gets
the part of the mask that is theirs, as an operand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from partitioner.ir.graph import Attr, Node
from partitioner.ir.ops.local import same_node
from partitioner.ir.ops.rules.attention import Attention, group_of
from partitioner.ir.ops.signature import Dims, OpaqueError, compound
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType, numpy_dtype

#: Operands of Attention.
MASK, PAST_KEY, LENGTHS = 3, 4, 6


def _attention(view: OpView) -> Rule:
    """4-D ``b heads position channel`` or 3-D ``b position (heads channel)``.

    Operands: query, key, value, mask, past key, past value, lengths of the sequences.
    """
    query, key, value = (view.shape(index) for index in range(3))
    packed = len(query) == 3
    heads, kv = query[1], key[1]
    if packed:
        heads, kv = view.int_attr("q_num_heads", 0), view.int_attr("kv_num_heads", 0)
    group = group_of(heads, kv)
    keys = key[1] if packed else key[2]
    # places of queries matter beyond a mask in windows, and for lengths and scores if it is causal
    has_window = any(view.int_attr(f"{side}_window_size", -1) >= 0 for side in ("left", "right"))
    is_apart = view.type(LENGTHS) is not None or any(view.node.outputs[3:])
    node = Attention(
        kv=kv,
        group=group,
        queries=query[1] if packed else query[2],
        channels=query[2] // heads if packed else query[3],
        keys=keys,
        total=keys + _past_keys(view, PAST_KEY),
        values=value[2] // kv if packed else value[3],
        ordered=has_window or (bool(view.int_attr("is_causal", 0)) and is_apart),
    )
    dims = {**node.split, **node.packed} if packed else node.split
    operands: list[Dims] = [
        *(dims["query"], dims["key"], dims["value"], node.mask(view.type(MASK))),
        *(dims["past_key"], dims["past_value"], "b"),
    ]
    return _rule(view, node, operands, dims["result"])


def _local_attention(view: OpView, local: LocalView) -> LocalOp:
    (node,) = _local_heads(view, local).nodes
    dim, past = view.rank() - 2, _past_keys(view, PAST_KEY)
    rows = local.regions[0][dim]
    if not view.int_attr("is_causal", 0) or rows == ((0, view.shape()[dim]),):
        return LocalOp((node,))
    total = past + local.shapes[1][dim]
    last, key, seen, mask = (f"{node.name}.{x}" for x in ("last", "key", "seen", "mask"))
    places = [past + start + i for start, size in rows for i in range(size)]
    constants = {last: np.array(places, np.int64)[:, None], key: np.arange(total)[None]}
    shape = (len(places), total)
    nodes = [Node(seen, "LessOrEqual", (key, last), (seen,))]
    types = {seen: TensorType.of("bool", shape)}
    given = view.type(MASK)
    if given is None:
        mask = seen
    else:
        shape = np.broadcast_shapes(local.shapes[MASK], shape)
        types[mask] = TensorType.of(given.dtype, shape)
        if given.dtype == "bool":
            nodes.append(Node(mask, "And", (node.inputs[MASK], seen), (mask,)))
        else:
            hidden = f"{node.name}.hidden"
            constants[hidden] = np.array(-np.inf, numpy_dtype(given.dtype))
            nodes.append(Node(mask, "Where", (seen, node.inputs[MASK], hidden), (mask,)))
    inputs = (*node.inputs[:MASK], mask, *node.inputs[MASK + 1 :])
    attrs = {name: value for name, value in node.attrs.items() if name != "is_causal"}
    return LocalOp((*nodes, replace(node, inputs=inputs, attrs=attrs)), constants, types)


def _multi_head(view: OpView) -> Rule:
    """MultiHeadAttention of separate 3-D queries, keys and values.

    Operands: query, key, value, bias, key padding mask, scores' bias, past key, past value.
    """
    if any(view.type(i) is None or view.rank(i) != 3 for i in range(3)):
        raise OpaqueError("query, key and value are not three 3-D operands")
    if any(view.node.inputs[8:]):
        raise OpaqueError("a cache that is updated in place")
    query, key, value = (view.shape(index) for index in range(3))
    heads = view.int_attr("num_heads", 0)
    node = Attention(
        kv=heads,
        group=group_of(heads, heads),
        queries=query[1],
        channels=query[2] // heads,
        keys=key[1],
        total=key[1] + _past_keys(view, 6),
        values=value[2] // heads,
        ordered=bool(view.int_attr("unidirectional", 0)),
    )
    operands: list[Dims] = [
        *(node.packed["query"], node.packed["key"], node.packed["value"], [node.joined]),
        *(_padding(view), node.mask(view.type(5))),
        *(node.split["past_key"], node.split["past_value"]),
    ]
    return _rule(view, node, operands, node.packed["result"])


def _group_query(view: OpView) -> Rule:
    """GroupQueryAttention (always causal): separate or packed query, key and value.

    Operands: query, key, value, past key, past value, last positions, longest length, cos, sin,
    positions, scores' bias.
    """
    if any(view.node.inputs[11:]):
        raise OpaqueError("head_sink or quantised caches")
    heads, kv = view.int_attr("num_heads", 0), view.int_attr("kv_num_heads", 0)
    group = group_of(heads, kv)
    (_, queries, width), packed = view.shape(), view.type(1) is None
    channels = width // (heads + 2 * kv if packed else heads)
    past, present, positions = view.type(3), view.out_types[1], view.type(9)
    assert present is not None
    total = present.shape[2]
    node = Attention(kv, group, queries, channels, queries, total, channels, ordered=True)
    # A cache may have room for more keys than it holds: its length is a factor of its own.
    cache = "present" if past is not None and past.shape[2] == total else "past"
    each_row = positions is not None and positions.shape[:1] == view.shape()[:1]
    operands: list[Dims] = [
        ["b", "q", node.joined] if packed else node.packed["query"],
        # Keys come with their queries.
        *(node.packed[name].replace("b k", "b q") for name in ("key", "value")),
        *(node.split[f"{cache}_key"], node.split[f"{cache}_value"], "b", None, None, None),
        *("b q" if each_row else None, node.mask(view.type(10))),
    ]
    return _rule(view, node, operands, node.packed["result"])


def _rule(view: OpView, node: Attention, operands: Sequence[Dims], result: Dims) -> Rule:
    """Results: the attention's, present keys, present values, scores."""
    present = [node.split[name] for name in ("present_key", "present_value", "scores")]
    return node.rule(view, operands, [result, *present])


def _past_keys(view: OpView, index: int) -> int:
    """Number of keys in a cache ``b heads position channel``."""
    cache = view.type(index)
    return 0 if cache is None else cache.shape[2]


def _padding(view: OpView) -> str | None:
    mask = view.type(4)
    if mask is None:
        return None
    if mask.rank == 1 and mask.shape[0] != view.shape()[0]:
        raise OpaqueError("key_padding_mask holds cumulated lengths")
    return ["b", "b m", "b q m"][mask.rank - 1]


def _local_heads(view: OpView, local: LocalView) -> LocalOp:
    kv, group = local.sizes.get("h", 1), local.sizes.get("r", 1)
    counts: dict[str, Attr] = {
        "q_num_heads": kv * group,
        "kv_num_heads": kv,
        "num_heads": kv * group,
    }
    return same_node(view, **{n: count for n, count in counts.items() if view.int_attr(n, 0)})


def _rotary(view: OpView) -> Rule:
    """Operands: x, cos, sin, positions; these index cos and sin, if they are given."""
    cache = "b s e" if view.type(3) is None else "p e"
    return _rotated(view, view.int_attr("num_heads", 0), [cache, cache, "b s"])


def _microsoft_rotary(view: OpView) -> Rule:
    """Operands: x, positions (or the first one), cos, sin."""
    if view.int_attr("is_packed_batching", 0):
        raise OpaqueError("is_packed_batching is set")
    shape, heads = view.shape(), view.int_attr("num_heads", 0)
    if len(shape) == 3 and not heads:
        heads = shape[2] // (2 * view.shape(2)[1])
    offset = view.rank(1) == 1
    return _rotated(view, heads, ["1" if offset else "b s", "p e", "p e"], ordered=offset)


def _rotated(view: OpView, heads: int, others: list[Dims], *, ordered: bool = False) -> Rule:
    """``b heads position channel`` or ``b position (heads channel)``: channels are whole.

    `heads` are those of a 3-D operand, `others` the dims of the operands after the first. Positions
    that are counted from the first (`ordered`) are whole.
    """
    x, sizes = "b h s d", dict[str, int]()
    if view.rank() == 3:
        group_of(heads, heads)
        sizes = {"h": heads, "d": view.shape()[2] // heads}
        x = f"b s {compound(**sizes)}"
    return view.rule(
        [x, *others],
        [x],
        sizes=sizes,
        whole="d e p s" if ordered else "d e p",
        points=[name for name in "bhsd" if name in x],
        flops=3,
    )


ROWS: Mapping[str, OpRow] = {
    "Attention": OpRow(_attention, _local_attention, attention=True, where=True),
    "RotaryEmbedding": OpRow(_rotary, _local_heads),
    "com.microsoft::GroupQueryAttention": OpRow(_group_query, _local_heads, attention=True),
    "com.microsoft::MultiHeadAttention": OpRow(_multi_head, _local_heads, attention=True),
    "com.microsoft::RotaryEmbedding": OpRow(_microsoft_rotary, _local_heads),
}
