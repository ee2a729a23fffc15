"""Random intra-operator problems, and the referee and the optimum written a second time."""

import itertools
import random
from itertools import accumulate

import numpy as np

from partitioner.solver.pairwise.model import Model, build
from partitioner.solver.pairwise.problem import FORBIDDEN, Pairwise
from partitioner.solver.pairwise.relax import prune


def whole(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def ragged(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    flat = [value for values in lists for value in values]
    return whole(flat), whole([0, *accumulate(map(len, lists))])


def make(
    costs: list[list[int]],
    usages: list[list[int]],
    intervals: list[tuple[int, int]],
    edges: list[tuple[int, int]],
    edge_costs: list[list[int]],
    limit: int | None,
) -> Pairwise:
    flat, offsets = ragged(costs)
    pairs, edge_offsets = ragged(edge_costs)
    return Pairwise(
        offsets,
        flat,
        ragged(usages)[0],
        whole([end for interval in intervals for end in interval]).reshape(-1, 2),
        whole([end for edge in edges for end in edge]).reshape(-1, 2),
        edge_offsets,
        pairs,
        limit,
    )


def instance(seed: int, nodes: int = 6, most: int = 4, scale: int = 20) -> Pairwise:
    """Forbidden entries, parallel edges, self loops, zero-length intervals; tight or no limit."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, most) for _ in range(nodes)]
    forbid = draw.choice([0.0, 0.1, 0.4])

    def cost() -> int:
        return (
            FORBIDDEN * draw.randint(1, 1000) if draw.random() < forbid else draw.randint(0, scale)
        )

    costs = [
        [cost() if draw.random() < 0.3 else draw.randint(0, scale) for _ in range(k)] for k in sizes
    ]
    usages = [[draw.randint(0, 10) for _ in range(k)] for k in sizes]
    ends = [sorted((draw.randint(0, 8), draw.randint(0, 8))) for _ in range(nodes)]
    edges = [
        (draw.randrange(nodes), draw.randrange(nodes)) for _ in range(draw.randint(0, 2 * nodes))
    ]
    tables = [[cost() for _ in range(sizes[u] * sizes[v])] for u, v in edges]
    limit = draw.choice([None, draw.randint(5, 6 * nodes)])
    return make(costs, usages, [(a, b) for a, b in ends], edges, tables, limit)


def second_opinion(problem: Pairwise, chosen: tuple[int, ...]) -> tuple[int, int, bool]:
    """Cost, peak usage, and whether the choice is feasible: entry by entry, time by time."""
    sizes = [int(b - a) for a, b in itertools.pairwise(problem.offsets)]
    terms = [int(problem.costs[problem.offsets[v] + p]) for v, p in enumerate(chosen)]
    for e, (u, v) in enumerate(problem.edges.tolist()):
        at = problem.edge_offsets[e] + chosen[u] * sizes[v] + chosen[v]
        terms.append(int(problem.edge_costs[at]))
    horizon = int(problem.intervals.max()) if sizes else 0
    peak = max(
        (
            sum(
                int(problem.usages[problem.offsets[v] + p])
                for v, p in enumerate(chosen)
                if problem.intervals[v, 0] <= time < problem.intervals[v, 1]
            )
            for time in range(horizon)
        ),
        default=0,
    )
    fits = problem.limit is None or peak <= problem.limit
    return sum(terms), peak, fits and max(terms, default=0) < FORBIDDEN


def optimum(problem: Pairwise) -> int | None:
    """The least cost of a feasible choice, by trying all."""
    sizes = [range(int(b - a)) for a, b in itertools.pairwise(problem.offsets)]
    tried = (second_opinion(problem, chosen) for chosen in itertools.product(*sizes))
    return min((cost for cost, _, feasible in tried if feasible), default=None)


#: Seeds of `instance` below 80 without a feasible choice, which presolve alone refutes, and seeds
#: of nine nodes below 60 that `pruned` refutes. A test checks both lists; those of steps after
#: presolve take all other seeds.
INFEASIBLE = frozenset(
    [6, 14, 15, 19, 22, 23, 24, 29, 33, 37, 42, 43, 49, 51, 57, 58, 59, 63, 69, 71, 77, 78, 79]
)
FEASIBLE = [seed for seed in range(80) if seed not in INFEASIBLE]
REFUTED_OF_NINE = frozenset(
    [2, 5, 8, 13, 24, 25, 30, 31, 32, 33, 34, 35, 36, 37, 39, 43, 46, 48, 50, 51, 53, 55, 56, 59]
)


def pruned(problem: Pairwise) -> Model | None:
    """The model of a problem; None if forbidden strategies and pairs refute it at once."""
    usable = np.logical_or.reduceat(problem.costs < FORBIDDEN, problem.offsets[:-1])
    return prune(build(problem)) if usable.all() else None


def presolved(seed: int, nodes: int = 6) -> Model:
    """The model of an instance that presolve does not refute."""
    model = pruned(instance(seed, nodes))
    assert model is not None, f"presolve refutes instance {seed}"
    return model


def choices(model: Model) -> list[np.ndarray]:
    """All choices of a small model."""
    sizes = np.diff(model.graph.offsets).tolist()
    return [np.array(chosen) for chosen in itertools.product(*map(range, sizes))]
