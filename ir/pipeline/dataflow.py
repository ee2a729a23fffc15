"""The actions that an action of a pipeline waits for, from the edges between stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partitioner.ir.pipeline.actions import PipelineScheduleError

Edge = tuple[int, int]  #: Data flows forward from the first stage to the second, a later one.


@dataclass(frozen=True)
class Dataflow:
    """Neighbours of each stage, ascending."""

    predecessors: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]


def dataflow(stages: int, edges: Iterable[Edge] | None = None) -> Dataflow:
    """The neighbours of each stage.

    Args:
        edges: Pairs of stages; None: the chain 0-1, 1-2, ...

    Raises:
        PipelineScheduleError: An edge leads to no later stage.
    """
    pairs = [(i, i + 1) for i in range(stages - 1)] if edges is None else sorted(set(edges))
    for i, j in pairs:
        if not 0 <= i < j < stages:
            raise PipelineScheduleError(
                f"edge {i}-{j}: an edge leads from a stage to a later one of 0..{stages - 1}"
            )
    return Dataflow(
        tuple(tuple(i for i, j in pairs if j == stage) for stage in range(stages)),
        tuple(tuple(j for i, j in pairs if i == stage) for stage in range(stages)),
    )
