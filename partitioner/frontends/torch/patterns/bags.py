"""Replaces `embedding_bag` in an exported graph by our own operator, whose table can be cut."""

from __future__ import annotations

import operator

import torch
from torch import fx

import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators
from partitioner.frontends.torch.patterns.rewrite import (
    Rewriter,
    arguments_of,
    rewrite_nodes,
    value,
)

_aten = torch.ops.aten
_BAGS = {_aten.embedding_bag.default, _aten.embedding_bag.padding_idx}


def replace_bags(module: fx.GraphModule) -> int:
    """Replace bags in place.

    Those whose gradients are sparse or scaled by frequency stay, and those of which more than the
    result is used.

    Returns:
        How many were replaced.
    """
    return rewrite_nodes(module, lambda node: node.target in _BAGS and _replace(node))


def _replace(bag: fx.Node) -> bool:
    args = arguments_of(bag)
    used = [user for user in bag.users if user.users]
    if args["scale_grad_by_freq"] or args["sparse"]:
        return False
    if len(used) != 1 or used[0].target is not operator.getitem or used[0].args[1] != 0:
        return False
    result, table, indices, offsets = used[0], args["weight"], args["indices"], args["offsets"]
    shapes = [value(node).shape for node in (table, indices, offsets, result)]
    if any(not isinstance(size, int) for shape in shapes for size in shape):
        return False
    weights = args["per_sample_weights"]
    if weights is not None and value(weights).dtype != value(table).dtype:
        return False
    size, total = value(table).shape[0], value(indices).shape[0]
    bags = value(offsets).shape[0] - bool(args["include_last_offset"])
    padding = args.get("padding_idx")
    padding = -1 if padding is None else padding % size
    settings = (args["mode"], bags, padding, size, total, [0], [size], [0], [total], [0], [bags])
    write, embedding_bag = Rewriter(result), torch.ops.partitioner.embedding_bag.default
    write.give(write.call(embedding_bag, table, indices, offsets, weights, *settings))
    for user in list(bag.users):
        bag.graph.erase_node(user)
    bag.graph.erase_node(bag)
    return True
