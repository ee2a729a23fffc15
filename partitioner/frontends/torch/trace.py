"""A PyTorch module and its trace."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partitioner.backends.torch.signature import Signature
from partitioner.frontends.torch.attention import replace_attention
from partitioner.frontends.torch.capture import capture, export_module, materialised
from partitioner.frontends.torch.composites import keep_composites
from partitioner.frontends.torch.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.dtypes import state_dtypes
from partitioner.frontends.torch.graph import SEED, ModuleGraph, module_graph
from partitioner.frontends.torch.losses import replace_losses
from partitioner.frontends.torch.options import OPTIMIZERS, ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.ir.graph import Graph
from partitioner.no_gc import no_collection


@dataclass(frozen=True)
class TracedModule:
    """A module and its graph.

    Attributes:
        module: The module itself.
        traced: The graph, and the parameters, buffers and results that its values stand for.
        options: Options of the trace.
        modes: Whether each submodule, by name, was in training mode.
    """

    module: nn.Module
    traced: ModuleGraph
    options: ModuleOptions = field(default_factory=ModuleOptions)
    modes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The forward pass and, in training, the backward pass."""
        return self.traced.graph

    def on(self, graph: Graph) -> TracedModule:
        """The module with another of its graphs: with offers, or with some of them taken."""
        return replace(self, traced=replace(self.traced, graph=graph))

    def of(self, names: Container[str]) -> TracedModule:
        """The module with the graph that has nodes of these names, if there is one."""
        return replace(self, traced=self.traced.of(names))

    @cached_property
    def signature(self) -> Signature:
        """How the module is called."""
        traced, inputs = self.traced, self.graph.inputs
        return Signature(
            traced.captured.in_spec,
            traced.captured.out_spec,
            traced.inputs,
            traced.captured.arguments,
            {name: self.graph.types[name] for name in inputs},
            traced.results,
            traced.captured.others,
            SEED if SEED in inputs else "",
            traced.tangent if traced.tangent in inputs else "",
            traced.captured.autocast.dtype,
        )

    def stored_values(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers of the module, by value of the graph."""
        tensors = self.traced.captured.tensors
        return {value: tensors[name].detach() for name, value in self.traced.stored.items()}


@no_collection()
def trace_module(
    module: nn.Module,
    example: Example,
    options: ModuleOptions,
    keep: frozenset[str] = frozenset(),
) -> TracedModule:
    """Trace a module.

    Args:
        module: The module; its weights may be fake, or on the meta device.
        example: Arguments to trace it with.
        options: Options of the trace.
        keep: First names of parameters and buffers that are stored though they are only read.

    Raises:
        FrontendError: It cannot be traced.
    """
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from its second use on: it would be traced as one input."""
        repeated = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.detach().clone() if repeated else tensor

    arguments = pytree.tree_map_only(torch.Tensor, distinct, (example.args, dict(example.kwargs)))
    traceable = materialised(module)
    program = export_module(traceable, *arguments, training=options.training)
    for rewrite in (state_dtypes, replace_attention, replace_losses, keep_composites):
        rewrite(program.graph_module)
    captured = capture(traceable, program, DECOMPOSITIONS, training=options.training)
    graph = module_graph(captured, type(module).__name__, OPTIMIZERS[options.optimizer], keep)
    modes = {name: part.training for name, part in module.named_modules()}
    return TracedModule(module, graph, options, modes)
