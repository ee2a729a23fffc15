"""Replaces the attention calls of an exported program by our own operator, one node a call.

PyTorch picks a kernel while it traces: a trace made on the CPU holds the CPU's, which no other
device has. Ours is the same for every device.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import Arguments, Rewriter, value

_aten = torch.ops.aten


def attention(write: Rewriter, args: Arguments) -> fx.Node | None:
    """Our own operator or, with dropout, plain ones.

    Calls of other forms than (batch, heads, rows, channels) and (batch, rows, channels) stay.
    """
    nodes = [args["query"], args["key"], args["value"]]
    ranks = {value(node).dim() for node in nodes}
    if ranks == {3}:
        with_heads = [write.call(_aten.unsqueeze.default, node, 1) for node in nodes]
        mask = args["attn_mask"]
        if mask is not None and value(mask).dim() >= 3:
            mask = write.call(_aten.unsqueeze.default, mask, 1)
        return write.call(_aten.squeeze.dim, _multi_head(write, args, with_heads, mask), 1)
    if ranks != {4}:
        return None
    query_heads, key_heads, value_heads = (value(node).shape[1] for node in nodes)
    if key_heads != value_heads or key_heads == 0 or query_heads % key_heads != 0:
        return None
    return _multi_head(write, args, nodes, args["attn_mask"])


def _multi_head(
    write: Rewriter, args: Arguments, operands: list[fx.Node], mask: fx.Node | None
) -> fx.Node:
    batch = max(value(node).shape[0] for node in operands)
    expanded = [
        node
        if value(node).shape[0] == batch
        else write.call(_aten.expand.default, node, [batch, *value(node).shape[1:]])
        for node in operands
    ]
    query, key, values = (write.cast(node, write.dtype) for node in expanded)
    depth = value(query).shape[-1]
    scale = depth**-0.5 if args["scale"] is None else args["scale"]
    if args["dropout_p"] > 0:
        return _with_dropout(write, args, (query, key, values, mask), scale)
    own = torch.ops.partitioner.attention.default
    results = write.call(own, query, key, values, mask, args["is_causal"], scale)
    return write.call(operator.getitem, results, 0)


def _with_dropout(
    write: Rewriter,
    args: Arguments,
    operands: tuple[fx.Node, fx.Node, fx.Node, fx.Node | None],
    scale: float,
) -> fx.Node:
    query, key, values, mask = operands
    group = value(query).shape[1] // value(key).shape[1]
    if group > 1:
        key, values = (
            write.call(_aten.repeat_interleave.self_int, node, group, 1) for node in (key, values)
        )
    scaled = write.call(_aten.mul.Tensor, query, scale)
    scores = write.call(_aten.matmul.default, scaled, write.call(_aten.mT.default, key))
    if args["is_causal"]:
        shape, device = list(value(scores).shape[-2:]), value(scores).device
        ones = write.call(_aten.ones.default, shape, dtype=torch.bool, device=device)
        mask = write.call(_aten.tril.default, ones)
    softmax = _aten.softmax.int if mask is None else _aten._safe_softmax.default
    if mask is not None and value(mask).dtype == torch.bool:
        hidden = write.call(_aten.logical_not.default, mask)
        scores = write.call(_aten.masked_fill.Scalar, scores, hidden, float("-inf"))
    elif mask is not None:
        scores = write.call(_aten.add.Tensor, scores, mask)
    weights = write.call(softmax, scores, -1)
    dropped = write.call(_aten.dropout.default, weights, args["dropout_p"], True)
    return write.call(_aten.matmul.default, dropped, values)
