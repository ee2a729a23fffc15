"""Choices in which nodes that one kernel can compute are on one device.

Such nodes cost nothing (see `cost_model.kernels`), so the solver is as content with a cut between a
Conv and its activation as with one behind both. Only the latter is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from partitioner.cost_model.kernels import computed_within
from partitioner.ir.graph import Graph
from partitioner.problem.build import Built


def beside_producers(
    graph: Graph, built: Built, chosen: Sequence[int], cost: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """The choices, with nodes moved to the device of the node whose kernel computes them.

    Args:
        graph: The graph of the problem.
        built: The problem.
        chosen: A choice for each node.
        cost: The referee's cost of choices; a move that raises it is not made.
    """
    within, picks = computed_within(graph), list(chosen)
    known: float | None = None
    for index, node in enumerate(graph.nodes):
        if node.name not in within:
            continue
        producer = within[node.name]
        above = built.candidates[producer][picks[graph.order[producer]]]
        own = built.candidates[node.name]
        if above.mesh.size() > 1 or own[picks[index]].mesh == above.mesh:
            continue
        pick = next((i for i, placed in enumerate(own) if placed.mesh == above.mesh), None)
        if pick is None:
            continue
        known = cost(picks) if known is None else known
        moved = [*picks[:index], pick, *picks[index + 1 :]]
        if cost(moved) <= known * (1 + 1e-9):
            picks = moved
    return tuple(picks)
