"""A kind of parallelism: a row of the table in `strategies.kinds.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from partitioner.frontends.torch.options import AtRest
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.kinds.batch import Followed, batch_of

#: Models that may lack a kind: any ONNX model, a module in inference, a module in training.
ModelKind = Literal["onnx", "inference", "training"]


@dataclass(frozen=True)
class Asked:
    """A kind of parallelism that is asked of a graph."""

    graph: Graph
    axes: Mapping[str, int]  #: The mesh axes of the kind and their sizes; at least one.
    alone: bool = True  #: Whether no other kind is asked for beside it.
    others: tuple[int, ...] = ()  #: Sizes of the axes of the others, as far as they are known.

    @property
    def axis(self) -> str:
        """The only axis of a kind that has one."""
        (axis,) = self.axes
        return axis

    @property
    def size(self) -> int:
        """The size of the only axis of a kind that has one."""
        return self.axes[self.axis]

    @cached_property
    def batch(self) -> Followed:
        """The batch of the graph, followed through it."""
        return batch_of(self.graph)


def whole_operators(
    graph: Graph, plan: Plan, axis: str, factors: Mapping[str, Container[str] | None]
) -> str:
    """Operators of the forward pass, for people, that a plan does not cut over an axis.

    By name, those that were to be: along one of these factors, of None along any.
    """
    whole = []
    for node in graph.nodes:
        if node.name not in factors or node.name in graph.backward or node.name not in plan.nodes:
            continue
        decision, own = plan.nodes[node.name], factors[node.name]
        cuts = (cut for name, cut in decision.cuts.items() if own is None or name in own)
        if axis in plan.groups[decision.group].names and not any(axis in cut.axes for cut in cuts):
            whole.append(f"{node.name} ({node.op.rpartition('::')[2]})")
    more = f" and {len(whole) - 3} more" if len(whole) > 3 else ""
    return ", ".join(whole[:3]) + more


@dataclass(frozen=True)
class Kind:
    """A kind of parallelism."""

    word: str  #: Its name in `parallel=`.
    #: The mesh axes that it may be given, by their usual names: it needs one of them at least, and
    #: has the first if no mesh is given.
    axes: tuple[str, ...]
    #: Makes its constraints on a graph; refuses a graph that it cannot cut with a
    #: `ConstraintError`. None: it is no matter of one mesh (stages).
    constraints: Callable[[Asked], Constraints] | None
    #: Notes on what a plan of the graph does with it, for the summary.
    notes: Callable[[Asked, Plan], tuple[str, ...]] = lambda *_: ()
    #: Whether it cuts the batch, in equal parts if devices are to do equal work.
    cuts_batch: bool = False
    #: The models that have no such kind, each with the reason.
    lacks: Mapping[ModelKind, str] = field(default_factory=dict)
    #: What a trace of these models must store for it, see `ModuleOptions.at_rest`.
    stored: Mapping[ModelKind, AtRest] = field(default_factory=dict)
