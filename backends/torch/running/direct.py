"""Passes as a rank runs them: without autograd, and up to their first communication at once.

PyTorch (2.13) has an autograd function in Python for each functional collective, and for each
operator that was registered with a gradient. Passes run without gradients: there the functions only
pass a call on. It looks up the schema of an operator anew at each call of it by name, which takes
longer than the function of the same operator (`FUNCTIONS`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import fx

from partitioner.backends.torch.graphs.eager import gathered, packed
from partitioner.backends.torch.graphs.notes import OPERATOR
from partitioner.backends.torch.operators.registry import KERNELS
from partitioner.backends.torch.operators.sent import SENDING

#: The namespace of the operators of communications.
_COMMUNICATIONS = "_c10d_functional"

aten = torch.ops.aten
#: PyTorch's functions that call an operator with the same arguments in the same order. Not all that
#: there are: those of which models call many on small tensors.
FUNCTIONS: Mapping[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.gelu.default: torch._C._nn.gelu,
    aten.log.default: torch.log,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.reshape.default: torch.reshape,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.silu.default: torch._C._nn.silu,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
}


@dataclass
class Gate:
    """A place in a pass where the rank waits, when it comes there first."""

    wait: Callable[[], None] | None = None  #: Waits; None if there is nothing to wait for.

    def enter(self) -> None:
        """Wait, if nothing has since `wait` was set."""
        wait, self.wait = self.wait, None
        if wait is not None:
            wait()

    def leave(self, error: BaseException) -> None:
        """End a pass that failed.

        The other ranks wait for one with an error. One that is interrupted waits in its next pass.
        """
        if not isinstance(error, Exception):
            self.wait = None
        self.enter()


def gated(module: fx.GraphModule, gate: Gate) -> fx.GraphModule:
    """The pass, which is changed: it enters the gate before others may notice that it runs.

    That is before it communicates, or writes to anything that it is given.

    Args:
        module: A pass as `eager` makes it.
        gate: The gate.
    """
    graph = module.graph
    first = next(node for node in graph.nodes if not _is_private(node))
    with graph.inserting_before(first):
        graph.call_function(gate.enter)
    module.recompile()
    return module


def _is_private(node: fx.Node) -> bool:
    """Test whether a node only computes a value of its own."""
    if node.op in ("placeholder", "get_attr") or node.target in ("contiguous", getitem, packed):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_local = node.target.namespace in ("aten", "partitioner") and node.target not in SENDING
    return is_local and not node.target._schema.is_mutable


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """The pass, which is changed: it must run under `torch.no_grad`.

    Args:
        module: A pass as `eager` makes it.
    """
    for node in module.graph.nodes:
        if node.target is aten.slice.Tensor and len(node.args) == 4 and node.args[1] == 0:
            tensor, _, start, end = node.args
            node.meta[OPERATOR], node.target = node.target, getitem
            node.args = (tensor, slice(start, end))
            continue
        call = _call_of(node.target) if node.op == "call_function" else None
        if call is not None:
            node.meta[OPERATOR], node.target = node.target, call
    module.recompile()
    return module


def _call_of(target: Any) -> Callable[..., Any] | None:
    """Find what to call in place of an operator; None for the operator itself."""
    if target in KERNELS:
        return KERNELS[target]
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    is_operator = isinstance(target, torch._ops.OpOverload)
    communicates = is_operator and target.namespace == _COMMUNICATIONS
    return _below_autograd(target) if communicates or target is gathered else None


@cache
def _below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    def communicate(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return communicate
