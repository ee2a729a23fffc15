"""Attention and its gradients as single nodes, with a mask that broadcasts to the scores.

Batch, key-value heads, query groups and query rows are cut. Under a causal mask a device that has
some of the rows runs the operator of a part, which knows their positions. Gradients of keys and
values are sums over groups and rows: each device that has some of them has a part of the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from partitioner.ir.graph import Attr
from partitioner.ir.ops.rules.attention import Attention, group_of
from partitioner.ir.ops.signature import Dims
from partitioner.ir.ops.table import LocalOp, LocalView, OpRow, OpView
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
        ordered=False,
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
        summed="q r",
        sums=[0],
    )


def _mask_backward(view: OpView) -> Rule:
    """The gradient of a learned bias sums over the dims along which it broadcasts."""
    node, operands = _attention_of(view, 1)
    result, logsumexp = node.split["result"], node.split["logsumexp"]
    operands = [result, *operands, result, logsumexp]
    return node.rule(view, operands, [operands[4]], reduce="b h r q", sums=[0])


def _local_rows(view: OpView, local: LocalView, first: int) -> LocalOp:
    """Causal attention of some rows, in whose operands the query is operand `first`."""
    rows = local.regions[first][2]
    if not view.attr("is_causal", 0) or rows == ((0, view.shape(first)[2]),):
        return LocalOp((view.node,))
    attrs: dict[str, Attr] = {
        **{name: value for name, value in view.node.attrs.items() if name != "is_causal"},
        "rows": tuple(itertools.chain(*rows)),
        "columns": (0, view.shape(first + 1)[2]),
    }
    op = "partitioner::attention_part" + ("_backward" if first else "")
    return LocalOp((replace(view.node, op=op, attrs=attrs),))


ROWS: Mapping[str, OpRow] = {
    "partitioner::attention": OpRow(
        _attention, partial(_local_rows, first=0), attention=True, where=True
    ),
    "partitioner::attention_backward": OpRow(
        _backward, partial(_local_rows, first=1), attention=True, where=True
    ),
    "partitioner::attention_mask_backward": OpRow(_mask_backward, attention=True),
}
