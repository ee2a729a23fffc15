"""The trace of a module whose calls run in micro-batches."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.micro_batches import MicroBatches, micro_batch_sizes, part
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import TracedModule, trace_module
from partitioner.ir.types import TensorType


def trace_micro_batch(
    module: nn.Module,
    example: Example,
    options: ModuleOptions,
    count: int,
    keep: frozenset[str] = frozenset(),
    *,
    fewer: bool = False,
    whole: TracedModule | None = None,
) -> TracedModule:
    """Trace a module with the first of `count` micro-batches of its example inputs.

    Its signature is that of a call with the whole batch. If the last micro-batch is smaller, the
    module is traced with it, too.

    Args:
        module: The module.
        example: A whole batch.
        options: Options of the trace.
        count: Number of micro-batches.
        keep: As of `trace_module`.
        fewer: Whether a batch too small for `count` micro-batches has fewer; else it is refused.
        whole: The trace of the whole batch, if that is known: one micro-batch has no other.

    Raises:
        BackendError: The batch cannot be cut, or a result is of no micro-batch.
        FrontendError: The module cannot be traced.
    """
    arguments = (example.args, dict(example.kwargs))
    sizes = micro_batch_sizes(arguments, count)
    batch = sum(sizes)
    if len(sizes) < count and not fewer:
        raise BackendError(
            f"micro_batches={count}: the batch of {batch} has {len(sizes)} parts of {sizes[0]} or "
            f"less: give micro_batches={len(sizes)}, or another batch"
        )

    def traced_part(rows: slice) -> TracedModule:
        args, kwargs = part(arguments, batch, rows)
        return trace_module(module, Example(args, kwargs), options, keep)

    traced = traced_part(slice(sizes[0])) if whole is None or len(sizes) > 1 else whole
    flat, known = tuple(pytree.tree_leaves(arguments)), traced.signature
    of_batch = {
        name: TensorType.of(known.types[name].dtype, tuple(value.shape))
        for name, value in zip(known.inputs, flat, strict=True)
        if name in known.types
    }
    signature = replace(known, example=flat, types={**known.types, **of_batch})
    micro = MicroBatches.of(sizes, signature, traced.graph.types)
    rest = traced_part(slice(batch - micro.rest, batch)) if micro.rest else None
    return replace(traced, batch=signature, micro=micro, rest=rest)
