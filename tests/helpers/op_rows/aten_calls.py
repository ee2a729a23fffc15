"""Nodes of the IR run one by one, as graphs of ranks call them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from partitioner.backends.torch.graphs.calls import (
    ALIAS,
    COPIED,
    DENSE,
    RESHAPES,
    arguments,
    branch_module,
    overload,
)
from partitioner.ir.graph import Node
from partitioner.ir.ops.aten.branches import BRANCHES, COND


def run_node(
    node: Node, values: Mapping[str, Tensor], device: torch.device
) -> Sequence[Tensor | None]:
    """Run a node on tensors by value name, as a graph does (`add_call`); one entry a result."""
    if node.op == ALIAS:
        return [values[node.inputs[0]]]
    if node.op == COND:
        bodies = [branch_module(node.attrs[which], device) for which in BRANCHES]
        predicate, *operands = map(values.__getitem__, node.inputs)
        return list(torch.ops.higher_order.cond(predicate, *bodies, tuple(operands)))

    def operand(name: str) -> Tensor:
        if node.op in COPIED:
            return values[name].clone(memory_format=torch.contiguous_format)
        return values[name].contiguous() if node.op in DENSE else values[name]

    args, kwargs = arguments(node, operand, device)
    results = overload(RESHAPES.get(node.op, node.op))(*args, **kwargs)
    return list(results) if isinstance(results, tuple | list) else [results]
