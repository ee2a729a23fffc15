"""Writes down the element types that an exported graph leaves to PyTorch's default."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.frontends.torch.patterns.rewrite import graph_modules, value


def state_dtypes(module: fx.GraphModule) -> None:
    """Give calls that make tensors of no tensor, as `torch.ones`, their element type, in place.

    They have PyTorch's default type, which a module may set for a part of its forward pass, and
    which may be another one where the graph is traced again.
    """
    for part in graph_modules(module):
        for node in part.graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
                continue
            names = {argument.name for argument in node.target._schema.arguments}
            makes = isinstance(node.meta.get("val"), torch.Tensor)
            if makes and "dtype" in names and node.kwargs.get("dtype") is None:
                node.kwargs = {**node.kwargs, "dtype": value(node).dtype}
        part.recompile()
