"""Nodes of the IR as calls of PyTorch operators: the inverse of the front end's encoding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import from_numpy, torch_dtype
from partitioner.ir.graph import Attr, Graph, Node
from partitioner.ir.ops.aten.branches import BRANCHES, COND

#: A rank's part of a tensor may lie otherwise in memory than the whole tensor did in the trace.
RESHAPES = {"aten::view": "aten::reshape", "aten::_unsafe_view": "aten::reshape"}
ALIAS = "partitioner::alias"

#: Keeps a branch in the graph module that a graph is for, and gives its name there.
Hold = Callable[[str, fx.GraphModule], str]


@cache
def overload(op: str) -> torch._ops.OpOverload:
    """The operator of a node's op: ``overload("aten::sum.dim_IntList")``.

    Raises:
        BackendError: This PyTorch has no such operator.
    """
    import partitioner.backends.torch.operators  # noqa: F401 - registers our own operators

    name, _, kind = op.partition(".")
    space, _, short = name.partition("::")
    try:
        found = getattr(getattr(getattr(torch.ops, space), short), kind or "default")
    except AttributeError:
        raise BackendError(f"PyTorch {torch.__version__} has no operator {op}") from None
    assert isinstance(found, torch._ops.OpOverload)
    return found


def arguments(
    node: Node, tensor: Callable[[str], Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a node's call.

    Args:
        node: The node; its inputs are in the schema's order.
        tensor: What stands for a value.
        device: Where tensors are made.
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    values = iter(node.inputs)
    used = 0  # what comes after has its default
    for argument in overload(node.op)._schema.arguments:
        if argument.name in ("layout", "pin_memory"):
            continue
        if argument.name == "device":
            kwargs["device"] = device
            continue
        found = _argument(str(argument.type), node.attrs.get(argument.name), values, tensor)
        is_default = argument.has_default_value() and _same(found, argument.default_value)
        if argument.kwarg_only:
            if found is not None and not is_default:
                kwargs[argument.name] = found
        else:
            args.append(found)
            if not is_default:
                used = len(args)
    return tuple(args[:used]), kwargs


def _argument(
    kind: str, attr: Attr | None, values: Iterator[str], tensor: Callable[[str], Any]
) -> Any:
    if "Tensor" in kind and "List" in kind:
        assert attr is None or isinstance(attr, int)
        return [tensor(name) if name else None for name in (next(values) for _ in range(attr or 0))]
    if kind in ("Tensor", "Optional[Tensor]"):
        name = next(values)
        return tensor(name) if name else attr
    if attr is None:
        return None
    return _decoded(kind, attr)


def _decoded(kind: str, attr: Attr) -> Any:
    if isinstance(attr, tuple):
        return list(attr)
    if isinstance(attr, str) and kind in ("int", "Optional[int]"):  # element types, memory formats
        return getattr(torch, attr) if attr in _FORMATS else torch_dtype(attr)
    return attr


_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})


def add_argument(graph: fx.Graph, name: str) -> fx.Node:
    """Add an argument to a graph, under a name that nothing else has in its code.

    PyTorch gives the node such a name, but the code calls the argument by its target: an attribute
    with that name would be read in its place.
    """
    node = graph.placeholder(name)
    node.target = node.name
    return node


def add_call(
    graph: fx.Graph,
    node: Node,
    tensor: Callable[[str], fx.Node],
    device: torch.device,
    hold: Hold,
    name: str | None = None,
) -> dict[str, fx.Node]:
    """Add a node's call to a graph.

    Args:
        graph: The graph.
        node: The node.
        tensor: What stands for a value.
        device: Where tensors are made.
        hold: Keeps its branches.
        name: Of the call, if it is free.

    Returns:
        What stands for each result.
    """
    if node.op == COND:
        bodies = [
            graph.get_attr(hold(f"{which}_branch", branch_module(node.attrs[which], device)))
            for which in BRANCHES
        ]
        predicate, *operands = map(tensor, node.inputs)
        cond = torch.ops.higher_order.cond
        args: tuple[Any, ...] = (predicate, *bodies, tuple(operands))
        call = graph.create_node("call_function", cond, args, {}, name)
        return _items(graph, node, call)
    target = overload(RESHAPES.get(node.op, node.op))
    found, kwargs = arguments(node, tensor, device)
    call = graph.create_node("call_function", target, found, kwargs, name)
    returns = target._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        return {node.outputs[0]: call}
    return _items(graph, node, call)


def _items(graph: fx.Graph, node: Node, call: fx.Node) -> dict[str, fx.Node]:
    return {
        name: graph.call_function(operator.getitem, (call, index))
        for index, name in enumerate(node.outputs)
        if name
    }


def branch_module(branch: Attr, device: torch.device) -> fx.GraphModule:
    """A branch as a graph module: takes its inputs, returns a tuple of its outputs."""
    assert isinstance(branch, Graph)
    root, graph = torch.nn.Module(), fx.Graph()

    def hold(name: str, body: fx.GraphModule) -> str:
        while hasattr(root, name):
            name += "_"
        root.add_module(name, body)
        return name

    known = {value: add_argument(graph, value) for value in branch.inputs}
    for value, constant in branch.constants.items():
        root.register_buffer(value, from_numpy(constant.load(), constant.type.dtype).to(device))
        known[value] = graph.get_attr(value)
    for node in branch.nodes:
        if node.op == ALIAS:
            known[node.outputs[0]] = known[node.inputs[0]]
        else:
            known.update(add_call(graph, node, known.__getitem__, device, hold))
    graph.output(tuple(known[value] for value in branch.outputs))
    return fx.GraphModule(root, graph)


def run_node(
    node: Node, values: Mapping[str, torch.Tensor], device: torch.device
) -> Sequence[torch.Tensor | None]:
    """Run a node on tensors by value name; one entry a result."""
    if node.op == COND:
        bodies = [branch_module(node.attrs[which], device) for which in BRANCHES]
        predicate, *operands = map(values.__getitem__, node.inputs)
        return list(torch.ops.higher_order.cond(predicate, *bodies, tuple(operands)))
    args, kwargs = arguments(node, values.__getitem__, device)
    found = overload(node.op)(*args, **kwargs)
    return list(found) if isinstance(found, tuple | list) else [found]


def _same(found: Any, default: Any) -> bool:
    plain = found is None or isinstance(found, bool | int | float | str | list)
    return plain and type(found) is type(default) and bool(found == default)
