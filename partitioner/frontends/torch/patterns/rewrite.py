"""Finds and replaces calls in the graph of an exported program, before its gradients are traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

_aten = torch.ops.aten

Arguments = dict[str, Any]  #: Arguments of a call by the schema's names, defaults filled in.


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node of an exported graph stands for."""
    tensor = node.meta["val"]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def graph_modules(module: torch.nn.Module) -> list[fx.GraphModule]:
    """The module and its submodules that have graphs: branches, and regions of other modes."""
    return [part for part in module.modules() if isinstance(part, fx.GraphModule)]


@dataclass(frozen=True)
class Rewriter:
    """Writes calls before a node, each with the fake value of its result."""

    node: fx.Node

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the replaced result; autocast may have chosen it."""
        return value(self.node).dtype

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The node's value in an element type; the node itself if it has that type."""
        same = value(node).dtype == dtype
        return node if same else self.call(_aten.to.dtype, node, dtype)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Write a call; it takes the place of the replaced node among the submodules."""
        graph = self.node.graph
        with graph.inserting_before(self.node):
            call = graph.call_function(target, args, kwargs)
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        with torch.no_grad():
            call.meta["val"] = target(*fake_args, **fake_kwargs)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.node.meta:
                call.meta[key] = self.node.meta[key]
        return call

    def give(self, call: fx.Node) -> None:
        """Make the node, which keeps its name (a signature's), the call written last."""
        node = self.node
        node.target, node.args, node.kwargs = call.target, call.args, call.kwargs
        node.meta["val"] = call.meta["val"]
        node.graph.erase_node(call)


def rewrite_nodes(module: fx.GraphModule, rewrite: Callable[[fx.Node], bool]) -> int:
    """Rewrite nodes of a graph and of its branches, in place; returns how many were."""
    total = 0
    for part in graph_modules(module):
        count = sum(rewrite(node) for node in list(part.graph.nodes))
        if count:
            part.recompile()
        total += count
    return total


#: Writes calls in the place of one, and returns the last, which gives the result; None keeps the
#: call.
Replacement = Callable[[Rewriter, Arguments], fx.Node | None]


def replace_calls(
    module: fx.GraphModule, replacements: Mapping[torch._ops.OpOverload, Replacement]
) -> int:
    """Replace calls in place, but for those with results of unknown sizes; count them."""

    def replace(node: fx.Node) -> bool:
        target: Any = node.target
        if node.op != "call_function" or target not in replacements:
            return False
        tensors, _ = tree_flatten(node.meta["val"])
        if not all(isinstance(size, int) for tensor in tensors for size in tensor.shape):
            return False
        write = Rewriter(node)
        last = replacements[target](write, arguments_of(node))
        if last is not None:
            write.give(last)
        return last is not None

    return rewrite_nodes(module, replace)


def arguments_of(node: fx.Node) -> Arguments:
    """The arguments of a call of an operator."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    defaults = {a.name: a.default_value if a.has_default_value() else None for a in schema}
    positional = dict(zip(defaults, node.args, strict=False))
    return {**defaults, **positional, **node.kwargs}


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
    """The node behind copies, and casts if asked, but not behind what cuts off a gradient."""
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
