"""Fewer calls of operators that only show a tensor in another shape."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def shorten_views(graph: fx.Graph) -> None:
    """Let one reshape stand for several in a row, and nothing for two transpositions."""
    for node in list(graph.nodes):
        before = node.args[0] if node.target in _VIEWS else None
        if not isinstance(before, fx.Node) or before.target is not node.target:
            continue
        if node.target is aten.t.default:
            node.replace_all_uses_with(before.args[0])
            graph.erase_node(node)
        elif len(before.users) == 1:  # a reshape may copy, which two readers share
            node.args = (before.args[0], *node.args[1:])
        if not before.users:
            graph.erase_node(before)


_VIEWS = frozenset({aten.reshape.default, aten.t.default})
