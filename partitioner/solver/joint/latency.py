"""The latency of one request: proposals by list scheduling and local search, and bounds.

Devices run their nodes in the given order, so a plan is still one choice a node. A plan is
proposed by the throughput solver, by each group alone, and by a list scheduler that lets each
node take the choice that finishes first; local search improves the best of them.

    bound = max(longest path of least node times with free communication,
                least load of the busiest device)

The second is the optimum itself where every node loads all devices alike (SPMD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from partitioner.solver.joint.incumbents import (
    EFFORT_PER_CHOICE,
    Search,
    improve,
    offer_all,
    starts,
)
from partitioner.solver.joint.local_search import Tables, tables
from partitioner.solver.problem import Problem
from partitioner.solver.referee import latency_s, occupy

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


def list_schedule(data: Tables) -> tuple[int, ...]:
    """Each node in order takes the choice that finishes first, the least loaded of equals."""
    free = [0.0] * data.problem.devices
    done: list[float] = []
    chosen: list[int] = []
    for node in range(len(data.load)):
        options = []
        for choice in range(len(data.load[node])):
            end, total, after = _finish(data, node, choice, chosen, done, free)
            options.append((end, total, choice, after))
        end, _, choice, free = min(options)
        chosen.append(choice)
        done.append(end)
    return tuple(chosen)


def _finish(
    data: Tables,
    node: int,
    choice: int,
    chosen: Sequence[int],
    done: Sequence[float],
    free: Sequence[float],
) -> tuple[float, float, list[float]]:
    """Run one more node, each of its values sent just before it.

    Returns:
        The second at which it is done, seconds on all devices, when each device is free then.
    """
    free = list(free)
    total = 0.0
    start = 0.0
    for other, table in data.near[node]:
        if other > node:
            continue
        items = table[choice][chosen[other]]
        if items is None:
            return math.inf, math.inf, free
        ready = done[other]
        for item in items:
            load = data.item_load[item]
            ready = occupy(free, load, ready)
            total += sum(seconds for _, seconds in load)
        start = max(start, ready)
    load = data.load[node][choice]
    end = occupy(free, load, start)
    return end, total + sum(seconds for _, seconds in load), free


def propose(search: Search) -> None:
    """Offer plans of short latency."""
    problem, data = search.problem, tables(search.problem)
    plans = [list_schedule(data), *starts(search)]
    if search.best is not None:
        plans.append(search.best)
    ranked = offer_all(search, plans, "list scheduling")
    effort = min(EFFORT // len(problem.nodes), EFFORT_PER_CHOICE * sum(map(len, problem.nodes)))
    improve(
        search,
        ranked,
        lambda state: (latency_s(problem, state.chosen),),
        effort,
        NODE_STEPS * len(problem.nodes),
    )
