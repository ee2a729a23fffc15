"""Attention calls of an exported program as our own operator, one node a call.

PyTorch picks a kernel while it traces: a trace made on the CPU holds the CPU's, which no other
device has. Ours is the same for every device.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.rewrite import Arguments, Rewriter, replace_calls, value

_aten = torch.ops.aten


def replace_attention(module: fx.GraphModule) -> int:
    """Rewrite every attention call; with dropout, as the plain operators that it is made of.

    Forms other than (batch, heads, rows, channels) and (batch, rows, channels) stay.

    Returns:
        How many were rewritten.
    """
    return replace_calls(module, {_aten.scaled_dot_product_attention.default: _attention})


def _attention(write: Rewriter, args: Arguments) -> fx.Node | None:
    nodes = [args["query"], args["key"], args["value"]]
    ranks = {value(node).dim() for node in nodes}
    if ranks == {3}:
        headed = [write.call(_aten.unsqueeze.default, node, 1) for node in nodes]
        found = _heads(write, args, headed, _headed_mask(write, args["attn_mask"]))
        return write.call(_aten.squeeze.dim, found, 1)
    if ranks != {4} or not _is_grouped(*(value(node).shape[1] for node in nodes)):
        return None
    return _heads(write, args, nodes, args["attn_mask"])


def _is_grouped(query: int, key: int, values: int) -> bool:
    return key == values and key > 0 and query % key == 0


def _headed_mask(write: Rewriter, mask: fx.Node | None) -> fx.Node | None:
    """A mask of (batch, rows, columns) beside operands that have got a dim of heads."""
    if mask is None or value(mask).dim() < 3:
        return mask
    return write.call(_aten.unsqueeze.default, mask, 1)


def _heads(
    write: Rewriter, args: Arguments, operands: list[fx.Node], mask: fx.Node | None
) -> fx.Node:
    query, key, values = (write.cast(node, write.dtype) for node in _same_batch(write, operands))
    depth = value(query).shape[-1]
    scale = depth**-0.5 if args["scale"] is None else args["scale"]
    if args["dropout_p"] > 0:
        return _with_dropout(write, args, (query, key, values, mask), scale)
    own = torch.ops.partitioner.attention.default
    found = write.call(own, query, key, values, mask, args["is_causal"], scale)
    return write.call(operator.getitem, found, 0)


def _same_batch(write: Rewriter, operands: list[fx.Node]) -> list[fx.Node]:
    batch = max(value(node).shape[0] for node in operands)
    return [
        node
        if value(node).shape[0] == batch
        else write.call(_aten.expand.default, node, [batch, *value(node).shape[1:]])
        for node in operands
    ]


def _with_dropout(
    write: Rewriter,
    args: Arguments,
    operands: tuple[fx.Node, fx.Node, fx.Node, fx.Node | None],
    scale: float,
) -> fx.Node:
    """Softmax of the scores, dropout of the weights."""
    query, key, values, mask = operands
    group = value(query).shape[1] // value(key).shape[1]
    if group > 1:
        key, values = (
            write.call(_aten.repeat_interleave.self_int, node, group, 1) for node in (key, values)
        )
    scaled = write.call(_aten.mul.Tensor, query, scale)
    scores = write.call(_aten.matmul.default, scaled, write.call(_aten.mT.default, key))
    if args["is_causal"]:
        mask = _causal(write, scores)
    if mask is None:
        weights = write.call(_aten.softmax.int, scores, -1)
    else:
        weights = write.call(_aten._safe_softmax.default, _masked(write, scores, mask), -1)
    kept = write.call(_aten.dropout.default, weights, args["dropout_p"], True)
    return write.call(_aten.matmul.default, kept, values)


def _causal(write: Rewriter, scores: fx.Node) -> fx.Node:
    like = value(scores)
    ones = write.call(
        _aten.ones.default, list(like.shape[-2:]), dtype=torch.bool, device=like.device
    )
    return write.call(_aten.tril.default, ones)


def _masked(write: Rewriter, scores: fx.Node, mask: fx.Node) -> fx.Node:
    if value(mask).dtype != torch.bool:
        return write.call(_aten.add.Tensor, scores, mask)
    unseen = write.call(_aten.logical_not.default, mask)
    return write.call(_aten.masked_fill.Scalar, scores, unseen, float("-inf"))
