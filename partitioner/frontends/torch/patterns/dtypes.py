"""Writes down the element types that an exported graph leaves to PyTorch's default."""

from __future__ import annotations

import torch
from torch import fx

from partitioner.frontends.torch.patterns.rewrite import rewrite_nodes, value


def state_dtypes(module: fx.GraphModule) -> None:
    """Give calls that make tensors of no tensor, as `torch.ones`, their element type, in place.

    They have PyTorch's default type, which a module may set for a part of its forward pass, and
    which may be another one where the graph is traced again.
    """

    def state(node: fx.Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or node.all_input_nodes:
            return False
        names = {argument.name for argument in node.target._schema.arguments}
        makes = isinstance(node.meta.get("val"), torch.Tensor)
        is_left = makes and "dtype" in names and node.kwargs.get("dtype") is None
        if is_left:
            node.kwargs = {**node.kwargs, "dtype": value(node).dtype}
        return is_left

    rewrite_nodes(module, state)
