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
    """A kind of parallelism that is asked of a graph.

    Attributes:
        graph: The graph.
        axes: The mesh axes of the kind and their sizes; at least one.
        alone: Whether no other kind is asked for beside it.
        others: Sizes of the axes of the others, as far as they are known.
    """

    graph: Graph
    axes: Mapping[str, int]
    alone: bool = True
    others: tuple[int, ...] = ()

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
    """A kind of parallelism.

    Attributes:
        word: Its name in `parallel=`.
        axes: The mesh axes that it may be given, by their usual names: it needs one of them at
            least, and has the first if no mesh is given.
        constraints: Makes its constraints on a graph; refuses a graph that it cannot cut with a
            `ConstraintError`. None: it is no matter of one mesh (stages).
        notes: Notes on what a plan of the graph does with it, for the summary.
        cuts_batch: Whether it cuts the batch, in equal parts if devices are to do equal work.
        lacks: The models that have no such kind, each with the reason.
        stored: What a trace of these models must store for it, see `ModuleOptions.at_rest`.
    """

    word: str
    axes: tuple[str, ...]
    constraints: Callable[[Asked], Constraints] | None
    notes: Callable[[Asked, Plan], tuple[str, ...]] = _no_notes
    cuts_batch: bool = False
    lacks: Mapping[ModelKind, str] = field(default_factory=dict)
    stored: Mapping[ModelKind, AtRest] = field(default_factory=dict)
