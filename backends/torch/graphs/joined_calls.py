"""Calls of a pass that a rank makes as one: each takes some microseconds by itself.

Results are the same in each bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import getitem, itemgetter

import torch
from torch import Tensor, fx

from partitioner.backends.torch.operators.normalization import layer_norm_gradients

aten = torch.ops.aten
operators = torch.ops.partitioner


def join_calls(module: fx.GraphModule) -> fx.GraphModule:
    """The pass, one of `eager` that is not `direct` yet, which is changed."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.target is aten.cat.default:
            _pack(graph, node)
        elif node.target is operators.layer_norm_grad_input.default:
            _join_gradients(graph, node)
        else:
            _unpack(graph, node)
    module.recompile()
    return module


def _pack(graph: fx.Graph, cat: fx.Node) -> None:
    """Let one call put several tensors one after the other, each as a line."""
    lines, *dim = cat.args
    assert isinstance(lines, list | tuple)
    if dim not in ([], [0]) or len({*lines}) < max(2, len(lines)):
        return
    if any(one.target is not aten.reshape.default or one.args[1] != [-1] for one in lines):
        return
    tensors = [line.args[0] for line in lines]
    dense = [one for one in tensors if one.op == "call_method" and one.target == "contiguous"]
    operands = [one.args[0] if one in dense else one for one in tensors]
    with graph.inserting_before(cat):
        packed = graph.call_function(torch._C._nn.flatten_dense_tensors, (operands,))
    cat.replace_all_uses_with(packed)
    for node in (cat, *lines, *dense):
        if not node.users:
            graph.erase_node(node)


def _unpack(graph: fx.Graph, flat: fx.Node) -> None:
    """Let one call take a flat tensor apart, all of which is read as parts of some shapes."""
    found = [(*user.args[1:], user) for user in flat.users if user.target is aten.slice.Tensor]
    if len(found) < max(2, len(flat.users)) or any(len(one) != 4 or one[0] != 0 for one in found):
        return
    parts = sorted(((start, end, *one.users) for _, start, end, one in found), key=itemgetter(0))
    if any(len(one) != 3 or one[2].target is not aten.reshape.default for one in parts):
        return
    shapes = [one[2].args[1] for one in parts]
    sizes = [end - start for start, end, _ in parts]
    is_all = parts[0][0] == 0 and all(one[1] == other[0] for one, other in pairwise(parts))
    if not is_all or 0 in sizes or sizes != [*map(math.prod, shapes)]:
        return
    with graph.inserting_after(flat):
        apart = graph.call_function(_taking_apart(shapes), (flat,))
    for index, (_, _, view) in enumerate(parts):
        (one,) = view.all_input_nodes
        with graph.inserting_before(view):
            part = graph.call_function(getitem, (apart, index))
        view.replace_all_uses_with(part)
        graph.erase_node(view)
        graph.erase_node(one)


def _taking_apart(shapes: Sequence[Sequence[int]]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Make a function that takes a flat tensor apart into views of these shapes."""
    outlines = [torch.empty(()).expand(shape) for shape in shapes]  # only their sizes are read

    def take_apart(flat: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = torch._C._nn.unflatten_dense_tensors(flat, outlines)
        return parts

    return take_apart


def _join_gradients(graph: fx.Graph, of_data: fx.Node) -> None:
    """Let one call compute all gradients of a layer norm, where those calls follow each other."""
    of_weight = of_data.next
    *operands, weight = of_data.args
    if of_weight.target is not operators.layer_norm_grad_weight.default or weight is None:
        return
    if [*of_weight.args[:-1]] != operands:
        return
    with graph.inserting_before(of_data):
        pair = graph.call_function(layer_norm_gradients, of_data.args)
        data = graph.call_function(getitem, (pair, 0))
        weights = graph.call_function(getitem, (pair, 1))
    of_data.replace_all_uses_with(data)
    of_weight.replace_all_uses_with(weights)
    graph.erase_node(of_weight)
    graph.erase_node(of_data)
