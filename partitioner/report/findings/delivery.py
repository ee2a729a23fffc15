"""Ranks bring a module's results whole to every rank, for the caller and beside the plan."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from partitioner.cost_model.evaluate import Evaluation
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan, resolve
from partitioner.ir.types import dense_bytes

#: Results are spoken of if they are at least so many bytes, and this share of those of the fullest
#: device: to gather less takes microseconds.
_LEAST_BYTES = 1 << 20
_LEAST_SHARE = 0.01


def delivery_notes(
    graph: Graph, plan: Plan, evaluation: Evaluation, delivered: AbstractSet[str], ranks: int
) -> tuple[str, ...]:
    """Large results that not every rank has whole: a plan's figures leave out their delivery."""
    apart = {}
    for placed in resolve(graph, plan):
        for value, at in placed.results():
            is_whole = at.mesh.size() == ranks and not at.sharding.axes
            if value in delivered and value in graph.outputs and not is_whole:
                apart[value] = graph.types[value]
    nbytes = sum(dense_bytes(one.numel, one.dtype) for one in apart.values())
    fullest = max((peak.bytes for peak in evaluation.exact_peak.values()), default=0)
    if nbytes < max(_LEAST_BYTES, _LEAST_SHARE * fullest):
        return ()
    largest = max(apart.values(), key=lambda one: dense_bytes(one.numel, one.dtype))
    note = (
        f"every rank returns the module's results whole: to gather {units.size(nbytes)} of them "
        f"(the largest is {largest}) takes time and memory that these figures leave out"
    )
    return (note,)
