"""Replaces rows that are gathered of weights of experts by embeddings, whose rows may be cut."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.frontends.torch.patterns.matching import (
    args_of,
    calls,
    indices_of,
    is_tensor,
    through,
)
from partitioner.frontends.torch.patterns.rewrite import Rewriter, graph_modules, value

_aten = torch.ops.aten


def replace_lookups(module: fx.GraphModule) -> int:
    """Replace rows that are gathered of weights of experts by embeddings of them, in place.

    Weights are parameters of three or more dims; biases, with two, are gathered by the same ids.

    Returns:
        How many were replaced.
    """
    total = 0
    for part in graph_modules(module):
        found = [node for node in part.graph.nodes if _looks_up(node)]
        chosen = {indices_of(node)[0] for node in found if value(args_of(node)[0]).dim() > 2}
        found = [node for node in found if indices_of(node)[0] in chosen]
        counted: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in found:
            _embed(node, counted)
        if found:
            part.recompile()
        total += len(found)
    return total


def _looks_up(node: fx.Node) -> bool:
    """Tell whether a node gathers rows of a parameter by ids that are computed."""
    if not calls(node, _aten.index.Tensor) or len(args_of(node)[1]) != 1 or not is_tensor(node):
        return False
    table, (ids,) = args_of(node)[0], indices_of(node)
    source = through(table, casts=True)
    return (
        source.name.startswith("p_")
        and source.op == "placeholder"
        and value(table).dim() > 1
        and value(table).is_floating_point()
        and 0 not in value(table).shape
        and ids is not None
        and value(ids).dtype == torch.int64
    )


def _embed(node: fx.Node, counted: dict[tuple[fx.Node, int], fx.Node]) -> None:
    """Replace a lookup by one of a matrix, with ids that count from the begin, made once."""
    write, (matrix, (ids,)) = Rewriter(node), args_of(node)
    size, shape = value(matrix).shape[0], list(value(node).shape)
    if value(matrix).dim() > 2:
        matrix = write.call(_aten.reshape.default, matrix, [size, -1])
    if (ids, size) not in counted:
        from_end = write.call(_aten.lt.Scalar, ids, 0)
        moved = write.call(_aten.add.Tensor, ids, size)
        counted[ids, size] = write.call(_aten.where.self, from_end, moved, ids)
    found = write.call(_aten.embedding.default, matrix, counted[ids, size])
    write.give(write.call(_aten.reshape.default, found, shape))
