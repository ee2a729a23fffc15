"""Fewer calls of operators that only show a tensor in another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

aten = torch.ops.aten


def shorten_views(graph: fx.Graph) -> None:
    """Let one reshape stand for several in a row, and nothing for what turns a tensor and back."""
    for node in list(graph.nodes):
        before = node.args[0] if node.target in _VIEWS else None
        if not isinstance(before, fx.Node) or before.target is not node.target:
            continue
        if _undoes_call(node, before):
            node.replace_all_uses_with(before.args[0])
            graph.erase_node(node)
        elif node.target is aten.reshape.default and len(before.users) == 1:
            # a reshape may copy, which two readers share
            node.args = (before.args[0], *node.args[1:])
        if not before.users:
            graph.erase_node(before)


def _undoes_call(node: fx.Node, before: fx.Node) -> bool:
    """Test whether one of two calls of a view, as a rank's code writes them, undoes the other.

    (`cost_model.profiles.forms.turns_back` tells it of nodes of a plan, by their rules.)
    """
    if node.target is aten.permute.default:
        first, second = (cast("Sequence[int]", one.args[1]) for one in (before, node))
        return [first[dim] % len(first) for dim in second] == [*range(len(first))]
    if node.target is aten.transpose.int:
        return {*node.args[1:]} == {*before.args[1:]}
    return node.target is aten.t.default


_VIEWS = frozenset({aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default})
