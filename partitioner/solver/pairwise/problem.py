"""The intra-operator problem as flat arrays, and its referee.

    min  sum_v cost_v[s_v] + sum_uv cost_uv[s_u, s_v]
    s.t. sum of usage_v[s_v] over the nodes live at t  <=  limit,   for every time t

A node is live during its half-open interval [lo, hi). Costs and usages are whole numbers in the
units of whoever states the problem; a cost of `FORBIDDEN` or more rules a strategy, or a pair of
strategies, out. The problem is that of Moffitt and Fegade, "The ASPLOS 2025 / EuroSys 2025 Contest
on Intra-Operator Parallelism for Distributed Deep Learning".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

from partitioner.solver.problem import SolverError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

#: A cost from here on means that the choice is not allowed (the contest's convention).
FORBIDDEN = 10**15


@dataclass(frozen=True)
class Pairwise:
    """Nodes with strategies, costs on nodes and on edges, one limit on the usage at any time.

    Strategy p of node v is entry `offsets[v] + p` of `costs` and `usages`; the pair (p, q) of
    edge e = (u, v) is entry `edge_offsets[e] + p * strategies(v) + q` of `edge_costs`.
    """

    offsets: Ints  #: First strategy of each node, and the number of all; (nodes + 1,).
    costs: Ints  #: Cost of each strategy, not negative; (strategies,).
    usages: Ints  #: Usage of each strategy, not negative; (strategies,).
    intervals: Ints  #: [lo, hi) of each node; equal ends are never live; (nodes, 2).
    edges: Ints  #: The two ends of each edge; (edges, 2).
    edge_offsets: Ints  #: First entry of each edge, and the number of all; (edges + 1,).
    edge_costs: Ints  #: Cost of each pair, row-major, not negative.
    limit: int | None  #: Largest usage at any time; None where there is no limit.

    def __post_init__(self) -> None:
        for fault in chain(_node_faults(self), _edge_faults(self), _value_faults(self)):
            raise SolverError(fault)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Ints:
        """Number of strategies of each node; (nodes,)."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class PairwiseOutcome:
    """Cost and usage of a choice of strategies, exact."""

    cost: int  #: Sum over the nodes and the edges.
    peak_usage: int  #: Largest usage at any time.
    peak_time: int | None  #: The first time at which it is reached; None if nothing is ever live.
    limit: int | None  #: The problem's limit.
    #: The first forbidden strategy or pair that was chosen, in words; empty if none.
    forbidden: str

    @property
    def fault(self) -> str:
        """The reason why the choice is infeasible; empty if it is feasible."""
        if self.limit is not None and self.peak_usage > self.limit:
            return f"usage {self.peak_usage} at time {self.peak_time} > limit {self.limit}"
        return self.forbidden


def offsets_of(counts: Ints | Flags) -> Ints:
    """First entry of each of consecutive groups of these sizes, and the number of all entries."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def index_in_group(counts: Ints) -> Ints:
    """Index of each entry within its group, of consecutive groups of these sizes."""
    index: Ints = np.arange(counts.sum()) - np.repeat(offsets_of(counts)[:-1], counts)
    return index


def evaluate(problem: Pairwise, chosen: Sequence[int]) -> PairwiseOutcome:
    """Price a choice of strategies, one index a node, exactly."""
    if len(chosen) != problem.nodes:
        raise SolverError(f"{len(chosen)} strategies for {problem.nodes} nodes")
    for node, (strategy, size) in enumerate(zip(chosen, problem.sizes.tolist(), strict=True)):
        if not 0 <= strategy < size:
            raise SolverError(f"strategy {strategy} of node {node} is not within its {size}")
    index = np.asarray(chosen, dtype=np.int64)
    picked = problem.offsets[:-1] + index
    node_costs = problem.costs[picked]
    u, v = problem.edges.T
    pair_costs = problem.edge_costs[
        problem.edge_offsets[:-1] + index[u] * problem.sizes[v] + index[v]
    ]
    change: dict[int, int] = {}
    usages = problem.usages[picked].tolist()
    for (low, high), usage in zip(problem.intervals.tolist(), usages, strict=True):
        if high > low:
            change[low] = change.get(low, 0) + usage
            change[high] = change.get(high, 0) - usage
    live = list(accumulate(change[time] for time in sorted(change)))
    peak = max(live, default=0)
    return PairwiseOutcome(
        # Python integers: a few entries of 1e18 exceed 64 bits
        sum(node_costs.tolist()) + sum(pair_costs.tolist()),
        peak,
        sorted(change)[live.index(peak)] if live else None,
        problem.limit,
        _forbidden(problem, index, node_costs, pair_costs),
    )


def _forbidden(problem: Pairwise, index: Ints, node_costs: Ints, pair_costs: Ints) -> str:
    for v in np.flatnonzero(node_costs >= FORBIDDEN)[:1]:
        return f"strategy {index[v]} of node {v} is forbidden (cost {node_costs[v]})"
    for e in np.flatnonzero(pair_costs >= FORBIDDEN)[:1]:
        u, v = problem.edges[e]
        return (
            f"strategies {index[u]} of node {u} and {index[v]} of node {v} are forbidden together "
            f"(cost {pair_costs[e]} of edge {e})"
        )
    return ""


def _node_faults(problem: Pairwise) -> Iterator[str]:
    if len(problem.offsets) < 1 or problem.offsets[0] != 0:
        yield "offsets of the nodes must start at 0"
    for v in np.flatnonzero(problem.sizes < 1)[:1]:
        yield f"node {v} has no strategy"
    total = problem.offsets[-1]
    for name, values in (("costs", problem.costs), ("usages", problem.usages)):
        if values.shape != (total,):
            yield f"{name} of shape {values.shape} for {total} strategies"
    if problem.intervals.shape != (problem.nodes, 2):
        yield f"intervals of shape {problem.intervals.shape} for {problem.nodes} nodes"
    low, high = problem.intervals[:, 0], problem.intervals[:, 1]
    for v in np.flatnonzero((low < 0) | (high < low))[:1]:
        yield f"interval [{low[v]}, {high[v]}) of node {v} is not one"


def _edge_faults(problem: Pairwise) -> Iterator[str]:
    ends, sizes = problem.edges, problem.sizes
    if ends.shape != (len(problem.edge_offsets) - 1, 2) or problem.edge_offsets[0] != 0:
        yield f"edges of shape {ends.shape} for {len(problem.edge_offsets)} offsets"
    for e in np.flatnonzero(((ends < 0) | (ends >= problem.nodes)).any(axis=1))[:1]:
        yield f"edge {e} joins nodes {ends[e].tolist()}, not within {problem.nodes} nodes"
    costs, pairs = np.diff(problem.edge_offsets), sizes[ends[:, 0]] * sizes[ends[:, 1]]
    for e in np.flatnonzero(costs != pairs)[:1]:
        u, v = ends[e]
        yield f"edge {e} has {costs[e]} costs for {sizes[u]} x {sizes[v]} strategies"
    if problem.edge_costs.shape != (problem.edge_offsets[-1],):
        yield f"{len(problem.edge_costs)} edge costs, not {problem.edge_offsets[-1]}"


def _value_faults(problem: Pairwise) -> Iterator[str]:
    for name, values in (
        ("cost", problem.costs),
        ("usage", problem.usages),
        ("cost of an edge", problem.edge_costs),
    ):
        for entry in np.flatnonzero(values < 0)[:1]:
            yield f"{name} {values[entry]} is negative"
    if problem.limit is not None and problem.limit < 0:
        yield f"usage limit {problem.limit} is negative"
