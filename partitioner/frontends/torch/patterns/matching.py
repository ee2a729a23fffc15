"""Tests of nodes of an exported graph, which see through copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from partitioner.frontends.torch.patterns.rewrite import value

_aten = torch.ops.aten

#: Operators that give their operand itself, or a copy of it.
_SAME = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.contiguous.default,
    _aten.detach.default,
    _aten.to.dtype,
    _aten._to_copy.default,
}


def through(node: Any, *, casts: bool = False) -> Any:
    """The node that gives a value, seen through copies, and if `casts` through other types.

    Not through what cuts a float off from its gradient, which the layer's own would go past.
    """
    while isinstance(node, fx.Node) and calls(node, *_SAME):
        source = args_of(node)[0]
        if not casts and value(source).dtype != value(node).dtype:
            break
        if calls(node, _aten.detach.default) and value(node).is_floating_point():
            break
        node = source
    return node


def args_of(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a call, of any type."""
    return node.args


def indices_of(node: fx.Node) -> list[Any]:
    """Return the indices by which a node gathers elements, seen through copies."""
    return [through(index) for index in args_of(node)[1]]


def is_shaped(node: fx.Node, *shape: int) -> bool:
    """Test whether a node is a tensor of these sizes."""
    return is_tensor(node) and tuple(value(node).shape) == shape


def is_tensor(node: fx.Node) -> bool:
    """Tell whether it is a tensor of known sizes."""
    tensor = node.meta.get("val")
    return isinstance(tensor, torch.Tensor) and all(isinstance(n, int) for n in tensor.shape)


def calls(node: Any, *targets: Callable[..., Any]) -> bool:
    """Test whether a node calls one of some operators."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets
