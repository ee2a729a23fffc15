"""A kind of parallelism: a row of the table in `strategies.kinds.parallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def _no_notes(_asked: Asked, _plan: Plan) -> tuple[str, ...]:
    return ()


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
    notes: Callable[[Asked, Plan], tuple[str, ...]] = _no_notes
    #: Whether it cuts the batch, in equal parts if devices are to do equal work.
    cuts_batch: bool = False
    #: The models that have no such kind, each with the reason.
    lacks: Mapping[ModelKind, str] = field(default_factory=dict)
    #: What a trace of these models must store for it, see `ModuleOptions.at_rest`.
    stored: Mapping[ModelKind, AtRest] = field(default_factory=dict)
