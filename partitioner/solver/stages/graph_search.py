"""Plans of graphs in stages, with a bound on all plans.

A graph of few downsets is cut at any of them, exactly. One of more is cut along several orders;
then the best cut's ends move: to any downset a few nodes away, and along other orders that pass
through them, all at once, until no move helps. Its bound is that of `graph_bound`, on all cuts.
"""

from __future__ import annotations

import math
import operator
import random
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from partitioner.solver.milp.engines import HIGHS, Engine
from partitioner.solver.outcome import Infeasible, Status, relative_gap
from partitioner.solver.stages.cut import cut_stages, find_cut
from partitioner.solver.stages.cut_orders import first_orders, random_order
from partitioner.solver.stages.graph import (
    Downset,
    Layout,
    PlannedStage,
    StageGraph,
    around,
    between,
    enumerate_downsets,
)
from partitioner.solver.stages.graph_bound import bound_plans
from partitioner.solver.stages.packed import StageSeconds, first_ranges
from partitioner.solver.work import Work

#: Entries of all options that arrays are meant for: 1 GB.
MOST_ENTRIES = 10**8
#: Stages that are packed between two cuts, and cuts where others are to be tried.
PACKED, COARSE_CUTS = 400, 10
#: A graph of so few downsets is cut at them at once; one of more along orders first.
FEW_DOWNSETS = 100
#: Downsets that are tried together at least, however many kinds of stages there are.
LEAST_DOWNSETS = 60
#: Downsets near a cut's ends that are tried together, and rounds without a better cut at the end.
NEAR = 240
PATIENCE = 8
#: Relative difference that rounding may make between two sums of the same plan.
ROUNDING = 1e-9


@dataclass(frozen=True)
class StagePlan:
    """A plan with its certificate."""

    #: None where no plan was found below some load, which is the load then.
    stages: tuple[PlannedStage, ...] = ()
    load_s: float = math.inf  #: Seconds a sample of its slowest stage.
    bound_s: float = 0.0  #: No plan takes less.
    status: Status = "feasible"  #: `optimal` within the gap asked for.
    solver: str = "bisection / bisection"  #: Methods that found the plan / proved the bound.


def plan_stages(
    graph: StageGraph, work: Work, *, gap: float = 0.0, seed: int = 0, engine: Engine = HIGHS
) -> StagePlan:
    """Plan a graph, until no plan is better by more than `gap` or the work is done.

    Raises:
        SolverError: No number of devices holds any node.
        Infeasible: No plan fits, or none was found; `proven` tells which.
    """
    best, bound_s = StagePlan(), 0.0
    downsets = enumerate_downsets(graph)
    if downsets is None or len(downsets) > FEW_DOWNSETS:
        for order in first_orders(graph):
            if not (best.stages and work.over):
                best = _better(graph, between((), order), best, work, gap)
    if downsets is None or len(downsets) > _most_downsets(graph):
        # the best cut after its ends have moved, until none of several moves in a row helps
        rng, idle = random.Random(seed), 0  # noqa: S311 - no secret
        while idle < PATIENCE and not work.over:
            stages = (frozenset(stage.configs) for stage in best.stages)
            ends = tuple(accumulate(stages, operator.or_))[:-1]
            if idle == 0 and ends:
                family = around(graph, ends, NEAR)
            else:
                family = between(ends, random_order(graph, rng))
            moved = _better(graph, family, best, work, gap)
            idle = 0 if moved.load_s < best.load_s * (1 - ROUNDING) else idle + 1
            best = moved
        best = replace(best, solver="orders / bisection")
    elif not (best.stages and work.over):
        layout = Layout(graph, downsets)
        best = best_cut(layout, work, gap, best)
        bound_s = best.bound_s
        if not best.stages:
            raise _refused(layout, work)
    best = _bounded(graph, replace(best, bound_s=bound_s), work, gap, engine)
    met = relative_gap(best.load_s, best.bound_s) <= gap
    return replace(best, status="optimal" if met else "time_limit" if work.stopped else "feasible")


def _bounded(
    graph: StageGraph, best: StagePlan, work: Work, gap: float, engine: Engine
) -> StagePlan:
    """The plan with the bound of the relaxation, if that is higher and the gap is not met.

    Raises:
        Infeasible: There is no plan.
    """
    if best.stages and relative_gap(best.load_s, best.bound_s) <= gap:
        return best
    several_s = bound_plans(graph, best.load_s, work, engine)
    if not best.stages and math.isinf(several_s):
        raise Infeasible("no cut into stages: the memory of all devices together is short")
    if not best.stages:
        raise Infeasible("no cut along the orders that were tried fits", proven=False)
    whole = Layout(graph, (frozenset(), frozenset(graph.nodes)))
    alone = best_cut(whole, Work(), 0.0, best)  # which takes no time
    relaxed_s = min(alone.bound_s, several_s)
    finder, _, prover = best.solver.partition(" / ")
    return replace(
        alone,
        bound_s=max(relaxed_s, best.bound_s),
        solver=f"{finder} / {'relaxation' if relaxed_s > best.bound_s else prover}",
    )


def _most_downsets(graph: StageGraph) -> int:
    """Downsets of whose stages the arrays are small enough."""
    ways = len(first_ranges(graph)) * len(graph.degrees)
    return max(LEAST_DOWNSETS, math.isqrt(MOST_ENTRIES // ways))


def _refused(layout: Layout, work: Work) -> Infeasible:
    """The verdict on a layout of all downsets without a cut."""
    try:
        cut_stages(StageSeconds(layout, first_ranges(layout.graph)).smallest())
    except Infeasible as error:
        return error
    assert work.stopped, "all stages fit in their smallest ways"
    return Infeasible("no plan was found in time", proven=False)


def _better(
    graph: StageGraph, downsets: tuple[Downset, ...], best: StagePlan, work: Work, gap: float
) -> StagePlan:
    """The best cut at some downsets, spread over all if they are many, or the known one."""
    kept = np.linspace(0, len(downsets) - 1, min(len(downsets), _most_downsets(graph)))
    layout = Layout(graph, tuple(downsets[at] for at in kept.astype(np.int64)))
    return best_cut(layout, work, gap, best, cuts=COARSE_CUTS)


def best_cut(
    layout: Layout, work: Work, gap: float, best: StagePlan, cuts: int | None = None
) -> StagePlan:
    """The best cut of a layout, or the known plan if none is better; the bound is of the layout.

    Cuts are made at the lower bounds of all stages. Of those the stages in doubt are packed or, if
    a number of cuts is given, only those of the cuts themselves.
    """
    table, bound_s, done = StageSeconds(layout, first_ranges(layout.graph)), 0.0, 0
    cut = find_cut(table.problem("upper", best.load_s)) or find_cut(
        table.problem("lower", best.load_s)
    )
    if cut is None:
        return replace(best, bound_s=best.load_s)
    while cut is not None:
        known, done = table.precision, done + 1
        plan = table.plan(cut)
        if plan is not None and plan[1] < best.load_s:
            best = StagePlan(*plan)
        if math.isfinite(best.load_s):
            if relative_gap(best.load_s, bound_s) <= gap or done == cuts:
                break
            if cuts is None:
                table.refine_between(bound_s, best.load_s, PACKED, work)
        if (table.precision == known and bound_s > 0) or work.late:
            break  # the stages of the cut are as exact as they can be, or time is up
        cut = find_cut(table.problem("lower", best.load_s))
        bound_s = max(bound_s, best.load_s if cut is None else cut.bound_s)
    return replace(best, bound_s=min(best.load_s, bound_s))
