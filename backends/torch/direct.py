"""Passes that call communications and own operators without autograd's part.

PyTorch (2.13) has an autograd function in Python for each functional collective, and for each
operator that was registered with a gradient. Passes run without gradients: there the functions only
pass a call on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

from partitioner.backends.torch.eager import gathered
from partitioner.backends.torch.faults import OPERATOR
from partitioner.backends.torch.operators.registry import KERNELS

#: The namespace of the operators of communications.
_COMMUNICATIONS = "_c10d_functional"


def direct(module: fx.GraphModule) -> fx.GraphModule:
    """The pass, which is changed: it must run under `torch.no_grad`.

    Args:
        module: A pass as `eager` makes it.
    """
    for node in module.graph.nodes:
        call = _call_of(node.target) if node.op == "call_function" else None
        if call is not None:
            node.meta[OPERATOR], node.target = node.target, call
    module.recompile()
    return module


def _call_of(target: Any) -> Callable[..., Any] | None:
    """What to call in place of an operator; None for the operator itself."""
    if target in KERNELS:
        return KERNELS[target]
    is_operator = isinstance(target, torch._ops.OpOverload)
    communicates = is_operator and target.namespace == _COMMUNICATIONS
    return _below_autograd(target) if communicates or target is gathered else None


@cache
def _below_autograd(operator: Callable[..., Any]) -> Callable[..., Any]:
    def communicate(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return communicate
