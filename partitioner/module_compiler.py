"""`compile` for PyTorch modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from partitioner.cost_model.cluster import Cluster
from partitioner.frontends.torch_attention import replace_attention
from partitioner.frontends.torch_capture import capture, export_module, materialised
from partitioner.frontends.torch_composites import keep_composites
from partitioner.frontends.torch_decompositions import DECOMPOSITIONS
from partitioner.frontends.torch_graph import ModuleGraph, module_graph
from partitioner.frontends.torch_losses import replace_cross_entropy
from partitioner.ir.errors import OptionError
from partitioner.limits import MOST_EXPLICIT
from partitioner.module_program import ModuleProgram
from partitioner.module_source import Example, ModuleSource
from partitioner.search import Request

if TYPE_CHECKING:
    from partitioner.compiler import Clock

#: Bytes that each optimizer keeps of an element of a parameter, beside it and its gradient.
OPTIMIZERS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "sgd": 0,
    "momentum": 4,
    "rmsprop": 4,
    "adagrad": 4,
}


def compile_module(
    module: nn.Module,
    example: Example,
    source: ModuleSource,
    cluster: Cluster,
    request: Request,
    clock: Clock,
    training: bool,
    optimizer: str,
) -> ModuleProgram:
    """Trace, plan and lower a module (see `partitioner.compile`).

    Raises:
        PartitionerError: As `partitioner.compile`.
    """
    from partitioner.compiler import plan_graph

    if training and request.strategy == "auto":
        request = replace(request, strategy="intra")
    with clock("tracing the module"):
        traced = trace_module(module, example, training, optimizer)
    outcome, found = plan_graph(traced.graph, (), cluster, request, clock)
    result = ModuleProgram(
        traced=traced,
        whole=module,
        training=training,
        optimizer=optimizer,
        source=source,
        cluster=cluster,
        plan=outcome.plan,
        evaluation=outcome.evaluation,
        summary=found,
        seconds=clock.seconds,
    )
    if len(cluster) <= MOST_EXPLICIT:
        with clock("lowering"):
            result.programs  # noqa: B018 - made on first use
    return result


def trace_module(
    module: nn.Module, example: Example, training: bool, optimizer: str
) -> ModuleGraph:
    """The graph of a module.

    Args:
        module: The module.
        example: Arguments to trace it with.
        training: Whether its backward pass is wanted.
        optimizer: What is kept of each parameter, in training.

    Raises:
        FrontendError: It cannot be traced.
        OptionError: There is no such optimizer.
    """
    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise OptionError(
            f"optimizer {optimizer!r} is not one of {known}: optimizers that are not elementwise "
            "cannot work on shards"
        )
    held = materialised(module)
    program = export_module(held, example.args, example.kwargs)
    for rewrite in (replace_attention, replace_cross_entropy, keep_composites):
        rewrite(program.graph_module)
    captured = capture(held, program, DECOMPOSITIONS, training=training)
    return module_graph(captured, type(module).__name__, OPTIMIZERS[optimizer])
