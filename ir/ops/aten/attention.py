"""Attention and its gradients as single nodes, with a mask that broadcasts to the scores.

Batch, key-value heads, query groups and query rows are cut (rows not under a causal mask, which
depends on their positions). Gradients of keys and values are summed over groups and rows, that of
queries is not: in the backward node groups and rows are whole.
"""

from __future__ import annotations

from collections.abc import Mapping

from partitioner.ir.ops.rules.attention import Attention, group_of
from partitioner.ir.ops.signature import Dims
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def _attention_of(view: OpView, first: int) -> tuple[Attention, list[Dims]]:
    """The attention whose query is operand `first`, and the dims of query, key, value and mask."""
    query, key, value = (view.shape(first + index) for index in range(3))
    node = Attention(
        kv=key[1],
        group=group_of(query[1], key[1]),
        queries=query[2],
        channels=query[3],
        keys=key[2],
        total=key[2],
        values=value[3],
        ordered=bool(view.attr("is_causal", 0)),
        masked="k",
        causal=bool(view.attr("is_causal", 0)),
    )
    mask = node.mask(view.type(first + 3))
    return node, [node.split["query"], node.split["key"], node.split["value"], mask]


def _attention(view: OpView) -> Rule:
    """``b (h r) q d, b h k d, b h k v -> b (h r) q v, b (h r) q``."""
    node, operands = _attention_of(view, 0)
    return node.rule(view, operands, [node.split["result"], node.split["logsumexp"]])


def _backward(view: OpView) -> Rule:
    """Gradients of query, key and value: linear in the result's gradient."""
    node, operands = _attention_of(view, 1)
    result, logsumexp = node.split["result"], node.split["logsumexp"]
    return node.rule(
        view,
        [result, *operands, result, logsumexp],
        operands[:3],
        products=(3, 2),
        whole="qr",
        sums=[0],
    )


def _mask_backward(view: OpView) -> Rule:
    """The gradient of a learned bias sums over the dims along which it broadcasts."""
    node, operands = _attention_of(view, 1)
    result, logsumexp = node.split["result"], node.split["logsumexp"]
    operands = [result, *operands, result, logsumexp]
    return node.rule(view, operands, [operands[4]], reduce="b h r q", sums=[0])


ROWS: Mapping[str, OpRow] = {
    "partitioner::attention": OpRow(_attention, attention=True),
    "partitioner::attention_backward": OpRow(_backward, attention=True),
    "partitioner::attention_mask_backward": OpRow(_mask_backward, attention=True),
}
