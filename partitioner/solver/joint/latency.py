"""The latency of one request: proposals by local search, and bounds.

Devices run their nodes in the given order, so a plan is still one choice a node. Local search
improves the best of the plans that the throughput solver proposes, and of those that it starts
from.

    bound = max(longest path of least node times with free communication,
                least load of the busiest device)

The second is the optimum itself where every node loads all devices alike (SPMD).
"""

from __future__ import annotations

from partitioner.solver.joint.incumbents import (
    EFFORT_PER_CHOICE,
    Search,
    improve,
    offer_all,
    starts,
)
from partitioner.solver.problem import Problem
from partitioner.solver.referee import latency_s

#: Local search may spend so many node evaluations: a plan's latency costs one a node.
EFFORT = 400_000
#: Steps of a move, for each node.
NODE_STEPS = 5.5


def critical_path_s(problem: Problem) -> float:
    """The longest path with the best choice of every node and nothing to pay on edges."""
    done = [min(max(choice.load_s) for choice in choices) for choices in problem.nodes]
    seconds = tuple(done)
    for edge in sorted(problem.edges, key=lambda edge: edge.v):
        done[edge.v] = max(done[edge.v], done[edge.u] + seconds[edge.v])
    return max(done)


def propose(search: Search) -> None:
    """Offer plans of short latency."""
    problem = search.problem
    known = [] if search.best is None else [search.best]
    ranked = offer_all(search, [*starts(search), *known], "dynamic programming")
    effort = min(EFFORT // len(problem.nodes), EFFORT_PER_CHOICE * sum(map(len, problem.nodes)))
    improve(
        search,
        ranked,
        lambda state: (latency_s(problem, state.chosen),),
        effort,
        NODE_STEPS * len(problem.nodes),
    )
