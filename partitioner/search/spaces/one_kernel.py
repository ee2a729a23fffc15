"""Choices in which nodes that one kernel can compute are on one device.

Such nodes cost next to nothing (see `cost_model.profiles.forms.chain`), so the solver is as content
with a cut between a Conv and its activation as with one behind both. Only the latter is one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from partitioner.cost_model.profiles.forms import chain
from partitioner.ir.graph import Graph
from partitioner.problem.build import Built

#: How much dearer all moves together may make a plan: less than a kernel that is torn apart costs,
#: which is in no price.
MOST_DEARER = 2e-3


def beside_producers(
    graph: Graph, built: Built, chosen: Sequence[int], cost: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """The choices, with nodes moved to the device of the node whose kernel computes them.

    Args:
        graph: The graph of the problem.
        built: The problem.
        chosen: A choice for each node.
        cost: The referee's cost of choices; no move is made that brings it above the first one by
            more than `MOST_DEARER`, and none if that is infinite.
    """
    picks = list(chosen)
    known: float | None = None
    for index, node in enumerate(graph.nodes):
        *_, producer = chain(graph, node.name) or (None,)
        if producer is None:
            continue
        above = built.candidates[producer.name][picks[graph.order[producer.name]]]
        own = built.candidates[node.name]
        if above.mesh.size() > 1 or own[picks[index]].mesh == above.mesh:
            continue
        pick = next((i for i, placed in enumerate(own) if placed.mesh == above.mesh), None)
        if pick is None:
            continue
        known = cost(picks) if known is None else known
        moved = [*picks[:index], pick, *picks[index + 1 :]]
        if math.isfinite(known) and cost(moved) <= known * (1 + MOST_DEARER):
            picks = moved
    return tuple(picks)
