"""`compile` for PyTorch modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from partitioner.compiled.module import ModuleProgram
from partitioner.cost_model.cluster import Cluster
from partitioner.frontends.torch.attention import replace_attention
from partitioner.frontends.torch.capture import capture, export_module, materialised
from partitioner.frontends.torch.composites import keep_composites
from partitioner.frontends.torch.decompositions import DECOMPOSITIONS
from partitioner.frontends.torch.graph import ModuleGraph, module_graph
from partitioner.frontends.torch.losses import replace_losses
from partitioner.frontends.torch.source import Example
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.no_gc import no_collection
from partitioner.search.explicit import Request
from partitioner.search.limits import MOST_EXPLICIT
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.parallel import batch_inputs, parallel_constraints, parallel_mesh
from partitioner.strategies.spaces import SearchError

if TYPE_CHECKING:
    from partitioner.compiler import Clock
    from partitioner.frontends.model import GivenModule

#: Bytes that each optimizer keeps of an element of a parameter, beside it and its gradient.
OPTIMIZERS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "sgd": 0,
    "momentum": 4,
    "rmsprop": 4,
    "adagrad": 4,
}


#: Whether the backward pass may compute again what it reads.
Recompute = bool | Literal["auto"]


@dataclass(frozen=True)
class ModuleOptions:
    """What is asked of a module's program beside the request.

    Attributes:
        training: Whether it has a backward pass.
        optimizer: One of `OPTIMIZERS`.
        parallel: Kind of parallelism, see `partitioner.strategies.parallel`; None for the cheapest.
        recompute: Whether the backward pass may compute again what it reads; "auto" for where no
            plan that keeps it fits, or by levels where memory forbids a cheaper one.

    Raises:
        OptionError: There is no such optimizer, `recompute` is none of these, or one that is for
            training is given without it.
    """

    training: bool = False
    optimizer: str = "adamw"
    parallel: str | None = None
    recompute: Recompute = "auto"

    def __post_init__(self) -> None:
        if not (isinstance(self.recompute, bool) or self.recompute == "auto"):
            raise OptionError(f"recompute {self.recompute!r} is not one of 'auto', True, False")
        if self.recompute is True and not self.training:
            raise OptionError("recompute is for training: inference keeps nothing")
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise OptionError(
                f"optimizer {self.optimizer!r} is not one of {known}: optimizers that are not "
                "elementwise cannot work on shards"
            )
        if self.parallel is not None and not self.training:
            raise OptionError("parallel is for training; give constraints for inference")

    def applied(self, request: Request, devices: int) -> Request:
        """The request with the search space that these options have.

        Raises:
            SearchError: The kind of parallelism and the mesh do not fit each other.
        """
        if self.parallel is not None and request.strategy == "inter":
            raise SearchError("parallel shards operators; leave it out with strategy 'inter'")
        if self.training and request.strategy == "auto":
            request = replace(request, strategy="intra")
        if self.parallel is None or devices == 1:
            return request
        return replace(request, mesh=parallel_mesh(self.parallel, devices, request.mesh))

    def offering(self, traced: ModuleGraph, plan: Plan | None) -> ModuleGraph:
        """With the graph that is planned first.

        Args:
            traced: The module's graph, in which all values are kept.
            plan: Whose decisions are kept; None for none.

        Raises:
            OptionError: Values may be computed again, and a plan says which are.
        """
        if plan is not None:
            if self.recompute is True:
                raise OptionError("recompute=True: the plan in constraints says what is recomputed")
            same = traced.of(plan.nodes)
            return same if same.graph.digest == plan.graph_digest else traced
        return replace(traced, graph=traced.offered) if self.recompute is True else traced

    def bound(self, request: Request, traced: ModuleGraph) -> Request:
        """The request with the constraints of the kind of parallelism."""
        if self.parallel is None or request.mesh is None:
            return request
        graph = traced.graph
        batch = batch_inputs(graph, [name for name in traced.inputs if name in graph.inputs])
        pins = parallel_constraints(self.parallel, graph, batch, request.mesh)
        held = request.constraints
        return replace(
            request, constraints=Constraints((*held.pins, *pins.pins), held.plan, pins.busy)
        )


def compile_module(
    given: GivenModule, cluster: Cluster, request: Request, clock: Clock
) -> ModuleProgram:
    """Trace, plan and lower a module (see `partitioner.compile`).

    Raises:
        PartitionerError: As `partitioner.compile`.
    """
    from partitioner.compiler import plan_graph

    request = given.applied(request, len(cluster))
    with clock("tracing the module"):
        traced = given.traced
    options = given.options
    traced = options.offering(traced, request.constraints.plan)

    def offered() -> tuple[Graph, Request] | None:
        more = replace(traced, graph=traced.offered)
        if not more.graph.optional:
            return None
        return more.graph, options.bound(request, more)

    bound = options.bound(request, traced)
    free = options.training and options.recompute == "auto" and request.constraints.plan is None
    outcome, found = plan_graph(traced.graph, (), cluster, bound, clock, offered if free else None)
    result = ModuleProgram(
        traced=replace(traced, graph=outcome.graph),
        whole=given.module,
        training=options.training,
        optimizer=options.optimizer,
        source=given.source,
        modes={name: one.training for name, one in given.module.named_modules()},
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


@no_collection()
def trace_module(
    module: nn.Module,
    example: Example,
    options: ModuleOptions,
    keep: frozenset[str] = frozenset(),
) -> ModuleGraph:
    """The graph of a module.

    Args:
        module: The module; its weights may be fake, or on the meta device.
        example: Arguments to trace it with.
        options: What is wanted of it.
        keep: First names of what is stored even if the graph only reads it.

    Raises:
        FrontendError: It cannot be traced.
    """
    seen: set[int] = set()

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        """One tensor given twice would be traced as one input."""
        again = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.detach().clone() if again else tensor

    given = pytree.tree_map_only(torch.Tensor, distinct, (example.args, dict(example.kwargs)))
    held = materialised(module)
    program = export_module(held, *given)
    for rewrite in (replace_attention, replace_losses, keep_composites):
        rewrite(program.graph_module)
    captured = capture(held, program, DECOMPOSITIONS, training=options.training)
    return module_graph(captured, type(module).__name__, OPTIMIZERS[options.optimizer], keep)
