"""`compile` for PyTorch modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    example_inputs: Any,
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

    if optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise OptionError(
            f"optimizer {optimizer!r} is not one of {known}: optimizers that are not elementwise "
            "cannot work on shards"
        )
    args, kwargs = _example(example_inputs)
    if training and request.strategy == "auto":
        request = replace(request, strategy="intra")
    with clock("tracing the module"):
        traced = trace_module(module, args, kwargs, OPTIMIZERS[optimizer], training=training)
    outcome, found = plan_graph(traced.graph, (), cluster, request, clock)
    result = ModuleProgram(
        traced=traced,
        whole=module,
        training=training,
        state_bytes=OPTIMIZERS[optimizer],
        modes={name: one.training for name, one in module.named_modules()},
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
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    state_bytes: int = 0,
    keep: frozenset[str] = frozenset(),
    *,
    training: bool,
) -> ModuleGraph:
    """The graph of a module.

    Args:
        module: The module; its weights may be fake, or on the meta device.
        args: Example inputs.
        kwargs: Likewise.
        state_bytes: Bytes an element that an optimizer keeps of each trained parameter.
        keep: First names of what is stored even if the graph only reads it.
        training: Whether the backward pass is wanted.

    Raises:
        FrontendError: It cannot be traced.
    """
    held = materialised(module)
    program = export_module(held, args, kwargs)
    for rewrite in (replace_attention, replace_cross_entropy, keep_composites):
        rewrite(program.graph_module)
    captured = capture(held, program, DECOMPOSITIONS, training=training)
    return module_graph(captured, type(module).__name__, state_bytes, keep)


def _example(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments.

    Raises:
        OptionError: None are given.
    """
    if given is None:
        raise OptionError("a PyTorch module is traced with example inputs: give example_inputs")
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple | list):
        return tuple(given), {}
    return (given,), {}
