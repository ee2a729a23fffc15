"""Gradients of layer norms whose two operators read the same operands: one kernel computes both.

A plan has the gradient of the data and those of weight and bias as two nodes, which may be cut in
different ways. Where a rank computes both from the same tensors, each would read them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.torch.graphs.notes import note_tasks, noted_tasks

aten = torch.ops.aten
operators = torch.ops.partitioner

#: Number of the operands that both operators read.
_SHARED = 5


def join_norms(graph: fx.Graph) -> None:
    """Let one call compute what two would, where it can stand in the place of the first of them."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    of_data = {
        _operands(node): node
        for node in graph.nodes
        if node.target is operators.layer_norm_grad_input.default
    }
    for weights in list(graph.nodes):
        if weights.target is not operators.layer_norm_grad_weight.default:
            continue
        data = of_data.pop(_operands(weights), None)
        if data is None:
            continue
        first, scale = min(data, weights, key=order.__getitem__), data.args[_SHARED]
        if isinstance(scale, fx.Node) and order[scale] < order[first]:
            _join(graph, first, data, weights)


def _operands(node: fx.Node) -> tuple[Any, ...]:
    grad_out, x, sizes, mean, rstd = node.args[:_SHARED]
    assert isinstance(sizes, Sequence)
    return grad_out, x, tuple(sizes), mean, rstd


def _join(graph: fx.Graph, first: fx.Node, data: fx.Node, weights: fx.Node) -> None:
    with graph.inserting_before(first):
        call = graph.call_function(layer_norm_grads, data.args)
        data_gradient, weight_gradients = (
            graph.call_function(getitem, (call, index)) for index in range(2)
        )
    note_tasks((call, data_gradient, weight_gradients), (*noted_tasks(data), *noted_tasks(weights)))
    for node, result in ((data, data_gradient), (weights, weight_gradients)):
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def layer_norm_grads(
    grad_out: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Results of the operators `layer_norm_grad_input` and `layer_norm_grad_weight`.

    PyTorch's kernel has one type for the weight, its gradient and that of the bias.
    """
    data, of_weight, of_bias = aten.native_layer_norm_backward(
        grad_out,
        x,
        normalized_shape,
        mean.contiguous(),
        rstd.contiguous(),
        weight,
        weight,
        [True, True, True],
    )
    return data, (of_weight, of_bias)
