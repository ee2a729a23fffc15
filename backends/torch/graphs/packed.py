"""Tensors that are copied into one line of memory by one call, in place of two more for each."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from partitioner.backends.torch.graphs.notes import OPERATOR

aten = torch.ops.aten


def pack_at_once(graph: fx.Graph) -> None:
    """Let one call make the lines of tensors that a `cat` puts behind each other."""
    for node in list(graph.nodes):
        lines = node.args[0] if node.target is aten.cat.default else ()
        if len(lines) < 2 or node.args[1:] not in ((), (0,)) or node.kwargs:
            continue
        if not all(_is_line(line) and [*line.users] == [node] for line in lines):
            continue
        node.meta[OPERATOR], node.target = node.target, packed
        node.args = ([_source(line) for line in lines],)
        for line in dict.fromkeys(lines):
            _erase(graph, line)


def packed(tensors: list[Tensor]) -> Tensor:
    """The elements of several tensors in a new one of one dim."""
    return torch._C._nn.flatten_dense_tensors(tensors)


def _is_line(node: fx.Node) -> bool:
    return node.target is aten.reshape.default and node.args[1] == [-1] and not node.kwargs


def _source(line: fx.Node) -> fx.Node:
    """Find what a line is made of, past `contiguous()`, which leaves its elements as they are."""
    source = line.all_input_nodes[0]
    is_dense = source.op == "call_method" and source.target == "contiguous"
    return source.all_input_nodes[0] if is_dense and not source.kwargs else source


def _erase(graph: fx.Graph, line: fx.Node) -> None:
    source = line.all_input_nodes[0]
    graph.erase_node(line)
    if source.op == "call_method" and not source.users:
        graph.erase_node(source)
