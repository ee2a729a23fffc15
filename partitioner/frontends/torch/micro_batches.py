"""The trace of a module whose calls run in micro-batches."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.utils import _pytree as pytree

from partitioner.backends.torch.micro_batches import MicroBatches, batch_size, first_part
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import TracedModule, trace_module
from partitioner.ir.types import TensorType


def trace_micro_batch(
    module: nn.Module, example: Example, options: ModuleOptions, count: int
) -> TracedModule:
    """Trace a module with the first of `count` micro-batches of its example inputs.

    Its signature is that of a call with the whole batch.

    Raises:
        BackendError: The batch cannot be cut, or a result is of no micro-batch.
        FrontendError: The module cannot be traced.
    """
    arguments = (example.args, dict(example.kwargs))
    batch = batch_size(arguments, count)
    args, kwargs = first_part(arguments, batch, count)
    traced = trace_module(module, Example(args, kwargs), options)
    flat, known = tuple(pytree.tree_leaves(arguments)), traced.signature
    whole = {
        name: TensorType.of(known.types[name].dtype, tuple(value.shape))
        for name, value in zip(known.inputs, flat, strict=True)
        if name in known.types
    }
    signature = replace(known, example=flat, types={**known.types, **whole})
    micro = MicroBatches.of(count, batch, signature, traced.graph.types)
    return replace(traced, batch=signature, micro=micro)
