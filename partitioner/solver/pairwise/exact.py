"""The exact integer program of a reduced model, over the local polytope.

    min   sum_v cost_v . x_v  +  sum_uv cost_uv . e_uv
    (1)   sum_p x_v[p] = 1                                  every node
    (2)   sum_q e_uv[p, q] = x_u[p],  sum_p e_uv[p, q] = x_v[q]   every edge
    (3)   sum over live v of usage_v . x_v <= capacity      every memory row

x is binary, e continuous and not negative; forbidden pairs have no column. (2) as equalities over
continuous e is the tightest form of this size (Wainwright and Jordan, "Graphical models,
exponential families, and variational inference", 2008).
"""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.program import Milp, MilpBuilder
from partitioner.solver.pairwise.model import Model
from partitioner.solver.pairwise.problem import Ints
from partitioner.solver.work import Work


def columns(model: Model) -> int:
    """Columns of the program."""
    return len(model.usage) + int(np.isfinite(model.graph.entries).sum()) // 2


def solve_exactly(
    model: Model, time_limit_s: float, gap: float, engine: Engine = HIGHS
) -> tuple[Ints | None, float]:
    """Solve the program with one thread, to a relative gap.

    Returns:
        The best strategies known to the solver, if any, and a lower bound: infinite if there are
        none, minus infinity if the solver was stopped before it had one.
    """
    pairs = np.where(np.isfinite(model.graph.entries), model.graph.entries, 0.0)
    scale = max(1.0, max(model.graph.unary.max(initial=0.0), pairs.max(initial=0.0)) / 1e6)
    result = solve_milp(_program(model, scale), Work.within(time_limit_s), gap, engine=engine)
    if not result.values:
        return None, result.bound * scale
    values = np.array(result.values)
    chosen = [int(values[a:b].argmax()) for a, b in pairwise(model.graph.offsets)]
    return np.array(chosen, dtype=np.int64), result.bound * scale


def _program(model: Model, scale: float) -> Milp:
    """The program, costs in so many units; memory rows are in shares of their capacity."""
    g, sizes, first = model.graph, model.graph.sizes, model.graph.offsets.tolist()
    build = MilpBuilder()
    for cost in (g.unary / scale).tolist():
        build.column(cost=cost, upper=1.0, integer=True)
    for start, stop in pairwise(first):
        build.row(((x, 1.0) for x in range(start, stop)), 0, 1.0)
    ends = list(zip(g.tails.tolist(), g.heads.tolist(), strict=True))
    tables: list[Ints] = [np.zeros((0, 0), dtype=np.int64)] * len(ends)  # columns of pairs, or -1
    for arc, (u, v) in enumerate(ends):
        if u < v:
            costs = g.entries[g.tables[arc] : g.tables[arc] + sizes[u] * sizes[v]] / scale
            pairs = [
                build.column(cost=cost, upper=1.0) if math.isfinite(cost) else -1
                for cost in costs.tolist()
            ]
            tables[arc] = np.array(pairs, dtype=np.int64).reshape(sizes[u], sizes[v])
            tables[g.back[arc]] = tables[arc].T
    for (u, _), table in zip(ends, tables, strict=True):
        for x, row in enumerate(table.tolist(), start=first[u]):
            build.row([(x, -1.0), *((e, 1.0) for e in row if e >= 0)], 0, 0.0)
    capacity = np.maximum(model.rows.capacity, 1.0).tolist()
    held: list[list[tuple[int, float]]] = [[] for _ in capacity]
    live = zip(model.rows.first.tolist(), model.rows.last.tolist(), strict=True)
    for v, (begin, end) in enumerate(live):
        for x, at in product(range(first[v], first[v + 1]), range(begin, end)):
            held[at].append((x, float(model.usage[x]) / capacity[at]))
    for terms, most, unit in zip(held, model.rows.capacity.tolist(), capacity, strict=True):
        build.row(terms, -1, most / unit)
    return build.build()
