"""Replacing calls in the graph of an exported program, before its gradients are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

Arguments = dict[str, Any]  #: Arguments of a call by the schema's names, defaults filled in.


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node of an exported graph stands for."""
    found = node.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


class Rewriter:
    """Writes calls before a node, and knows the shapes that they give."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.graph = node.graph

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the result that is replaced; autocast may have chosen it."""
        return value(self.node).dtype

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """A node's value in an element type."""
        same = value(node).dtype == dtype
        return node if same else self.call(torch.ops.aten.to.dtype, node, dtype)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call, with the fake value of its result."""
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        real, named = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        with torch.no_grad():
            made.meta["val"] = target(*real, **named)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.node.meta:
                made.meta[key] = self.node.meta[key]
        return made


#: Writes the calls that stand for one, and returns the last.
Replacement = Callable[[Rewriter, Arguments], fx.Node | None]


def arguments(node: fx.Node) -> Arguments:
    """Arguments of a call of an operator."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    given = dict(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    return {
        argument.name: given.get(
            argument.name,
            node.kwargs.get(
                argument.name,
                argument.default_value if argument.has_default_value() else None,
            ),
        )
        for argument in target._schema.arguments
    }


def replace_calls(
    module: fx.GraphModule,
    replacements: Mapping[torch._ops.OpOverload, Replacement],
) -> int:
    """Replace the results of calls, in the graph's order, in regions of other modes too.

    Args:
        module: Changed in place.
        replacements: By operator: writes other calls and returns the last, which gives the
            result; None keeps the call.

    Returns:
        How many were replaced.
    """
    graphs = [part for part in module.modules() if isinstance(part, fx.GraphModule)]
    return sum(_replace_calls(part, replacements) for part in graphs)


def _replace_calls(
    module: fx.GraphModule, replacements: Mapping[torch._ops.OpOverload, Replacement]
) -> int:
    count = 0
    for node in list(module.graph.nodes):
        if node.op != "call_function" or node.target not in replacements:
            continue
        new = replacements[node.target](Rewriter(node), arguments(node))
        if new is not None:
            _become(node, new)
            count += 1
    if count:
        module.recompile()
    return count


def _become(node: fx.Node, new: fx.Node) -> None:
    """Turn a node into a new one: it keeps its name, which the program's signature may hold."""
    node.target, node.args, node.kwargs = new.target, new.args, new.kwargs
    node.meta["val"] = new.meta["val"]
    node.graph.erase_node(new)
