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
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from partitioner.solver.milp.engines import HIGHS, Engine, solve_milp
from partitioner.solver.milp.program import Milp, Row
from partitioner.solver.pairwise.model import Model
from partitioner.solver.pairwise.problem import Floats, Ints, index_in_group, offsets_of
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
    cost, matrix, lower, upper = _program(model)
    scale = max(1.0, float(cost.max(initial=0.0)) / 1e6)
    milp = _milp(cost / scale, matrix, lower, upper, len(model.usage))
    result = solve_milp(milp, Work.within(time_limit_s), gap, engine=engine)
    if not result.values:
        return None, result.bound * scale
    values = np.array(result.values)
    chosen = [int(values[a:b].argmax()) for a, b in pairwise(model.graph.offsets)]
    return np.array(chosen, dtype=np.int64), result.bound * scale


def _milp(cost: Floats, matrix: Any, lower: Floats, upper: Floats, strategies: int) -> Milp:
    """The program as data; each row has one finite side, or both equal."""
    total, by_row = len(cost), matrix.tocsr()
    rows = (
        Row(
            tuple(by_row.indices[a:b].tolist()),
            tuple(by_row.data[a:b].tolist()),
            0 if math.isfinite(least) else -1,
            most,
        )
        for (a, b), least, most in zip(
            pairwise(by_row.indptr.tolist()), lower.tolist(), upper.tolist(), strict=True
        )
    )
    return Milp(
        tuple(cost.tolist()),
        (0.0,) * total,
        (1.0,) * total,
        (True,) * strategies + (False,) * (total - strategies),
        tuple(rows),
    )


def _program(model: Model) -> tuple[Floats, Any, Floats, Floats]:
    """Costs, matrix by columns, lower and upper sides of the rows."""
    g, sizes, tails = model.graph, model.graph.sizes, model.graph.tails
    strategies = len(model.usage)
    nodes = np.repeat(np.arange(g.nodes), sizes)
    forward = np.flatnonzero(tails < g.heads)
    areas = sizes[tails[forward]] * sizes[g.heads[forward]]
    arc, inner = np.repeat(forward, areas), index_in_group(areas)
    cost = g.entries[g.tables[arc] + inner]
    kept = np.flatnonzero(np.isfinite(cost))
    arc, inner, cost = arc[kept], inner[kept], cost[kept]
    width = sizes[g.heads[arc]]
    p, q = inner // width, inner % width
    first = offsets_of(sizes[tails])  # marginal rows of each arc's tail
    marginals = int(first[-1])
    pair = strategies + np.arange(len(arc))
    strategy = np.repeat(g.offsets[tails], sizes[tails]) + index_in_group(sizes[tails])
    usage_rows, usage_columns, usage = _usage(model, nodes)
    scale = np.maximum(model.rows.capacity, 1.0)
    row = np.concatenate([
        nodes, g.nodes + np.arange(marginals), g.nodes + first[arc] + p,
        g.nodes + first[g.back[arc]] + q, g.nodes + marginals + usage_rows,
    ])  # fmt: skip
    column = np.concatenate([np.arange(strategies), strategy, pair, pair, usage_columns])
    value = np.concatenate([
        np.ones(strategies), -np.ones(marginals), np.ones(2 * len(pair)), usage / scale[usage_rows]
    ])  # fmt: skip
    rows = len(model.rows.capacity)
    shape = (g.nodes + marginals + rows, strategies + len(pair))
    matrix = sp.csc_matrix((value, (row, column)), shape=shape)
    sides = np.concatenate([np.ones(g.nodes), np.zeros(marginals)])
    upper = np.concatenate([sides, model.rows.capacity / scale])
    lower = np.concatenate([sides, np.full(rows, -np.inf)])
    return np.concatenate([g.unary, cost]), matrix, lower, upper


def _usage(model: Model, nodes: Ints) -> tuple[Ints, Ints, Floats]:
    """Row, column and value of each usage in a memory row."""
    rows = model.rows
    spans = np.maximum(rows.last - rows.first, 0)[nodes]
    spans = np.where(model.usage > 0, spans, 0)
    column = np.repeat(np.arange(len(nodes)), spans)
    return rows.first[nodes[column]] + index_in_group(spans), column, model.usage[column]
